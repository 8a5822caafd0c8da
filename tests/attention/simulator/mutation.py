"""Plants faults in copies of a kernel's source, one at a time."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: the text between two offsets of the source replaced.

    Attributes:
        kind: of the fault.
        line: in the source.
        was, now: the text replaced, and what replaces it.
        start, end: offsets.
    """

    kind: str
    line: int
    was: str
    now: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"line {self.line}, {self.kind}: {self.was!r} -> {self.now!r}"

    def source(self, source: str) -> str:
        return source[: self.start] + self.now + source[self.end :]


class _Planter(ast.NodeVisitor):
    def __init__(self, source: str):
        self.source, self.mutants = source, []
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def plant(self, kind: str, node: ast.AST, now: str) -> None:
        start, end = self.span(node)
        self.mutants.append(Mutant(kind, node.lineno, self.source[start:end], now, start, end))

    def replace(self, kind: str, first: ast.AST, last: ast.AST, now: str) -> None:
        """As `plant`, of all from one statement to another."""
        start, end = self.span(first)[0], self.span(last)[1]
        self.mutants.append(Mutant(kind, first.lineno, self.source[start:end], now, start, end))

    def block(self, body: list[ast.stmt]) -> None:
        """Releases before what they wait for; waits in a row for the same products, together."""
        row: list[ast.stmt] = []
        for statement in [*body, ast.Pass()]:
            waits = _called(statement) == "async_dot_wait"
            same = row and waits and self.text(_argument(row[0])) == self.text(_argument(statement))
            if not same:
                if row:
                    self.waits(row, statement if _called(statement) == "barrier_arrive" else None)
                row = []
            if waits:
                row.append(statement)

    def waits(self, row: list[ast.stmt], release: ast.stmt | None) -> None:
        indent = "\n" + " " * row[0].col_offset
        texts = [self.text(x) for x in row]
        count = self.text(_argument(row[0]))
        late = [x.replace(f"({count},", f"({count} + 1,") for x in texts]
        self.replace("one product more in flight", row[0], row[-1], indent.join(late))
        if release is not None:
            swapped = indent.join([self.text(release), *texts])
            self.replace("early release", row[0], release, swapped)

    def generic_visit(self, node: ast.AST) -> None:
        for name in ("body", "orelse"):
            if isinstance(getattr(node, name, None), list):
                self.block(getattr(node, name))
        super().generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        called = _called(node)
        if called in DROPPED:
            self.plant(f"no {called}", node, "pass")
        if called == "barrier_arrive":
            indent = " " * node.col_offset
            self.plant("arrives twice", node, f"{self.text(node)}\n{indent}{self.text(node)}")
        if called == "local_store":
            self.plant("no local_store", node, "pass")
        if called == "async_descriptor_store_wait":
            open_stores = node.value.args[0]
            self.plant("one store more in flight", open_stores, f"{self.text(open_stores)} + 1")
        for keyword in node.value.keywords if called == "barrier_arrive" else ():
            if keyword.arg == "pred":
                self.plant("arrives always", keyword.value, "True")
                self.plant("never arrives", keyword.value, "False")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if _called(node) == "async_dot_wait":
            self.plant("no async_dot_wait", node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called, args = _called(node), node.args
        if called == "barrier_wait":
            self.plant("phase flipped", args[1], f"({self.text(args[1])}) ^ 1")
        elif called == "barrier_expect_bytes":
            self.plant("half the bytes", args[1], f"{self.text(args[1])} // 2")
            self.plant("twice the bytes", args[1], f"{self.text(args[1])} * 2")
        elif called == "local_alloc":
            self.plant("one buffer less", args[2], f"{self.text(args[2])} - 1")
        elif called in ("alloc_barriers", "alloc_warp_barrier"):
            count = node.keywords[0].value if node.keywords else args[-1]
            self.plant("one arrival more", count, f"{self.text(count)} + 1")
            self.plant("one barrier less", args[0], f"{self.text(args[0])} - 1")
        elif called in ("named_barrier_wait", "named_barrier_arrive"):
            self.plant("half the threads", args[1], f"{self.text(args[1])} // 2")
            self.plant("next named barrier", args[0], f"{self.text(args[0])} + 1")
        elif called in ("async_descriptor_load", "async_descriptor_store"):
            offsets = args[2]
            *start, row, column = (self.text(x) for x in offsets.elts)
            self.plant("next row", offsets, f"[{', '.join([*start, row])} + 1, {column}]")
            self.plant("next column", offsets, f"[{', '.join([*start, row, column])} + 4]")
            if start:
                a, b, c = start
                self.plant("swapped offsets", offsets, f"[{a}, {row}, {c}, {b}, {column}]")
                self.plant("swapped offsets", offsets, f"[{a}, {b}, {column}, {row}, {c}]")
        elif called == "copy_rows":
            self.plant("swapped offsets", args[5], self.text(args[6]))
            self.plant("no end of the sample", args[4], f"{self.text(args[4])} + 9")
        elif called in ("store_rows", "store_columns"):
            self.plant("swapped offsets", args[4], self.text(args[5]))
            self.plant("no end of the sample", args[3], f"{self.text(args[3])} + 9")
            for column in args[6:]:
                self.plant("next column", column, f"{self.text(column)} + 8")
        elif called == "async_load":
            sizes = [k.value for k in node.keywords if k.arg == "bulk_size"]
            self.plant("next row", args[0], f"{self.text(args[0])} + 4")
            for size in sizes:
                self.plant("half the bytes", size, f"{self.text(size)} // 2")
        elif called == "async_dot" and len(args) > 2:
            start = self.span(node)[0]
            self.plant("sum begun anew", node, f"{self.source[start : self.span(args[1])[1]]})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = self.text(node)
        turns = "STAGES" in text or text in ("turn // 2", "count % 2", "turn % 2")
        if isinstance(node.op, ast.Mod) and turns:
            self.plant("always the first buffer", node, f"({text}) * 0")
        elif isinstance(node.op, ast.FloorDiv) and turns:
            self.plant("phase of every step", node, self.text(node.left))
        self.generic_visit(node)


DROPPED = (
    "barrier_wait", "barrier_arrive", "barrier_expect_bytes", "fence",
    "async_descriptor_store_wait", "named_barrier_wait", "named_barrier_arrive",
    "async_descriptor_load", "async_descriptor_store", "copy_rows", "store_rows", "store_columns",
    "async_load", "wait_for_writes",
)  # fmt: skip


def _called(node: ast.AST) -> str:
    """The name of the function that a statement or expression calls."""
    node = getattr(node, "value", node) if isinstance(node, ast.Expr | ast.Assign) else node
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _argument(node: ast.stmt) -> ast.AST:
    """The first argument of the call that a statement makes."""
    return node.value.args[0]


def mutants(source: str) -> list[Mutant]:
    """Every fault that is known for this source, in its order."""
    planter = _Planter(source)
    planter.visit(ast.parse(source))
    return sorted(planter.mutants, key=lambda m: (m.line, m.kind, m.now))


def within(source: str, names: set[str]) -> list[Mutant]:
    """The faults of these functions of a source."""
    functions = [x for x in ast.parse(source).body if getattr(x, "name", None) in names]
    return [
        m for m in mutants(source) if any(f.lineno <= m.line <= f.end_lineno for f in functions)
    ]


def edited(source: str, kind: str, was: str, now: str) -> Mutant:
    """A fault of one's own: text that occurs once, replaced."""
    assert source.count(was) == 1, f"{was!r} occurs {source.count(was)} times"
    start = source.index(was)
    line = source.count("\n", 0, start) + 1
    return Mutant(kind, line, was, now, start, start + len(was))


def replaced(sources: dict[str, str], was: str, now: str) -> dict[str, str]:
    """The sources of a kernel with text replaced that occurs once in all of them.

    Args:
        sources: by the module's name.
    """
    assert sum(x.count(was) for x in sources.values()) == 1, f"{was!r} does not occur once"
    return {name: x.replace(was, now) for name, x in sources.items()}


def imported_kernel(sources: dict[str, str], folder: Path, mark: str):
    """The last module of these sources, written to files of their own.

    Args:
        sources: by the module's name, those that others import first.
        mark: makes the copies' names unique.
    """
    copies = {name: f"gem_{name.rpartition('.')[2]}_{mark}" for name in sources}
    for name, source in sources.items():
        for original, copy in copies.items():
            source = source.replace(original, copy)
        module = imported(source, folder / f"{copies[name]}.py")
    return module


def imported(source: str, path: Path):
    """The module of a source written to a file."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
