"""Under a default device that is not the CPU, everything does what it does without one.

Buffers were made where the default device was. On ``meta`` they had no memory: a load that casts
wrote to address 0 and ended the process, a save of what lies strided wrote nothing, and a save in
the background failed with an error of torch's.
"""

import ast
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.utils._device import _device_constructors

import dcp_rs
from dcp_rs import CheckpointManager, RsReader, RsWriter
from dcp_rs.optim import load_training_state, save_training_state
from support import assert_state_equal, run_ranks

PACKAGE = Path(dcp_rs.__file__).parent
#: What gives a new tensor on the default device, as the installed torch has it.
FACTORIES = {constructor.__name__.removeprefix("fft_") for constructor in _device_constructors()}


def state() -> dict[str, Any]:
    return {
        "strided": torch.arange(12.0).view(3, 4).t(),
        "half": torch.arange(4, dtype=torch.bfloat16),
        "conjugated": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
        "whole": torch.arange(5),
        "empty": torch.ones(0, 3),
        "number": 3,
    }


def cast(values: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What a load of these as `dtype` gives."""
    return {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in values.items()
    }


def blank() -> dict[str, Any]:
    """Where they are loaded to: lazily conjugated, and of other dtypes."""
    made = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for name, value in state().items()
    }
    return made | {
        "half": torch.zeros(4),
        "conjugated": torch.zeros(3, dtype=torch.complex64).conj(),
    }


@contextmanager
def device_that_is_set() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def save_and_load(folder: Path, on_meta: Callable[[], AbstractContextManager[Any]]) -> None:
    want, full = state(), cast(state(), torch.float32)
    loaded, wider, by_torch, once_more = blank(), blank(), blank(), blank()
    with on_meta():
        dcp_rs.save(dict(want), folder / "saved", no_dist=True)
        dcp_rs.load(loaded, folder / "saved", no_dist=True)
        wanted = {"dtype": torch.float64, "assign": True}
        dcp_rs.load(wider, folder / "saved", no_dist=True, **wanted)
        dcp.save(dict(want), storage_writer=RsWriter(folder / "by torch"), no_dist=True)
        reader = RsReader(folder / "by torch")
        dcp.load(by_torch, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
        dcp_rs.async_save(dict(want), folder / "in the background", no_dist=True).result()
        dcp_rs.load(once_more, folder / "in the background", no_dist=True)
        assert dcp_rs.verify(folder / "in the background").ok
    assert_state_equal(loaded, full)
    assert_state_equal(wider, cast(want, torch.float64))
    assert_state_equal(by_torch, full)
    assert_state_equal(once_more, full)


def open_and_convert(folder: Path, on_meta: Callable[[], AbstractContextManager[Any]]) -> None:
    want = state()
    dcp_rs.save(dict(want), folder / "saved", no_dist=True)
    with on_meta():
        with dcp_rs.open(folder / "saved") as checkpoint:
            opened = {name: checkpoint[name] for name in checkpoint}
            rows = checkpoint.get_slice("strided")[1:3]
            streamed = dict(checkpoint.stream())
        dcp_rs.convert(
            folder / "saved", out=folder / "half.safetensors", dtype=torch.float16, exclude="number"
        )
        dcp_rs.convert(folder / "saved", out=folder / "all.pt")
        dcp_rs.convert(folder / "saved", out=folder / "stock", to="dcp")
        halves = dcp_rs.load_file(folder / "half.safetensors")
    assert_state_equal(opened, want)
    assert torch.equal(rows, want["strided"][1:3])
    assert_state_equal(streamed, want)
    tensors = {name: value for name, value in want.items() if isinstance(value, torch.Tensor)}
    assert_state_equal(halves, cast(tensors, torch.float16))
    assert_state_equal(torch.load(folder / "all.pt"), want)
    by_stock = blank()
    dcp.load(by_stock, storage_reader=dcp.FileSystemReader(folder / "stock"), no_dist=True)
    assert_state_equal(by_stock, cast(want, torch.float32))


def train_and_resume(folder: Path, on_meta: Callable[[], AbstractContextManager[Any]]) -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(2)
    other, its_optimizer = trained(0)
    kept: dict[str, Any] = {"seen": (torch.arange(3), 2)}
    extra: dict[str, Any] = {"seen": None}
    with on_meta():
        save_training_state(folder / "training", model, optimizer, kept, no_dist=True)
        load_training_state(folder / "training", other, its_optimizer, extra, no_dist=True)
    assert_state_equal(its_optimizer.state_dict(), optimizer.state_dict())
    assert_state_equal(other.state_dict(), model.state_dict())
    assert extra["seen"][0].tolist() == [0, 1, 2]


def manage(folder: Path, on_meta: Callable[[], AbstractContextManager[Any]]) -> None:
    told = dist.get_rank() == 1
    want, loaded = state(), blank()
    with on_meta(), CheckpointManager(folder / "run", preemption=lambda: told) as manager:
        assert manager.should_save(1)
        manager.async_save(1, dict(want)).result()
        assert manager.load(loaded) == 1
    assert_state_equal(loaded, cast(want, torch.float32))


def in_a_process(folder: Path, part: Callable[..., None], way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of casts, which are meant
        own = folder if part is manage else folder / str(dist.get_rank())
        part(own, device_that_is_set if way == "set" else lambda: torch.device("meta"))


@pytest.mark.parametrize("part", [save_and_load, open_and_convert, train_and_resume, manage])
@pytest.mark.parametrize("way", ["entered", "set"])
def test_a_default_device_changes_nothing(tmp_path, part, way):
    run_ranks(2 if part is manage else 1, in_a_process, tmp_path, part, way)


def unplaced(path: Path) -> list[str]:
    """Where a module has torch make a tensor, or hands over what makes one, without a word of the device."""
    tree = ast.parse(path.read_text())
    placed = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and any(keyword.arg == "device" for keyword in node.keywords)
    }
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in FACTORIES
        and ast.unparse(node.value) in ("torch", "torch.fft", "torch.nested")
        and id(node) not in placed
    ]


def test_no_tensor_is_made_without_its_device():
    """Host memory is asked for with ``device="cpu"``, and the user's default device by name."""
    assert {"empty", "zeros", "ones", "full", "tensor", "arange", "as_tensor"} <= FACTORIES
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 100
    assert [place for path in modules for place in unplaced(path)] == []


def test_unplaced_tensors_are_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "one.py").write_text(
        "a = torch.empty(3)\nb = torch.empty(3, device='cpu')\nc = map(torch.zeros, [1])\n"
    )
    assert unplaced(tmp_path / "one.py") == ["one.py:1: torch.empty", "one.py:3: torch.zeros"]
