"""The sequence block: a personalised feed-forward (PFFN as GDPA), then attention.

Shapes: rows all samples' events, B batch, C CLS tokens, D width, H heads, d = D / H, M generated
keys.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.attention import (
    JaggedLayout,
    apply_rotary,
    apply_sink,
    jagged_attention,
    joint_linear,
)
from gem.model.jagged import Blocks, LastRows
from gem.model.layers import TokenLinear, transposed_pair


@dataclass(frozen=True)
class SequenceState:
    """A sequence on its way through the layers, with what all layers reuse.

    Attributes:
        s: [rows, D] events. cls: [B, C, D] the sample's CLS tokens, which see all of its events.
        layout: of the events. cls_layout: C rows per sample.
        blocks: the events in blocks, for products with per-sample weights.
        recent: where each sample's last events are.
        rotary: of the events, (cos, sin), each [rows, d / 2], or None.
    """

    s: Tensor
    cls: Tensor
    layout: JaggedLayout
    cls_layout: JaggedLayout
    blocks: Blocks
    recent: LastRows
    rotary: tuple[Tensor, Tensor] | None


class GDPA(nn.Module):
    """Generalised dot-product attention: a feed-forward whose weights the user's features make.

    Kunlun (arXiv 2602.10016), in the form that GEM runs (PyTorch blog "Towards Free
    Normalization", 2026-07): `q = LN(S); O = act(scale q K^T) V + q; S' = S + RMSNorm(O)` with
    `K = w1(X_sum), V = w2(X_sum)`, no softmax. M keys are the hidden width of the feed-forward.
    Norms span all heads and have no affine part. At the start w1 and w2 are the identity, so that
    an event's hidden units are its similarities to the features.

    Args:
        width: D. heads: H. summary_tokens: tokens of X_sum. keys: M.
    """

    def __init__(self, width: int, heads: int, summary_tokens: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys = heads, keys
        self.tokens = TokenLinear(summary_tokens, keys)
        self.weights = nn.Linear(width, 2 * width, bias=False)
        with torch.no_grad():
            self.weights.weight.copy_(torch.eye(width).repeat(2, 1))
        self.key_bias = nn.Parameter(torch.randn(keys, width) * 0.5)
        self.value_bias = nn.Parameter(torch.randn(keys, width) * 0.5)
        self.scale = (width // heads) ** -0.5

    def forward(self, state: SequenceState, summary: Tensor) -> SequenceState:
        """summary X_sum [B, n, D]; events and CLS tokens alike pass through."""
        shape = (-1, self.keys, self.heads, summary.shape[2] // self.heads)
        k, v = self.weights(self.tokens(summary)).chunk(2, dim=-1)  # [B, M, D] each
        k = ((k + self.key_bias) * self.scale).view(shape).permute(0, 2, 3, 1).contiguous()
        v = (v + self.value_bias).view(shape).transpose(1, 2).contiguous()

        s, cls, blocks = state.s, state.cls, state.blocks
        q = F.layer_norm(s, s.shape[-1:])
        to_blocks = (w.index_select(0, blocks.sample) for w in (k, v))
        out = blocks.unpack(_hidden(blocks.pack(q, self.heads), *to_blocks))
        s = s + F.rms_norm(out + q, s.shape[-1:])
        if cls.shape[1]:
            q = F.layer_norm(cls, s.shape[-1:])
            heads = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            out = _hidden(heads, k, v).transpose(1, 2).flatten(2)
            cls = cls + F.rms_norm(out + q, s.shape[-1:])
        return replace(state, s=s, cls=cls)


def _hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [..., n, d], k [..., d, M], v [..., M, d] -> [..., n, d]."""
    return F.silu(q @ k) @ v


class SequenceAttention(nn.Module):
    """`S' = S + MHA(LN(S))`: events see a window of their neighbours, CLS tokens every event.

    Window and global tokens as in Longformer (arXiv 2004.05150); the CLS tokens of InterFormer
    (eq. 9), which come from the features, so read the whole history with the candidate in mind.
    Within the window queries and keys are rotated by position and time; a CLS token reads them
    unrotated, or events of one kind would answer it differently at every distance. At the start a
    query finds the keys that equal it and values come out as they are; what an event takes from
    its neighbours starts small (LayerScale, arXiv 2103.17239), so that events keep their identity.

    Args:
        width: D. heads: H. window: events seen to the left (and right unless causal); None all.
        cls: whether there are CLS tokens.
        backend, deterministic: as in `gem.attention.jagged_attention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        window: int | None,
        causal: bool,
        cls: bool = True,
        backend: str = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.left, self.right = window, 0 if causal else window
        self.kernel = {"backend": backend, "deterministic": deterministic}
        self.norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        with torch.no_grad():
            nn.init.orthogonal_(self.q_proj.weight)
            self.k_proj.weight.copy_(self.q_proj.weight)
        self.v_proj, self.out_proj = transposed_pair(width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))
        self.sink = nn.Parameter(torch.zeros(heads)) if cls else None

    def forward(self, state: SequenceState) -> SequenceState:
        """Events and CLS tokens after attention, same shapes."""
        s = self.norm(state.s)
        joint = joint_linear(s, self.q_proj, self.k_proj, self.v_proj)
        qk, v = joint.unflatten(-1, (-1, self.head_dim)).split([2 * self.heads, self.heads], dim=1)
        turned = qk if state.rotary is None else apply_rotary(qk, *state.rotary)
        window, layout = (self.left, self.right), state.layout
        q, k = turned.chunk(2, dim=1)
        out = jagged_attention(q, k, v, layout, layout, window=window, **self.kernel)
        cls = state.cls
        if self.sink is not None:
            q = self.q_proj(self.norm(cls)).view(-1, self.heads, self.head_dim)
            k = qk[:, self.heads :]
            seen, lse = jagged_attention(
                q, k, v, state.cls_layout, layout, return_lse=True, **self.kernel
            )
            seen = apply_sink(seen, lse, self.sink)
            cls = cls + self.out_proj(seen.view_as(cls))
        return replace(state, s=state.s + self.gamma * self.out_proj(out.flatten(1)), cls=cls)


class SequenceBlock(nn.Module):
    """`S' = MHA(PFFN(X_sum, S))` (InterFormer, arXiv 2411.09852, eq. 8-9).

    Args:
        feed_forward, attention: either may be None (Kunlun's CompSkip alternates them).
    """

    def __init__(self, feed_forward: GDPA | None, attention: SequenceAttention | None) -> None:
        super().__init__()
        self.feed_forward, self.attention = feed_forward, attention

    def forward(self, state: SequenceState, summary: Tensor | None) -> SequenceState:
        """summary X_sum [B, n, D], for the feed-forward."""
        if self.feed_forward is not None:
            state = self.feed_forward(state, summary)
        if self.attention is not None:
            state = self.attention(state)
        return state
