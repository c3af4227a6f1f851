"""Tracebacks of mistakes were 45 lines of this package's frames on each rank: they show the caller's lines and one sentence."""

import os
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcp_rs
from dcp_rs._tracebacks import shorten
from dcp_rs.errors import CheckpointNotFoundError, InternalError
from support import run_ranks
from support.both import save_rs

STATE = {"w": torch.ones(2)}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.delenv("DCP_RS_DEBUG")  # which tests set, for those that fail


def frames(error):
    return [
        (frame.f_globals["__name__"].partition(".")[0], frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]


def own(name):
    return __name__, name


MISTAKES = [
    lambda path: dcp_rs.load(STATE, path, no_dist=True),
    lambda path: dcp_rs.save(STATE, None, no_dist=True),
    lambda path: dcp_rs.save(STATE, "/proc/none/new", no_dist=True),
    lambda path: dcp_rs.async_save(STATE, "/proc/none/new", no_dist=True).result(60),
    lambda path: dcp_rs.open(path, verify=True),
    lambda path: dcp_rs.convert(path, path / "out"),
    lambda path: dcp_rs.verify(path, threads=1),
    lambda path: dcp_rs.optim.load_training_state(path, torch.nn.Linear(1, 1), no_dist=True),
    lambda path: dcp_rs.CheckpointManager(path, no_dist=True).load(STATE, 3),
]  # fmt: skip


@pytest.mark.parametrize("make", MISTAKES)
def test_only_the_callers_lines_are_shown(make, tmp_path):
    with pytest.raises((dcp_rs.errors.DcpRsError, OSError, TypeError)) as raised:
        make(tmp_path / "nothing")
    shown = [frame for frame in frames(raised.value) if frame[0] not in ("concurrent", "threading")]
    assert shown == [own("test_only_the_callers_lines_are_shown"), own("<lambda>")]


def test_all_frames_are_shown_on_request(tmp_path, monkeypatch):
    monkeypatch.setenv("DCP_RS_DEBUG", "1")
    with pytest.raises(CheckpointNotFoundError) as raised:
        dcp_rs.load(STATE, tmp_path, no_dist=True)
    assert ("dcp_rs", "open_index") in frames(raised.value)


class Spoiled(DefaultLoadPlanner):
    def create_local_plan(self):
        return spoil(self.why)


def spoil(why):
    raise why("of the caller's planner")


@pytest.mark.parametrize("why", [ValueError, RuntimeError, AttributeError])
def test_lines_of_the_callers_planner_are_shown(why, tmp_path):
    save_rs(STATE, tmp_path)
    planner = Spoiled()
    planner.why = why
    with pytest.raises(why) as raised:
        dcp_rs.load(STATE, tmp_path, planner=planner, no_dist=True)
    assert [name for _, name in frames(raised.value)][1:] == ["create_local_plan", "spoil"]


@pytest.mark.parametrize("error", [RuntimeError("a defect"), InternalError("a defect")])
def test_what_may_be_a_defect_keeps_all_frames(error):
    def fail(*_, **__):
        raise error

    fail = type(fail)(
        fail.__code__,
        {**globals(), "__name__": "dcp_rs.engine.made_up"},
        "fail",
        None,
        fail.__closure__,
    )
    with pytest.raises(type(error)) as raised:
        fail()
    before = frames(raised.value)
    shorten(raised.value)
    assert frames(raised.value) == before
    assert before[-1] == ("dcp_rs", "fail")


def load_nothing(path):
    os.environ.pop("DCP_RS_DEBUG", None)
    try:
        dcp_rs.load({"w": torch.ones(2)}, path)
    except CheckpointNotFoundError as error:
        return len("".join(traceback.format_exception(error)).splitlines())


def test_it_is_short_on_every_rank(tmp_path):
    assert all(lines <= 7 for lines in run_ranks(2, load_nothing, tmp_path / "nothing"))


def load_with_a_planner_that_fails(path):
    os.environ.pop("DCP_RS_DEBUG", None)
    planner = None
    if dist.get_rank() == 1:
        planner = Spoiled()
        planner.why = OSError
    try:
        dcp_rs.load({"w": torch.ones(2)}, path, planner=planner)
    except OSError as error:
        return "".join(traceback.format_exception(error))


def test_other_ranks_see_the_lines_of_the_rank_that_failed(tmp_path):
    save_rs(STATE, tmp_path)
    for text in run_ranks(2, load_with_a_planner_that_fails, tmp_path):
        assert "in spoil" in text
        assert "dcp_rs/engine" not in text
        assert "raised on rank 1" in text
        assert len(text.splitlines()) < 25


def test_no_frame_holds_what_the_caller_passed(tmp_path, monkeypatch):
    monkeypatch.setenv("DCP_RS_DEBUG", "1")
    with pytest.raises(CheckpointNotFoundError) as raised:
        dcp_rs.open(tmp_path)
    assert frames(raised.value)[1] == ("dcp_rs", "open")
