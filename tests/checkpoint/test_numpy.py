"""`dcp_rs.open(framework="np")`: the arrays are what torch has, of every kind of checkpoint, and only values import torch."""

import subprocess
import sys
import warnings
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
from dcp_rs.errors import CorruptDataError, DcpRsError, EntryNotFoundError, UnsafePickleError
from dcp_rs.tensors import elements
from support import dtypes_state, nested_state, run_ranks, shapes_state
from support.both import save_rs, save_stock

WHOLE = torch.arange(12 * 8, dtype=torch.float64).reshape(12, 8)


def save_sharded(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp_rs.save(
        {"w": distribute_tensor(WHOLE, mesh, [Shard(1)], src_data_rank=None), "step": 4}, path
    )


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """The same tensors of every dtype and shape in each kind of checkpoint."""
    folder = tmp_path_factory.mktemp("kinds")
    state = {**dtypes_state(), **shapes_state(), "step": 3, "betas": (0.9, 0.95)}
    save_rs(state, folder / "ours")
    save_stock(state, folder / "stock")
    dcp_rs.convert(folder / "ours", folder / "hf", to="safetensors", skip_unsupported=True)
    return folder


def raw(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def bits_of(tensor):
    """The same in bytes, as torch has them."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


@pytest.mark.filterwarnings("ignore:tensor .* which NumPy lacks")
@pytest.mark.parametrize("kind", ["ours", "stock", "hf"])
def test_every_kind_gives_the_bits_that_torch_gives(kinds, kind):
    with dcp_rs.open(kinds / kind, framework="np") as arrays, dcp_rs.open(kinds / kind) as tensors:
        assert list(arrays) == list(tensors)
        compared = 0
        for name in tensors:
            tensor, array = tensors[name], arrays[name]
            if not isinstance(tensor, torch.Tensor):
                assert array == tensor
                continue
            assert array.shape == tuple(tensor.shape) == arrays.info(name).shape
            assert np.array_equal(raw(array), bits_of(tensor)), name
            assert array.dtype == arrays.info(name).dtype
            compared += 1
        assert compared > 20


def test_tensor_in_one_piece_is_a_private_view(ckpt):
    save_rs({"w": WHOLE}, ckpt)
    with dcp_rs.open(ckpt, framework="np") as arrays:
        view = arrays["w"]
        assert np.shares_memory(view, arrays["w"])
        view[:] = -1.0
    assert (view == -1.0).all()  # after close
    assert torch.equal(dcp_rs.open(ckpt)["w"], WHOLE)


def test_pieces_are_put_together_and_slices_read_a_part(ckpt):
    run_ranks(2, save_sharded, ckpt)
    expected = WHOLE.numpy()
    arrays = dcp_rs.open(ckpt, framework="np")
    assert arrays.info("w").chunks == 2
    assert np.array_equal(arrays["w"], expected)
    part = arrays.get_slice("w")
    assert (part.get_shape(), part.dtype) == ([12, 8], np.float64)
    for key in (np.s_[2:5, 3:7], np.s_[-1], np.s_[..., 5], np.s_[::3, 1:6:2], np.s_[4:4], ()):
        assert np.array_equal(part[key], expected[key]), key
    # A piece that is gone is missed only where it is asked for.
    arrays.close()
    next(ckpt.glob("*-r00001-*")).unlink()
    arrays = dcp_rs.open(ckpt, framework="np")
    assert np.array_equal(arrays.get_slice("w")[:, :4], expected[:, :4])
    with pytest.raises(CorruptDataError):
        arrays["w"]
    for key in (12, (0, 0, 0)):
        with pytest.raises(IndexError):
            part[key]


def test_types_that_numpy_lacks(ckpt, monkeypatch):
    values = torch.tensor([1.5, -2.0, float("inf")])
    save_rs(
        {"b": values.bfloat16(), "f": values.to(torch.float8_e5m2), "g": values.bfloat16()}, ckpt
    )
    if elements.has_ml_dtypes():
        arrays = dcp_rs.open(ckpt, framework="np")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert arrays["b"].dtype.name == "bfloat16"
            assert arrays["b"].astype(np.float32).tolist() == [1.5, -2.0, float("inf")]
            assert arrays["f"].astype(np.float32).tolist() == [1.5, -2.0, float("inf")]
    monkeypatch.setattr(elements, "has_ml_dtypes", lambda: False)
    arrays = dcp_rs.open(ckpt, framework="np")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert arrays.info("b").dtype == np.uint16  # nothing is read
    with pytest.warns(
        UserWarning,
        match="'b' is of dtype bfloat16, which NumPy lacks without ml_dtypes.*bits, in uint16",
    ) as said:
        assert arrays["b"].tolist() == values.bfloat16().view(torch.uint16).tolist()
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays["g"]  # said once


def test_values_are_what_torch_loads(ckpt):
    state = {
        "plain": {"a": [1, 2.5, None, True, "ü"], "b": (b"\x00\xff", {1, 2}, 3j)},
        "more": (bytearray(b"\x80a"), Counter("aab"), OrderedDict(z=1, a=2)),
        "size": (torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1)),
        "tensor": (torch.arange(6).reshape(2, 3).t(), torch.tensor([1 + 2j]).conj()),
    }
    save_rs(state, ckpt)
    arrays, tensors = dcp_rs.open(ckpt, framework="np"), dcp_rs.open(ckpt)
    for name in ("plain.a", "plain.b", "more", "size"):
        assert arrays[name] == tensors[name]
    for array, tensor in zip(arrays["tensor"], state["tensor"], strict=True):
        assert torch.equal(array, tensor)


class Other:
    pass


def test_a_pickle_of_something_else_is_refused_by_name(ckpt):
    with pytest.warns(UserWarning, match="will not load"):
        save_rs({"odd": Other()}, ckpt)
    with pytest.raises(UnsafePickleError, match=r"'odd' .*Other was not an allowed global"):
        dcp_rs.open(ckpt, framework="np")["odd"]


def test_errors_are_those_of_torchs_checkpoint(ckpt):
    save_rs({"model.w": torch.ones(3), "step": 1}, ckpt)
    arrays = dcp_rs.open(ckpt, framework="np")
    with pytest.raises(EntryNotFoundError, match=r"no entry 'w' in .*it is stored as 'model\.w'"):
        arrays["w"]
    assert arrays.get("w") is None
    with pytest.raises(TypeError, match="'step' is not a tensor"):
        arrays.get_slice("step")
    with pytest.raises(ValueError, match="one of 'pt', 'np'"):
        dcp_rs.open(ckpt, framework="jax")
    with pytest.raises(ValueError, match="has neither devices"):
        dcp_rs.open(ckpt, framework="np", device="cuda")
    next(ckpt.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(CorruptDataError):
        arrays["model.w"]
    arrays.close()
    with pytest.raises(DcpRsError, match="closed"):
        arrays["model.w"]


SCRIPT = """
import sys
import dcp_rs
assert "torch" not in sys.modules, "import dcp_rs"
with dcp_rs.open(sys.argv[1], framework="np") as arrays:
    for name in arrays:
        if arrays.info(name).dtype is not None: arrays[name]
    arrays.get_slice("model.embedding.weight")[1:3]
assert "torch" not in sys.modules, "open"
from dcp_rs.cli import main
for command in (["ls"], ["ls", "--json"], ["inspect"], ["verify", "--allow-unverified"], ["tree"]):
    try: main([command[0], sys.argv[1], *command[1:]])
    except SystemExit as ended: assert ended.code == 0, command
    assert "torch" not in sys.modules, command
"""


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_torch_is_not_imported(tmp_path, kind):
    state = nested_state()
    (save_rs if kind == "ours" else save_stock)(state, tmp_path / "ckpt")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
