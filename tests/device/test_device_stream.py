"""``open(device=).stream()`` on the simulated device, by consumers that let tensors go at once and change their streams."""

import weakref

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CorruptDataError
from support import assert_state_equal, threads
from support.simulated import host
from support.slabs import damage, save_shards


@pytest.fixture
def want(ckpt):
    torch.manual_seed(1)
    state = {f"w{i:02}": torch.randn(100 + i, 300) for i in range(40)}
    state |= {f"same{i:03}": torch.randn(64, 64) for i in range(200)}
    state |= {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2),
        "step": 7,
        "zz": torch.empty(3, 0),
    }
    dcp_rs.save(state, ckpt)
    return state


@pytest.mark.parametrize(
    "options", [{}, {"max_inflight_bytes": 300_000}, {"verify": True}, {"io": "direct"}]
)
def test_a_stream_gives_everything(ckpt, want, sim, device, options):
    with dcp_rs.open(ckpt, device=device, **options) as source:
        sim.delay = 300
        got = dict(source.stream())
        sim.delay = 0
    assert {tensor.device for name, tensor in got.items() if name != "step"} == {device}
    assert_state_equal(host(got), want)


def test_a_consumer_may_let_go_of_what_it_still_uses(ckpt, want, sim, device):
    """Memory that it lets go is the next tensor's, whose copies must not come before its last use."""
    copies = {}
    with dcp_rs.open(ckpt, device=device, max_inflight_bytes=1 << 20) as source:
        sim.delay = 500
        for name, tensor in source.stream():
            copies[name] = tensor if name == "step" else tensor.clone()
            del tensor
        sim.delay = 0
    assert_state_equal(host(copies), want)


def test_a_consumer_may_change_its_stream(ckpt, want, sim, device, other_device):
    """W9: what was handed over was ordered for one stream, and taken by another."""
    streams = [torch.Stream(device=device) for _ in range(3)]
    copies = {}
    with dcp_rs.open(ckpt, device=device, max_inflight_bytes=1 << 20) as source:
        sim.delay = 500
        running = source.stream()
        for turn in range(len(want)):
            with streams[turn % 3], torch.accelerator.device_index(turn % 2):
                name, tensor = next(running)
                with streams[turn % 3]:
                    copies[name] = tensor if name == "step" else tensor.clone()
                del tensor
        assert next(running, None) is None
        sim.delay = 0
    sim.synchronize()
    assert_state_equal(host(copies), want)


def test_a_consumer_may_change_the_current_device(ckpt, sim, device):
    """``device="cuda"`` was whichever was current: tensors of one device were ordered for a stream of another, and held what was there before."""
    want = {f"w{i}": torch.randn(256, 1000) for i in range(8)}
    dcp_rs.save(want, ckpt)
    copies = {}
    with dcp_rs.open(ckpt, device=device.type, max_inflight_bytes=8 << 20) as source:
        sim.delay = 20_000
        running = source.stream()
        for turn in range(len(want)):
            with torch.accelerator.device_index(turn % 2):
                name, tensor = next(running)
            copies[name] = tensor.clone()
        sim.delay = 0
    assert {tensor.device for tensor in copies.values()} == {device}
    assert_state_equal(host(copies), want)


def test_a_consumer_may_change_the_mode(ckpt, want, sim, device):
    """What is filled in turns, or was made for the copies, may be written to out of the inference mode that it came into being in."""
    dcp_rs.save(want | {"w00": torch.randn(3000, 1000)}, ckpt)
    with dcp_rs.open(ckpt, device=device, max_inflight_bytes=1 << 20) as source:
        want["w00"] = source["w00"].cpu()
        got, running = {}, source.stream()
        for turn in range(len(want)):
            with torch.inference_mode(turn % 2 == 0):
                got.update([next(running)])
    assert_state_equal(host(got), want)


def test_memory_is_not_used_again_before_another_stream_is_done_with_it(ckpt, want, sim, device):
    """W9: the allocator knows the stream that made memory, and no other that uses it unless it is told."""
    busy = torch.Stream(device=device)
    copies = {}
    with dcp_rs.open(ckpt, device=device, max_inflight_bytes=1 << 20) as source, sim.held_up(busy):
        running = source.stream()
        copies.update([next(running)])  # the memory is of the stream that is current now
        for turn in range(1, len(want)):
            with busy if turn % 2 else torch.accelerator.current_stream(device):
                name, tensor = next(running)
                copies[name] = tensor if name == "step" else tensor.clone()
                del tensor
    busy.synchronize()
    assert_state_equal(host(copies), want)


def test_memory_is_of_the_stream_that_began(ckpt, want, sim, device):
    mine = torch.Stream(device=device)
    copies = {}
    with dcp_rs.open(ckpt, device=device, max_inflight_bytes=1 << 20) as source:
        sim.delay = 500
        with mine:
            running = source.stream()
            copies.update([next(running)])
        for name, tensor in running:
            copies[name] = tensor if name == "step" else tensor.clone()
            del tensor
        sim.delay = 0
    mine.synchronize()
    assert_state_equal(host(copies), want)


@pytest.mark.usefixtures("want")
def test_a_stream_holds_nothing_that_it_has_handed_over(ckpt, device):
    with dcp_rs.open(ckpt, device=device) as source:
        for name, tensor in source.stream():
            if name == "w03":
                seen = weakref.ref(tensor)
                del tensor
                assert seen() is None
                break


@pytest.mark.usefixtures("want")
def test_a_stream_can_be_left_early(ckpt, sim, device):
    with dcp_rs.open(ckpt, device=device, max_inflight_bytes=1 << 20) as source:
        sim.delay = 1000
        running = source.stream()
        kept = dict([next(running), next(running)])
        running.close()
        sim.delay = 0
    assert threads.none_of("dcp-rs-slab")
    before = host(kept)
    del running
    again = [
        torch.zeros(100 + i, 300, device=device) for i in range(40)
    ]  # in the memory that it let go
    sim.synchronize()
    assert_state_equal(host(kept), before)
    assert all(tensor.cpu().abs().sum() == 0 for tensor in again)


@pytest.mark.usefixtures("want")
def test_damage_is_raised_where_it_is(ckpt, sim, device):
    with dcp_rs.open(ckpt, device=device, verify=True, max_inflight_bytes=300_000) as source:
        damage(ckpt, source._index)
        sim.delay = 200
        with pytest.raises(CorruptDataError):
            for _ in source.stream():
                pass
    assert threads.none_of("dcp-rs-slab")


def test_a_checkpoint_of_shards_streams_whole_tensors(ckpt, sim, device):
    whole = {"a": torch.randn(90, 40), "b": torch.randn(60, 7)}
    save_shards(ckpt, whole, 3)
    sim.delay = 1000
    with dcp_rs.open(ckpt, device=device) as source:
        got = dict(source.stream())
    assert_state_equal(host(got), whole)


def test_entries_slices_and_state_dicts(ckpt, sim, device):
    want = {"a": torch.randn(500, 400), "nested": {"b": torch.arange(7)}, "step": 3}
    dcp_rs.save(want, ckpt)
    sim.delay = 1000
    with dcp_rs.open(ckpt, device=device) as source:
        assert torch.equal(source["a"].cpu(), want["a"])
        assert torch.equal(source.get_slice("a")[100:200, 3:9].cpu(), want["a"][100:200, 3:9])
        got = source.state_dict()
    assert torch.equal(got["a"].cpu(), want["a"])
    assert torch.equal(got["nested"]["b"].cpu(), want["nested"]["b"])
    assert got["step"] == 3


def test_a_device_without_streams(ckpt, want, sim, device):
    sim.streams = 0
    with dcp_rs.open(ckpt, device=device, max_inflight_bytes=1 << 20) as source:
        assert_state_equal(host(dict(source.stream())), want)
