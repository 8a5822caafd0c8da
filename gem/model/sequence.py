"""The sequence block: a personalised feed-forward (PFFN as GDPA), then windowed self-attention.

Shapes: rows all samples' events, B batch, D width, H heads, d = D / H, M generated keys.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.attention import JaggedAttention, JaggedLayout
from gem.model.jagged import Blocks
from gem.model.layers import TokenLinear


class GDPA(nn.Module):
    """Generalised dot-product attention used as a feed-forward whose weights the user's features make.

    Kunlun (arXiv 2602.10016), in the form that GEM runs (PyTorch blog "Towards Free
    Normalization", 2026-07): `q = LN(S); O = act(scale q K^T) V + q; S' = S + RMSNorm(O)` with
    `K = w1(X_sum), V = w2(X_sum)`, no softmax. M keys are the hidden width of the feed-forward.
    Norms span all heads and have no affine part.

    Args:
        width: D. heads: H. summary_tokens: tokens of X_sum. keys: M.
        block: rows that share one product with their sample's keys.
    """

    def __init__(
        self, width: int, heads: int, summary_tokens: int, keys: int, *, block: int = 64
    ) -> None:
        super().__init__()
        self.heads, self.block, self.keys = heads, block, keys
        self.tokens = TokenLinear(summary_tokens, keys)
        self.weights = nn.Linear(width, 2 * width)
        self.key_bias = nn.Parameter(torch.randn(keys, width) * width**-0.5)
        self.value_bias = nn.Parameter(torch.randn(keys, width) * width**-0.5)
        self.scale = (width // heads) ** -0.5

    def forward(self, s: Tensor, summary: Tensor, blocks: Blocks) -> Tensor:
        """s [rows, D], summary [B, n, D], the rows' blocks -> [rows, D]."""
        width, shape = s.shape[-1], (-1, self.keys, self.heads, s.shape[-1] // self.heads)
        q = F.layer_norm(s, (width,))
        k, v = self.weights(self.tokens(summary)).chunk(2, dim=-1)  # [B, M, D] each
        k = ((k + self.key_bias) * self.scale).view(shape).permute(0, 2, 3, 1)
        v = (v + self.value_bias).view(shape).transpose(1, 2)
        k, v = (w.contiguous().index_select(0, blocks.sample) for w in (k, v))
        hidden = F.silu(blocks.pack(q, self.heads) @ k)  # [blocks, H, size, M]
        return s + F.rms_norm(blocks.unpack(hidden @ v) + q, (width,))


class SelfAttentionBlock(nn.Module):
    """`S' = S + MHA(LN(S))` within a window, queries and keys rotated by position and time.

    Args:
        width: D. heads: H. window: events a query sees to the left (and right unless causal).
        backend, deterministic: as in `gem.attention.jagged_attention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        window: int | None,
        causal: bool,
        backend: str = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.left, self.right = window, 0 if causal else window
        self.norm = nn.LayerNorm(width)
        self.attention = JaggedAttention(
            width,
            heads,
            causal=causal,
            window=None if window is None else (self.left, self.right),
            backend=backend,
            deterministic=deterministic,
        )

    def forward(
        self, s: Tensor, layout: JaggedLayout, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """s [rows, D], rotary (cos, sin) each [rows, d / 2] -> [rows, D]."""
        return s + self.attention(self.norm(s), layout, rotary=rotary)


class SequenceBlock(nn.Module):
    """`S' = MHA(PFFN(X_sum, S))` (InterFormer, arXiv 2411.09852, eq. 8-9); CompSkip drops a half.

    Args:
        feed_forward, attention: either may be None (Kunlun's CompSkip alternates them).
    """

    def __init__(self, feed_forward: GDPA | None, attention: SelfAttentionBlock | None) -> None:
        super().__init__()
        self.feed_forward, self.attention = feed_forward, attention

    def forward(
        self,
        s: Tensor,
        summary: Tensor | None,
        layout: JaggedLayout,
        blocks: Blocks,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """s [rows, D], summary [B, n, D] (for the feed-forward) -> [rows, D]."""
        if self.feed_forward is not None:
            s = self.feed_forward(s, summary, blocks)
        if self.attention is not None:
            s = self.attention(s, layout, rotary)
        return s
