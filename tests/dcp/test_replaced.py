"""A checkpoint that another save replaces while it is read."""

import contextlib
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from crash.states import found_number
from dcp_rs import RsReader, _core
from dcp_rs.checkpoint.locate import LoadSource
from dcp_rs.engine.load import retry
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.errors import CheckpointReplacedError
from support import assert_state_equal, rank_outcomes, run_ranks
from support.numbered import check_loaded, save, template


def test_a_reader_whose_files_are_gone_says_so(ckpt):
    save(ckpt, 2)
    checkpoint = dcp_rs.open(ckpt)
    reader = RsReader(ckpt)
    metadata = reader.read_metadata()
    save(ckpt, 4)
    with pytest.raises(CheckpointReplacedError, match="replaced by another save") as raised:
        checkpoint["common"]
    assert raised.value.path == str(ckpt / "index.dcprs")
    assert type(pickle.loads(pickle.dumps(raised.value))) is CheckpointReplacedError
    with pytest.raises(CheckpointReplacedError):
        checkpoint.get_slice("common")[:3]
    with pytest.raises(CheckpointReplacedError):
        metadata.state_dict_metadata.index.verify(threads=1)
    assert found_number(ckpt, 1) == 4  # opened again


def overtaking(path, numbers):
    """A hook that saves, each time that it is called with bytes or with the one name."""

    def hook(first, *_):
        if numbers and (isinstance(first, int) or first == "common"):
            save(path, numbers.pop(0))
        return first

    return hook


@pytest.mark.parametrize("hook", ["rename", "progress"])
def test_a_load_without_a_planner_that_is_overtaken_begins_again(ckpt, hook):
    """One hook is called while the load plans, the other while it reads."""
    save(ckpt, 2)
    numbers, got = [4, 6, 8], template()
    dcp_rs.load(got, ckpt, no_dist=True, **{hook: overtaking(ckpt, numbers)})
    assert check_loaded(got) == 8
    assert not numbers


def test_a_load_with_globs_of_an_iterator_that_is_overtaken_loads_the_same(ckpt):
    save(ckpt, 2)
    got = template()
    want = {**template(), "common": None}
    how = {"include": iter(["common", "of.*"]), "exclude": (glob for glob in ["of.*"])}
    dcp_rs.load(got, ckpt, no_dist=True, rename=overtaking(ckpt, [4, 6]), **how)
    assert got["common"][0] == 6
    want["common"] = got["common"]
    assert_state_equal(got, want)


def test_a_load_with_views_of_an_iterator_that_is_overtaken_loads_the_same(ckpt):
    """The load that began again had no views: it loaded the tensor as stored, and said nothing."""
    state, times = {"w": torch.arange(4.0).view(2, 2)}, [1]
    dcp_rs.save(state, ckpt, no_dist=True, fsync=False)

    def rename(name):
        if times:
            times.pop()
            dcp_rs.save(state, ckpt, no_dist=True, fsync=False)
        return name

    got = {"w": torch.zeros(2, 2)}
    views = iter([dcp_rs.Transpose("w", (1, 0))])
    dcp_rs.load(got, ckpt, no_dist=True, rename=rename, views=views)
    assert not times
    assert torch.equal(got["w"], state["w"].T)


@pytest.mark.parametrize("hook", ["rename", "progress"])
def test_a_partial_load_that_is_overtaken_says_so(ckpt, hook):
    """It does not begin again: what the new checkpoint lacks would keep what was read from the old one."""
    save(ckpt, 2)
    with pytest.raises(CheckpointReplacedError):
        dcp_rs.load(
            template(), ckpt, no_dist=True, allow_partial_load=True, **{hook: overtaking(ckpt, [4])}
        )


def load_in_part_on_one_rank(path):
    partial = dist.get_rank() == 0
    dist.barrier()
    hook = overtaking(path, [4]) if partial else None
    dcp_rs.load(template(), path, allow_partial_load=partial, progress=hook)


def test_ranks_begin_again_together_or_not_at_all(ckpt):
    save(ckpt, 2)
    for outcome in rank_outcomes(2, load_in_part_on_one_rank, ckpt, timeout=60):
        assert isinstance(outcome.error, CheckpointReplacedError), outcome


def load_with_an_interrupt_on_one_rank():
    ranks = RankGroup()

    def interrupted():
        raise KeyboardInterrupt

    def overtaken():
        raise CheckpointReplacedError("by another save")

    tries = []

    def load():
        tries.append(1)
        ranks.run(interrupted if ranks.rank else overtaken)

    with pytest.raises((KeyboardInterrupt, CheckpointReplacedError)) as raised:
        retry(ranks, load, lambda: True)
    return raised.type.__name__, len(tries)


def test_an_interrupt_ends_a_load_that_is_overtaken():
    outcomes = run_ranks(2, load_with_an_interrupt_on_one_rank, timeout=60)
    assert outcomes == [("CheckpointReplacedError", 1), ("KeyboardInterrupt", 1)]


def test_a_load_that_is_always_overtaken_gives_up(ckpt):
    save(ckpt, 2)
    hook = overtaking(ckpt, list(range(4, 1000, 2)))
    with pytest.raises(CheckpointReplacedError):
        dcp_rs.load(template(), ckpt, no_dist=True, rename=hook)


class Replacing(dcp_rs.RsLoadPlanner):
    """Another save is committed once the load is planned."""

    def finish_plan(self, new_plan):
        save(self.path, 4)
        return super().finish_plan(new_plan)


@pytest.mark.parametrize("load", [dcp.load, dcp_rs.load_state_dict])
def test_the_protocol_of_torch_reports_it(ckpt, load):
    save(ckpt, 2)
    planner = Replacing()
    planner.path = ckpt
    with pytest.raises(CheckpointException) as raised:
        load(template(), storage_reader=RsReader(ckpt), no_dist=True, planner=planner)
    assert type(raised.value.failures[0][0]) is CheckpointReplacedError


def load_across(path):
    """Rank 1 opens what there was before rank 0 commits another save, and opens that."""
    got, is_late, real = template(), False, LoadSource.open
    # The files of the old one stay: nothing but the ids says that there are two.
    kept = [os.open(file, os.O_RDONLY) for file in path.glob("g*")] if dist.get_rank() == 0 else []
    dist.barrier()

    def opened(source, rank=None):
        nonlocal is_late
        found = real(source, rank)
        if not is_late:
            is_late = True
            dist.barrier()
            if dist.get_rank() == 0:
                save(path, 4)
                found = real(source, rank)
        return found

    with mock.patch.object(LoadSource, "open", opened):
        dcp_rs.load(got, path)
    for fd in kept:
        os.close(fd)
    return check_loaded(got)


def test_ranks_that_opened_two_saves_are_noticed(ckpt):
    save(ckpt, 2)
    assert run_ranks(2, load_across, ckpt) == [4, 4]


def test_plans_of_two_saves_are_refused(tmp_path):
    plans = []
    for name in ("a", "b"):
        save(tmp_path / name, 2)
        reader = RsReader(tmp_path / name)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(dcp.LoadPlan([])))
    joined = reader.prepare_global_plan(plans[:1] * 3)
    assert len(joined) == 3
    with pytest.raises(CheckpointReplacedError):
        reader.prepare_global_plan(plans)


def test_rank_local_saves_replaced_by_a_whole_one(ckpt):
    save(ckpt, 2)
    (ckpt / "index.dcprs").rename(ckpt / "__0.index.dcprs")
    index = _core.Index.open(str(ckpt), 0, False)
    save(ckpt, 4)
    with pytest.raises(CheckpointReplacedError):
        index.check_files([0])


def read_or_write(path, seconds):
    """Rank 0 saves; the others load, in two threads each. Returns how many loads each saw of how many saves."""
    end = time.monotonic() + seconds
    if dist.get_rank() == 0:
        number = 2
        while time.monotonic() < end:
            save(path, number := number + 1)
        return number
    seen = []

    def load_on():
        while time.monotonic() < end:
            got = template()
            # Every save has another shape than the one before it, of which a template has one.
            with contextlib.suppress(dcp_rs.errors.PlanError, CheckpointReplacedError):
                dcp_rs.load(got, path, no_dist=True)
                seen.append(check_loaded(got))
            with contextlib.suppress(CheckpointReplacedError):
                seen.append(found_number(path, 1))

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(load_on) for _ in range(2)]:
            future.result()
    assert seen
    return len(set(seen))


@pytest.mark.slow
def test_processes_and_threads_read_while_another_overwrites(ckpt):
    save(ckpt, 2)
    saves, *readers = run_ranks(4, read_or_write, ckpt, 3)
    assert saves > 3
    assert all(readers)
