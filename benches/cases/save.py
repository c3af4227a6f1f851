"""Saving, with fsync: a model's state, and many small tensors."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import loaders
from harness.context import Context, ask_limit
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of, small_shapes
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import dcp_rs

State = dict[str, torch.Tensor]

OURS = "dcp_rs.save"
OURS_STOCK_PLANNER = "dcp.save, RsWriter"
STOCK = "FileSystemWriter"
DRIVER = "dcp.save, a writer that does nothing"
DRIVER_RESOLVING = "dcp.save, a writer that only resolves the items"
LIMIT = "limit: O_DIRECT, 4 in flight, fsync"


class NullWriter(StorageWriter):
    """Writes nothing: what is left is torch's driver and planner, with or without its share in every item that is written."""

    def __init__(self, *, resolve: bool) -> None:
        super().__init__()
        self._resolve = resolve

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._resolve:
            for item in plan.items:
                planner.resolve_data(item)
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003  # the protocol's
        return True


def ours(state: State, path: Path) -> None:
    dcp_rs.save(state, path, no_dist=True)


def ours_buffered(state: State, path: Path) -> None:
    dcp_rs.save(state, path, no_dist=True, io="buffered")


def ours_stock_planner(state: State, path: Path) -> None:
    dcp.save(state, storage_writer=dcp_rs.RsWriter(path), no_dist=True)


def stock(state: State, path: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def driver(state: State, _path: Path) -> None:
    dcp.save(state, storage_writer=NullWriter(resolve=False), no_dist=True)


def driver_resolving(state: State, _path: Path) -> None:
    dcp.save(state, storage_writer=NullWriter(resolve=True), no_dist=True)


def run(context: Context) -> list[Row]:
    large = Pattern(model_shapes(context.sizes), torch.bfloat16)
    small = Pattern(small_shapes(context.sizes.small), torch.float32)
    return [*_large(context, large), *_small(context, small)]


def _saves(
    name: str,
    save: Callable[[State, Path], None],
    load: Callable[[Path, State], None] | None,
    pattern: Pattern,
    state: State,
    folder: Path,
) -> Contender:
    """A contender that saves to a new folder, which is loaded and compared after each run."""
    path = folder / "saved"

    def check() -> None:
        if load is not None:
            loaded = pattern.blank()
            load(path, loaded)
            pattern.check(loaded)

    return Contender(name, lambda: save(state, path), before=lambda: _remove(path), verify=check)


def _remove(path: Path) -> None:
    """Removes what the last contender wrote, and all that would still have to be written of it."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _large(context: Context, pattern: Pattern) -> list[Row]:
    folder = context.folder / "saves"
    folder.mkdir(parents=True, exist_ok=True)
    state = pattern.state()
    limit_path = folder / "limit"
    with context.limit_over() as limit:
        times = measure(
            [
                _saves(OURS, ours, loaders.ours, pattern, state, folder),
                _saves(STOCK, stock, loaders.stock, pattern, state, folder),
                _saves(
                    OURS_STOCK_PLANNER, ours_stock_planner, loaders.ours, pattern, state, folder
                ),
                Contender(
                    LIMIT,
                    lambda: ask_limit(limit, "write", limit_path, pattern.nbytes),
                    before=lambda: _remove(limit_path),
                    verify=lambda: _remove(limit_path),
                ),
            ],
            **context.pairs,
        )
    shutil.rmtree(folder)
    case = f"save with fsync, {len(pattern.shapes)} bf16 tensors, {size_of(pattern.nbytes)}"
    return [
        versus(case, times, OURS, STOCK, reach=1.5, stretch=2.2),
        versus(case, times, OURS_STOCK_PLANNER, STOCK),
        versus(case, times, OURS, LIMIT),
    ]


def _small(context: Context, pattern: Pattern) -> list[Row]:
    folder = context.folder / "saves"
    folder.mkdir(parents=True, exist_ok=True)
    state = pattern.state()
    times = measure(
        [
            _saves(OURS, ours, loaders.ours, pattern, state, folder),
            _saves(STOCK, stock, None, pattern, state, folder),
            _saves(OURS_STOCK_PLANNER, ours_stock_planner, loaders.ours, pattern, state, folder),
            _saves(DRIVER, driver, None, pattern, state, folder),
            _saves(DRIVER_RESOLVING, driver_resolving, None, pattern, state, folder),
        ],
        **context.pairs,
    )
    shutil.rmtree(folder)
    case = f"save {len(pattern.shapes):,} float32 tensors of 64x16, with fsync"
    return [
        versus(case, times, OURS, STOCK, reach=20, stretch=60),
        versus(
            case,
            times,
            OURS_STOCK_PLANNER,
            DRIVER,
            reach=0.7,
            stretch=0.9,
            note="share of what torch's driver and planner leave possible",
        ),
        versus(case, times, OURS_STOCK_PLANNER, DRIVER_RESOLVING),
        versus(case, times, OURS_STOCK_PLANNER, STOCK),
    ]
