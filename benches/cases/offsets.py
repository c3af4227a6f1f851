"""Loads into tensors at different distances from the start of a page.

Cores compare only the low twelve bits of addresses, so a copy may be slow where source and
destination lie at certain distances modulo 4,096. torch's large tensors begin 64 bytes after the
start of a page.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.pairs import Contender, Times, measure
from harness.rows import Row, figure, versus
from harness.states import Pattern, size_of

import dcp_rs

PAGE = 4096
OFFSETS = (0, 64, 128, 192, 256, 512, 1024, 2048, 3072, 4032)
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    'io="buffered"': {"io": "buffered"},
    'io="mmap"': {"io": "mmap"},
    "verify=True": {"verify": True},
}
COPY = "Tensor.copy_ from memory"


def run(context: Context) -> list[Row]:
    sizes = context.sizes
    shape = (sizes.hidden * 4, sizes.hidden)
    pattern = Pattern({f"layers.{i}.weight": shape for i in range(4)}, torch.bfloat16)
    path = checkpoints.native(context.folder / "offsets", pattern)
    page_cache.warm(path)
    sources = {name: placed(pattern, name, 0) for name in pattern.shapes}
    for name, source in sources.items():
        source.copy_(pattern.view(name))

    def copy(_: Path, state: loaders.State) -> None:
        for name, tensor in state.items():
            tensor.copy_(sources[name])

    def load(options: dict[str, Any]) -> Callable[[Path, loaders.State], None]:
        def run(path: Path, state: loaders.State) -> None:
            dcp_rs.load(state, path, **options)

        return run

    ways = {mode: load(options) for mode, options in MODES.items()} | {COPY: copy}
    contenders: list[Contender] = []
    for offset in OFFSETS:
        state = {name: placed(pattern, name, offset) for name in pattern.shapes}
        contenders += [
            loaders.loads(f"{way}, at {offset}", function, path, state, pattern)
            for way, function in ways.items()
        ]
    times = measure(contenders, **context.pairs)
    case = f"warm, {len(pattern.shapes)} bf16 tensors, {size_of(pattern.nbytes)}"
    return [row for mode in MODES for row in _rows(case, times, mode)]


def placed(pattern: Pattern, name: str, offset: int) -> torch.Tensor:
    """Return an empty tensor that begins `offset` bytes after the start of a page."""
    source = pattern.view(name)
    memory = torch.empty(source.nbytes + 2 * PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % PAGE + offset
    return memory[skip : skip + source.nbytes].view(source.dtype).view(source.shape)


def _rows(case: str, times: dict[str, Times], mode: str) -> list[Row]:
    """Return the slowest offset beside the fastest, and beside torch's copy at the same place."""
    failed = [name for name in times if name.startswith(mode) and times[name].error]
    if failed:
        return [Row(case, mode, error=f"{failed[0]}: {times[failed[0]].error}")]
    medians = {offset: times[f"{mode}, at {offset}"].median for offset in OFFSETS}
    worst = max(medians, key=lambda offset: medians[offset])
    name, copy = f"{mode}, at {worst}", f"{COPY}, at {worst}"
    note = ", ".join(f"{offset}: {seconds * 1e3:.1f} ms" for offset, seconds in medians.items())
    return [
        figure(
            f"{case}, the slowest of {len(OFFSETS)} places over the fastest",
            f"dcp_rs.load, {mode}",
            "x",
            [medians[worst] / min(medians.values())],
            reach=1.4,
            stretch=1.2,
            note=note,
        ),
        versus(f"{case}, at the slowest place", times, name, copy, reach=1.0),
    ]
