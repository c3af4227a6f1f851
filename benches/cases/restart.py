"""A job that saves, dies, and restores on the same machine in a new process, and then in another.

The page cache holds what the save left there: nothing is warmed or dropped in between.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from harness import checkpoints
from harness.context import Context
from harness.driven import worker
from harness.loaders import OURS, SAFETENSORS, STOCK
from harness.pairs import Contender, Times, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of
from safetensors.torch import save_file

from cases import save as saves

#: dcp-rs loads the folder that stock DCP just saved: no restore of its own should be slower.
OURS_OF_STOCK = "dcp_rs.load of the stock folder"
OURS_BUFFERED = 'dcp_rs.save(io="buffered")'

#: The loader that each contender restores with.
LOADS = {
    OURS: OURS,
    OURS_BUFFERED: OURS,
    STOCK: STOCK,
    OURS_OF_STOCK: OURS,
    SAFETENSORS: SAFETENSORS,
}


def run(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    path = context.folder / "restart"
    state = pattern.state()
    restores: dict[str, list[Times]] = {name: [Times(), Times()] for name in LOADS}

    def contender(name: str, save: Callable[[saves.State, Path], None]) -> Contender:
        def restore() -> None:
            for times in restores[name]:
                with worker("load_worker", path, context.size) as process:
                    process.ask("prepare", LOADS[name])
                    seconds = process.seconds("load")
                    process.ask("verify")
                times.seconds.append(seconds)

        return Contender(
            name,
            lambda: save(state, path),
            before=lambda: checkpoints.remove(path),
            verify=restore,
            warm_up=False,
        )

    times = measure(
        [
            contender(OURS, saves.ours),
            contender(OURS_BUFFERED, saves.ours_buffered),
            contender(STOCK, saves.stock),
            contender(OURS_OF_STOCK, saves.stock),
            contender(SAFETENSORS, _safetensors),
        ],
        **context.pairs,
    )
    checkpoints.remove(path)
    size = size_of(pattern.nbytes)
    rows = [
        versus(f"save {size} with fsync, then restart", times, OURS, other)
        for other in (OURS_BUFFERED, STOCK, SAFETENSORS)
    ]
    for number, word in enumerate(("first", "second")):
        case = f"{word} restore of {size} after a save, in a new process"
        ordered = {name: done[number] for name, done in restores.items()}
        for name, record in ordered.items():
            record.error = times[name].error
        rows.append(versus(case, ordered, OURS_BUFFERED, OURS_OF_STOCK, reach=1.0))
        rows += [
            versus(case, ordered, OURS_BUFFERED, other) for other in (STOCK, SAFETENSORS, OURS)
        ]
    return rows


def _safetensors(state: saves.State, path: Path) -> None:
    """Save one file, and make it as durable as the others are."""
    path.mkdir(parents=True)
    file = path / "model.safetensors"
    save_file(state, file)
    for name in (file, path):
        opened = os.open(name, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)
