"""`dcp_rs.async_save`: saves in the background of training."""

import logging
import os
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs.engine import background
from dcp_rs.engine import save as engine_save
from dcp_rs.errors import SaveInProgressError, UnsupportedError
from dcp_rs.transfer.stage import Staging, stage
from support import assert_state_equal, run_ranks
from support.layouts import sharded_state
from support.places import data_files
from support.threads import saves_held_up


def test_training_may_go_on(ckpt):
    def made():
        w = torch.arange(300_000.0).view(300, 1000)
        return {"w": w, "n": {"b": torch.ones(2), "list": [torch.ones(2)]}, "step": 1}

    future = dcp_rs.async_save(state := made(), ckpt)
    for tensor in (state["w"], state["n"]["b"], state["n"]["list"][0]):
        tensor.zero_()
    metadata = future.result(60)
    assert set(metadata.state_dict_metadata) == {"w", "n.b", "n.list.0", "step"}
    got = {"w": torch.zeros(300, 1000), "n": {"b": torch.zeros(2), "list": [torch.zeros(2)]}}
    dcp_rs.load(got := got | {"step": 0}, ckpt, verify=True)
    assert_state_equal(got, made())


def test_a_tensor_inside_a_value_is_saved_without_its_neighbours(ckpt):
    """torch.save wrote the storage that the copies of all tensors shared, or refused two dtypes."""
    state = {"w": torch.ones(1 << 18), "pair": (torch.ones(2), torch.arange(3))}
    state["deep"] = (torch.ones(4),)
    dcp_rs.async_save(state, ckpt, no_dist=True).result(60)
    with dcp_rs.open(ckpt) as checkpoint:
        tensors = [*checkpoint["pair"], *checkpoint["deep"]]
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [0, 1, 2], [1, 1, 1, 1]]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [8, 24, 16]


def test_one_copy_at_a_time_waits_for_the_save_that_reads_it(tmp_path, held_saves):
    """W7: two queued saves shared the one block, and the first checkpoint held the second's numbers, with right digests."""
    state = {"w": torch.ones(1000)}
    first = dcp_rs.async_save(state, tmp_path / "first", max_copies=1)
    state["w"].fill_(2)
    timer = threading.Timer(0.2, held_saves.go.set)
    timer.start()
    second = dcp_rs.async_save(state, tmp_path / "second", max_copies=1)
    assert held_saves.go.is_set()  # it waited
    first.result(60)
    second.result(60)
    assert dcp_rs.open(tmp_path / "first")["w"].eq(1).all()
    assert dcp_rs.open(tmp_path / "second")["w"].eq(2).all()


def test_a_second_save_to_the_path_is_refused_until_the_first_is_over(ckpt, tmp_path, held_saves):
    first = dcp_rs.async_save({"w": torch.ones(2)}, ckpt)
    with pytest.raises(SaveInProgressError, match="wait for its future"):
        dcp_rs.async_save({"w": torch.zeros(2)}, ckpt)
    with pytest.raises(SaveInProgressError):
        dcp_rs.save({"w": torch.zeros(2)}, ckpt.parent / "." / "ckpt")
    other = dcp_rs.async_save({"w": torch.zeros(2)}, tmp_path / "other")  # queued
    held_saves.go.set()
    first.result(60)
    other.result(60)
    dcp_rs.async_save({"w": torch.full((2,), 2.0)}, ckpt).result(60)
    assert dcp_rs.open(ckpt)["w"].tolist() == [2, 2]


def test_a_fork_does_not_wait_for_the_saves_of_its_parent(ckpt, held_saves):
    """The future of a save in the background is never done in a child, which has not its thread."""
    future = dcp_rs.async_save({"w": torch.ones(2)}, ckpt)
    assert held_saves.begun.wait(60)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            background.saves.check_path(ckpt)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    held_saves.go.set()
    future.result(60)


def test_the_future_tells_what_went_wrong(ckpt):
    dcp_rs.save({"w": torch.ones(2)}, ckpt)
    before = data_files(ckpt)
    future = dcp_rs.async_save({"w": torch.ones(2), "m": torch.empty(1, device="meta")}, ckpt)
    with pytest.raises(UnsupportedError, match="meta device"):
        future.result(60)
    assert data_files(ckpt) == before
    dcp_rs.async_save({"w": torch.zeros(2)}, ckpt).result(60)
    assert not dcp_rs.open(ckpt)["w"].any()


def test_the_future_tells_it_even_where_the_log_fails(ckpt, monkeypatch):
    class Failing(logging.Handler):
        def emit(self, record):
            raise KeyError(record.levelname)

    monkeypatch.setattr(logging.getLogger("dcp_rs"), "handlers", [Failing()])
    future = dcp_rs.async_save({"m": torch.empty(1, device="meta")}, ckpt)
    with pytest.raises(UnsupportedError, match="meta device"):
        future.result(60)
    dcp_rs.async_save({"w": torch.ones(2)}, ckpt).result(60)


def test_a_tensor_whose_memory_was_freed_is_refused_by_name(ckpt):
    """The copy read the freed memory, and the process crashed."""
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match=r"'w' .*memory has been freed"):
        dcp_rs.async_save({"w": freed}, ckpt, no_dist=True).result(60)


class Own(torch.Tensor):
    """A class of a user's."""


def swapped_halves(kind):
    """Two shards of a tensor, as attributes describe them since torch 2.15."""
    tensor = torch.arange(12.0).reshape(4, 3).as_subclass(kind)
    tensor.global_shape = [4, 3]
    tensor.global_offsets, tensor.local_offsets = [[2, 0], [0, 0]], [[0, 0], [2, 0]]
    tensor.local_sizes = [[2, 3], [2, 3]]
    return tensor


@pytest.mark.parametrize("kind", [torch.Tensor, Own])
def test_a_copy_of_a_shard_is_the_same_shard(ckpt, kind):
    """Copies of classes and of buffers forgot it: each rank saved its shard as the whole tensor."""
    pytest.importorskip("torch.distributed.checkpoint.protocol")
    module = torch.nn.Module()
    module.register_buffer("w", swapped_halves(kind))
    module.state_dict = lambda: {"w": module.w}
    state = {"w": swapped_halves(kind), "m": module}
    dcp_rs.async_save(state, ckpt, no_dist=True, async_staging=True).result(60)
    with dcp_rs.open(ckpt) as checkpoint:
        for name in ("w", "m.w"):
            assert checkpoint[name].equal(torch.arange(12.0).reshape(4, 3).roll(2, 0))


def save_in_background(path):
    for seed in (1, 2):
        state = sharded_state(seed)
        future = dcp_rs.async_save(state, path, max_copies=1)
        state["rows"].to_local().zero_()
        state["model"]["w3"].zero_()
        metadata = future.result(150)
        assert len(metadata.state_dict_metadata) == 43
        dist.barrier()
        got = sharded_state(9)
        dcp_rs.load(got, path, verify=True)
        assert_state_equal(got, sharded_state(seed))
        dist.barrier()
    state["bad"] = torch.empty(1, device="meta")
    try:
        dcp_rs.async_save(state, path).result(150)
    except UnsupportedError as error:
        return str(error)
    return None


def test_ranks_save_in_the_background(ckpt):
    for message in run_ranks(2, save_in_background, ckpt):
        assert "'bad' is on the meta device" in message
    assert len(data_files(ckpt)) == 2


def fail_in_a_callback(path):
    """On the first rank, or on both: the save of a callback, with another one before it."""
    for name, failing in ("one", {0}), ("both", {0, 1}):
        outcomes, told = [], threading.Event()

        def save_another(_, name=name, failing=failing, outcomes=outcomes, told=told):
            try:
                state = NotCopied() if dist.get_rank() in failing else 9.0
                dcp_rs.async_save({"v": state}, path / name / "last").add_done_callback(
                    lambda future: (outcomes.append(future.exception()), told.set())
                )
            except UnsupportedError as refused:
                outcomes.append(refused)
                told.set()

        with saves_held_up():
            first = dcp_rs.async_save({"w": torch.ones(5)}, path / name / "1")
            first.add_done_callback(save_another)
            second = dcp_rs.async_save({"w": torch.ones(5)}, path / name / "2")
        first.result(60)
        second.result(60)
        assert told.wait(60)
        assert [str(error) for error in outcomes] == ["no copy of this"]
        dcp_rs.async_save({"w": torch.ones(5)}, path / name / "3").result(60)
    return True


class NotCopied:
    def __deepcopy__(self, memo):
        raise UnsupportedError("no copy of this")


def test_a_save_that_fails_in_a_callback_of_one_does_not_wait_for_itself(tmp_path):
    """The thread that saves, which calls it, waited for itself to tell the other ranks: for ever, and all of them."""
    assert run_ranks(2, fail_in_a_callback, tmp_path, fresh=True) == [True, True]


@pytest.fixture
def places(monkeypatch):
    """Addresses of the tensors that saves read. A save of a negative number fails."""
    places, real = [], engine_save.plan_locally

    def look(selected, *arguments, **options):
        places.append(selected.values["w"].data_ptr())
        if selected.values["w"].flatten()[0] < 0:
            raise ArithmeticError("as meant")
        return real(selected, *arguments, **options)

    monkeypatch.setattr(engine_save, "plan_locally", look)
    return places


def test_the_memory_of_a_save_that_is_over_serves_the_next(tmp_path, places):
    """T7: each save made its copy in new pages, which took several times as long as the copy itself."""
    dcp_rs.release_pinned_memory()
    for number in range(3):
        path = tmp_path / str(number)
        dcp_rs.async_save({"w": torch.full((300, 1000), float(number))}, path).result(60)
        assert dcp_rs.open(path, verify=True)["w"].eq(number).all()
    assert len(places) == 3
    assert len(set(places)) == 1


def test_a_save_that_fails_gives_its_memory_back(tmp_path, places):
    dcp_rs.release_pinned_memory()
    for value in (-1.0, 1.0):
        future = dcp_rs.async_save({"w": torch.full((300, 1000), value)}, tmp_path / "ckpt")
        assert isinstance(future.exception(60), ArithmeticError) == (value < 0)
    assert len(places) == 2
    assert len(set(places)) == 1


# --- Ctrl-C


def interrupt_after(monkeypatch, name):
    """Raise a KeyboardInterrupt in this thread right after a step of the queue."""
    real = getattr(background.SaveQueue, name)

    def interrupt(*arguments):
        monkeypatch.undo()
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(background.SaveQueue, name, interrupt)


def saved_after(ckpt):
    """What was saved, once three more saves have shown that nothing keeps the path or a copy."""
    dcp_rs.async_save({}, ckpt.parent / "last").result(60)
    saved = dcp_rs.open(ckpt)["w"].tolist()
    for number in range(3):
        dcp_rs.async_save({"w": torch.full((3,), float(number))}, ckpt).result(60)
    assert dcp_rs.open(ckpt)["w"].tolist() == [2, 2, 2]
    return saved


def test_an_interrupt_after_the_hand_over_leaves_the_save_as_it_is(ckpt, monkeypatch):
    """The copy was released, and the save thread saved what was left of it: nothing."""
    dcp_rs.save({"w": torch.ones(3)}, ckpt)
    with saves_held_up():
        interrupt_after(monkeypatch, "_put")
        with pytest.raises(KeyboardInterrupt):
            dcp_rs.async_save({"w": torch.zeros(3)}, ckpt)
    assert saved_after(ckpt) == [0, 0, 0]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["_enter", "stage"])
def test_after_an_interrupt_before_the_hand_over_nothing_is_saved(ckpt, monkeypatch, step):
    dcp_rs.save({"w": torch.ones(3)}, ckpt)
    if step == "stage":
        monkeypatch.setattr(Staging, "finish", interrupted)
    else:
        interrupt_after(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        dcp_rs.async_save({"w": torch.zeros(3)}, ckpt)
    monkeypatch.undo()
    assert saved_after(ckpt) == [1, 1, 1]


def test_an_interrupt_after_the_save_has_begun_leaves_its_memory_alone(
    ckpt, monkeypatch, held_saves
):
    real = background.SaveQueue._put

    def put(*arguments):
        real(*arguments)
        assert held_saves.begun.wait(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(background.SaveQueue, "_put", put)
        with pytest.raises(KeyboardInterrupt):
            dcp_rs.async_save({"w": torch.zeros(3)}, ckpt)
    stage({"w": torch.full((3,), 7.0)})  # to the memory of that copy, were it free
    held_saves.go.set()
    assert saved_after(ckpt) == [0, 0, 0]


@pytest.mark.parametrize("save", ["dcp_rs", "torch"])
def test_a_relative_path_stays_what_it_was_when_the_folder_changes(tmp_path, monkeypatch, save):
    """The save went to the folder of the other name, and replaced the checkpoint there."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        dcp_rs.save({"w": torch.ones(1)}, folder / "parent", no_dist=True)
        dcp_rs.save({"w": torch.ones(1)}, folder / "ckpt", no_dist=True)
    monkeypatch.chdir(here)
    state = {"w": torch.zeros(1)}
    if save == "dcp_rs":
        with saves_held_up():
            future = dcp_rs.async_save(state, "ckpt", parent="parent", no_dist=True)
            monkeypatch.chdir(there)
        future.result(60)
    else:
        writer = dcp_rs.RsWriter("ckpt", parent="parent")
        copy = writer.stage(state)
        monkeypatch.chdir(there)
        dcp.save(copy, storage_writer=writer, no_dist=True)
    for folder, want in ((there, 1), (here, 0)):
        assert dcp_rs.open(folder / "ckpt")["w"].item() == want
