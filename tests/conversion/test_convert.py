"""Conversion: every direction, judged by stock readers; bounds on memory; and nothing left behind when it fails."""

import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dcp_rs
from dcp_rs.checkpoint.blocks import BLOCK_BYTES, Region, cut, rectangles
from dcp_rs.checkpoint.source import Chunk, Item
from dcp_rs.conversion.job import Task, split
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptDataError,
    CorruptIndexError,
    PlanError,
    UnsafePickleError,
    UnsupportedError,
)
from dcp_rs.testing.states import can_copy
from support import assert_state_equal, blank, dtypes_state, nested_state, random_tensor, run_ranks
from support.both import load_rs, load_stock, save_rs, save_stock
from support.places import STOCK

SOURCES = ["dcp-rs", "dcp", "torch"]


def make(kind: str, state: dict, path: Path) -> Path:
    if kind == "dcp-rs":
        save_rs(state, path)
    elif kind == "dcp":
        save_stock(state, path)
    elif kind == "torch":
        torch.save(state, path)
    else:
        path.mkdir()
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path


def judge(kind: str, path: Path, state: dict) -> None:
    """Fails unless stock readers find `state` at `path`, bit for bit."""
    if kind == "dcp-rs":
        assert_state_equal(load_rs(blank(state), path), state)
        assert dcp_rs.verify(path)
    elif kind == "dcp":
        assert_state_equal(load_stock(blank(state), path), state)
    elif kind == "torch":
        assert_state_equal(torch.load(path, weights_only=True), state)
    else:
        assert_state_equal(load_hf(path), state)


def load_hf(path: Path) -> dict[str, torch.Tensor]:
    """A Hugging Face folder as transformers reads it."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        assert [file.name for file in path.iterdir()] == ["model.safetensors"]
        return load_file(path / "model.safetensors")
    said = json.loads(index.read_text())
    files = sorted(set(said["weight_map"].values()))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert {file.name for file in path.iterdir()} == {*files, index.name}
    state = {}
    for file in files:
        loaded = load_file(path / file)
        with safe_open(path / file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
        assert {name for name, where in said["weight_map"].items() if where == file} == set(loaded)
        state |= loaded
    assert said["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert list(said["weight_map"]) == sorted(state)
    return state


def leftovers(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.name.endswith(".tmp") or entry.name.startswith(".")]


# --- what comes back is what was there ---------------------------------------------------------------


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch"])
@pytest.mark.parametrize("source", SOURCES)
def test_nested_state_survives(source: str, to: str, tmp_path: Path) -> None:
    state = nested_state()
    src = make(source, state, tmp_path / "src")
    report = dcp_rs.convert(src, tmp_path / "dst", to=to)
    judge(to, tmp_path / "dst", state)
    assert len(report.written) == 15
    assert report.files == 1
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
@pytest.mark.parametrize("source", [*SOURCES, "safetensors"])
@pytest.mark.parametrize("shards", [1, 3])
def test_flat_tensors_survive(source: str, to: str, shards: int, tmp_path: Path) -> None:
    state = {f"layers.{i}.w": random_tensor((3, i, 5), torch.bfloat16, seed=i) for i in range(7)}
    state |= {"scalar": random_tensor((), torch.int64), "big": random_tensor((1023, 1025, 3), torch.float32, 9)}
    src = make(source, state, tmp_path / "src")
    many = {} if to == "torch" else {"shards": shards}
    report = dcp_rs.convert(src, tmp_path / "dst", to=to, **many)
    judge(to, tmp_path / "dst", state)
    assert report.files == (1 if to == "torch" else shards)
    assert report.bytes == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch"])
@pytest.mark.parametrize("source", SOURCES)
def test_all_dtypes_survive(source: str, to: str, tmp_path: Path) -> None:
    state = dtypes_state()
    if "dcp" in (source, to):
        state = {name: tensor for name, tensor in state.items() if can_copy(tensor.dtype)}
    try:
        src = make(source, state, tmp_path / "src")
    except (RuntimeError, KeyError, NotImplementedError) as error:
        pytest.skip(f"this torch cannot save all of its types: {error}")
    dcp_rs.convert(src, tmp_path / "dst", to=to)
    judge(to, tmp_path / "dst", state)


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(
        [{"params": model[1].parameters(), "lr": 0.1}, {"params": model[0].parameters()}], lr=0.01
    )
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("way", ["dcp-rs", "dcp", "state_dict"])
def test_an_optimizer_goes_on_where_it_was(way: str, tmp_path: Path) -> None:
    model, optimizer = trained(steps=3)
    state = {"model": model.state_dict(), "optims": [optimizer.state_dict()], "epoch": 3}
    torch.save(state, tmp_path / "before.pt")
    dcp_rs.convert(tmp_path / "before.pt", tmp_path / "between", to="dcp" if way == "dcp" else "dcp-rs")
    if way == "state_dict":
        with dcp_rs.open(tmp_path / "between") as opened:
            back = opened.state_dict()
    else:
        dcp_rs.convert(tmp_path / "between", tmp_path / "after.pt", to="torch")
        back = torch.load(tmp_path / "after.pt")
    assert list(back["optims"][0]["state"]) == [0, 1, 2, 3]
    resumed_model, resumed = trained(steps=0)
    resumed_model.load_state_dict(back["model"])
    resumed.load_state_dict(back["optims"][0])
    step(model, optimizer)
    step(resumed_model, resumed)
    assert len(resumed.state) == 4
    assert_state_equal(resumed_model.state_dict(), model.state_dict())
    assert_state_equal(resumed.state_dict(), optimizer.state_dict())


def test_safetensors_holds_its_own_dtypes(tmp_path: Path) -> None:
    state = dtypes_state()
    make("dcp-rs", state, tmp_path / "src")
    with pytest.raises(UnsupportedError, match=r"'complex128' is of complex128"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to="safetensors")
    assert not (tmp_path / "dst").exists()
    report = dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to="safetensors", skip_unsupported=True)
    assert {"complex128", "complex32"} <= set(report.skipped)
    assert_state_equal(load_hf(tmp_path / "dst"), {name: t for name, t in state.items() if name not in report.skipped})
    assert len(report.written) >= 16


def _save_sharded(path: str) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "rows": distribute_tensor(random_tensor((7, 5), seed=1), mesh, [Shard(0)]),
        "columns": distribute_tensor(random_tensor((6, 9), torch.bfloat16, 2), mesh, [Shard(1)]),
        "whole": random_tensor((3,), seed=3),
        "step": 7,
    }
    save(state, storage_writer=torch.distributed.checkpoint.FileSystemWriter(path))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """What three ranks saved."""
    folder = tmp_path_factory.mktemp("sharded") / "src"
    run_ranks(3, _save_sharded, str(folder))
    return folder


def test_shards_stay_shards(sharded: Path, tmp_path: Path) -> None:
    state = {
        "rows": random_tensor((7, 5), seed=1),
        "columns": random_tensor((6, 9), torch.bfloat16, 2),
        "whole": random_tensor((3,), seed=3),
        "step": 7,
    }
    for to in ("dcp-rs", "dcp"):
        dcp_rs.convert(sharded, tmp_path / to, to=to)
        judge(to, tmp_path / to, state)
        with dcp_rs.open(sharded) as old, dcp_rs.open(tmp_path / to) as new:
            for name in ("rows", "columns"):
                chunks = [[(c.offsets, c.sizes) for c in opened.chunks(name)] for opened in (old, new)]
                assert chunks[0] == chunks[1]
                assert len(chunks[1]) == 3
        # A shard of a shard, cast on the way.
        dcp_rs.convert(sharded, tmp_path / f"{to}-cast", to=to, dtype="fp64", shards=2)
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        judge(to, tmp_path / f"{to}-cast", wide)
    # The others put them together.
    dcp_rs.convert(sharded, tmp_path / "x.pt", to="torch")
    judge("torch", tmp_path / "x.pt", state)
    dcp_rs.convert(sharded, tmp_path / "hf", to="safetensors", exclude="step")
    judge("safetensors", tmp_path / "hf", {name: state[name] for name in ("rows", "columns", "whole")})


@pytest.mark.parametrize(
    "case", sorted(p.parent for p in STOCK.glob("*/*/.metadata") if "nested" in p.parts[-2]), ids=lambda p: p.parts[-2]
)
def test_what_older_torch_wrote(case: Path, tmp_path: Path) -> None:
    dcp_rs.convert(case, tmp_path / "dst")
    with dcp_rs.open(case) as old, dcp_rs.open(tmp_path / "dst") as new:
        assert_state_equal(new.state_dict(), old.state_dict())


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, "fp64", "float8_e4m3fn"])
def test_casts_are_torchs(to: str, dtype: object, tmp_path: Path) -> None:
    state = {
        "w": torch.randn(700, 1500),
        "half": torch.randn(9, 9).bfloat16(),
        "ids": torch.arange(10),
        "scaled": random_tensor((8,), torch.float8_e5m2),
    }
    make("dcp", state, tmp_path / "src")
    dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to, dtype=dtype)
    target = {"fp64": torch.float64, "float8_e4m3fn": torch.float8_e4m3fn}.get(str(dtype), dtype)
    want = state | {"w": state["w"].to(target), "half": state["half"].to(target)}
    judge(to, tmp_path / "dst", want)


def test_choosing_and_renaming(tmp_path: Path) -> None:
    make("dcp-rs", nested_state(), tmp_path / "src")
    dcp_rs.convert(
        tmp_path / "src", tmp_path / "hf", to="safetensors", include="model.*", exclude="*.0.*", rename={"model": ""}
    )
    assert set(load_hf(tmp_path / "hf")) == {"embedding.weight"}
    renames = {"model": "module.net", "model.layers": "blocks", "": "all"}
    dcp_rs.convert(tmp_path / "src", tmp_path / "new", include=["model.*", "step", "modelx*"], rename=renames)
    with dcp_rs.open(tmp_path / "new") as made:
        assert set(made) == {"module.net.embedding.weight", "blocks.0.weight", "all.step"}
    dcp_rs.convert(tmp_path / "src", tmp_path / "x.pt", to="torch", include="model.*", rename=str.upper)
    assert set(torch.load(tmp_path / "x.pt")) == {"MODEL.EMBEDDING.WEIGHT", "MODEL.LAYERS.0.WEIGHT"}
    with pytest.raises(PlanError, match=r"both be named 'x'"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "clash", rename=lambda _: "x")
    with pytest.raises(PlanError, match="none of the 15 entries"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "none", include="absent*")
    assert {entry.name for entry in tmp_path.iterdir()} == {"src", "hf", "new", "x.pt"}


def test_archives_have_their_checksums(tmp_path: Path) -> None:
    """Conversion has torch leave them out, for speed; they are added after."""
    state = {
        "large": random_tensor((1500, 1000), seed=1),
        "empty": torch.empty(0),
        "scalar": torch.tensor(2),
        "step": 7,
    }
    make("dcp-rs", state, tmp_path / "src")
    dcp_rs.convert(tmp_path / "src", tmp_path / "x.pt", to="torch")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        assert len([entry for entry in archive.infolist() if entry.CRC]) >= 5
    dcp_rs.convert(tmp_path / "src", tmp_path / "dcp", to="dcp", shards=2)
    places = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().storage_data.values()
    assert len(places) == 4
    for place in places:
        data = (tmp_path / "dcp" / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            assert archive.getinfo("archive/data.pkl").CRC != 0
    # The next save of this process has its own.
    torch.save(state, tmp_path / "own.pt")
    with zipfile.ZipFile(tmp_path / "own.pt") as archive:
        assert archive.testzip() is None


def test_what_is_no_archive_gets_no_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(100)}, path)
    good = path.read_bytes()
    descriptor = good.index(b"PK\x07\x08")
    for bad in (good[:-1], good[:descriptor] + b"????" + good[descriptor + 4 :], b"PK\x03\x04", b""):
        path.write_bytes(bad)
        with pytest.raises(CorruptDataError, match=r"x\.pt"):
            dcp_rs._core.seal_archives(str(path), [(0, len(bad))], 1)
        assert path.read_bytes() == bad
    path.write_bytes(good)
    with pytest.raises(CorruptDataError):
        dcp_rs._core.seal_archives(str(path), [(0, len(good) + 1)], 1)


def test_numbers_for_keys_survive_from_torch_to_torch(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "empty": {}}
    torch.save(state, tmp_path / "x.pt")
    dcp_rs.convert(tmp_path / "x.pt", tmp_path / "y.pt", to="torch", exclude="model.bias")
    got = torch.load(tmp_path / "y.pt", weights_only=True)
    del state["model"]["bias"]
    assert_state_equal(got["optimizer"], state["optimizer"])
    assert_state_equal(got["model"], state["model"])


@pytest.mark.parametrize("source", ["torch", "dcp-rs", "dcp"])
def test_what_is_taken_out_of_its_container_stays_nested(tmp_path: Path, source: str) -> None:
    inner = {
        "state": {"w": {"step": torch.tensor(2.0), "exp_avg": torch.ones(3)}},
        "param_groups": [{"lr": 0.1, "params": ["w"]}],
    }
    make(source, {"optimizer": inner, "model": {"w": torch.ones(2)}}, tmp_path / "src")
    dcp_rs.convert(tmp_path / "src", tmp_path / "out.pt", to="torch", include="optimizer.*", rename={"optimizer": ""})
    assert_state_equal(torch.load(tmp_path / "out.pt"), inner)
    dcp_rs.convert(tmp_path / "src", tmp_path / "out", include="optimizer.*", rename={"optimizer": ""})
    assert_state_equal(dcp_rs.open(tmp_path / "out").state_dict(), inner)
    # Where names come from several places they are names, and no nesting.
    dcp_rs.convert(
        tmp_path / "src", tmp_path / "all.pt", to="torch", rename={"optimizer": ""}, include=["model.w", "*.step"]
    )
    assert_state_equal(
        torch.load(tmp_path / "all.pt"), {"state.w.step": torch.tensor(2.0), "model": {"w": torch.ones(2)}}
    )


def test_tied_weights(tmp_path: Path) -> None:
    weight = random_tensor((6, 4), seed=1)
    fused = random_tensor((8, 2), seed=2)
    state = {"lm_head": weight, "embed": weight, "q": fused[:4], "k": fused[4:], "both": fused}
    torch.save(state, tmp_path / "x.pt")
    report = dcp_rs.convert(tmp_path / "x.pt", tmp_path / "hf", to="safetensors")
    assert report.tied == {"lm_head": "embed"}
    assert_state_equal(load_hf(tmp_path / "hf"), {k: v for k, v in state.items() if k != "lm_head"})
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "lm_head": "embed"}
    # As safetensors.torch itself writes and reads a model with them.
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "lm_head": torch.nn.Linear(4, 6, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    torch.save(model.state_dict(), tmp_path / "model.pt")
    dcp_rs.convert(tmp_path / "model.pt", tmp_path / "one.safetensors", to="safetensors")
    from safetensors.torch import load_model

    fresh = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "lm_head": torch.nn.Linear(4, 6, bias=False)})
    fresh["lm_head"].weight = fresh["embed"].weight
    load_model(fresh, tmp_path / "one.safetensors")
    assert torch.equal(fresh["embed"].weight, model["embed"].weight)
    # Everyone else has both names, and torch still one memory.
    dcp_rs.convert(tmp_path / "x.pt", tmp_path / "y.pt", to="torch")
    again = torch.load(tmp_path / "y.pt")
    assert again["lm_head"].data_ptr() == again["embed"].data_ptr()


def test_of_tied_weights_the_one_stays_that_transformers_keeps(tmp_path: Path) -> None:
    weight, bias = random_tensor((6, 4), seed=1), random_tensor((6,), seed=2)
    models = {
        # (names of one tensor, in the order of the state dict) and the one that `save_pretrained` keeps
        "llama": (("model.embed_tokens.weight", "lm_head.weight"), "model.embed_tokens.weight"),
        "sorted": (("lm_head.weight", "model.embed_tokens.weight"), "model.embed_tokens.weight"),
        "t5": (
            ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
            "shared.weight",
        ),
        "bert": (
            ("embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
            "embeddings.word_embeddings.weight",
        ),
    }
    for model, (names, kept) in models.items():
        state = {"lm_head.bias": bias} | dict.fromkeys(names, weight) | {"lm_head.decoder.bias": bias}
        torch.save(state, tmp_path / f"{model}.pt")
        report = dcp_rs.convert(tmp_path / f"{model}.pt", tmp_path / model, to="safetensors")
        dropped = dict.fromkeys(set(names) - {kept}, kept) | {"lm_head.decoder.bias": "lm_head.bias"}
        assert report.tied == dropped
        assert set(load_hf(tmp_path / model)) == {kept, "lm_head.bias"}
        with safe_open(tmp_path / model / "model.safetensors", framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"} | dropped


def test_tensors_that_raw_bytes_cannot_hold(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    torch.save({"s": sparse, "t": torch.ones(2)}, tmp_path / "x.pt")
    dcp_rs.convert(tmp_path / "x.pt", tmp_path / "ckpt")
    dcp_rs.convert(tmp_path / "ckpt", tmp_path / "y.pt", to="torch")
    assert torch.equal(torch.load(tmp_path / "y.pt")["s"].to_dense(), torch.eye(3))
    with pytest.raises(UnsupportedError, match="'s' is not a tensor"):
        dcp_rs.convert(tmp_path / "x.pt", tmp_path / "hf", to="safetensors")


# --- where it may write ------------------------------------------------------------------------------


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    make("dcp-rs", {"w": torch.ones(3)}, tmp_path / "src")
    make("dcp", {"old": torch.ones(3)}, tmp_path / "dst")
    with pytest.raises(CheckpointExistsError, match="exists"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst")
    judge("dcp", tmp_path / "dst", {"old": torch.ones(3)})
    (tmp_path / "dst" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match=r"notes\.txt"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", overwrite=True)
    (tmp_path / "dst" / "notes.txt").unlink()
    dcp_rs.convert(tmp_path / "src", tmp_path / "dst", overwrite=True)
    judge("dcp-rs", tmp_path / "dst", {"w": torch.ones(3)})
    (tmp_path / "empty").mkdir()
    dcp_rs.convert(tmp_path / "src", tmp_path / "empty", to="dcp")
    (tmp_path / "file.pt").write_text("old")
    dcp_rs.convert(tmp_path / "src", tmp_path / "file.pt", to="torch", overwrite=True)
    judge("torch", tmp_path / "file.pt", {"w": torch.ones(3)})
    assert not leftovers(tmp_path)


def test_the_source_is_never_the_destination(tmp_path: Path) -> None:
    make("dcp-rs", {"w": torch.ones(3)}, tmp_path / "outer" / "src")
    src = tmp_path / "outer" / "src"
    (tmp_path / "link").symlink_to(src)
    data = next(src.glob("*.safetensors"))
    for dst, to in [(src, "dcp"), (tmp_path / "outer", "dcp"), (tmp_path / "link", "dcp"), (data, "safetensors")]:
        with pytest.raises(ValueError, match="is the source"):
            dcp_rs.convert(src, dst, to=to, overwrite=True)
    judge("dcp-rs", src, {"w": torch.ones(3)})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"to": "zarr"}, "to='zarr'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"dtype": "bf17"}, "dtype='bf17'"),
        ({"dtype": torch.int32}, "dtype=torch.int32"),
        ({"shards": 0}, "shards=0"),
        ({"to": "torch", "shards": 2}, "is one file"),
    ],
)
def test_options_are_checked_first(options: dict, match: str, tmp_path: Path) -> None:
    make("dcp-rs", {"w": torch.ones(3)}, tmp_path / "src")
    with pytest.raises(ValueError, match=match):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", **options)
    assert not (tmp_path / "dst").exists()


# --- bad sources -------------------------------------------------------------------------------------


class Exploit:
    def __reduce__(self):
        return os.system, ("touch owned",)


def test_bad_sources(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content, error in [
        ("evil.pt", Exploit(), UnsafePickleError),
        ("list.pt", [torch.ones(2)], UnsupportedError),
        ("keys.pt", {(1, 2): torch.ones(2)}, UnsupportedError),
        ("clash.pt", {"a": {"b": 1}, "a.b": 2}, PlanError),
    ]:
        torch.save(content, name)
        with pytest.raises(error):
            dcp_rs.convert(name, "dst")
    Path("junk.pt").write_bytes(b"PK\x03\x04" + b"\x00" * 100)
    Path("pickle.pt").write_bytes(pickle.dumps(Exploit()))
    for name in ("junk.pt", "pickle.pt"):
        with pytest.raises((CorruptDataError, UnsafePickleError, UnsupportedError)):
            dcp_rs.convert(name, "dst")
    torch.save({"w": torch.ones(2000)}, "short.pt")
    os.truncate("short.pt", 5000)
    Path("empty.pt").write_bytes(b"")
    Path("text.pt").write_text("junk")
    for name, why in [
        ("short.pt", "it was cut short"),
        ("empty.pt", "not a file of torch.save: it is empty"),
        ("text.pt", "not a file of torch.save: it begins as none does"),
    ]:
        with pytest.raises(CorruptDataError, match=f"{name}: .*{why}") as raised:
            dcp_rs.convert(name, "dst")
        assert raised.value.path == name
    with pytest.raises(CheckpointNotFoundError):
        dcp_rs.convert("nowhere", "dst")
    assert not Path("owned").exists()
    assert not Path("dst").exists()


def test_damage_goes_over_only_where_it_is_asked_to(tmp_path: Path) -> None:
    state = {"a": random_tensor((10, 7), seed=1)}
    data = next(make("dcp-rs", state, tmp_path / "src").glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 1]))
    dcp_rs.convert(tmp_path / "src", tmp_path / "dst", verify=False)
    with dcp_rs.open(tmp_path / "dst", verify=True) as opened:
        assert (opened["a"] != state["a"]).sum() == 1


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
def test_damaged_sources(to: str, tmp_path: Path) -> None:
    state = {"a": random_tensor((1000, 700), seed=1), "b": random_tensor((9,), seed=2)}
    make("dcp-rs", state, tmp_path / "src")
    data = next((tmp_path / "src").glob("*.safetensors"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(CorruptDataError):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to)
    data.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(CorruptDataError, match=r'tensor "b": block 0'):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to)
    assert not (tmp_path / "dst").exists()
    data.unlink()
    with pytest.raises(CorruptDataError):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to)
    index = tmp_path / "src" / "index.dcprs"
    index.write_bytes(index.read_bytes()[:-8])
    with pytest.raises(CorruptIndexError):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to)
    assert {entry.name for entry in tmp_path.iterdir()} == {"src"}


CUT_SHORT = """
import os, pathlib, sys, dcp_rs
src, dst, file = sys.argv[1:]
whole = pathlib.Path(file).read_bytes()

def cut_short(done, total):
    if done >= 2 << 20 and os.path.getsize(file) > keep:
        os.truncate(file, keep)

for to in ("dcp-rs", "dcp", "torch", "safetensors"):
    for keep in (1 << 20, len(whole) - 1):
        pathlib.Path(file).write_bytes(whole)
        try:
            dcp_rs.convert(src, dst, to=to, progress=cut_short)
        except dcp_rs.errors.CorruptDataError as error:
            assert error.path == file, error
        else:
            raise AssertionError(to)
        assert not os.path.exists(dst)
"""


@pytest.mark.parametrize("source", ["dcp-rs", "dcp", "torch"])
def test_a_source_that_is_cut_short_meanwhile(source: str, tmp_path: Path) -> None:
    """It used to end the process with a bus error, or to leave zeros in the result."""
    state = {f"w{i}": random_tensor((1 << 20,), torch.uint8, seed=i) for i in range(8)}
    src = make(source, state, tmp_path / "src")
    file = src if source == "torch" else max(src.iterdir(), key=lambda path: path.stat().st_size)
    command = [sys.executable, "-c", CUT_SHORT, src, tmp_path / "dst", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_tensor_with_a_hole(sharded: Path, tmp_path: Path) -> None:
    """One rank's file is gone, with its index: what is left of the tensor is not taken for all of it."""
    shutil.copytree(sharded, tmp_path / "half")
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(tmp_path / "half").read_metadata()
    del metadata.state_dict_metadata["rows"].chunks[1]
    metadata.storage_data = {
        key: info
        for key, info in metadata.storage_data.items()
        if key.fqn != "rows" or key.offset != torch.Size([3, 0])
    }
    (tmp_path / "half" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptDataError, match="'rows' is not all there"):
        dcp_rs.convert(tmp_path / "half", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


# --- bounds and interruptions --------------------------------------------------------------------------

GROWTH = """
import sys, threading, time, torch, warnings
warnings.simplefilter("ignore")
import dcp_rs
import dcp_rs.conversion
import torch.distributed.checkpoint

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

src, dst, dtype = sys.argv[1:]
for to in ("dcp-rs", "dcp", "torch", "safetensors"):
    dcp_rs.convert(src + "-small", f"{dst}-{to}", to=to)  # what is loaded once is not the conversion's
    before, peak, done = anonymous(), 0, False

    def watch():
        global peak
        while not done:
            peak = max(peak, anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    dcp_rs.convert(src, f"{dst}-{to}", to=to, dtype=dtype or None, fsync=False, overwrite=True)
    done = True
    watcher.join()
    print(to, peak - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """400 MB: tensors of 2, 32 and 200 MB."""
    folder = tmp_path_factory.mktemp("large")
    state = {f"small.{i}": torch.full((512, 1024), i, dtype=torch.float32) for i in range(35)}
    state |= {f"middle.{i}": torch.full((2048, 4096), i, dtype=torch.float32) for i in range(4)}
    state["large"] = torch.full((50_000_000,), 3.0)
    make("dcp-rs", state, folder / "src")
    make("dcp-rs", {"w": torch.ones(4)}, folder / "src-small")
    yield folder / "src"
    shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_memory_is_bounded(dtype: str, large: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", GROWTH, str(large), str(tmp_path / "dst"), dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250)
    grown = {to: int(nbytes) for to, nbytes in map(str.split, done.stdout.splitlines())}
    assert len(grown) == 4
    assert max(grown.values()) < 120e6, grown


SLOW = """
import signal, sys, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
warnings.simplefilter("ignore")
import dcp_rs

def progress(done, total):
    print(done, flush=True)
    import time; time.sleep(0.2)

dcp_rs.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], progress=progress, max_inflight_bytes=1 << 20)
"""


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
def test_ctrl_c_leaves_nothing(to: str, tmp_path: Path) -> None:
    make("dcp-rs", {f"w.{i}": torch.ones(4 << 20) for i in range(5)}, tmp_path / "src")
    command = [sys.executable, "-c", SLOW, str(tmp_path / "src"), str(tmp_path / "dst"), to]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()  # something is written
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert {entry.name for entry in tmp_path.iterdir()} == {"src"}


@pytest.fixture
def tiny_disk(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
def test_a_full_disk_leaves_nothing(to: str, tiny_disk: Path, tmp_path: Path) -> None:
    make("dcp", {"w": torch.ones(1000, 500), "v": torch.ones(1000, 500)}, tmp_path / "src")
    with pytest.raises(OSError, match="No space left"):
        dcp_rs.convert(tmp_path / "src", tiny_disk / "dst", to=to)
    assert list(tiny_disk.iterdir()) == []


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    make("dcp-rs", nested_state(), tmp_path / "src")
    for to in ("dcp-rs", "dcp", "torch"):
        seen = []
        report = dcp_rs.convert(
            tmp_path / "src", tmp_path / to, to=to, dtype="fp64", progress=lambda *now, seen=seen: seen.append(now)
        )
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert {total for _, total in seen} == {report.bytes}
        assert seen[-1] == (report.bytes, report.bytes)


def test_many_small_tensors_are_quick(tmp_path: Path) -> None:
    state = {f"layers.{i}.weight": torch.full((16,), i) for i in range(5000)}
    make("dcp-rs", state, tmp_path / "src")
    begin = time.perf_counter()
    dcp_rs.convert(tmp_path / "src", tmp_path / "hf", to="safetensors")
    assert time.perf_counter() - begin < 20
    assert_state_equal(load_hf(tmp_path / "hf"), state)


# --- the pure parts ------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 5), max_size=4),
    data=st.data(),
)
def test_rectangles_are_the_elements_in_order(sizes: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    begin = data.draw(st.integers(0, whole.numel() - 1))
    count = data.draw(st.integers(0, whole.numel() - begin))
    got = []
    for offsets, extent in rectangles(sizes, begin, count):
        part = whole
        for dim, (offset, size) in enumerate(zip(offsets, extent, strict=True)):
            part = part.narrow(dim, offset, size)
        got += part.flatten().tolist()
    assert got == list(range(begin, begin + count))


def item(name: str, numel: int, dtype: torch.dtype) -> Item:
    return Item(name, 0, dtype, (numel,), (Chunk((0,), (numel,)),), numel * dtype.itemsize)


@given(
    numels=st.lists(st.integers(0, 12 << 20), max_size=6),
    dtypes=st.lists(
        st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2]), min_size=6, max_size=6
    ),
    to=st.sampled_from([torch.float64, torch.bfloat16, torch.float8_e5m2]),
)
def test_parts_fill_slabs_and_keep_the_rules_of_a_save(numels, dtypes, to) -> None:
    regions = [Region(item(str(i), n, d), None, to) for i, (n, d) in enumerate(zip(numels, dtypes, strict=False))]
    slab = 16 << 20
    reached = [0] * len(regions)
    for parts in cut(regions, slab):
        end = 0
        for part in parts:
            region = regions[part.region]
            assert part.slab_at >= end
            end = part.slab_at + part.count * region.source_dtype.itemsize
            assert end <= slab
            assert part.begin == reached[part.region]
            reached[part.region] += part.count
            if reached[part.region] < region.numel:
                assert part.count * region.dtype.itemsize % BLOCK_BYTES == 0
            assert part.count > 0
    assert reached == [region.numel for region in regions]


@given(sizes=st.lists(st.integers(0, 1000), max_size=40), count=st.integers(1, 9))
def test_split_is_even_and_in_order(sizes: list[int], count: int) -> None:
    tasks = [Task(item(str(i), n, torch.uint8), str(i), torch.uint8, (str(i),)) for i, n in enumerate(sizes)]
    runs = split(tasks, count)
    assert [task for run in runs for task in run] == tasks
    assert len(runs) == max(1, min(count, len(tasks)))
    assert all(runs) or not tasks
    biggest, mean = max(sizes, default=0), sum(sizes) / len(runs)
    assert all(sum(task.nbytes for task in run) <= mean + 2 * biggest + 1 for run in runs)
