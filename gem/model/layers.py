"""Small parts that several blocks share."""

import torch
from torch import Tensor, nn


def mlp(widths: list[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers from widths[0] to widths[-1] with SiLU (Swish) between them."""
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        if i:
            layers.append(nn.SiLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(fan_in, fan_out))
    return nn.Sequential(*layers)


class TokenLinear(nn.Module):
    """Linear on the token axis, `W X` with W [M, N]: InterFormer's LCE, Wukong's LCB."""

    def __init__(self, tokens: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, tokens))
        nn.init.orthogonal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] -> [B, M, D]."""
        return self.weight @ x


class Gate(nn.Module):
    """Self-gating of tokens: `X * 2 sigmoid(MLP(X))`.

    InterFormer (eq. 10) writes `sigma(X * MLP(X))`; with the nonlinearity on the gate alone, and
    the gate at 1 when training begins, tokens pass unchanged until the gate has learned something.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        return x * (2 * torch.sigmoid(self.linear(x)))


def transposed_pair(width: int) -> tuple[nn.Linear, nn.Linear]:
    """Value and output projections that start as an orthogonal map and its transpose.

    What is read passes unchanged at first, so that pooled events still lie where features on the
    same table do. The values' bias is a direction of its own: where attention has a sink, the
    output holds it in proportion to how much was found.
    """
    value = nn.Linear(width, width)
    out = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        nn.init.orthogonal_(value.weight)
        nn.init.normal_(value.bias)
        out.weight.copy_(value.weight.T)
    return value, out
