"""What has to hold on any accelerator: on a real one where there is one, else on the simulated one."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.errors import CorruptDataError
from dcp_rs.options import ReadOptions
from dcp_rs.transfer.buffers import shared_blocks
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.stage import Staging, stage
from dcp_rs.transfer.target import Target
from support import ALL_DTYPES, assert_state_equal, random_tensor, same_bits
from support.files import flip

MIB = 1 << 20


@pytest.fixture
def device(accelerator):
    yield accelerator
    dcp_rs.release_pinned_memory()


def state(large=8, small=500):
    torch.manual_seed(3)
    tensors = {f"large.{i}": torch.randn(1500 + i, 1000) for i in range(large)}
    tensors |= {f"small.{i}": torch.randn(16, 16 + i % 5) for i in range(small)}
    return tensors | {"scalar": torch.tensor(2.0), "empty": torch.empty(0, 3)}


def on(device, tensors):
    return {name: torch.full_like(tensor, 7, device=device) for name, tensor in tensors.items()}


def host(tensors):
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize("io", ["auto", "mmap", "direct", "buffered"])
@pytest.mark.parametrize("verify", [False, True, "auto"])
def test_load(ckpt, device, io, verify):
    want = state()
    dcp_rs.save(want, ckpt)
    got = on(device, want)
    dcp_rs.load(got, ckpt, io=io, verify=verify)
    assert_state_equal(host(got), want)


def test_stock_planner(ckpt, device):
    want = state()
    dcp_rs.save(want, ckpt)
    got = on(device, want)
    dcp.load(got, storage_reader=dcp_rs.RsReader(ckpt), no_dist=True)
    assert_state_equal(host(got), want)


def test_kernels_that_follow_see_the_data_and_those_before_do_not_undo_it(ckpt, device):
    want = {f"w{i}": torch.randn(2048, 1024) for i in range(8)}
    dcp_rs.save(want, ckpt)
    got = on(device, want)
    stream = torch.Stream(device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    busy = torch.randn(2048, 2048, device=device)
    for _ in range(5):
        with stream:
            for _ in range(20):
                busy = busy.clone()  # keeps the caller's stream behind
            for tensor in got.values():
                tensor.fill_(3)
            dcp_rs.load(got, ckpt)
            sums = [tensor.sum() for tensor in got.values()]
            copies = {name: tensor.clone() for name, tensor in got.items()}
        stream.synchronize()
        assert_state_equal(host(copies), want)
        assert len(sums) == 8


def test_every_dtype_and_cast(ckpt, device):
    want = {str(dtype): random_tensor((37, 5), dtype) for dtype in ALL_DTYPES}
    dcp_rs.save(want, ckpt)
    index = open_index(ckpt)
    targets, got = [], {}
    for name, tensor in want.items():
        got[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        targets.append(Target(index.find(name), [0, 0], got[name], name, tensor.dtype))
    cast = torch.zeros(37, 5, dtype=torch.bfloat16, device=device)
    where = index.find("torch.float32")
    targets.append(Target(where, [0, 0], cast, "torch.float32", torch.float32))
    fill(index, targets, ReadOptions())
    for name, tensor in want.items():
        assert same_bits(got[name].cpu(), tensor), name
    assert same_bits(cast.cpu(), want["torch.float32"].bfloat16())


def test_strided_and_narrowed_destinations(ckpt, device):
    want = torch.randn(3000, 1000)
    dcp_rs.save({"w": want}, ckpt)
    index = open_index(ckpt)
    wide = torch.zeros(3000, 1500, device=device)
    across = torch.zeros(1000, 3000, device=device).t()
    column = torch.zeros(3000, 64, device=device)
    pinned = torch.zeros(3000, 1000, pin_memory=True)
    targets = [
        Target(0, [0, 0], wide[:, 200:1200], "w", torch.float32),
        Target(0, [0, 0], across, "w", torch.float32),
        Target(0, [0, 100], column, "w", torch.float32),
        Target(0, [0, 0], pinned, "w", torch.float32),
    ]
    fill(index, targets, ReadOptions())
    assert torch.equal(wide[:, 200:1200].cpu(), want)
    assert wide[:, :200].abs().sum().item() == 0
    assert torch.equal(across.cpu(), want)
    assert torch.equal(column.cpu(), want[:, 100:164])
    assert torch.equal(pinned, want)


def test_all_devices_in_one_load(ckpt, device):
    count = torch.accelerator.device_count()
    if count < 2:
        pytest.skip("one device")
    want = state()
    dcp_rs.save(want, ckpt)
    got = {
        name: torch.zeros_like(tensor, device=torch.device(device.type, i % count))
        for i, (name, tensor) in enumerate(want.items())
    }
    dcp_rs.load(got, ckpt)
    assert_state_equal(host(got), want)


@pytest.mark.slow
def test_memory_is_bounded(ckpt, device):
    module = (
        torch.accelerator
        if hasattr(torch.accelerator, "max_memory_allocated")
        else torch.get_device_module(device)
    )
    if not hasattr(module, "max_memory_allocated"):
        pytest.skip("no memory statistics")
    want = state(large=60)
    dcp_rs.save(want, ckpt)
    got = on(device, want)
    dcp_rs.release_pinned_memory()
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    dcp_rs.load(got, ckpt)
    assert module.max_memory_allocated(device) - before <= 256 * MIB
    assert_state_equal(host(got), want)


def test_damage_in_the_middle(ckpt, device):
    want = state()
    dcp_rs.save(want, ckpt)
    (data,) = ckpt.glob("*.safetensors")
    flip(data)
    with pytest.raises(CorruptDataError):
        dcp_rs.load(on(device, want), ckpt, verify=True)
    torch.accelerator.synchronize()
    got = on(device, want)
    dcp_rs.load(got, ckpt, verify=False)  # the slabs are as good as before


def test_open_and_stream(ckpt, device):
    want = state() | {"step": 3}
    dcp_rs.save(want, ckpt)
    with dcp_rs.open(ckpt, device=device) as source:
        assert source["large.1"].device == device
        assert torch.equal(source["large.1"].cpu(), want["large.1"])
        part = source.get_slice("large.2")[100:200, 3:9]
        assert torch.equal(part.cpu(), want["large.2"][100:200, 3:9])
        for name, tensor in source.stream():
            if name == "step":
                assert tensor == 3
                continue
            doubled = tensor * 2
            del tensor
            assert torch.equal(doubled.cpu(), want[name] * 2), name
        nested = source.state_dict()
    assert nested.keys() == want.keys()


def test_a_stream_taken_by_several(ckpt, device):
    want = {f"w{i:03}": torch.randn(200, 300) for i in range(200)}
    dcp_rs.save(want, ckpt)
    streams = [torch.Stream(device=device) for _ in range(3)]
    copies = {}
    with dcp_rs.open(ckpt, device=device, max_inflight_bytes=4 * MIB) as source:
        running = source.stream()
        for turn in range(len(want)):
            with streams[turn % 3]:
                name, tensor = next(running)
                copies[name] = tensor.clone()
                del tensor
    for stream in streams:
        stream.synchronize()
    assert_state_equal(host(copies), want)


@pytest.mark.parametrize("copies", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_async_save(tmp_path, device, copies):
    want = state(large=3)
    futures = []
    for turn in range(3):
        state_dict = {name: (tensor + turn).to(device) for name, tensor in want.items()}
        base = torch.randn(300, 200, dtype=torch.complex64)
        there = base.to(device)
        state_dict["conj"], state_dict["neg"] = there.conj(), there.conj().imag
        futures.append(
            (turn, base, dcp_rs.async_save(state_dict, tmp_path / str(turn), max_copies=copies))
        )
        for tensor in (*state_dict.values(), there):
            tensor.zero_()
    for turn, base, future in futures:
        future.result(120)
        saved = {name: tensor + turn for name, tensor in want.items()}
        saved |= {
            "conj": base.conj().resolve_conj(),
            "neg": base.conj().imag.resolve_neg().contiguous(),
        }
        with dcp_rs.open(tmp_path / str(turn), verify=True) as source:
            assert_state_equal(dict(source), saved)


def test_pinned_blocks(device):
    source = {f"w{i}": torch.full((100, 1000), float(i), device=device) for i in range(50)}
    staging = Staging(source, shared_blocks)
    staging.finish()
    assert all((staging.values[f"w{i}"] == i).all() for i in range(50))
    staging.release()
    if hasattr(torch.get_device_module(device), "cudart"):
        released = dcp_rs.release_pinned_memory()
        assert sum(tensor.nbytes for tensor in source.values()) <= released <= 20_010_000
    again = stage(source)
    assert all((again[f"w{i}"] == i).all() for i in range(50))


def test_save(ckpt, device):
    want = state()
    state_dict = {name: tensor.to(device) for name, tensor in want.items()}
    state_dict["across"] = torch.randn(2000, 1000, device=device).t()
    want["across"] = state_dict["across"].cpu()
    for tensor in state_dict.values():
        tensor.mul_(2)  # still in the stream when the save begins
    dcp_rs.save(state_dict, ckpt)
    with dcp_rs.open(ckpt) as source:
        assert_state_equal(dict(source), {n: (want[n] * 2).contiguous() for n in source})
