"""Hugging Face folders as tools leave them: several models in one folder, and the hub's cache of links."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import dcp_rs
from dcp_rs import RsReader
from dcp_rs.errors import CheckpointNotFoundError, CorruptDataError, UnsupportedError
from support.both import save_rs

BASE = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}
ADAPTER = {"lora_A": torch.full((2, 2), 7.0)}


def contents(path: Path, **options) -> dict[str, torch.Tensor]:
    with dcp_rs.open(path, **options) as checkpoint:
        return {name: checkpoint[name].clone() for name in checkpoint}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def write_index(folder: Path, name: str, weight_map: dict[str, str]) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# --- several models in one folder

#: What lies beside BASE, and under which names BASE itself does: what transformers 5.23 and
#: diffusers 0.42 load without further arguments.
FOLDERS = {
    "an adapter": (["model.safetensors"], ["adapter_model.safetensors"]),
    "a variant": (["model.safetensors"], ["model.fp16.safetensors"]),
    "another layout": (
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["consolidated.safetensors"],
    ),
    "an index left behind": (["model.safetensors"], ["model-00001-of-00001.safetensors"]),
    "diffusers": (
        ["diffusion_pytorch_model.safetensors"],
        ["diffusion_pytorch_model.non_ema.safetensors"],
    ),
    "a model of timm": (
        ["model.safetensors"],
        ["open_clip_model.safetensors", "optimizer.safetensors"],
    ),
    "another model": (["model.safetensors"], ["model_1.safetensors"]),
}


def make_folder(folder: Path, base: list[str], beside: list[str]) -> None:
    folder.mkdir()
    for name, part in zip(
        base, [BASE] if len(base) == 1 else [{"w": BASE["w"]}, {"b": BASE["b"]}], strict=True
    ):
        save_file(part, folder / name)
    for i, name in enumerate(beside):
        save_file(ADAPTER if i else {**ADAPTER, "w": torch.zeros(2, 3)}, folder / name)
    if len(base) > 1:
        write_index(folder, "model.safetensors.index.json", {"w": base[0], "b": base[1]})
    if beside[0].startswith("model-00001-of-00001"):
        write_index(folder, "model.safetensors.index.json", {"w": beside[0], "lora_A": beside[0]})


@pytest.mark.parametrize("kind", FOLDERS)
def test_model_that_loaders_take_is_opened(tmp_path, kind):
    folder = tmp_path / "model"
    make_folder(folder, *FOLDERS[kind])
    assert same(contents(folder), BASE)
    target = {name: torch.zeros_like(tensor) for name, tensor in BASE.items()}
    dcp_rs.load(target, folder)
    assert same(target, BASE)
    dcp_rs.convert(folder, tmp_path / "converted")
    assert same(contents(tmp_path / "converted"), BASE)
    dcp_rs.index(folder, digests=True)
    assert same(contents(folder), BASE)
    assert dcp_rs.verify(folder).ok


@pytest.mark.parametrize(
    "beside",
    [
        ["adapter_model.safetensors"],
        ["consolidated.safetensors", "adapter_model.safetensors"],
        ["adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"],
    ],
)
@pytest.mark.parametrize("is_series", [False, True])
def test_weights_of_torch_save_are_the_model_beside_other_safetensors(beside, is_series, tmp_path):
    """The adapter opened in silence. transformers 5.23 loads the weights."""
    if is_series:
        files = {"w": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
        for name, file in files.items():
            torch.save({name: BASE[name]}, tmp_path / file)
        write_index(tmp_path, "pytorch_model.bin.index.json", files)
    else:
        torch.save(BASE, tmp_path / "pytorch_model.bin")
    for i, name in enumerate(beside):
        save_file({f"lora_{i}": torch.ones(2)}, tmp_path / name)
    assert same(contents(tmp_path), BASE)
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": beside[0]}))
    if len(beside) == 1:
        assert contents(tmp_path).keys() == {"lora_0"}
    (tmp_path / "config.json").unlink()
    save_file(ADAPTER, tmp_path / "model.safetensors")
    assert same(contents(tmp_path), ADAPTER)


def test_the_configuration_of_a_model_names_its_file(tmp_path):
    make_folder(tmp_path / "model", ["model.safetensors"], ["adapter_model.safetensors"])
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"transformers_weights": "adapter_model.safetensors"})
    )
    assert "lora_A" in contents(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"transformers_weights": "../other.safetensors"})
    )
    assert same(contents(tmp_path / "model"), BASE)


@pytest.mark.parametrize(
    "names",
    [
        ["model.bf16.safetensors", "model.fp16.safetensors"],
        ["consolidated.safetensors", "adapter_model.safetensors"],
        ["consolidated.safetensors", "model-00001-of-00001.safetensors"],
        ["model-00001-of-00001.safetensors", "other-00001-of-00001.safetensors"],
    ],
)
def test_where_no_loader_would_choose_the_files_are_named(tmp_path, names):
    """v0.1 took all of them for one checkpoint."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(BASE, folder / names[0])
    save_file(ADAPTER, folder / names[1])
    for use in (
        dcp_rs.open,
        dcp_rs.index,
        lambda path: dcp_rs.load({}, path),
        lambda path: dcp_rs.convert(path, tmp_path / "x"),
    ):
        with pytest.raises(UnsupportedError, match="several models in one folder") as raised:
            use(folder)
        assert all(name in str(raised.value) for name in names)
    assert sorted(os.listdir(folder)) == sorted(names)
    # The way out, as the message has it.
    assert same(contents(folder / names[0]), BASE)
    dcp_rs.index(folder / names[0])
    assert same(contents(folder), BASE)
    dcp_rs.index(folder / names[1], overwrite=True)
    assert same(contents(folder), ADAPTER)


def test_a_model_of_several_files_is_chosen_by_its_index(tmp_path):
    for precision, value in (("fp16", 1.0), ("bf16", 2.0)):
        names = [f"model.{precision}-0000{i}-of-00002.safetensors" for i in (1, 2)]
        for name, key in zip(names, "wb", strict=True):
            save_file({key: torch.full((2,), value)}, tmp_path / name)
        write_index(
            tmp_path,
            f"model.safetensors.index.{precision}.json",
            dict(zip("wb", names, strict=True)),
        )
    with pytest.raises(UnsupportedError, match=r"model\.safetensors\.index\.bf16\.json"):
        dcp_rs.open(tmp_path)
    chosen = tmp_path / "model.safetensors.index.fp16.json"
    ones = {"w": torch.ones(2), "b": torch.ones(2)}
    assert same(contents(chosen), ones)
    dcp_rs.index(chosen)
    assert same(contents(tmp_path), ones)
    (tmp_path / "model.fp16-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptDataError, match=r"00002-of-00002"):
        dcp_rs.open(chosen)


def test_a_part_of_a_checkpoint_is_no_model_under_any_name(tmp_path):
    """A data file of ours, renamed or copied by hand, is not all of what was saved."""
    save_rs({"w": torch.arange(4.0)}, tmp_path / "ckpt")
    (data,) = (tmp_path / "ckpt").glob("g*.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    shutil.copy(data, folder / "model.safetensors")
    assert same(contents(folder), {"w": torch.arange(4.0)})
    with safe_open(data, "pt") as opened:
        metadata = opened.metadata()
    about = {**json.loads(metadata["DCPRS"]), "world_size": 2}
    save_file(
        {"w": torch.arange(4.0)},
        folder / "model.safetensors",
        {**metadata, "DCPRS": json.dumps(about)},
    )
    with pytest.raises(CheckpointNotFoundError, match="a part of a checkpoint"):
        dcp_rs.open(folder)


# --- the hub's cache


def put_in_cache(cache: Path, files: dict[str, Path], revision: str = "0" * 40) -> Path:
    """A snapshot as ``huggingface_hub`` makes it: links to files that are named by their digests."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / revision
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    for name, source in files.items():
        blob = repository / "blobs" / hashlib.sha256(source.read_bytes()).hexdigest()
        shutil.copy(source, blob)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@pytest.fixture
def snapshot(tmp_path):
    for name, part in (("1", {"w": BASE["w"]}), ("2", {"b": BASE["b"]})):
        save_file(part, tmp_path / name)
    names = {"1": "model-00001-of-00002.safetensors", "2": "sub/model-00002-of-00002.safetensors"}
    write_index(tmp_path, "index.json", {"w": names["1"], "b": names["2"]})
    files = {name: tmp_path / part for part, name in names.items()}
    return put_in_cache(
        tmp_path / "hub", {**files, "model.safetensors.index.json": tmp_path / "index.json"}
    )


def test_an_index_in_a_snapshot_of_the_hub_opens(snapshot, tmp_path, recwarn):
    assert same(contents(snapshot), BASE)
    dcp_rs.index(snapshot, digests=True)
    with dcp_rs.open(snapshot) as checkpoint:
        assert same({name: checkpoint[name] for name in checkpoint}, BASE)
    for mode in ("auto", "mmap", "direct", "buffered"):
        target = {name: torch.zeros_like(tensor) for name, tensor in BASE.items()}
        dcp_rs.load(target, snapshot, io=mode, verify=True)
        assert same(target, BASE)
    assert dcp_rs.verify(snapshot).bytes_verified == 36
    dcp_rs.convert(snapshot, tmp_path / "converted")
    assert same(contents(tmp_path / "converted"), BASE)
    # By another way to the same folder, too.
    (tmp_path / "link").symlink_to(snapshot)
    assert same(contents(tmp_path / "link"), BASE)
    assert not recwarn.list


def test_a_checkpoint_of_ours_from_the_hub_opens(tmp_path):
    save_rs({"model": BASE}, tmp_path / "ckpt")
    snapshot = put_in_cache(
        tmp_path / "hub", {file.name: file for file in (tmp_path / "ckpt").iterdir()}
    )
    assert same(contents(snapshot), {f"model.{name}": tensor for name, tensor in BASE.items()})
    assert dcp_rs.verify(snapshot).ok
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in BASE.items()}}
    dcp_rs.load(target, snapshot)
    assert same(target["model"], BASE)


@pytest.mark.parametrize(
    "kind", ["another repository", "a file of the user", "a blob that is a link", "not a cache"]
)
def test_links_to_elsewhere_are_still_refused(tmp_path, kind):
    save_file(BASE, tmp_path / "secret")
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "1"
    blobs = tmp_path / "hub" / "models--org--name" / "blobs"
    if kind == "another repository":
        blobs = tmp_path / "hub" / "models--org--other" / "blobs"
    if kind == "not a cache":
        blobs, snapshot = tmp_path / "mine" / "blobs", tmp_path / "mine" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    shutil.copy(tmp_path / "secret", blobs / "0")
    if kind == "a blob that is a link":
        (blobs / "0").unlink()
        (blobs / "0").symlink_to(tmp_path / "secret")
    target = tmp_path / "secret" if kind == "a file of the user" else blobs / "0"
    (snapshot / "model.safetensors").symlink_to(target)
    assert same(contents(snapshot), BASE)  # by looking: whoever made the folder made the links
    # An index was written, with a warning, and the folder, which had opened before, opened no more.
    with pytest.raises(UnsupportedError, match=r"a link to something outside its folder.*out="):
        dcp_rs.index(snapshot)
    assert same(contents(snapshot), BASE)
    link = snapshot / "model.safetensors"
    link.rename(tmp_path / "link")
    shutil.copy2(tmp_path / "link", link)
    dcp_rs.index(snapshot)
    (tmp_path / "link").replace(link)
    for use in (contents, dcp_rs.verify, lambda path: dcp_rs.load({"w": torch.zeros(2, 3)}, path)):
        with pytest.raises(UnsupportedError, match="allow_external=True"):
            use(snapshot)
    assert same(contents(snapshot, allow_external=True), BASE)


# --- under torch's own functions


@pytest.mark.parametrize("keys", [None, "w", {"w", "b"}, {"layers"}])
def test_torch_loads_some_names_as_from_a_folder_of_its_own(tmp_path, keys):
    state = BASE | {"layers.0.w": torch.ones(2)}
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    reader = RsReader(tmp_path / "hf")
    planner_data = reader.read_metadata().planner_data
    assert dict(planner_data) == dict(
        dcp.FileSystemReader(tmp_path / "stock").read_metadata().planner_data
    )
    assert len(planner_data) == 3
    want = _load_state_dict_from_keys(keys, storage_reader=dcp.FileSystemReader(tmp_path / "stock"))
    got = _load_state_dict_from_keys(keys, storage_reader=reader)
    assert same(got, want)
