"""Results as tables: for the terminal and for a page of the documentation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

COLUMNS = ("fa4", "fa4_view", "fa3", "varlen_attn", "sdpa_padded", "flex", "torch", "triton", "tlx")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of what is there; None of nothing."""
    known = [v for v in values if v is not None]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def groups(data: dict) -> Iterator[tuple[str, str, list[dict]]]:
    """(set, pass, entries), in the order of the file."""
    for name in dict.fromkeys(r["set"] for r in data["rows"]):
        for direction in ("forward", "backward"):
            rows = [r for r in data["rows"] if (r["set"], r["pass"]) == (name, direction)]
            if rows:
                yield name, direction, rows


def columns(rows: Iterable[dict]) -> list[str]:
    """The contenders that have anything to show, in one order."""
    seen = {n for r in rows for part in ("ms", "broken") for n in r.get(part, {})}
    return [n for n in COLUMNS if n in seen] + sorted(seen - set(COLUMNS))


def cells(entry: dict, names: Iterable[str]) -> dict[str, str]:
    """By contender "ms/TFLOP/s", "broken (ratio)" or "-"; a "<" before an upper bound."""
    texts = {}
    for name in names:
        if name in entry["ms"]:
            bound = "<" if entry["timer"][name] == "events" else ""
            texts[name] = f"{bound}{entry['ms'][name]:.3f}/{entry['tflops'][name]:.0f}"
        elif name in entry["broken"]:
            texts[name] = f"broken ({number(entry['broken'][name], '{:.1f}')})"
        else:
            texts[name] = "-"
    return texts


def number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def tail(entry: dict) -> list[str]:
    """ratio, shares of the roofline (the second one not in older files), error ratio."""
    return [
        number(entry["ratio"], "{:.2f}"),
        number(entry["roofline_share"], "{:.0%}"),
        number(entry.get("hot_share"), "{:.0%}"),
        number(entry["error_ratio"], "{:.2f}"),
    ]


def print_tables(data: dict, console: Console | None = None) -> None:
    """A table per set and pass; ms / TFLOP/s, the best peer's and our best underlined."""
    console = console or Console(width=200, highlight=False)
    for name, direction, rows in groups(data):
        names = columns(rows)
        mean = geometric_mean(r["ratio"] for r in rows)
        title = f"{name}, {direction}: ms/TFLOP/s"
        if mean is not None:
            title += f"; geometric mean of ratio {mean:.3f}"
        table = Table(title=title, title_justify="left", pad_edge=False)
        table.add_column("row", no_wrap=True)
        for column in [*names, "ratio", "roof", "hot", "error"]:
            table.add_column(column, justify="right", no_wrap=True)
        for entry in rows:
            texts = cells(entry, names)
            for best in (entry["ours"], entry["best_peer"]):
                if best:
                    texts[best] = f"[bold underline]{texts[best]}[/]"
            table.add_row(entry["name"], *texts.values(), *tail(entry))
        console.print(table)
    for reason, where in skips(data).items():
        console.print(f"skipped {reason}: {where}", markup=False)


def skips(data: dict) -> dict[str, str]:
    """By "contender: reason", in how many rows and passes, or which where they are few."""
    found: dict[str, list[str]] = {}
    for entry in data["rows"]:
        for name, reason in entry["skipped"].items():
            found.setdefault(f"{name} ({reason})", []).append(f"{entry['name']} {entry['pass']}")
    return {k: ", ".join(v) if len(v) <= 2 else f"{len(v)} times" for k, v in found.items()}


def markdown(data: dict) -> str:
    """The results as Markdown: the machine, the ceilings, a table per set and pass."""
    machine, ceilings = data.get("machine", {}), data.get("ceilings", {})
    facts = [f"{k} {v}" for k, v in machine.items() if v and k not in ("boot", "gpu")]
    lines = [f"Measured on {machine.get('gpu') or 'a CPU'}, {data.get('date', 'no date')}, with"]
    lines += [f"`{data.get('command', '')}`.", ""]
    if facts:
        lines += ["; ".join(facts) + ".", ""]
    if ceilings:
        lines += [
            f"Ceilings of the same run: matmul {ceilings['matmul_tflops']:.0f} TFLOP/s, copy "
            f"{ceilings['copy_tb_s']:.2f} TB/s (read and written).",
            "",
        ]
    if not data.get("complete"):
        lines += ["Not every row of the shapes file is in these results.", ""]
    for name, direction, rows in groups(data):
        names = columns(rows)
        mean = geometric_mean(r["ratio"] for r in rows)
        lines += [f"### {name}, {direction}", ""]
        if mean is not None:
            lines += [f"Geometric mean of the ratio: {mean:.2f}.", ""]
        head = ["row", *names, "ratio", "roofline", "hot", "error"]
        lines += ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
        for entry in rows:
            texts = cells(entry, names)
            for best in (entry["ours"], entry["best_peer"]):
                if best:
                    texts[best] = f"**{texts[best]}**"
            lines.append("| " + " | ".join([entry["name"], *texts.values(), *tail(entry)]) + " |")
        lines.append("")
    if reasons := skips(data):
        lines += ["Left out:", "", *(f"- {k}: {v}" for k, v in reasons.items()), ""]
    return "\n".join(lines)


def rewrite(page: Path | str, data: dict) -> None:
    """Puts the results between the markers of a page.

    Raises:
        ValueError: if the page lacks the markers.
    """
    page = Path(page)
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} must have one {BEGIN} and one {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{markdown(data)}{END}{after}")
