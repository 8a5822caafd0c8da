"""Attention on packed (jagged) batches: self, cross and broadcast-Q. Needs torch and NumPy."""

from gem.attention.functional import broadcast_attention, jagged_attention
from gem.attention.layout import JaggedLayout
from gem.attention.module import (
    BroadcastAttention,
    JaggedAttention,
    apply_sink,
    joint_linear,
)
from gem.attention.rotary import apply_rotary, rotary_angles

__all__ = [
    "BroadcastAttention",
    "JaggedAttention",
    "JaggedLayout",
    "apply_rotary",
    "apply_sink",
    "broadcast_attention",
    "jagged_attention",
    "joint_linear",
    "rotary_angles",
]
