"""State dicts of the simulated device staged to host memory: what is copied, to which memory, and when that is used again."""

import logging
import os
import threading
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_leaves, tree_map_only

import dcp_rs
from dcp_rs import RsWriter
from dcp_rs.errors import UnsupportedError
from dcp_rs.transfer import buffers
from dcp_rs.transfer.buffers import shared_blocks
from dcp_rs.transfer.copy_stream import copy_stream_for
from dcp_rs.transfer.stage import Staging, stage
from support import assert_state_equal

MIB = 1 << 20


def state(seed=0, rows=300):
    torch.manual_seed(seed)
    return {
        "model": {f"w{i}": torch.randn(rows + i, 100) for i in range(20)},
        "large": torch.randn(700, 1000),
        "pair": (torch.arange(5), [torch.ones(3, dtype=torch.bfloat16)]),
        "transposed": torch.randn(30, 20).t(),
        "empty": torch.empty(0, 3),
        "young": torch.arange(8, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "step": seed,
    }


def to(device, tree):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)


def contiguous(tree):
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.resolve_conj().resolve_neg().contiguous(), tree
    )


def zero(tree):
    for tensor in tree_leaves(tree):
        if isinstance(tensor, torch.Tensor):
            (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor).zero_()


@pytest.mark.parametrize("without", [None, "pinned", "streams"])
def test_a_staged_copy_is_a_copy(sim, device, without):
    want = state()
    source = to(device, want)
    if without:
        setattr(sim, without, 0)
    sim.delay = 500
    staged = stage(source)
    zero(source)
    assert_state_equal(contiguous(staged), contiguous(want))
    for tensor in (*staged["model"].values(), staged["large"], staged["pair"][0]):
        assert sim.is_pinned(tensor) == (without != "pinned")


def test_conjugated_and_negated(sim, device):
    """W13: the host conjugated what had not arrived yet, and the copy was that of the tensor as it was."""
    base = torch.randn(500, 40, dtype=torch.complex64)
    there = base.to(device)
    want = {"conj": base.conj(), "neg": base.conj().imag, "both": base.conj().t(), "plain": base}
    source = {
        "conj": there.conj(),
        "neg": there.conj().imag,
        "both": there.conj().t(),
        "plain": there,
    }
    sim.delay = 3000
    staged = stage(source)
    assert_state_equal(contiguous(staged), contiguous(want))


def test_several_devices(sim, device, other_device):
    want = {f"w{i}": torch.randn(100 + i, 70) for i in range(20)}
    source = {
        name: tensor.to(other_device if i % 2 else device)
        for i, (name, tensor) in enumerate(want.items())
    }
    sim.delay = 1000
    with torch.accelerator.device_index(1):
        staged = stage(source)
    assert_state_equal(dict(staged), want)


# --- how much memory


def test_not_a_byte_more_is_pinned(sim, device):
    """G3: one block for all, which torch rounds up to a power of two, and which was never given back."""
    source = {
        f"w{i}": torch.zeros(100, 1000, device=device) for i in range(50)
    }  # 20 MB: 32 MiB as a power of two
    staging = Staging(source, shared_blocks)
    staging.finish()
    assert 20_000_000 <= sim.pinned_bytes <= 20_010_000
    assert dcp_rs.release_pinned_memory() == 0  # in use
    staging.release()
    assert 20_000_000 <= dcp_rs.release_pinned_memory() <= 20_010_000
    assert sim.pinned_bytes == 0


@pytest.mark.parametrize("kind", ["across", "steps", "expanded"])
def test_strided_tensors_take_bounded_memory_of_the_device(sim, device, kind):
    """Each was made contiguous whole, in memory that the allocator kept for the side stream: a transposed embedding, a convolution in channels_last."""
    whole = torch.arange(12 << 20, dtype=torch.int32).view(3 << 10, 4 << 10)
    views = {
        "across": torch.t,
        "steps": lambda t: t[:, ::2],
        "expanded": lambda t: t[:1].expand_as(t),
    }
    view, there = views[kind], whole.to(device)
    torch.accelerator.memory.reset_peak_memory_stats(device)
    before = torch.accelerator.memory.memory_allocated(device)
    staged = stage({"w": view(there), "small": there[:3, :3].t()})
    peak = torch.accelerator.memory.max_memory_allocated(device) - before
    assert peak <= 2 * buffers.SLAB_BYTES + MIB
    assert torch.equal(staged["w"], view(whole))
    assert torch.equal(staged["small"], whole[:3, :3].t())


def staged_and_released(source):
    """Copy it as a save does. Return where the copy lay."""
    staging = Staging(source, shared_blocks)
    staging.finish()
    place = staging.values["w"].data_ptr()
    staging.release()
    return place


def test_pinned_memory_is_kept_for_the_next_staging(sim, device):
    source = {"w": torch.zeros(1000, 1000, device=device)}
    places = {staged_and_released(source) for _ in range(4)}
    assert len(places) == 1
    assert sim.pinned_bytes <= 4_001_000
    both = [Staging(source, shared_blocks) for _ in range(2)]
    assert both[0].values["w"].data_ptr() != both[1].values["w"].data_ptr()
    for staging in both:
        staging.finish()
        staging.release()
    smaller = {"w": torch.zeros(10, 1000, device=device)}
    staged_and_released(smaller)
    staged_and_released(smaller)
    assert sim.pinned_bytes < 100_000  # what two stagings did not need is let go


def test_where_torch_alone_can_pin_blocks_are_not_rounded_up_together(sim, device, monkeypatch):
    """As on the devices of others than NVIDIA and AMD."""
    monkeypatch.delattr(torch.get_device_module(device), "cudart")
    monkeypatch.setattr("dcp_rs.transfer.stage.BLOCK_BYTES", MIB)
    want = {f"w{i}": torch.randn(100 + i, 200) for i in range(30)} | {
        "large": torch.randn(3000, 100)
    }
    staged = stage(to(device, want))
    assert_state_equal(dict(staged), want)
    assert all(sim.is_pinned(tensor) for tensor in staged.values())
    total = sum(tensor.nbytes for tensor in want.values())
    assert sim.pinned_bytes <= 1.5 * total + MIB
    del staged
    dcp_rs.release_pinned_memory()
    assert sim.pinned_bytes == 0


@pytest.mark.parametrize("descending", [False, True])
def test_a_block_may_lie_below_or_above_the_one_before(sim, device, monkeypatch, descending):
    """A block below was taken for a part of the block before it, and the copy failed."""
    want = {f"w{i}": torch.randn(100 + i, 200) for i in range(30)}
    made = [torch.empty(MIB, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
    blocks = iter(sorted(made, key=torch.Tensor.data_ptr, reverse=descending))
    monkeypatch.setattr("dcp_rs.transfer.stage.BLOCK_BYTES", MIB)
    monkeypatch.setattr(
        "dcp_rs.transfer.stage.host_memory", lambda nbytes, **_: next(blocks)[:nbytes]
    )
    assert_state_equal(dict(stage(to(device, want))), want)


def test_one_staged_state_dict_at_a_time(sim, device):
    for seed in range(4):
        staging = Staging(to(device, state(seed)), shared_blocks)
        staging.finish()
        assert_state_equal(contiguous(staging.values), contiguous(state(seed)))
        staging.release()
    assert sim.pinned_bytes <= 6 * MIB
    dcp_rs.release_pinned_memory()
    assert sim.pinned_bytes == 0


def test_a_fork_leaves_blocks_alone(sim, device):
    first = Staging(to(device, state()), shared_blocks)
    first.finish()
    staged = stage(to(device, state(1)))
    held = sim.pinned_bytes
    child = os.fork()
    if child == 0:
        status = 1
        try:
            first.release()
            dcp_rs.release_pinned_memory()
            del staged, first
            status = 0 if sim.pinned_bytes == held else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert_state_equal(contiguous(staged), contiguous(state(1)))
    first.release()
    again = Staging(to(device, state(2)), shared_blocks)
    again.finish()
    assert_state_equal(contiguous(again.values), contiguous(state(2)))
    again.release()
    assert sim.pinned_bytes == held


def test_a_failed_staging_gives_its_memory_back_when_no_copy_is_under_way(sim, device):
    source = to(device, state())
    sim.synchronize()
    sim.delay = 5000
    sim.fail_after = sim.copies + 3
    with pytest.raises(RuntimeError, match="out of order"):
        stage(source)
    sim.fail_after, sim.delay = -1, 0
    again = stage(source)  # nothing of the failed one arrives in it
    sim.synchronize()
    assert_state_equal(contiguous(again), contiguous(state()))


@pytest.mark.parametrize("late", [0, 1])
def test_a_stream_that_fails_does_not_keep_the_other_from_being_waited_for(
    sim, device, late, monkeypatch
):
    """The memory of a failed staging went to the next one, while the other stream still wrote to it."""
    made = []

    def copy_stream(*arguments):
        made.append(copy_stream_for(*arguments))
        return made[-1]

    monkeypatch.setattr("dcp_rs.transfer.stage.copy_stream_for", copy_stream)
    source = {"small": torch.ones(10, device=device), "large": torch.ones(700, 1000, device=device)}
    staging = Staging(source, shared_blocks)
    ((*streams,),) = (stream._streams for stream in made)
    sim.fail_late = 1
    with sim.held_up(streams[late], 0.2):
        with pytest.raises(RuntimeError, match="a copy was lost"):
            staging.finish()
        assert all(stream.query() for stream in streams)
    staging.release()


# --- how fast


def test_small_tensors_are_gathered_on_the_device_and_copied_together(sim, device):
    """Each was a copy to the host, of which there were 20,000."""
    want = {f"w{i}": torch.randn(30 + i % 7, 10) for i in range(2000)}
    source = to(device, want)
    sim.synchronize()
    copies, grouped = sim.copies, sim.grouped
    staged = stage(source)
    assert sim.copies - copies - (sim.grouped - grouped) <= 3
    assert_state_equal(dict(staged), want)


def test_small_tensors_of_several_dtypes_are_copied_together(sim, device):
    """Weights in bfloat16 beside optimizer state in float32, and each was copied by itself: torch has a kernel for lists of one dtype and equal strides only."""
    dtypes = torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.bool
    want = {f"w{i}": torch.ones(30 + i % 7, 10).to(dtypes[i % 5]) for i in range(2000)}
    source = to(device, want)
    want["across"] = torch.randn(50, 20).t()
    source["across"] = want["across"].t().to(device).t()
    sim.synchronize()
    copies, grouped = sim.copies, sim.grouped
    staged = stage(source)
    assert sim.copies - copies <= 8
    assert sim.grouped - grouped >= 1
    assert_state_equal(contiguous(dict(staged)), contiguous(want))


@pytest.mark.parametrize("without", ["pinned", "streams"])
def test_slow_copies_are_logged_once(tmp_path, sim, device, without, caplog):
    """Any error meant synchronous copies, or memory that was not pinned, without a word."""
    setattr(sim, without, 0)
    buffers.warn_once.cache_clear()
    state = {"w": torch.ones(1000, device=device)}
    with caplog.at_level(logging.WARNING, "dcp_rs"):
        for number in range(2):
            dcp_rs.save(state, tmp_path / str(number))
            dcp_rs.async_save(state, tmp_path / f"async-{number}").result(60)
            dcp_rs.load({"w": torch.zeros(1000, device=device)}, tmp_path / str(number))
    word = "not pinned" if without == "pinned" else "are synchronous"
    messages = [record.message for record in caplog.records if word in record.message]
    assert len(messages) == len(set(messages)) >= 1


def test_memory_of_the_device_that_runs_out_is_an_error(ckpt, sim, device, monkeypatch):
    state = {"w": torch.ones(1000, device=device)}

    def fail(_):
        raise torch.OutOfMemoryError("as meant")

    monkeypatch.setattr("dcp_rs.transfer.copy_stream.PairedCopyStream", fail)
    for save in (dcp_rs.save, dcp_rs.async_save):
        with pytest.raises(torch.OutOfMemoryError, match="as meant"):
            save(state, ckpt)
    assert not list(ckpt.glob("*.dcprs"))


def test_a_graph_that_is_being_captured_is_named(ckpt, sim, device, monkeypatch):
    state = {"w": torch.ones(1000, device=device)}
    module = torch.get_device_module(device)
    with monkeypatch.context() as patch:
        patch.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)
        for save in (dcp_rs.save, dcp_rs.async_save):
            with pytest.raises(UnsupportedError, match="graph of the device is being captured"):
                save(state, ckpt)
        assert sim.pinned_bytes == 0  # a block whose pin the capture refuses would be kept

    class Captured:
        def record(self):
            pass

        def synchronize(self):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("dcp_rs.transfer.copy_stream._new_event", lambda _: Captured())
    future = dcp_rs.async_save(state, ckpt, async_staging=True)
    with pytest.raises(UnsupportedError, match="graph of the device is being captured"):
        future.result(60)


def test_a_refused_pin_leaves_no_error_to_the_next_kernel(sim, device, monkeypatch, caplog):
    """CUDA keeps the error of a failed call, and the next launch of any kernel raises it."""
    module, left = torch.get_device_module(device), []

    class Probe:
        def add_(self, _):
            left.clear()
            raise RuntimeError("CUDA error: out of memory")

    def register(*_):
        left.append("error")
        return 2

    runtime = types.SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(module, "cudart", lambda: runtime)
    monkeypatch.setattr(buffers, "_probe", lambda _: Probe())
    buffers.warn_once.cache_clear()
    block = buffers.Block(4096, device)
    assert left == []
    assert "cudaHostRegister of 4,096 bytes failed with error 2" in caplog.text
    block.memory.fill_(1)
    block.unpin()  # it is not pinned


# --- saves


def test_async_saves_that_queue(tmp_path, sim, device, held_saves):
    weights = {f"w{i}": torch.empty(200, 300, device=device) for i in range(20)}
    futures = []
    sim.delay = 300
    for seed in range(4):
        for tensor in weights.values():
            tensor.fill_(seed)
        if seed == 1:
            threading.Timer(0.1, held_saves.go.set).start()
        futures.append(dcp_rs.async_save(weights, tmp_path / str(seed), max_copies=1))
    for seed, future in enumerate(futures):
        future.result(60)
        with dcp_rs.open(tmp_path / str(seed), verify=True) as saved:
            assert all((tensor == seed).all() for tensor in dict(saved).values())


def test_torchs_async_save(tmp_path, sim, device):
    writer = RsWriter(tmp_path, cache_staged_state_dict=True)
    weights = {f"w{i}": torch.empty(200, 300, device=device) for i in range(20)}
    sim.delay = 300
    for seed in range(3):
        for tensor in weights.values():
            tensor.fill_(seed)
        path = tmp_path / str(seed)
        future = dcp.async_save(weights, checkpoint_id=path, storage_writer=writer, no_dist=True)
        for tensor in weights.values():
            tensor.fill_(-1)
        future.result(60)
        with dcp_rs.open(path, verify=True) as saved:
            assert all((tensor == seed).all() for tensor in dict(saved).values())
    assert sim.pinned_bytes <= 10 * MIB


# --- copies that go on beside training


class HeldUp:
    """The streams that a staging makes: their streams wait at a gate before the first copy."""

    def __init__(self, sim):
        self.sim, self.streams, self.gates = sim, [], []

    def __call__(self, device):
        stream = copy_stream_for(device)
        self.streams.append(stream)
        self.gates += [self.sim.gate(stream) for stream in stream._streams]
        return stream

    def let_go(self):
        for gate in self.gates:
            self.sim.open(gate)


def test_copies_come_after_the_kernels_that_were_queued_before_the_call(ckpt, sim, device):
    """The call does not wait for those kernels; the copies do."""
    training = torch.accelerator.current_stream(device)
    weights = {f"w{i}": torch.zeros(300, 100 + i, device=device) for i in range(10)}
    sim.synchronize()
    gate = sim.gate(training)
    try:
        for tensor in weights.values():
            tensor.fill_(7)  # the optimizer's step, which the device has not come to
        future = dcp_rs.async_save(weights, ckpt, async_staging=True)
        assert not future.staged.done()
    finally:
        sim.open(gate)
    future.result(60)
    with dcp_rs.open(ckpt, verify=True) as saved:
        assert all((tensor == 7).all() for tensor in dict(saved).values())


def test_copies_have_a_stream_of_their_own_and_training_goes_on(ckpt, sim, device, monkeypatch):
    """Kernels that are queued after the call wait for no copy, and staged comes after the last of the copies."""
    held = HeldUp(sim)
    monkeypatch.setattr("dcp_rs.transfer.stage.copy_stream_for", held)
    training = torch.accelerator.current_stream(device)
    weights = {f"w{i}": torch.empty(300, 100 + i, device=device) for i in range(10)}
    batch = torch.ones(1000, device=device)
    sim.synchronize()
    sim.delay = 2000
    for tensor in weights.values():
        tensor.fill_(7)
    try:
        future = dcp_rs.async_save(weights, ckpt, async_staging=True)
        assert not future.staged.done()
        (stream,) = held.streams
        assert all(stream != training for stream in stream._streams)
        batch.fill_(3)  # the next forward and backward pass
        training.synchronize()
        assert batch.cpu().eq(3).all()
        assert not future.staged.done()  # the copies still wait
        assert not future.done()
    finally:
        held.let_go()
    future.staged.result(60)
    for tensor in weights.values():
        tensor.fill_(-1)  # the optimizer's step
    sim.synchronize()
    future.result(60)
    with dcp_rs.open(ckpt, verify=True) as saved:
        assert all((tensor == 7).all() for tensor in dict(saved).values())


@pytest.mark.parametrize("current", [0, 1])
def test_no_other_device_gets_a_context(tmp_path, sim, device, current):
    """A stream by itself makes the device current again that was so before, which gives it a context: half a gigabyte of the first GPU from every rank, as a new thread begins there."""
    there = torch.device(device.type, 1)
    want = {f"w{i}": torch.randn(300, 100 + i) for i in range(20)} | {
        "large": torch.randn(700, 1000)
    }
    weights, got = to(there, want), to(there, want)
    with torch.accelerator.device_index(current):
        sim.contexts = 0
        dcp_rs.save(weights, tmp_path / "saved")
        dcp_rs.async_save(weights, tmp_path / "copied", async_staging=True).result(60)
        dcp_rs.load(got, tmp_path / "copied")
        with dcp_rs.open(tmp_path / "saved", device=there) as source:
            streamed = dict(source.stream())
        dcp_rs.release_pinned_memory()
        assert sim.contexts in (0b00, 0b10)
    assert_state_equal(to("cpu", got), want)
    assert_state_equal(to("cpu", streamed), want)


@pytest.mark.parametrize("without", [None, "pinned", "streams"])
def test_optimizer_step_after_staging_does_not_reach_the_checkpoint(tmp_path, sim, device, without):
    if without:
        setattr(sim, without, 0)
    weights = {f"w{i}": torch.empty(200, 300 + i, device=device) for i in range(10)}
    sim.delay = 1000
    futures = []
    for step in range(4):
        for tensor in weights.values():
            tensor.fill_(step)
        futures.append(dcp_rs.async_save(weights, tmp_path / str(step), async_staging=True))
        futures[-1].staged.result(60)
        for tensor in weights.values():
            tensor.fill_(-1)
    assert sim.pinned_bytes < 3 * sum(
        tensor.nbytes for tensor in weights.values()
    )  # two copies at most
    for step, future in enumerate(futures):
        future.result(60)
        with dcp_rs.open(tmp_path / str(step), verify=True) as saved:
            assert all((tensor == step).all() for tensor in dict(saved).values())


@pytest.mark.parametrize("late", [False, True])
def test_a_copy_that_fails_is_heard_of_and_nothing_is_saved(ckpt, sim, device, late):
    weights = {f"w{i}": torch.ones(200, 300 + i, device=device) for i in range(10)}
    sim.synchronize()
    sim.delay = 1000
    if late:
        sim.fail_late = 1
    else:
        sim.fail_after = sim.copies
    future = dcp_rs.async_save(weights, ckpt, async_staging=True)
    with pytest.raises(RuntimeError, match="a copy was lost" if late else "out of order"):
        future.result(60)
    future.staged.result(60)
    sim.fail_after, sim.fail_late, sim.delay = -1, 0, 0
    assert not any(ckpt.glob("*"))
    dcp_rs.async_save(weights, ckpt, async_staging=True).result(60)
    with dcp_rs.open(ckpt, verify=True) as saved:
        assert all((tensor == 1).all() for tensor in dict(saved).values())


def test_a_manager_stages_each_step_to_the_memory_of_the_one_before(tmp_path, sim, device):
    weights = {f"w{i}": torch.empty(200, 300 + i, device=device) for i in range(10)}
    sim.delay = 300
    with dcp_rs.CheckpointManager(tmp_path, keep_last=2, no_dist=True) as manager:
        held = set()
        for step in range(1, 5):
            for tensor in weights.values():
                tensor.fill_(step)
            manager.async_save(step, weights, async_staging=True).staged.result(60)
            held.add(sim.pinned_bytes)
            for tensor in weights.values():
                tensor.fill_(-1)
        manager.wait()
        assert len(held) == 1
        assert held.pop() > 0
    assert sim.pinned_bytes == 0
    for step in (3, 4):
        with dcp_rs.open(tmp_path / f"step-{step}", verify=True) as saved:
            assert all((tensor == step).all() for tensor in dict(saved).values())
