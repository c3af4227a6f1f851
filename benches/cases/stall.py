"""What a save in the background costs the training step that it begins in: parameters and Adam's moments, in host memory."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness.context import Context
from harness.pairs import Contender, Times, measure
from harness.rows import Row, figure, versus
from harness.states import size_of
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import dcp_rs

NONE = "no save"
OURS = "async_save(async_staging=True)"
DEFAULT = "async_save"
STOCK = "dcp.async_save"
STOCK_STAGED = "dcp.async_save, DefaultStager"

#: Samples of a batch for each thousand columns of a layer: as long as a step of a real model takes,
#: beside the copy of it.
BATCH = 64

#: Saves, and gives what says when parameters may change, and when the checkpoint is there.
Save = Callable[[dict[str, torch.Tensor], Any], tuple[Future[Any] | None, Future[Any]]]


class Training:
    """A model that is trained, and saved once a step.

    Attributes:
        returned, staged, step: seconds from the begin of a step until the save's call returned,
            until parameters might change, until the step was over; by contender.
    """

    def __init__(self, context: Context) -> None:
        hidden = context.sizes.hidden
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Linear(hidden, hidden, bias=False) for _ in range(context.sizes.layers))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(max(4, BATCH * hidden // 1000), hidden)
        self.path = context.folder / "stall"
        self.returned: dict[str, Times] = {}
        self.staged: dict[str, Times] = {}
        self.step: dict[str, Times] = {}
        self._forward_and_backward()
        self.optimizer.step()  # from now on it has moments

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and moments."""
        state = dict(self.model.state_dict())
        for number, moments in self.optimizer.state_dict()["state"].items():
            state |= {f"optim.{number}.{name}": value for name, value in moments.items()}
        return state

    def _forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()

    def run(self, name: str, save: Save | None) -> float:
        """A step, in which a save begins. Afterwards, untimed: the rest of the save, and whether it is right."""
        state = self.state()
        want = {key: _sum(value) for key, value in state.items()}
        shutil.rmtree(self.path, ignore_errors=True)
        begun = time.perf_counter()
        staged, saved = save(state, self.path) if save is not None else (None, None)
        returned = time.perf_counter() - begun
        self._forward_and_backward()
        waited = time.perf_counter()
        if staged is not None:
            staged.result()
        waited = time.perf_counter() - waited
        self.optimizer.step()
        took = time.perf_counter() - begun
        for measured, seconds in (
            (self.returned, returned),
            (self.staged, returned + waited),
            (self.step, took),
        ):
            measured.setdefault(name, Times()).seconds.append(seconds)
        if saved is not None:
            saved.result()
            with dcp_rs.open(self.path) as checkpoint:
                assert {key: _sum(checkpoint[key]) for key in checkpoint} == want, (
                    f"{name}: a torn checkpoint"
                )
        return took


def _sum(tensor: torch.Tensor) -> int:
    """Of the bits: what tearing would change."""
    return int(tensor.contiguous().view(torch.int32).sum(dtype=torch.int64))


def run(context: Context) -> list[Row]:
    training = Training(context)
    stock_stager = DefaultStager(StagingOptions(False, False, True, False))

    def ours(state: dict[str, torch.Tensor], path: Any) -> tuple[Future[Any], Future[Any]]:
        future = dcp_rs.async_save(state, path, no_dist=True, max_copies=1, async_staging=True)
        return future.staged, future

    def default(state: dict[str, torch.Tensor], path: Any) -> tuple[Future[Any], Future[Any]]:
        future = dcp_rs.async_save(state, path, no_dist=True)
        return future.staged, future

    def stock(state: dict[str, torch.Tensor], path: Any) -> tuple[None, Future[Any]]:
        future = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
        assert isinstance(future, Future)
        return None, future

    def stock_staged(state: dict[str, torch.Tensor], path: Any) -> tuple[Future[Any], Future[Any]]:
        writer = dcp.FileSystemWriter(path)
        response = dcp.async_save(
            state, storage_writer=writer, async_stager=stock_stager, no_dist=True
        )
        assert isinstance(response, AsyncSaveResponse)
        return response.staging_completion, response.upload_completion

    saves: dict[str, Save | None] = {
        NONE: None,
        OURS: ours,
        DEFAULT: default,
        STOCK: stock,
        STOCK_STAGED: stock_staged,
    }
    contenders = [
        Contender(name, lambda name=name, save=save: training.run(name, save))
        for name, save in saves.items()
    ]
    errors = {name: times.error for name, times in measure(contenders, **context.pairs).items()}
    stock_stager.close()
    dcp_rs.release_pinned_memory()
    for measured in (training.returned, training.staged, training.step):
        for name in saves:
            times = measured.setdefault(name, Times())
            times.error = errors[name]
            del times.seconds[:1]  # the warm-up
    state = size_of(sum(tensor.nbytes for tensor in training.state().values()))
    shutil.rmtree(training.path, ignore_errors=True)
    rows = []
    for what, measured in (
        ("until the call returns", training.returned),
        ("until parameters may change, in all that a step waits for it", training.staged),
        ("a step in which a save begins", training.step),
    ):
        case = f"{what}, {state} of parameters and moments"
        rows += [
            versus(case, measured, OURS, STOCK),
            versus(case, measured, OURS, STOCK_STAGED),
            versus(case, measured, DEFAULT, STOCK),
        ]
    case = "what a save adds to the step that it begins in"
    for name in (OURS, DEFAULT, STOCK, STOCK_STAGED):
        if errors[name] is None and errors[NONE] is None:
            pairs = zip(training.step[name].seconds, training.step[NONE].seconds, strict=False)
            rows.append(
                figure(case, name, "%", [100 * (saved / without - 1) for saved, without in pairs])
            )
    return rows
