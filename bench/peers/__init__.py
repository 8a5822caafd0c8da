"""The contenders of the attention benchmark, peers first.

A new peer is a `Contender` (see base.py) in a file of its own and one entry in `PEERS`.
"""

from bench.peers.base import Contender
from bench.peers.flash import Fa3, Fa4, Fa4View, VarlenAttn
from bench.peers.flex import Flex
from bench.peers.ours import Backend
from bench.peers.padded import SdpaPadded
from gem.attention import backends

PEERS = {peer.name: peer for peer in (Fa4(), Fa4View(), Fa3(), VarlenAttn(), SdpaPadded(), Flex())}
# Backends that are not measured: a choice among the others, and the loops of the reference.
NOT_MEASURED = ("auto", "reference")


def contenders(deterministic: bool = False) -> dict[str, Contender]:
    """By name: every peer, then every backend, those expected to be slow last."""
    ours = [name for name in backends.names() if name not in NOT_MEASURED]
    return {**PEERS, **{name: Backend(name, deterministic) for name in ours}}
