"""``load_file``, ``save_file`` and ``dcp_rs.open`` where safetensors' own were: what one writes the other reads."""

import inspect
import json
import os
import stat

import pytest
import safetensors
import safetensors.torch as stock
import torch

import dcp_rs
from dcp_rs.errors import (
    CheckpointNotFoundError,
    DcpRsError,
    EntryNotFoundError,
    PlanError,
    UnsupportedError,
)

DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
#: What safetensors 0.5 lacks: by the release that has it.
YOUNG = {
    (0, 6): ["float8_e8m0fnu", "float4_e2m1fn_x2"],
    (0, 7): ["complex64"],
    (0, 8): ["float8_e4m3fnuz", "float8_e5m2fnuz"],
}


def tensors():
    torch.manual_seed(0)
    named = {f"of.{str(dtype)[6:]}": torch.randn(3, 5).mul(3).abs().to(dtype) for dtype in DTYPES}
    return named | {
        "large": torch.randn(700, 1001),
        "scalar": torch.tensor(1.5),
        "none": torch.zeros(0, 4),
        'ünïcode/"quoted"': torch.arange(3),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }


def same(loaded, expected):
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        got = loaded[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (got, tensor)]
        assert torch.equal(*as_bytes), name


def test_safetensors_reads_our_files(tmp_path):
    path = tmp_path / "model.safetensors"
    dcp_rs.save_file(tensors(), path, {"format": "pt", "note": "näh"})
    same(stock.load_file(path), tensors())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "näh"}
    same(
        stock.load(path.read_bytes()), tensors()
    )  # the strict reader of bytes: no gap, nothing left over
    same(dcp_rs.load_file(path), tensors())
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_files_of_safetensors_load(tmp_path):
    path = tmp_path / "model.safetensors"
    stock.save_file(tensors(), path)
    for loaded in (
        dcp_rs.load_file(path),
        dcp_rs.load_file(str(path), "cpu", backend="pread", threads=2),
    ):
        same(loaded, tensors())
    path.write_bytes(b"")  # what was loaded is no view of the file
    same(loaded, tensors())


def test_views_of_the_file_where_they_are_asked_for(tmp_path):
    """The default copies: it took 1.6 times as long as safetensors' views, on a warm file."""
    path = tmp_path / "model.safetensors"
    dcp_rs.save_file({"w": torch.zeros(4096), "untouched": torch.zeros(4096)}, path)
    copies, views = dcp_rs.load_file(path), dcp_rs.load_file(path, backend="mmap")
    views["w"][0] = 7  # a private page: the file stays
    same(stock.load_file(path), copies)
    with open(path, "r+b") as file:  # in place, as nobody should
        file.seek(-4 * 4096, os.SEEK_END)
        file.write(torch.ones(4096).numpy().tobytes())
    assert views["untouched"].all()
    assert not copies["untouched"].any()


def test_views_of_a_checkpoint_of_several_pieces(tmp_path):
    state = {"w": torch.arange(64.0).reshape(8, 8), "b": torch.ones(3)}
    dcp_rs.save(state, tmp_path / "ckpt")
    same(dcp_rs.load_file(tmp_path / "ckpt", backend="mmap"), state)
    dcp_rs.save({"step": 1}, tmp_path / "values")
    with pytest.raises(UnsupportedError, match="not a tensor"):
        dcp_rs.load_file(tmp_path / "values", backend="mmap")


def test_a_backend_that_is_none_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="backend='nmap': must be one of 'mmap', 'pread'"):
        dcp_rs.load_file(tmp_path / "model.safetensors", backend="nmap")


def young(name):
    dtype = getattr(torch, name)
    return torch.arange(1, 1 + 8 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(4, 2)


def test_types_that_came_later_are_written_as_safetensors_writes_them(tmp_path):
    """They were refused, as what safetensors cannot hold, and ``get_slice`` called them otherwise."""
    here = tuple(map(int, safetensors.__version__.split(".")[:2]))
    wanted = {
        name: young(name) for since, names in YOUNG.items() if here >= since for name in names
    }
    wanted |= {f"empty {name}": tensor[:, :0] for name, tensor in wanted.items()}
    ours, theirs, converted = (
        tmp_path / f"{name}.safetensors" for name in ("ours", "theirs", "converted")
    )
    dcp_rs.save_file(wanted, ours)
    stock.save_file(wanted, theirs)
    dcp_rs.save(wanted, tmp_path / "native")
    dcp_rs.convert(tmp_path / "native", converted)
    for path in (ours, converted):
        same(stock.load_file(path), wanted)
    with safetensors.safe_open(theirs, "pt") as known:
        for path in (ours, theirs, converted, tmp_path / "native"):
            same(dcp_rs.load_file(path), wanted)
            with dcp_rs.open(path) as opened:
                for name in wanted:
                    mine, their = opened.get_slice(name), known.get_slice(name)
                    assert (mine.get_dtype(), mine.get_shape()) == (
                        their.get_dtype(),
                        their.get_shape(),
                    ), name
                    assert (mine.dtype, mine.shape) == (wanted[name].dtype, wanted[name].shape)
                    same({name: mine[1:3]}, {name: wanted[name][1:3]})
        for path in (ours, converted):
            with safetensors.safe_open(path, "pt") as read:
                for name in wanted:
                    assert read.get_slice(name).get_shape() == known.get_slice(name).get_shape()


def test_signatures_are_those_of_safetensors():
    for name in ("load_file", "save_file"):
        theirs = inspect.signature(getattr(stock, name)).parameters
        ours = inspect.signature(getattr(dcp_rs, name)).parameters
        for at, (parameter, known) in enumerate(theirs.items()):
            assert list(ours)[at] == parameter
            assert ours[parameter].kind == known.kind


def test_a_checkpoint_of_many_files_is_loaded(tmp_path):
    wanted = {name: value for name, value in tensors().items() if name != "parameter"}
    dcp_rs.save(wanted, tmp_path / "native")
    torch.distributed.checkpoint.save(wanted, checkpoint_id=tmp_path / "stock")
    for kind in ("native", "stock"):
        same(dcp_rs.load_file(tmp_path / kind), wanted)
    dcp_rs.save({"w": torch.zeros(2), "step": 3}, tmp_path / "values")
    with pytest.raises(UnsupportedError, match=r"'step'.*is not a tensor"):
        dcp_rs.load_file(tmp_path / "values")
    skeleton = dcp_rs.load_file(tmp_path / "native", "meta")
    assert skeleton["large"].is_meta
    assert skeleton["large"].shape == (700, 1001)


def test_an_empty_file(tmp_path):
    dcp_rs.save_file({}, tmp_path / "empty.safetensors", {"a": "b"})
    assert stock.load_file(tmp_path / "empty.safetensors") == {}
    assert dcp_rs.load_file(tmp_path / "empty.safetensors") == {}


@pytest.mark.parametrize(
    ("saved", "error", "message"),
    [
        ({"a": torch.zeros(3, 4).t()}, PlanError, "'a' is not contiguous"),
        ({"a": 1}, UnsupportedError, "'a': it is a int"),
        ({1: torch.zeros(1)}, TypeError, "1 names a tensor"),
        ([torch.zeros(1)], TypeError, "a list"),
        ({"a": torch.eye(2).to_sparse()}, UnsupportedError, "'a': its layout"),
        (
            {"a": torch.zeros(1, dtype=torch.complex128)},
            UnsupportedError,
            "'a': its dtype is complex128",
        ),
        ({"a": torch.zeros(1, device="meta")}, UnsupportedError, "'a' is on the meta device"),
        (
            {"a": young("float4_e2m1fn_x2")[0, 0]},
            UnsupportedError,
            "'a': its dtype is float4.*without a dimension",
        ),
        ({"__metadata__": torch.zeros(1)}, UnsupportedError, "keeps for itself"),
    ],
    ids=["strided", "number", "key", "list", "sparse", "dtype", "meta", "pairs", "metadata"],
)
def test_unsavable_tensors_are_refused(tmp_path, saved, error, message):
    path = tmp_path / "model.safetensors"
    stock.save_file({"old": torch.ones(2)}, path)
    with pytest.raises(error, match=message):
        dcp_rs.save_file(saved, path)
    same(stock.load_file(path), {"old": torch.ones(2)})
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_shared_memory_is_told_as_safetensors_tells_it(tmp_path):
    base = torch.arange(12.0)
    path = tmp_path / "model.safetensors"
    for shared in (
        {"head": base, "embedding": base},
        {"a": base[:7], "b": base[6:]},
        {"all": base, "inner": base[3:5], "outer": torch.zeros(3)},
    ):
        with pytest.raises(RuntimeError):
            stock.save_file(shared, tmp_path / "theirs")
        with pytest.raises(PlanError, match="share memory"):
            dcp_rs.save_file(shared, path)
    apart = {"a": base[:6], "b": base[6:], "none": base[:0]}
    stock.save_file(apart, tmp_path / "theirs")
    dcp_rs.save_file(apart, path)
    same(stock.load_file(path), apart)
    with pytest.raises(TypeError, match=r"metadata=\{'step'"):
        dcp_rs.save_file({"a": base}, path, {"step": 3})


def test_a_file_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "model.safetensors"
    dcp_rs.save_file({"a": torch.zeros(4)}, path)
    view = dcp_rs.open(path)["a"]
    os.umask(mask := os.umask(0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    link = tmp_path / "link.safetensors"
    link.symlink_to("model.safetensors")
    dcp_rs.save_file({"a": torch.ones(4)}, link)
    assert (
        not link.is_symlink()
    )  # as a snapshot of the hub leads to a blob that others lead to as well
    same(dcp_rs.load_file(path), {"a": torch.zeros(4)})
    dcp_rs.save_file({"a": torch.ones(4)}, path, fsync=False)
    same(dcp_rs.load_file(path), {"a": torch.ones(4)})
    assert torch.equal(view, torch.zeros(4))
    with pytest.raises(IsADirectoryError):
        dcp_rs.save_file({"a": torch.ones(4)}, tmp_path)


@pytest.mark.parametrize("of", ["ü", "重", "x"])
def test_names_may_be_as_long_as_the_file_system_has_them(tmp_path, of):
    """A temporary name was 200 characters of it, which may be 800 bytes."""
    stem = of * (242 // len(of.encode()))
    path = tmp_path / f"{stem}.safetensors"
    wanted = {"a": torch.ones(3)}
    stock.save_file(wanted, path)
    for _ in range(2):
        dcp_rs.save_file(wanted, path)
        same(stock.load_file(path), wanted)
    for suffix in (".safetensors", ".pt", ""):
        for _ in range(2):
            dcp_rs.convert(path, tmp_path / f"{stem[:-1]}b{suffix}", overwrite=True)
            same(dcp_rs.load_file(tmp_path / f"{stem[:-1]}b{suffix}"), wanted)
    assert len(os.listdir(tmp_path)) == 4


def test_open_does_what_safe_open_does(tmp_path):
    path = tmp_path / "model.safetensors"
    wanted = {"b": torch.randn(6, 4), "a": torch.arange(5), "c": torch.randn(3).bfloat16()}
    stock.save_file(wanted, path, {"format": "pt"})
    with safetensors.safe_open(path, "pt", "cpu") as theirs, dcp_rs.open(path, "pt", "cpu") as ours:
        calls = {name for name in dir(theirs) if not name.startswith("_")}
        assert calls <= set(dir(ours))
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata() == {"format": "pt"}
        same(ours.get_tensors(), theirs.get_tensors())
        for name in theirs.keys():  # noqa: SIM118
            assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name))
            mine, known = ours.get_slice(name), theirs.get_slice(name)
            assert mine.get_shape() == known.get_shape()
            assert mine.get_dtype() == known.get_dtype()
            assert torch.equal(mine[1:3], known[1:3])
        assert torch.equal(ours.get_slice("b")[:, 1:3], theirs.get_slice("b")[:, 1:3])
        assert torch.equal(ours.get_slice("b")[2], theirs.get_slice("b")[2])
        with pytest.raises(EntryNotFoundError, match="there is no entry 'd'"):
            ours.get_tensor("d")
    with pytest.raises(DcpRsError, match="closed"):
        ours.metadata()
    with pytest.raises(ValueError, match="framework='np': must be one of 'pt'"):
        dcp_rs.open(path, framework="np")
    with pytest.raises(CheckpointNotFoundError) as raised:
        dcp_rs.open(tmp_path / "none.safetensors", "pt")
    assert isinstance(raised.value, FileNotFoundError)


def test_metadata_of_several_files_and_of_none(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    for number, metadata in (
        (1, {"format": "pt", "which": "first"}),
        (2, {"which": "second", "more": "x"}),
    ):
        stock.save_file(
            {f"w{number}": torch.zeros(2)},
            folder / f"model-0000{number}-of-00002.safetensors",
            metadata,
        )
    weights = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )
    assert dcp_rs.open(folder).metadata() == {"format": "pt", "which": "first", "more": "x"}
    stock.save_file({"w": torch.zeros(2)}, tmp_path / "silent.safetensors")
    assert dcp_rs.open(tmp_path / "silent.safetensors").metadata() is None
    dcp_rs.save({"w": torch.zeros(2)}, tmp_path / "native")
    assert dcp_rs.open(tmp_path / "native").metadata() is None
