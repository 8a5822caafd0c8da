"""Buffers that share memory: `storage_alias_spec` and `reuse_group` of TLX."""

from __future__ import annotations

from gem.attention.simulator import context
from gem.attention.simulator.errors import OutOfBounds, ResourceError, UnsupportedOperation
from gem.attention.simulator.memory import Buffers, SharedMemory


class AliasedBuffers(Buffers):
    """Buffers whose place their alias specification decides, when one is first used."""

    def __init__(self, memory: SharedMemory, alias: AliasSpec, num: int, shape, dtype, name: str):
        super().__init__(memory, 0, num, shape, dtype, name)
        self.alias, self.starts = alias, None

    def start(self, index: int) -> int:
        if self.starts is None:
            self.alias.place(self.memory)
        return self.starts[index]


class ReuseGroup:
    """How buffers overlap: "shared" in one region, or "distinct" side by side."""

    def __init__(self, *elements, group_type="shared", group_size=1):
        self.elements = elements
        self.distinct = str(getattr(group_type, "value", group_type)) == "distinct"
        self.size = int(group_size)


class AliasSpec:
    """Memory that several `local_alloc` share; without an overlap all begin at its start."""

    def __init__(self, size: int | None, memory: SharedMemory):
        self.size, self.memory, self.users, self.overlap = size, memory, [], None

    def set_buffer_overlap(self, overlap_def: ReuseGroup) -> None:
        if any(user.starts is not None for user in self.users):
            raise context.error(
                UnsupportedOperation, "set_buffer_overlap after a buffer of it has been used"
            )
        self.overlap = overlap_def

    def place(self, memory: SharedMemory) -> None:
        """Allocates the region and gives every buffer its place."""
        names = ", ".join(user.name for user in self.users)
        if self.overlap is None:
            needed = max(user.num * user.bytes_each for user in self.users)
            places = {user: (0, 1, user.bytes_each) for user in self.users}
        else:
            unit, found = _laid_out(self.overlap, 1)
            units = {user.num // group for user, (_, group) in found.items()}
            if len(units) != 1 or any(user.num % group for user, (_, group) in found.items()):
                raise context.error(
                    OutOfBounds, f"the groups of {names} have unlike numbers of buffers"
                )
            if set(found) != set(self.users):
                raise context.error(
                    UnsupportedOperation, f"set_buffer_overlap does not name all of {names}"
                )
            needed = units.pop() * unit
            places = {user: (at, group, unit) for user, (at, group) in found.items()}
        if self.size is not None and needed > self.size:
            raise context.error(
                ResourceError, f"{names} need {needed} bytes of a specification for {self.size}"
            )
        base = memory.allocate(self.size or needed, names)
        for user, (at, group, unit) in places.items():
            user.starts = [
                base + at + i // group * unit + i % group * user.bytes_each for i in range(user.num)
            ]


def _laid_out(node, group: int) -> tuple[int, dict]:
    """(bytes of one index, {buffers: (offset in them, buffers per index)})."""
    if isinstance(node, Buffers):
        alignment = node.memory.alignment
        return -(-node.bytes_each * group // alignment) * alignment, {node: (0, group)}
    total, found = 0, {}
    for element in node.elements:
        size, inner = _laid_out(element, group * node.size)
        for user, (at, each) in inner.items():
            found[user] = (at + total if node.distinct else at), each
        total = total + size if node.distinct else max(total, size)
    return total, found
