"""Multi-head attention modules on packed batches: projections and heads over `functional`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.attention import functional
from gem.attention.layout import JaggedLayout
from gem.attention.rotary import apply_rotary


class _Heads(nn.Module):
    """What both modules share: the projections to and from heads."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        qk_norm: bool,
        bias: bool,
        backend: str,
        deterministic: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (
            ("d_model", d_model),
            ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, but they are {num_heads} and "
                f"{num_kv_heads}"
            )
        if head_dim is None:
            if d_model % num_heads:
                raise ValueError(
                    f"d_model must be a multiple of num_heads where head_dim is not given, but "
                    f"they are {d_model} and {num_heads}"
                )
            head_dim = d_model // num_heads
        if not 1 <= head_dim <= functional.MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be 1 to {functional.MAX_HEAD_DIM}, but is {head_dim}")
        functional.check_backend(backend)
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_kv_heads
        self.head_dim, self.qk_norm = head_dim, qk_norm
        self.backend, self.deterministic = backend, deterministic
        kind = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(d_model, num_heads * head_dim, **kind)
        self.k_proj = nn.Linear(d_model, num_kv_heads * head_dim, **kind)
        self.v_proj = nn.Linear(d_model, num_kv_heads * head_dim, **kind)
        self.out_proj = nn.Linear(num_heads * head_dim, d_model, **kind)
        if qk_norm:
            self.q_scale = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
            self.k_scale = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform projections, zero biases, unit scales of the norms."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.qk_norm:
            nn.init.ones_(self.q_scale)
            nn.init.ones_(self.k_scale)

    def _queries(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """x `[rows, d_model]` -> `[rows, num_heads, head_dim]`."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        return self._placed(q, self.q_scale if self.qk_norm else None, rotary)

    def _keys_values(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """x `[rows, d_model]` -> two of `[rows, num_kv_heads, head_dim]`."""
        both = joint_linear(x, self.k_proj, self.v_proj)
        k, v = both.unflatten(-1, (2 * self.num_kv_heads, self.head_dim)).chunk(2, dim=1)
        return self._placed(k, self.k_scale if self.qk_norm else None, rotary), v

    def _placed(
        self, heads: Tensor, scale: Tensor | None, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        dtype = heads.dtype
        if scale is not None:
            heads = F.rms_norm(heads, (self.head_dim,), eps=1e-6) * scale
        if rotary is not None:
            heads = apply_rotary(heads, *rotary)
        return heads.to(dtype)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"qk_norm={self.qk_norm}, backend={self.backend!r}"
        )

    @staticmethod
    def _check_rows(x: Tensor, name: str, d_model: int) -> None:
        if x.dim() != 2 or x.shape[1] != d_model:
            raise ValueError(f"{name} must have shape [rows, {d_model}], but has {list(x.shape)}")


class JaggedAttention(_Heads):
    """Multi-head self- or cross-attention of packed rows (arXiv 1706.03762, section 3.2.2).

    Args:
        d_model: width of the rows.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of num_heads (default: num_heads).
        head_dim: width of a head (default: d_model // num_heads).
        causal, window: what a query sees, as in `jagged_attention`.
        qk_norm: RMS-normalise each head's queries and keys, with a learned scale, before rotary.
        bias: biases in the projections.
        backend, deterministic: as in `jagged_attention`.

    Raises:
        ValueError: if the arguments do not fit together.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        backend: str = "auto",
        deterministic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        functional.window_sides(causal, window)
        super().__init__(
            d_model,
            num_heads,
            num_kv_heads,
            head_dim,
            qk_norm,
            bias,
            backend,
            deterministic,
            device,
            dtype,
        )
        self.causal, self.window = causal, window

    def forward(
        self,
        x: Tensor,
        layout: JaggedLayout,
        kv: Tensor | None = None,
        kv_layout: JaggedLayout | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        kv_rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attends from each row of x to its sample's rows of x, or of `kv`.

        Args:
            x: `[rows, d_model]`.
            layout: where the samples' rows of x lie.
            kv, kv_layout: `[kv_rows, d_model]` and its layout, for cross-attention.
            rotary: (cos, sin), each `[rows, head_dim // 2]`, as `rotary_angles` makes them; turns
                the queries, and the keys too unless there is `kv`.
            kv_rotary: the same for the keys of `kv`, each `[kv_rows, head_dim // 2]`.

        Returns:
            `[rows, d_model]`.

        Raises:
            ValueError: if shapes do not fit, or one of kv and kv_layout is missing.
        """
        self._check_rows(x, "x", self.d_model)
        if (kv is None) != (kv_layout is None):
            raise ValueError("kv and kv_layout must be given together, but one is missing")
        if kv is None:
            if kv_rotary is not None:
                raise ValueError("kv_rotary turns the keys of kv, but there is no kv")
            kv, kv_layout, kv_rotary = x, layout, rotary
        else:
            self._check_rows(kv, "kv", self.d_model)
        q = self._queries(x, rotary)
        k, v = self._keys_values(kv, kv_rotary)
        out = functional.jagged_attention(
            q,
            k,
            v,
            layout,
            kv_layout,
            causal=self.causal,
            window=self.window,
            backend=self.backend,
            deterministic=self.deterministic,
        )
        return self.out_proj(out.flatten(1))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, causal={self.causal}, window={self.window}"


class BroadcastAttention(_Heads):
    """Pooling by multi-head attention: a few queries, shared by the batch, read every sample.

    Set Transformer (arXiv 1810.00825, section 3.2). An empty sample gives the output projection of
    zero.

    Args:
        d_model: width of the rows and of the queries.
        num_heads: query heads.
        num_queries: number of learned queries; None for none, then `forward` needs `queries`.
        num_kv_heads, head_dim, qk_norm, bias: as in `JaggedAttention`.
        sink: give each head a learned logit that takes its share of the softmax and adds nothing
            (attention sinks, as in arXiv 2508.10925, section 2). A query that finds nothing may
            then return little, and a sample's output grows with how much there is to find.
        backend, deterministic: as in `broadcast_attention`.

    Raises:
        ValueError: if the arguments do not fit together.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_queries: int | None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        sink: bool = False,
        backend: str = "auto",
        deterministic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            num_heads,
            num_kv_heads,
            head_dim,
            qk_norm,
            bias,
            backend,
            deterministic,
            device,
            dtype,
        )
        if num_queries is not None and num_queries < 1:
            raise ValueError(f"num_queries must be at least 1 or None, but is {num_queries}")
        self.num_queries = num_queries
        self.queries = None
        if num_queries is not None:
            self.queries = nn.Parameter(
                torch.empty(num_queries, d_model, device=device, dtype=dtype)
            )
            nn.init.normal_(self.queries)
        self.sink = None
        if sink:
            self.sink = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))

    def forward(self, x: Tensor, layout: JaggedLayout, queries: Tensor | None = None) -> Tensor:
        """Reads each sample with every query.

        Args:
            x: `[rows, d_model]`.
            layout: where the samples' rows of x lie.
            queries: `[num_queries, d_model]` to use in place of the learned ones, in any number.

        Returns:
            `[batch, num_queries, d_model]`.

        Raises:
            ValueError: if shapes do not fit, or there are no queries.
        """
        self._check_rows(x, "x", self.d_model)
        if queries is None:
            queries = self.queries
        if queries is None:
            raise ValueError("queries must be given, since this module has no learned ones")
        self._check_rows(queries, "queries", self.d_model)
        k, v = self._keys_values(x)
        out, lse = functional.broadcast_attention(
            self._queries(queries),
            k,
            v,
            layout,
            return_lse=True,
            backend=self.backend,
            deterministic=self.deterministic,
        )
        if self.sink is not None:
            out = apply_sink(out, lse, self.sink)
        return self.out_proj(out.flatten(2))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_queries={self.num_queries}"


def joint_linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """What several linear layers make of the same x `[..., n]`, side by side, by one product.

    One operator in place of many, and one copy of x where autocast makes one.
    """
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = ((layer.bias, layer.weight.new_zeros(layer.out_features)) for layer in layers)
        bias = torch.cat([none if bias is None else bias for bias, none in biases])
    return F.linear(x, torch.cat([layer.weight for layer in layers]), bias)


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Attention with one more key per head whose logit is learned and whose value is 0.

    `sum_j e^s_j v_j / (e^sink + sum_j e^s_j)`, from the output and log-sum-exp without it.

    Args:
        out: `[..., heads, dim]`. lse: `[..., heads]`, -inf where nothing was seen.
        sink: `[heads]`.

    Returns:
        as out.
    """
    return out * torch.sigmoid(lse - sink).unsqueeze(-1).to(out.dtype)
