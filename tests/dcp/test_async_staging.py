"""Saves whose copy is made beside training (``async_staging=True``): what is saved is what was there, and who changes it too early hears of it."""

import copy
import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

import dcp_rs
import programs
from dcp_rs import CheckpointManager
from dcp_rs.engine import background
from dcp_rs.errors import StateChangedError, UnsupportedError
from dcp_rs.optim import training_state
from dcp_rs.transfer.buffers import BlockPool
from dcp_rs.transfer.stage import Staging
from support import assert_state_equal, run_ranks
from support.threads import copies_held_up


def saved(path):
    with dcp_rs.open(path, verify=True) as checkpoint:
        return dict(checkpoint)


# --- what is saved


def test_async_staging_returns_before_the_copy(ckpt):
    weight = torch.nn.Parameter(torch.ones(1000))
    state = {"w": weight, "view": weight.detach()[:10], "at": {"lr": 0.5, "rows": [1, 2]}}
    with copies_held_up():
        future = dcp_rs.async_save(state, ckpt, async_staging=True)
        assert not future.staged.done()
        assert not future.staged.cancel()
        state["at"]["lr"] = 0.1  # what is no tensor may change at once
        state["at"]["rows"].append(3)
        weight.data = torch.zeros(1000)  # and so may what a parameter refers to
        assert not future.done()
    future.staged.result(60)
    future.result(60)
    got = saved(ckpt)
    assert got["w"].eq(1).all()
    assert got["view"].eq(1).all()
    assert (got["at.lr"], got["at.rows"]) == (0.5, [1, 2])


@pytest.mark.parametrize("copies", [1, 2])
def test_changes_after_staging_do_not_reach_the_checkpoint(tmp_path, copies):
    state = {f"w{i}": torch.empty(700, 300 + i) for i in range(12)}
    futures = []
    for step in range(6):
        for tensor in state.values():
            tensor.fill_(step)
        futures.append(
            dcp_rs.async_save(state, tmp_path / str(step), async_staging=True, max_copies=copies)
        )
        futures[-1].staged.result(60)
        for tensor in state.values():
            tensor.fill_(-1)
    for step, future in enumerate(futures):
        future.result(60)
        assert all(tensor.eq(step).all() for tensor in saved(tmp_path / str(step)).values())


def test_without_it_the_copy_is_made_when_it_returns(ckpt):
    with copies_held_up():
        future = dcp_rs.async_save({"w": torch.ones(10)}, ckpt)
        assert future.staged.done()
        future.result(60)


def test_tensors_of_inference(ckpt):
    with torch.inference_mode():
        state = {"w": torch.ones(500), "t": torch.arange(6.0).reshape(2, 3).t()}
        future = dcp_rs.async_save(state, ckpt, async_staging=True)
    future.result(60)
    assert torch.equal(saved(ckpt)["t"], torch.arange(6.0).reshape(2, 3).t())


# --- how many there are at a time


def test_a_third_save_waits_until_the_first_is_over(tmp_path, held_saves):
    state = {"w": torch.ones(1000)}
    first = dcp_rs.async_save(state, tmp_path / "1", async_staging=True)
    first.staged.result(60)
    state["w"].fill_(2)
    second = dcp_rs.async_save(state, tmp_path / "2", async_staging=True)
    second.staged.result(60)  # beside the first, which is not written
    assert not first.done()
    state["w"].fill_(3)
    threading.Timer(0.2, held_saves.go.set).start()
    third = dcp_rs.async_save(state, tmp_path / "3", async_staging=True)
    assert held_saves.go.is_set()
    assert first.done()
    third.result(60)
    assert [saved(tmp_path / name)["w"][0].item() for name in ("1", "2", "3")] == [1, 2, 3]


def test_one_copy_at_a_time_makes_the_second_save_wait(tmp_path, held_saves):
    state = {"w": torch.ones(1000)}
    first = dcp_rs.async_save(state, tmp_path / "1", max_copies=1, async_staging=True)
    first.staged.result(60)
    state["w"].fill_(2)
    threading.Timer(0.2, held_saves.go.set).start()
    dcp_rs.async_save(state, tmp_path / "2", max_copies=1, async_staging=True).result(60)
    assert held_saves.go.is_set()
    assert [saved(tmp_path / name)["w"][0].item() for name in ("1", "2")] == [1, 2]


class NotCopied:
    def __deepcopy__(self, memo):
        raise UnsupportedError("no copy of this")


def test_saves_that_fail_take_no_room(tmp_path):
    for number in range(2 * background.MAX_COPIES):
        with pytest.raises(UnsupportedError, match="no copy of this"):
            dcp_rs.async_save({"v": NotCopied()}, tmp_path / str(number), async_staging=True)
        failed = dcp_rs.async_save(
            {"m": torch.empty(1, device="meta")}, tmp_path / str(number), async_staging=True
        )
        assert isinstance(failed.exception(60), UnsupportedError)
    dcp_rs.async_save({"w": torch.ones(2)}, tmp_path / "ok", async_staging=True).result(60)


def test_a_save_out_of_a_callback_of_one_does_not_wait_for_itself(tmp_path, held_saves):
    begun = []

    def save_another(_):
        begun.append(dcp_rs.async_save({"w": torch.full((5,), 9.0)}, tmp_path / "last"))

    first = dcp_rs.async_save({"w": torch.ones(5)}, tmp_path / "1")
    first.add_done_callback(save_another)
    others = [dcp_rs.async_save({"w": torch.ones(5)}, tmp_path / "2")]
    threading.Timer(0.1, held_saves.go.set).start()
    others.append(dcp_rs.async_save({"w": torch.ones(5)}, tmp_path / "3"))
    for future in (first, *others):
        future.result(60)
    begun[0].result(60)  # that of the callback, which came before the others
    assert saved(tmp_path / "last")["w"].eq(9).all()


def test_a_callback_does_not_wait_for_the_copy_of_a_save_after_its_own(tmp_path, held_saves):
    """It waited for the other save to give back the memory, which waited for the thread that it was called in."""
    waiting, begun = threading.Event(), []

    def save_another(_):
        waiting.wait(60)
        begun.append(
            dcp_rs.async_save({"w": torch.full((5,), 9.0)}, tmp_path / "last", max_copies=1)
        )

    first = dcp_rs.async_save({"w": torch.ones(5)}, tmp_path / "1", max_copies=1)
    first.add_done_callback(save_another)
    held_saves.go.set()
    second = dcp_rs.async_save({"w": torch.full((5,), 2.0)}, tmp_path / "2", max_copies=1)
    waiting.set()
    second.result(30)
    begun[0].result(30)
    for name, value in ("1", 1), ("2", 2), ("last", 9):
        assert saved(tmp_path / name)["w"].eq(value).all()


# --- what goes wrong


def test_a_change_before_it_is_staged_is_an_error_and_no_checkpoint(ckpt):
    dcp_rs.save({"model": {"w": torch.zeros(10)}}, ckpt)
    state = {"model": {"w": torch.ones(10), "b": torch.ones(3)}}
    with copies_held_up():
        future = dcp_rs.async_save(state, ckpt, async_staging=True)
        state["model"]["w"].add_(1)
    future.staged.result(60)  # of which one rank alone would hear
    with pytest.raises(
        StateChangedError, match=r"'model\.w' was changed while it was being copied"
    ) as raised:
        future.result(60)
    assert raised.value.tensor == "model.w"
    assert future.report is None
    assert saved(ckpt)["model.w"].eq(0).all()
    dcp_rs.async_save(state, ckpt, async_staging=True).result(60)
    assert saved(ckpt)["model.w"].eq(2).all()
    kept = weakref.ref(state["model"]["b"])
    del state
    gc.collect()
    assert kept() is None  # by the error


def test_changes_after_waiting_for_the_copy_are_no_error():
    state = {"w": torch.ones(10)}
    staging = Staging(state, BlockPool())
    state["w"].add_(0)  # another thread's, say
    staging.finish()
    assert staging.values["w"].eq(1).all()
    staging.release()


def test_an_interrupt_within_the_call_leaves_no_future_that_is_never_done(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with CheckpointManager(tmp_path, no_dist=True) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "__init__", interrupt)
            with pytest.raises(KeyboardInterrupt):
                manager.async_save(1, {"w": torch.ones(3)})
        with pytest.raises(KeyboardInterrupt):
            manager.wait()
        manager.save(2, {"w": torch.ones(3)})
        assert manager.latest_step() == 2


def test_a_forward_pass_that_writes_to_buffers_is_noticed(ckpt):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    with copies_held_up():
        future = dcp_rs.async_save(model.state_dict(), ckpt, async_staging=True)
        model(torch.randn(8, 4))
    with pytest.raises(StateChangedError, match="num_batches_tracked"):
        future.result(60)


@pytest.mark.parametrize("way", ["training_state", "module"])
def test_a_forward_pass_may_write_to_buffers_where_the_module_is_known(ckpt, way):
    """The loop of docs/steps.md ended with a `StateChangedError` where the model had batch normalisation."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model(torch.randn(8, 4))
    want = {name: value.clone() for name, value in model.state_dict().items()}
    state = training_state(model) if way == "training_state" else {"model": model}
    with copies_held_up():
        future = dcp_rs.async_save(state, ckpt, async_staging=True)
        model(torch.randn(8, 4))
    future.result(60)
    got = {"model": {name: torch.zeros_like(value) for name, value in want.items()}}
    dcp_rs.load(got, ckpt)
    assert_state_equal(got["model"], want)


@pytest.mark.parametrize("how", ["for-loop", "foreach", "fused"])
def test_a_step_of_an_optimizer_whose_state_is_saved_is_noticed(ckpt, how):
    weight = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.AdamW([weight], foreach=how == "foreach", fused=how == "fused")
    weight.grad = torch.ones(10)
    optimizer.step()
    state = {"w": weight, "optim": optimizer.state_dict()["state"]}
    with copies_held_up():
        future = dcp_rs.async_save(copy.copy(state), ckpt, async_staging=True)
        optimizer.step()
    with pytest.raises(StateChangedError):
        future.result(60)


def change_on_one_rank(path):
    state = {f"own.{dist.get_rank()}": torch.ones(100), "common": torch.ones(5)}
    with copies_held_up():
        future = dcp_rs.async_save(state, path, async_staging=True)
        if dist.get_rank() == 1:
            state["own.1"].add_(1)
    future.staged.result(60)
    error = future.exception(60)
    assert isinstance(error, StateChangedError)
    dcp_rs.async_save(state, path, async_staging=True).result(60)
    return error.tensor, error.__notes__


def test_a_copy_that_fails_on_one_rank_fails_the_save_of_all(ckpt):
    for tensor, notes in run_ranks(2, change_on_one_rank, ckpt):
        assert tensor == "own.1"
        assert "raised on rank 1" in notes
    assert saved(ckpt)["own.1"].eq(2).all()
    assert len(list(ckpt.glob("g*"))) == 2  # nothing is left of the one that failed


def meet_in_manager(root, call):
    def state_of(value):
        return {f"own.{dist.get_rank()}": torch.full((100,), float(value)), "step": value}

    with CheckpointManager(root, keep_last=1) as manager:
        manager.save(1, state_of(1))
        state = state_of(2)
        with copies_held_up():
            future = manager.async_save(2, state, async_staging=True)
            if dist.get_rank() == 1:
                state["own.1"].add_(1)
        future.staged.result(60)  # on every rank: the loop goes on to its next collective
        with pytest.raises(StateChangedError, match=r"own\.1"):
            manager.save(3, state_of(3)) if call == "save" else manager.wait()
        found = manager.latest_step()
        dist.barrier()
        saving = manager.async_save(4, state_of(4), async_staging=True)
        saving.staged.result(60)
        manager.wait()
        assert saving.report.bytes_written >= 400
        dist.barrier()
        return found, manager.latest_step()


@pytest.mark.parametrize("call", ["save", "wait"])
def test_the_next_call_to_a_manager_raises_it_on_every_rank(tmp_path, call):
    assert run_ranks(2, meet_in_manager, tmp_path / "run", call) == [(1, 4)] * 2


ENDS_AT_ONCE = """
import sys, threading
import torch
import dcp_rs
from dcp_rs.transfer.stage import Staging

go, finish = threading.Event(), Staging.finish
Staging.finish = lambda staging: (go.wait(60), finish(staging))
threading.Timer(0.5, go.set).start()
dcp_rs.async_save({f"w{i}": torch.full((1000, 1000), float(i)) for i in range(8)}, sys.argv[1], async_staging=True)
"""


def test_a_process_that_ends_makes_the_copy_and_saves_it_first(ckpt):
    done = programs.run(
        [sys.executable, "-W", "ignore", "-c", ENDS_AT_ONCE, str(ckpt)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    got = saved(ckpt)
    assert all(got[f"w{i}"].eq(i).all() for i in range(8))
