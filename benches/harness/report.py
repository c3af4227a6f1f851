"""The results for people: a Markdown table. Losses stay in it."""

from collections.abc import Iterable
from typing import Any

Results = dict[str, Any]

_EXPLANATION = (
    "Medians of interleaved pairs, quartiles in brackets; `x` is their time over ours, so below 1 is a loss. "
    "What was loaded or saved was compared bit for bit after every timed run."
)
_VERDICTS = {"short": "**short**", "failed": "**failed**"}


def markdown(results: Results) -> str:
    """The whole report."""
    machine = results["machine"]
    about = (
        f"{machine.get('processor', machine['cpu'])}, {machine['cores']} cores, {machine['memory_gb']} GB of memory, "
        f"{machine['file_system']}, Linux {machine['kernel']}, accelerator: {machine['accelerator']}. "
        f"torch {machine['torch']}, safetensors {machine['safetensors']}, "
        f"dcp-rs {machine['dcp_rs']} ({machine['commit']}), Python {machine['python']}. "
        f"Sizes: {results['size']}."
    )
    lines = [
        f"# Benchmarks of {results['date']}",
        "",
        about,
        "",
        _EXPLANATION,
        "",
        *_noise(results),
        "",
        "| case | ours | against | ours, s | theirs, s | measured | reach | stretch | |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    notes: list[str] = []
    for family in results["families"]:
        lines += [_line(row, notes) for row in family["rows"]]
    lines += ["", *(f"{i}. {note}" for i, note in enumerate(notes, 1))]
    return "\n".join(lines).rstrip() + "\n"


def _noise(results: Results) -> Iterable[str]:
    busy = [f["noise"][when]["busy"] for f in results["families"] for when in ("before", "after")]
    if not busy:
        return
    yield (
        f"Before and after the families of cases, with none of them running, the processors were {min(busy):.0%} "
        f"to {max(busy):.0%} busy with other work"
        + (": **a noisy machine, take the ratios with care.**" if max(busy) > 0.1 else ".")
    )


def _line(row: dict[str, Any], notes: list[str]) -> str:
    verdict = _VERDICTS.get(row["verdict"], row["verdict"])
    note = row["error"] or row["note"]
    if note:
        if note not in notes:
            notes.append(note)
        verdict = f"{verdict} ({notes.index(note) + 1})".strip()
    cells = [
        row["case"],
        row["ours"],
        row["against"],
        _number(row["ours_s"]),
        _number(row["theirs_s"]),
        _measured(row),
        _target(row, "reach"),
        _target(row, "stretch"),
        verdict,
    ]
    return "| " + " | ".join(cells) + " |"


def _measured(row: dict[str, Any]) -> str:
    if row["value"] is None:
        return "-"
    text = f"{_number(row['value'])} {row['unit']}"
    if row["rounds"] > 1:
        text += f" [{_number(row['low'])}-{_number(row['high'])}]"
    return text


def _target(row: dict[str, Any], which: str) -> str:
    return "" if row[which] is None else f"{row[which]:g}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
