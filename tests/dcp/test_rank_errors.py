"""Errors of one rank, as all of them tell them. test_rank_matrix.py has the steps that may fail."""

import contextlib
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.engine import save as engine_save
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptDataError,
    DcpRsError,
    PlanError,
    UnsafePickleError,
    UnsupportedError,
)
from support import files_in, rank_outcomes, run_ranks
from support.both import save_rs

WEIGHT = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def saved(ckpt):
    save_rs({"w": WEIGHT, "b": torch.ones(2)}, ckpt)
    return ckpt


class RaisingLoadPlanner(DefaultLoadPlanner):
    """Raises on rank 1, in the method that it is told."""

    def __init__(self, method, error):
        super().__init__()
        self.method, self.error = method, error

    def maybe(self, method):
        if method == self.method and dist.get_rank() == 1:
            raise self.error

    def create_local_plan(self):
        self.maybe("create_local_plan")
        return super().create_local_plan()

    def resolve_tensor(self, read_item):
        self.maybe("resolve_tensor")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item, tensor):
        self.maybe("commit_tensor")
        super().commit_tensor(read_item, tensor)


class RaisingSavePlanner(DefaultSavePlanner):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            raise self.error
        return super().resolve_data(write_item)


def load_with(path, planner, template=None):
    template = template or {"w": torch.zeros(3, 4)}
    dcp_rs.load_state_dict(template, RsReader(path), planner=planner)


def save_own(path, error=None):
    """Save an entry of each rank. Rank 1 fails with the error after rank 0 has planned."""
    state = {f"x{dist.get_rank()}": torch.arange(1000)}
    failing = mock.patch.object(engine_save, "write_files", side_effect=error)
    with failing if error and dist.get_rank() == 1 else contextlib.nullcontext():
        dcp_rs.save(state, path)


def save_again_after_a_failure(path):
    """With torch's own `save`, what the ranks that did not fail wrote stays until the writer is used again."""
    state = {f"x{dist.get_rank()}": torch.arange(1000)}
    writer = RsWriter(path)
    for error in (ValueError("no"), None):
        planner = RaisingSavePlanner(error) if error else None
        with contextlib.suppress(CheckpointException):
            dcp.save(state, storage_writer=writer, planner=planner)
            dcp_rs.load({f"x{dist.get_rank()}": torch.zeros(1000).long()}, path)
        dist.barrier()
    return len(files_in(path))


def errors_of(size, function, *args):
    """The errors of all ranks, none of which may be missing or a time-out."""
    errors = [outcome.error for outcome in rank_outcomes(size, function, *args, timeout=30)]
    assert all(
        isinstance(e, DcpRsError | CheckpointException | OSError | ValueError) for e in errors
    ), errors
    return errors


@pytest.mark.parametrize("method", ["create_local_plan", "resolve_tensor", "commit_tensor"])
def test_a_planner_that_raises_on_one_rank(saved, method):
    """Torch's driver tells all ranks."""
    planner = RaisingLoadPlanner(method, PlanError("cannot place 'w'", tensor="w"))
    for error in errors_of(2, load_with, saved, planner):
        assert isinstance(error, CheckpointException)
        ((rank, (cause, _)),) = error.failures.items()
        assert (rank, type(cause), cause.tensor) == (1, PlanError, "w")


class OwnPlanner(DefaultLoadPlanner):
    """Torch's driver runs it."""


def load_with_an_own_planner_on(path, rank):
    load_with(path, OwnPlanner() if dist.get_rank() == rank else None)


@pytest.mark.parametrize("rank", [0, 1])
def test_planner_of_ones_own_on_one_rank(saved, rank):
    outcomes = rank_outcomes(2, load_with_an_own_planner_on, saved, rank, timeout=30)
    error = outcomes[1 - rank].error
    assert type(error) is PlanError
    assert "make the same calls on all ranks" in str(error)
    assert outcomes[rank].error is not None


def load_value(path, as_torch_does):
    if as_torch_does:
        dcp.load({"value": None}, storage_reader=RsReader(path))
    else:
        dcp_rs.load({"value": None}, path)


@pytest.mark.parametrize("as_torch_does", [False, True])
def test_a_value_that_is_not_safe_to_load(ckpt, as_torch_does):
    save_rs({"value": Path("x")}, ckpt)
    for error in errors_of(2, load_value, ckpt, as_torch_does):
        if as_torch_does:
            assert isinstance(error, CheckpointException)
            assert sorted(error.failures) == [0, 1]
            error = error.failures[1][0]  # noqa: PLW2901
        assert type(error) is UnsafePickleError
        assert error.tensor == "value"


def load_path(path):
    dcp_rs.load({"w": torch.zeros(3, 4)}, path)


def test_no_checkpoint_there(ckpt):
    for error in errors_of(2, load_path, ckpt):
        assert type(error) is CheckpointNotFoundError
        assert error.path == str(ckpt)


def test_a_missing_data_file_is_found_by_the_ranks_that_need_it(ckpt):
    run_ranks(2, save_own, ckpt)
    next(ckpt.glob("*-r00001-*")).unlink()
    for error in errors_of(2, load_x1_on_rank_zero, ckpt):
        assert type(error) is CorruptDataError
        assert "-r00001-" in error.path
        assert "raised on rank 0" in error.__notes__[0]


def load_x1_on_rank_zero(path):
    name = "x1" if dist.get_rank() == 0 else "x0"
    dcp_rs.load({name: torch.zeros(1000).long()}, path)


# --- saving


def test_a_failed_save_leaves_no_files_and_the_old_checkpoint(ckpt):
    run_ranks(2, save_own, ckpt)
    before = {file.name: file.read_bytes() for file in ckpt.iterdir()}
    for error in errors_of(2, save_own, ckpt, ValueError("no")):
        assert type(error) is ValueError
        assert error.__notes__[-1] == "raised on rank 1"
    assert {file.name: file.read_bytes() for file in ckpt.iterdir()} == before
    run_ranks(2, save_own, ckpt)
    assert len(files_in(ckpt)) == 3


def test_a_writer_cleans_up_after_a_failed_save_when_it_is_used_again(ckpt):
    assert run_ranks(2, save_again_after_a_failure, ckpt) == [3, 3]


def save_without_overwriting(path):
    dcp_rs.save({"w": torch.ones(1)}, path, overwrite=False)


def test_all_ranks_refuse_to_overwrite(ckpt):
    run_ranks(2, save_without_overwriting, ckpt)
    for error in errors_of(2, save_without_overwriting, ckpt):
        assert type(error) is CheckpointExistsError
        assert error.path == str(ckpt)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for error in errors_of(2, save_own, tmp_path / "file" / "ckpt"):
        assert type(error) is NotADirectoryError
        assert error.__notes__[-1].startswith("raised on ranks 0, 1; this is rank ")


def save_with_a_wrong_path_on_one_rank(path, wrong):
    """The rank with the wrong path raised before the others knew, which waited for it."""
    state = {"w": torch.ones(2)}
    arguments = (state, path) if dist.get_rank() == 0 else wrong(state, path)
    with pytest.raises(TypeError, match="path"):
        dcp_rs.async_save(*arguments).result(20)


def as_bytes(state, path):
    return state, bytes(path)


def swapped(state, path):
    return path, state


@pytest.mark.parametrize("wrong", [as_bytes, swapped])
def test_a_wrong_path_of_a_background_save(ckpt, wrong):
    run_ranks(2, save_with_a_wrong_path_on_one_rank, ckpt, wrong, timeout=40)


def test_every_error_pickles():
    for kind in (
        CheckpointExistsError,
        CheckpointNotFoundError,
        CorruptDataError,
        DcpRsError,
        PlanError,
        UnsafePickleError,
        UnsupportedError,
    ):
        error = kind("message", path="/a/b", tensor="t", offset=3)
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is kind
        assert (str(copy), copy.path, copy.tensor, copy.offset) == ("message", "/a/b", "t", 3)
        assert str(kind()) == kind.__name__
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(CheckpointExistsError, FileExistsError)
