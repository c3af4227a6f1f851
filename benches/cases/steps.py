"""Steps of a run that trains adapters: a frozen backbone of 1 GB, and 10 MB of adapters and their optimizer that change."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness.context import Context
from harness.pairs import Contender, measure
from harness.rows import Row, figure, versus
from harness.states import Pattern, size_of

import dcp_rs

FULL = "dcp_rs.save"
STOCK = "FileSystemWriter"
KNOWN = "parent=, reuse="
DIGEST = "parent="
FROZEN = "backbone.*"

#: Matrices of the backbone, and adapters of each, which are one in so many parts of it with their
#: two moments.
MATRICES = 15
PARTS = 100


class Run:
    """The state of a run, and where it is saved."""

    def __init__(self, hidden: int, folder: Path) -> None:
        shapes = {f"backbone.{i}.weight": (2 * hidden, 4 * hidden) for i in range(MATRICES)}
        self.frozen = Pattern(shapes, torch.bfloat16)
        count = self.frozen.nbytes // PARTS // 4 // 3 // MATRICES
        self.trained = {
            f"{kind}.{i}": torch.zeros(count)
            for kind in ("adapter", "optim.exp_avg", "optim.exp_avg_sq")
            for i in range(MATRICES)
        }
        self.state: dict[str, torch.Tensor] = {**self.frozen.state(), **self.trained}
        self.path = folder / "step"
        self.written: dict[str, list[float]] = {}

    @property
    def nbytes(self) -> int:
        """Of a whole step."""
        return sum(tensor.nbytes for tensor in self.state.values())

    def step(self) -> None:
        """Trains the adapters, and makes room for another save."""
        for tensor in self.trained.values():
            tensor.add_(1)
        shutil.rmtree(self.path, ignore_errors=True)

    def check(self, name: str) -> None:
        """Raises unless every bit was saved; notes what was written for it."""
        with dcp_rs.open(self.path, verify=True) as checkpoint:
            self.frozen.check(checkpoint)
            for key, tensor in self.trained.items():
                assert torch.equal(checkpoint[key], tensor), f"{key} was not saved as it is"
        alone = [file for file in self.path.iterdir() if file.stat().st_nlink == 1]
        share = 100 * sum(file.stat().st_size for file in alone) / self.nbytes
        self.written.setdefault(name, []).append(share)


def run(context: Context) -> list[Row]:
    folder = context.folder / "steps"
    folder.mkdir(parents=True, exist_ok=True)
    lora = Run(context.sizes.hidden, folder)
    parent, told = folder / "parent", folder / "told"
    dcp_rs.save(lora.state, parent, no_dist=True)
    dcp_rs.save(lora.state, told, no_dist=True, reuse=FROZEN)

    def contender(name: str, save: Callable[[], Any]) -> Contender:
        checks = (lambda: None) if name == STOCK else (lambda: lora.check(name))

        def timed() -> None:
            save()

        return Contender(name, timed, before=lora.step, verify=checks)

    def ours(**options: Any) -> Callable[[], Any]:
        return lambda: dcp_rs.save(lora.state, lora.path, no_dist=True, **options)

    times = measure(
        [
            contender(FULL, ours()),
            contender(DIGEST, ours(parent=parent)),
            contender(KNOWN, ours(parent=told, reuse=FROZEN)),
            contender(
                STOCK,
                lambda: dcp.save(
                    lora.state, storage_writer=dcp.FileSystemWriter(lora.path), no_dist=True
                ),
            ),
        ],
        **context.pairs,
    )
    shutil.rmtree(folder)
    trained = lora.nbytes - lora.frozen.nbytes
    case = f"a step of {size_of(lora.nbytes)}, of which {size_of(trained)} changed, with fsync"
    rows = [
        versus(case, times, KNOWN, FULL, reach=10, note="the caller says what is frozen"),
        versus(case, times, DIGEST, FULL, reach=2.5, note="all is compared"),
        versus(case, times, KNOWN, STOCK),
        versus(case, times, DIGEST, STOCK),
    ]
    what = "bytes written, of a whole step"  # each time but the first, the warm-up
    return rows + [
        figure(what, name, "%", lora.written[name][1:], reach=2)
        for name in (KNOWN, DIGEST)
        if times[name].error is None
    ]
