"""Indexes of single ranks beside one of all ranks, as a kill between its commit and their removal leaves them.

Any error of ``index.dcprs`` led to them: the ranks of one load took two saves, and nobody was told.
"""

import errno
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.checkpoint import locate
from dcp_rs.checkpoint.locate import LoadSource
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptIndexError,
    StorageError,
)
from support import rank_outcomes, run_ranks
from support.both import HAS_RANK_LOCAL

pytestmark = pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch has no rank-local saves")

OURS, TORCHS = "dcp_rs.load", "dcp.load"


def state(value):
    return {"w": torch.full((4,), float(value)), "step": value}


def save_rank_local(path):
    dcp.save(state(1), storage_writer=RsWriter(path), use_collectives=False)


def load(how, path):
    got = state(0)
    try:
        if how == TORCHS:
            dcp.load(got, storage_reader=RsReader(path))
        else:
            dcp_rs.load(got, path)
    except BaseException:
        assert got["step"] == 0
        assert not got["w"].any()
        raise
    return got["step"], got["w"].tolist()


@pytest.fixture
def beside(ckpt, tmp_path):
    """Step 1 of each of two ranks, and step 2 of all."""
    run_ranks(2, save_rank_local, ckpt)
    shutil.copytree(ckpt, tmp_path / "kept")
    dcp_rs.save(state(2), ckpt)
    for file in (tmp_path / "kept").iterdir():
        if not (ckpt / file.name).exists():
            shutil.copy(file, ckpt)
    assert {"index.dcprs", "__0.index.dcprs", "__1.index.dcprs"} <= {
        file.name for file in ckpt.iterdir()
    }
    return ckpt


@pytest.mark.parametrize("how", [OURS, TORCHS])
def test_the_index_of_all_ranks_comes_first(beside, how):
    assert run_ranks(2, load, how, beside) == [(2, [2.0] * 4)] * 2


def load_where_one_fails(how, path, error):
    real, left = locate.open_index, [error]

    def fails_once(where, *, rank=None, **options):
        if dist.get_rank() == 1 and rank is None and left:
            raise left.pop()
        return real(where, rank=rank, **options)

    with mock.patch.object(locate, "open_index", fails_once):
        return load(how, path)


@pytest.mark.parametrize("how", [OURS, TORCHS])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        CorruptIndexError("damaged"),
        StorageError("status 503"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_rank_that_cannot_read_it_does_not_take_its_own(beside, how, error):
    for outcome in rank_outcomes(2, load_where_one_fails, how, beside, error):
        assert isinstance(outcome.error, CheckpointException if how == TORCHS else type(error)), (
            outcome
        )


@pytest.mark.parametrize("how", [OURS, TORCHS])
@pytest.mark.parametrize("damage", ["a byte", "a link that leads nowhere"])
def test_a_damaged_one_is_an_error(beside, how, damage):
    index = beside / "index.dcprs"
    if damage == "a byte":
        data = bytearray(index.read_bytes())
        data[300] ^= 1
        index.write_bytes(data)
    else:
        index.unlink()
        index.symlink_to("nowhere")
    want = CorruptIndexError if damage == "a byte" else CheckpointNotFoundError
    for outcome in rank_outcomes(2, load, how, beside):
        assert isinstance(outcome.error, CheckpointException if how == TORCHS else want), outcome
    with pytest.raises(want):
        RsReader(beside).read_metadata(rank=0)


def test_a_reader_that_is_asked_for_a_rank_s_looks_for_that_of_all(beside):
    with pytest.raises(CheckpointNotFoundError, match="all ranks"):
        RsReader(beside).read_metadata(rank=0)
    (beside / "index.dcprs").unlink()
    assert set(RsReader(beside).read_metadata(rank=0).state_dict_metadata) == {"w", "step"}


def load_overtaken(how, path, new):
    """Rank 1 has opened its own index when that of all ranks is committed, which rank 0 opens."""
    left, real = [new], LoadSource.open

    def opened(source, rank=None):
        if not left or (dist.get_rank() == 1 and rank is None):
            return real(source, rank)
        left.clear()
        found = real(source, rank) if dist.get_rank() == 1 else None
        dist.barrier()
        if found is None:
            for file in sorted(new.iterdir()):  # the index is the last
                shutil.copy(file, path)
            found = real(source, rank)
        dist.barrier()
        return found

    with mock.patch.object(LoadSource, "open", opened):
        return load(how, path)


@pytest.mark.parametrize("how", [OURS, TORCHS])
def test_ranks_agree_on_which_of_the_two_it_is(ckpt, tmp_path, how):
    run_ranks(2, save_rank_local, ckpt)
    dcp_rs.save(state(2), tmp_path / "new")
    outcomes = rank_outcomes(2, load_overtaken, how, ckpt, tmp_path / "new")
    if how == OURS:  # which begins again
        assert [outcome.value for outcome in outcomes] == [(2, [2.0] * 4)] * 2, outcomes
        return
    for outcome in outcomes:
        assert isinstance(outcome.error, CheckpointException), outcome
        assert {type(error) for error, _ in outcome.error.failures.values()} == {
            CheckpointReplacedError
        }


# --- without overwriting


def refused(how, path):
    """Return whether a save of all ranks that may replace nothing is refused."""
    if how == OURS:
        with pytest.raises(CheckpointExistsError, match="overwrite=False"):
            dcp_rs.save(state(2), path, overwrite=False)
    else:
        with pytest.raises(CheckpointException, match="overwrite=False"):
            dcp.save(state(2), storage_writer=RsWriter(path, overwrite=False))
    return True


@pytest.mark.parametrize("how", [OURS, TORCHS])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_may_replace_nothing_replaces_no_rank_local_one(ckpt, how, ranks):
    """Its commit removed the indexes of all ranks, and their data."""
    run_ranks(2, save_rank_local, ckpt)
    before = {file.name: file.read_bytes() for file in ckpt.iterdir()}
    if ranks == 1:
        assert refused(how, ckpt)
    else:
        assert run_ranks(2, refused, how, ckpt) == [True, True]
    assert {file.name: file.read_bytes() for file in ckpt.iterdir()} == before
    dcp_rs.save(state(2), ckpt)
    assert not list(ckpt.glob("__*"))


def save_beside_a_rank(path):
    """Save without overwriting, while a rank commits a save of its own."""

    def other(*_):
        if not list(path.glob("__*")):
            save_rank_local(path)

    with pytest.raises(CheckpointExistsError, match="meanwhile"):
        dcp_rs.save(state(2), path, overwrite=False, progress=other, no_dist=True)
    return True


def test_rank_local_save_committed_meanwhile_is_kept(ckpt):
    assert run_ranks(1, save_beside_a_rank, ckpt) == [True]
    got = RsReader(ckpt)
    assert set(got.read_metadata(rank=0).state_dict_metadata) == {"w", "step"}
    assert len(list(ckpt.glob("g*"))) == 1
