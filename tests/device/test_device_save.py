"""Saves of what lies on the simulated device: `save`, `dcp.save`, and what they take of its memory."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from dcp_rs.transfer import buffers
from support import ALL_DTYPES, assert_state_equal, files_in, random_tensor, same_bits
from support.slabs import state

MIB = 1 << 20


def loaded(path):
    with dcp_rs.open(path, verify=True) as source:
        return dict(source)


def plain(value):
    return (
        value.resolve_conj().resolve_neg().contiguous()
        if isinstance(value, torch.Tensor)
        else value
    )


def moved(device, values):
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


@pytest.fixture
def want():
    torch.manual_seed(2)
    return state(200, 3) | {
        "large": torch.randn(2000, 1000),
        "transposed": torch.randn(700, 900).t(),
        "strided": torch.randn(40, 40)[::2, ::3],
        "tall": torch.randn(3, 70_001).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "step": 3,
    }


def on_device(device, want):
    """On the device as they are on the host, strides and all."""
    made = {}
    for name, value in want.items():
        if not isinstance(value, torch.Tensor):
            made[name] = value
            continue
        made[name] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=device
        ).copy_(value)
    return made


@pytest.mark.parametrize("limit", [None, 4 * MIB])
def test_save(ckpt, want, sim, device, limit):
    state_dict = on_device(device, want)
    before = sim.copies
    sim.delay = 300
    dcp_rs.save(state_dict, ckpt, max_inflight_bytes=limit)
    sim.delay = 0
    assert sim.copies - before < 60
    assert_state_equal(loaded(ckpt), {name: plain(value) for name, value in want.items()})


@pytest.mark.parametrize("planner", [None, dcp.DefaultSavePlanner, RsSavePlanner])
def test_dcp_save(ckpt, want, sim, device, planner):
    state_dict = on_device(device, want)
    sim.delay = 300
    dcp.save(state_dict, storage_writer=RsWriter(ckpt), planner=planner and planner(), no_dist=True)
    assert_state_equal(loaded(ckpt), {name: plain(value) for name, value in want.items()})


def test_a_save_begins_after_the_callers_work(ckpt, sim, device):
    large, small = torch.zeros(1 << 20, device=device), torch.zeros(10, device=device)
    strided = torch.zeros(300, 200, device=device).t()
    with sim.held_up(torch.accelerator.current_stream(device), 0.05):
        for tensor in (large, small, strided):
            tensor.fill_(7)
        dcp_rs.save({"large": large, "small": small, "strided": strided}, ckpt)
    for tensor in loaded(ckpt).values():
        assert (tensor == 7).all()


def test_work_queued_after_a_save_does_not_change_it(ckpt, sim, device):
    want = {f"w{i}": torch.randn(500 + i, 700) for i in range(20)}
    state_dict = on_device(device, want)
    sim.delay = 2000
    dcp_rs.save(state_dict, ckpt, max_inflight_bytes=2 * MIB)
    for tensor in state_dict.values():
        tensor.zero_()
    sim.delay = 0
    assert_state_equal(loaded(ckpt), want)


def test_several_devices(ckpt, sim, device, other_device):
    want = {f"w{i}": torch.randn(500 + i, 70) for i in range(20)}
    state_dict = {
        name: tensor.to(other_device if i % 2 else device)
        for i, (name, tensor) in enumerate(want.items())
    }
    sim.delay = 500
    with torch.accelerator.device_index(1):
        dcp_rs.save(state_dict, ckpt)
    assert_state_equal(loaded(ckpt), want)


def test_every_dtype(ckpt, sim, device):
    want = {str(dtype): random_tensor((37, 5), dtype) for dtype in ALL_DTYPES}
    want |= {f"{dtype}, strided": random_tensor((5, 37), dtype) for dtype in ALL_DTYPES}
    state_dict = moved(device, want)
    for dtype in ALL_DTYPES:
        state_dict[f"{dtype}, strided"] = state_dict[f"{dtype}, strided"].t()
    sim.delay = 300
    dcp_rs.save(state_dict, ckpt)
    got = loaded(ckpt)
    for name, tensor in want.items():
        assert same_bits(got[name], tensor.t() if "strided" in name else tensor), name


def test_conjugated_and_negated(ckpt, sim, device):
    """W13: `.view(dtype)` refuses what is lazily conjugated, so such a save raised."""
    base = {
        "c64": torch.randn(600, 500, dtype=torch.complex64),
        "c128": torch.randn(7, dtype=torch.complex128),
        "large": torch.randn(3000, 100, dtype=torch.complex64),
    }
    there = moved(device, base)
    state_dict, want = {}, {}
    for source, made in ((base, want), (there, state_dict)):
        for name, tensor in source.items():
            made[f"{name}.conj"] = tensor.conj()
            made[f"{name}.neg"] = tensor.conj().imag
            made[f"{name}.both"] = tensor.conj().t() if tensor.dim() == 2 else tensor.conj()[::2]
    assert all(t.is_conj() or t.is_neg() for t in state_dict.values())
    sim.delay = 1000
    dcp_rs.save(state_dict, ckpt)
    assert_state_equal(loaded(ckpt), {name: plain(tensor) for name, tensor in want.items()})


def test_casts(ckpt, sim, device):
    want = {"a": torch.randn(700, 900), "b": torch.randn(5), "t": torch.randn(900, 700)}
    state_dict = moved(device, want)
    state_dict["t"] = state_dict["t"].t()
    want["t"] = want["t"].t().contiguous()
    sim.delay = 500
    dcp_rs.save(state_dict, ckpt, dtype=torch.bfloat16)
    assert_state_equal(loaded(ckpt), {name: tensor.bfloat16() for name, tensor in want.items()})


@pytest.mark.parametrize("shape", [(4, 4 << 20), (1, 16 << 20), (8 << 20, 2)])
def test_strided_tensors_take_no_more_memory_than_the_bound(ckpt, sim, device, shape):
    """G2: one whose first dimension is short was made contiguous whole, once for each slab: eight times its size."""
    rows, columns = shape
    whole = torch.arange(rows * columns * 2, dtype=torch.int32).reshape(columns, rows, 2)
    strided = whole.to(device)[:, :, 0].t()
    assert strided.shape == shape
    torch.accelerator.memory.reset_peak_memory_stats(device)
    before = torch.accelerator.memory.memory_allocated(device)
    dcp_rs.save({"w": strided}, ckpt, max_inflight_bytes=32 * MIB)
    peak = torch.accelerator.memory.max_memory_allocated(device) - before
    assert peak <= 2 * buffers.SLAB_BYTES
    assert torch.equal(loaded(ckpt)["w"], whole[:, :, 0].t())


@pytest.mark.parametrize("without", ["pinned", "streams"])
def test_a_device_without(ckpt, want, sim, device, without):
    state_dict = on_device(device, want)
    setattr(sim, without, 0)
    sim.delay = 100
    dcp_rs.save(state_dict, ckpt)
    assert_state_equal(loaded(ckpt), {name: plain(value) for name, value in want.items()})


def test_pinned_memory_is_bounded(ckpt, sim, device):
    want = {"w": torch.randn(8 << 20)}
    state_dict = moved(device, want)
    for limit in (2 * MIB, 5 * MIB, 32 * MIB):
        dcp_rs.release_pinned_memory()
        dcp_rs.save(state_dict, ckpt, max_inflight_bytes=limit)
        assert 0 < sim.pinned_bytes <= limit
        assert_state_equal(loaded(ckpt), want)


@pytest.mark.parametrize("when", ["fail_after", "fail_late"])
def test_a_device_that_fails_leaves_no_files(ckpt, sim, device, when):
    state_dict = {f"w{i}": torch.randn(1 << 20).to(device) for i in range(6)}
    sim.synchronize()
    setattr(sim, when, sim.copies + 3 if when == "fail_after" else 1)
    with pytest.raises(RuntimeError, match=r"out of order|a copy was lost"):
        dcp_rs.save(state_dict, ckpt, max_inflight_bytes=4 * MIB)
    sim.reset()
    assert files_in(ckpt) == []
    dcp_rs.save(state_dict, ckpt, max_inflight_bytes=4 * MIB)
    assert_state_equal(loaded(ckpt), {name: tensor.cpu() for name, tensor in state_dict.items()})


@given(
    shape=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    order=st.permutations(range(4)),
    step=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.uint8, torch.complex64, torch.float8_e4m3fn]),
    conj=st.booleans(),
    cast=st.booleans(),
)
def test_any_strides(tmp_path_factory, sim, device, shape, order, step, dtype, conj, cast):
    path = tmp_path_factory.mktemp("any") / "ckpt"
    whole = random_tensor(tuple(shape), dtype) if not conj else torch.randn(shape).to(dtype)
    there = whole.to(device)
    order = [dim for dim in order if dim < len(shape)]
    views = [tensor.permute(order)[..., ::step] for tensor in (whole, there)]
    if conj:
        views = [view.conj() for view in views]
    want, view = views
    to = torch.float64 if cast and want.dtype == torch.float32 else None
    sim.delay = 100
    dcp_rs.save({"w": view}, path, dtype=to, max_inflight_bytes=2 * MIB)
    sim.delay = 0
    assert same_bits(loaded(path)["w"], want.to(to or want.dtype))
