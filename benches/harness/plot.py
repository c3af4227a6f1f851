"""The results as a picture: every ratio on one logarithmic axis, beside its targets."""

import textwrap
from pathlib import Path
from typing import Any

_COLOURS = {"stretch": "#1a7f5a", "reached": "#5aa9c8", "short": "#c8553d", "": "#9a9a9a"}
_LEGEND = {
    "stretch": "stretch target met",
    "reached": "target met",
    "short": "short of its target",
    "": "no target",
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes an SVG. Only ratios of times are in it."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "dcp-rs"  # the same results give the same file
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [
        row
        for family in results["families"]
        for row in family["rows"]
        if row["unit"] == "x" and row["value"]
    ][::-1]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(12, 1.4 + 0.52 * len(rows)))
    for y, row in enumerate(rows):
        value = row["value"]
        axes.barh(y, value - 1, left=1, height=0.6, color=_COLOURS[row["verdict"]], zorder=2)
        axes.plot([row["low"], row["high"]], [y, y], color="black", linewidth=1, zorder=4)
        for name, style in (("reach", "-"), ("stretch", ":")):
            if row[name]:
                axes.plot(
                    [row[name]] * 2, [y - 0.42, y + 0.42], f"k{style}", linewidth=1.5, zorder=3
                )
        axes.annotate(
            f"{value:.3g}x",
            (max(value, row["high"], row["reach"] or 0, row["stretch"] or 0, 1), y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    labels = [
        textwrap.fill(row["case"], 78) + f"\n{row['ours']}  /  {row['against']}" for row in rows
    ]
    axes.set_yticks(range(len(rows)), labels, fontsize=7.5)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1, zorder=1)
    axes.set_xlabel("their time over ours, logarithmic: right of 1 is faster, left of it is slower")
    axes.grid(axis="x", which="major", alpha=0.3, zorder=0)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.margins(x=0.1)
    used = [name for name in _LEGEND if any(row["verdict"] == name for row in rows)]
    handles: list[Any] = [Patch(color=_COLOURS[name], label=_LEGEND[name]) for name in used]
    handles += [
        Line2D([], [], color="black", linestyle="-", label="target"),
        Line2D([], [], color="black", linestyle=":", label="stretch target"),
    ]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize=8, frameon=False)
    machine = results["machine"]
    figure.suptitle(
        f"dcp-rs {machine['dcp_rs']}, {results['date']}: {machine['cpu']}, {machine['cores']} cores",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
