"""A picture of a results file: TFLOP/s by row and contender, with the roofline."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

from bench.report import columns, groups  # noqa: E402

PEER_COLORS = ("#9ecae1", "#6baed6", "#3182bd", "#bcbddc", "#bdbdbd", "#d9d9d9")
OUR_COLORS = {"torch": "#fdd0a2", "triton": "#fd8d3c", "tlx": "#d94801"}


def colors(names: list[str]) -> dict[str, str]:
    peers = [n for n in names if n not in OUR_COLORS]
    return {**{n: PEER_COLORS[i % len(PEER_COLORS)] for i, n in enumerate(peers)}, **OUR_COLORS}


def plot(data: dict, path: Path | str) -> None:
    """One row of two panels (forward, backward) per set; black marks are the roofline."""
    panels = {(name, direction): rows for name, direction, rows in groups(data)}
    sets = list(dict.fromkeys(name for name, _ in panels))
    if not sets:
        raise ValueError("the results hold no rows")
    names = columns(data["rows"])
    color = colors(names)
    heights = [max(len(panels.get((s, d), ())) for d in ("forward", "backward")) for s in sets]
    figure, axes = plt.subplots(
        len(sets),
        2,
        figsize=(17, 1.5 + 0.1 * (len(names) + 1) * sum(heights) + 0.8 * len(sets)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for i, name in enumerate(sets):
        for axis, direction in zip(axes[i], ("forward", "backward"), strict=True):
            _panel(axis, panels.get((name, direction), []), names, color)
            axis.set_title(f"{name}, {direction}", loc="left")
            axis.set_xlabel("TFLOP/s")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color[n]) for n in names]
    handles.append(Line2D([], [], color="black", marker="|", markersize=10, linestyle="none"))
    figure.legend(handles, [*names, "roofline"], loc="outside upper center", ncols=len(names) + 1)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis, rows: list[dict], names: list[str], color: dict[str, str]) -> None:
    thick = 0.84 / max(1, len(names))
    for place, entry in enumerate(rows):
        for k, name in enumerate(names):
            value = entry["tflops"].get(name)
            if value is not None:
                at = place - 0.42 + thick * (k + 0.5)
                axis.barh(at, value, thick * 0.92, color=color[name])
        if entry["ms"]:
            known = next(iter(entry["ms"]))
            roof = entry["tflops"][known] * entry["ms"][known] / (entry["roofline_us"] / 1e3)
            axis.plot([roof, roof], [place - 0.45, place + 0.45], color="black", linewidth=1.5)
    axis.set_yticks(range(len(rows)), [entry["name"] for entry in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
