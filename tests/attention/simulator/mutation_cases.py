"""The kernels in which `test_mutation` plants faults, and the launches that are to show them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from gem.attention.backends import (
    tlx_,
    tlx_backward,
    tlx_backward_copies,
    tlx_backward_steps,
    tlx_backward_sums,
    tlx_backward_tiles,
    tlx_common,
    tlx_forward_softmax,
    tlx_forward_steps,
    tlx_forward_tiles,
    tlx_hopper_backward,
    tlx_hopper_forward,
    tlx_hopper_shared_backward,
)
from gem.attention.testing import Problem, random_problem
from tests.attention.simulator.helpers import (
    differentiated,
    launched,
    with_all,
    wrong,
    wrong_gradients,
)
from tests.attention.simulator.mutation import Mutant, edited, mutants, within

Shape = tlx_.Shape
LENGTHS = (260, 65, 0, 330, 130, 64)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel on a small problem.

    Attributes:
        dim: of a head.
        options: of the problem; with none, queries and keys are as many in the reverse order, and
            `queries` makes it broadcast attention.
        lengths: of the samples.
        processors: of the simulated GPU.
        shape, p_shared: of the forward.
        deterministic, whole: of the backward.
    """

    dim: int
    options: dict
    processors: int = 2
    lengths: Sequence[int] = LENGTHS
    shape: Shape | None = None
    p_shared: bool = False
    deterministic: bool = False
    whole: bool = False

    def problem(self, generator: torch.Generator) -> Problem:
        rest = {k: v for k, v in self.options.items() if k != "queries"}
        rest = {"heads": 2, "kv_heads": 1, "dim": self.dim, "dtype": torch.bfloat16} | rest
        queries = self.options.get("queries", self.lengths)
        keys = self.lengths if self.options else self.lengths[::-1]
        return random_problem(queries, keys, generator=generator, **rest)

    def bad(self, problem: Problem, seed: int) -> list[str]:
        """What is wrong with the results."""
        if self.shape is not None:
            out, lse, _ = launched(
                problem, self.shape, seed, self.processors, p_shared=self.p_shared
            )
            return wrong(problem, out, lse)
        switches = {"deterministic": self.deterministic, "whole": self.whole}
        gradients, _ = differentiated(problem, seed, self.processors, **switches)
        return wrong_gradients(problem, gradients)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and what is known of its faults.

    Attributes:
        name: of the kernel.
        module: where it is defined.
        host: where its launch looks it up.
        launches: that between them reach every line.
        edits: faults of this kernel alone: (kind, text that occurs once, text instead).
        harmless: faults that change nothing, as text in their description: how often, and why.
        parts: modules that only this kernel is made of.
    """

    name: str
    module: ModuleType
    host: ModuleType
    launches: Sequence[Launch]
    edits: Sequence[tuple[str, str, str]]
    harmless: dict[str, tuple[int, str]]
    parts: Sequence[ModuleType] = ()

    def __str__(self) -> str:
        return self.name.removesuffix("_kernel")

    @property
    def sources(self) -> dict[str, str]:
        """By the module's name, those that others import first, the kernel's last."""
        modules = (tlx_common, *self.parts, self.module)
        return {x.__name__: Path(x.__file__).read_text() for x in modules}

    def faults(self) -> list[tuple[Mutant, dict[str, str]]]:
        """(fault, sources with it)."""
        sources, found = self.sources, []
        for module in (self.module, *self.parts):
            found += [(module.__name__, m) for m in mutants(sources[module.__name__])]
        for kind, was, now in self.edits:
            (name,) = (name for name, source in sources.items() if was in source)
            found.append((name, edited(sources[name], kind, was, now)))
        used = {name for x in (self.module, *self.parts) for name in vars(x)}
        common = tlx_common.__name__
        found += [(common, m) for m in within(sources[common], used & set(vars(tlx_common)))]
        return [(m, sources | {name: m.source(sources[name])}) for name, m in found]

    def why(self, mutant: Mutant) -> str | None:
        """Why a fault changes nothing."""
        return next((why for text, (_, why) in self.harmless.items() if text in str(mutant)), None)

    def explains(self, missed: Sequence[Mutant]) -> bool:
        """Whether every one is harmless, and none more often than is known."""
        return all(self.why(m) for m in missed) and all(
            sum(text in str(m) for m in missed) <= times
            for text, (times, _) in self.harmless.items()
        )


def alias(allocation: str, other: str) -> tuple[str, str, str]:
    """The fault that buffers share the memory of others."""
    return "overlapping alias", allocation, f"{allocation.removesuffix(')')}, reuse={other})"


NO_ZIGZAG = (
    "without the zig-zag each place of a turn is one CTA's too, and a CTA counts its turns by the"
    " same places, so that all tiles are dealt, only less evenly"
)

FORWARD = Case(
    "hopper_forward_kernel",
    tlx_hopper_forward,
    tlx_,
    [
        Launch(128, {"window": (150, 20)}, shape=with_all(Shape(2, 64, 2, 1, 240))),
        Launch(64, {}, shape=Shape(2, 64, 3, 2, 240, counter=True)),
        Launch(128, {}, shape=Shape(2, 64, 1, 1, 240), p_shared=True),
        Launch(64, {"causal": True}, 4, shape=Shape(3, 64, 2, 1, 160), p_shared=True),
        Launch(64, {"causal": True}, shape=with_all(Shape(2, 128, 2, 2, 240))),
        Launch(64, {"queries": 130}, 4, shape=with_all(Shape(2, 64, 2, 1, 240))),
        # Scores whose exponentials no half precision holds against another block's maximum.
        Launch(64, {"queries": 130, "scale": 4.0}, 3, shape=with_all(Shape(2, 64, 3, 2, 240))),
        # A sample with nearly all keys, whose tiles are in parts.
        Launch(128, {"queries": 130}, 12, (1500, 3, 65), Shape(2, 64, 2, 1, 240)),
    ],
    [
        alias("v_tiles = tlx.local_alloc((BLOCK_K, BLOCK_D), DTYPE, STAGES)", "k_tiles"),
        alias("out_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, CONSUMERS)", "q_tiles"),
        ("takes a tile past its bound", "turn + 2 < turns", "True"),
        ("no end of the tiles", "tl.where(number < tiles, number, -1)", "number"),
        (
            "skips a tile",
            "tl.num_programs(0) // TEAM + number",
            "tl.num_programs(0) // TEAM + number + 1",
        ),
        ("no block is too large", "added > LIMIT", "added < 0.0"),
        ("nobody has seen no key", 'too_low | (top == -float("inf"))', "too_low"),
        ("the output stays as it was", "            out0, out1 = _shrunk", "            _shrunk"),
        (
            "a block worked off again counts twice",
            "        else:\n            total += added",
            "        total += added",
        ),
        (
            "the sums are of a block alone",
            "            total += added",
            "            total = added",
        ),
        ("the first block is lazy too", "OPTIONS.LAZY and not TAIL", "OPTIONS.LAZY"),
        (
            "parts see all keys",
            "SOME_KEYS: tl.constexpr = WINDOW or PARTS is not None",
            "SOME_KEYS = WINDOW",
        ),
        ("parts are near each other", "part.to(tl.int64) * (64 * OPTIONS.CONSUMERS)", "part * 64"),
        ("what is whole is a part too", "is_part = part >= 0", "is_part = part >= -1"),
    ],
    {
        "always the first buffer: 'turn % 2' -> '(turn % 2) * 0'": (1, NO_ZIGZAG),
        "early release: 's = tlx.async_dot_wait(OPTIONS.PIECES, s)\\n"
        "    tlx.barrier_arrive(k_empty)'": (
            1,
            "before a block of keys is copied, the producer waits for the values of a block before"
            " to be released, which consumers do after the product in question",
        ),
        "one product more in flight: 'out1 = tlx.async_dot_wait(0, out1)'": (
            2,
            "the wait for the first half of the output has waited for all products",
        ),
        "no barrier_wait: 'tlx.barrier_wait(v_full, v_phase)'": (
            1,
            "it only keeps the compiler from moving what comes after it; the barrier has been"
            " passed",
        ),
    },
    (tlx_forward_tiles, tlx_forward_softmax, tlx_forward_steps),
)

BACKWARD = Case(
    "hopper_backward_kernel",
    tlx_hopper_backward,
    tlx_backward,
    [
        Launch(128, {"window": (150, 20)}),
        # Of the samples two are longer than a whole one; the others have one tile, or two.
        Launch(64, {}, whole=True),
        Launch(128, {"kv_heads": 2}, whole=True),  # an odd number of steps
        # Both consumers have keys in a whole sample's last tile, and add to what they wrote.
        Launch(128, {"kv_heads": 2}, 1, lengths=(200,), whole=True),
        # Samples with one tile each, the first of which comes after its neighbour.
        Launch(64, {"kv_heads": 2}, 1, lengths=(50, 100, 100), whole=True),
        Launch(64, {"causal": True, "kv_heads": 2}, deterministic=True),
        Launch(128, {"queries": 130, "kv_heads": 2}, 3),
        Launch(128, {}, deterministic=True),
    ],
    [
        alias("v_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2)", "k_tiles"),
        alias("do_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2 * TILES)", "q_tiles"),
        alias("delta_tiles = tlx.local_alloc((64,), tl.float32, 2 * TILES)", "lse_tiles"),
        ("the first tile adds", "fresh = order == 1", "fresh = order == 5"),
        ("every tile of a whole sample writes", "fresh = order == 1", "fresh = order >= 1"),
        ("every tile writes", "fresh = order == 1", "fresh = True"),
        ("the first tile adds, heads grouped", "order % 2 == 1", "order == 5"),
        ("every tile writes, heads grouped", "order % 2 == 1", "order >= 1"),
        ("a tile that is alone adds", "alone = order == 3", "alone = order == 5"),
        ("every tile of a whole sample writes dQ", "alone = order == 3", "alone = order >= 1"),
        ("a tile that is alone is not told", "row + 9) == 3", "row + 9) == 5"),
        ("adds once earlier writes are read", "bulk.wait_group 0", "bulk.wait_group.read 0"),
        ("waits where any may come first", "if order == 2:", "if order == 0:"),
        ("keys are read after every step", "k_read[0], pred=last", "k_read[0]"),
        ("values are free after every step", "pred=last)\n    ds = ", "pred=True)\n    ds = "),
        ("dV where the other consumer's is", "dv_stages[OPTIONS.TILES * cid]", "dv_stages[0]"),
        ("the other consumer's dK", "dk_place(tile, c, OPTIONS)", "dk_place(tile, 1 - c, OPTIONS)"),
    ],
    {
        "always the first buffer: 'turn % 2' -> '(turn % 2) * 0'": (1, NO_ZIGZAG),
        "no barrier_wait: 'tlx.barrier_wait(to.k_empty[ks]": (
            1,
            "before, the producer waits for room for a number, which the warp that stores dK makes"
            " when dK has left the place of the keys in question",
        ),
        "no barrier_wait: 'tlx.barrier_wait(full[slot], (turn // TILE_STAGES) & 1)'": (
            1,
            "the producer hands over a number before it copies the keys of the tile before, for"
            " which the consumer has waited",
        ),
    },
    [tlx_backward_sums, tlx_backward_tiles, tlx_backward_copies, tlx_backward_steps],
)

SHARED_BACKWARD = Case(
    "hopper_shared_backward_kernel",
    tlx_hopper_shared_backward,
    tlx_backward,
    [
        Launch(64, {"queries": 40, "kv_heads": 2}, 4),
        Launch(128, {"queries": 64, "kv_heads": 2}, 2),
    ],
    [
        alias("v_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, CONSUMERS * STAGES)", "k_tiles"),
        alias("out_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2)", "do_tiles"),
        alias("delta_tiles = tlx.local_alloc((64,), tl.float32, CONSUMERS)", "ds_tiles"),
    ],
    {
        "always the first buffer: 'turn % 2' -> '(turn % 2) * 0'": (
            1,
            "the table has a row for every worker in every turn, so that without the zig-zag all"
            " runs are dealt too, only less evenly (the two stages of dout are chosen elsewhere)",
        ),
    },
)

CASES = [FORWARD, BACKWARD, SHARED_BACKWARD]
