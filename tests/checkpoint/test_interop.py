"""The data files are safetensors files: the `safetensors` package and torch's Hugging Face reader take them as they are."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._hf_utils import DTYPE_MAP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_rs import RsWriter
from support import (
    assert_state_equal,
    blank,
    dtypes_state,
    nested_state,
    random_tensor,
    run_ranks,
    shapes_state,
    strange_names_state,
)
from support.both import save_rs
from support.oracle import raw_bytes

# Those that both safetensors and torch's reader have (section 6 of docs/format.md); the others are
# bytes to them.
NOT_SHARED = {
    "complex32",
    "bcomplex32",
    "complex128",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
}
# Older torch has fewer.
SHARED = {
    name: tensor
    for name, tensor in dtypes_state().items()
    if name not in NOT_SHARED and tensor.dtype in DTYPE_MAP.values()
}


def header_name(fqn):
    return fqn + "~" if fqn == "__metadata__" or fqn.startswith("__metadata__~") else fqn


@pytest.mark.parametrize(
    "make",
    [dtypes_state, shapes_state, nested_state, strange_names_state],
    ids=lambda f: f.__name__,
)
def test_safetensors_opens_every_file(ckpt, make):
    state = make()
    save_rs(state, ckpt)
    for file in ckpt.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                opened.get_tensor(name)
        tensors = load_file(file)
        if make is nested_state:
            assert_state_equal(
                tensors["optimizer.state.embedding.weight.exp_avg"],
                state["optimizer"]["state"]["embedding.weight"]["exp_avg"],
            )
            continue
        assert set(tensors) == {header_name(name) for name in state}
        for name, want in state.items():
            got = tensors[header_name(name)]
            if name in NOT_SHARED:
                assert got.dtype == torch.uint8
                size = want.element_size()
                assert got.shape == (want.shape if size == 1 else (*want.shape, size))
                assert raw_bytes(got) == raw_bytes(want)
            else:
                assert_state_equal(got, want)


def test_safetensors_slices_what_we_wrote(ckpt):
    want = random_tensor((40, 30))
    save_rs({"w": want}, ckpt)
    with safe_open(next(ckpt.glob("*.safetensors")), "pt") as opened:
        assert_state_equal(opened.get_slice("w")[3:7, ::2], want[3:7, ::2])


def test_names_with_tildes_stay_apart(ckpt):
    want = {
        name: random_tensor((3,), seed=i)
        for i, name in enumerate(
            ["__metadata__", "__metadata__~", "__metadata__~~", "__metadata__x", "~"]
        )
    }
    save_rs(want, ckpt)
    tensors = load_file(next(ckpt.glob("*.safetensors")))
    assert_state_equal(tensors, {header_name(name): t for name, t in want.items()})


def test_payloads_are_aligned(ckpt):
    state = {f"w{n}": random_tensor((n,), torch.uint8, n) for n in (1, 2, 3, 8, 4096, 8192, 5000)}
    state |= {"f": random_tensor((3,), torch.float64), "page": random_tensor((2048,))}
    save_rs(state, ckpt)
    raw = next(ckpt.glob("*.safetensors")).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 4096 == 0
    place = 0
    for name, entry in sorted(header.items(), key=lambda kv: kv[1].get("data_offsets", [0, 0])):
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        assert begin == place
        place = end
        size = end - begin
        assert begin % min(4096, size & -size) == 0, name
    assert 8 + length + place == len(raw)


def test_torch_s_reader_loads_the_folder(ckpt):
    state = SHARED | {
        name: tensor
        for name, tensor in shapes_state().items()
        if not tensor.is_neg() and not tensor.is_conj()
    }
    save_rs(state, ckpt)
    got = blank(state)
    dcp.load(got, storage_reader=HuggingFaceStorageReader(str(ckpt)), no_dist=True)
    assert_state_equal(got, state)


WHOLE = torch.arange(70.0).reshape(10, 7)


def save_sharded(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    square = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    state = {
        "rows": distribute_tensor(WHOLE, mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(WHOLE.half(), mesh, [Shard(1)], src_data_rank=None),
        "blocks": distribute_tensor(WHOLE, square, [Shard(0), Shard(1)], src_data_rank=None),
        "complex": distribute_tensor(
            WHOLE.to(torch.complex128), mesh, [Shard(0)], src_data_rank=None
        ),
        "plain": WHOLE.double(),
        "step": 3,
    }
    dcp.save(state, storage_writer=RsWriter(path))


def test_torch_s_reader_loads_what_four_ranks_saved(ckpt):
    run_ranks(4, save_sharded, ckpt)
    want = {"rows": WHOLE, "columns": WHOLE.half(), "blocks": WHOLE, "plain": WHOLE.double()}
    got = blank(want)
    dcp.load(got, storage_reader=HuggingFaceStorageReader(str(ckpt)), no_dist=True)
    assert_state_equal(got, want)
    # What it has no type for are the bytes of each element, in a dimension of their own.
    raw = {"complex": torch.zeros(10, 7, 16, dtype=torch.uint8)}
    dcp.load(raw, storage_reader=HuggingFaceStorageReader(str(ckpt)), no_dist=True)
    assert_state_equal(raw["complex"].view(torch.complex128)[..., 0], WHOLE.to(torch.complex128))


def test_sharding_is_told_to_torch_s_reader(ckpt):
    run_ranks(2, save_two_rows, ckpt)
    for rank, file in enumerate(sorted(ckpt.glob("*.safetensors"), key=lambda f: f.name[26:])):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        assert metadata["DCP_VERSION"] == "1.0"
        sharding = json.loads(metadata["DCP_SHARDING_INFO"])
        assert sharding["w"] == {"saved_offsets": [rank, 0]}
        own = json.loads(metadata["DCPRS"])
        assert (own["version"], own["rank"], own["world_size"], own["files"]) == (1, rank, 2, 1)
        assert own["tensors"]["w"]["shape"] == [2, 3]


def save_two_rows(path):
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)], src_data_rank=None)
    dcp.save({"w": weight}, storage_writer=RsWriter(path))
