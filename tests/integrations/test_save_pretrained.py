"""Where ``save_pretrained`` may write; what transformers makes of the result is in ``tests/frameworks``. It needs no transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp_rs
from dcp_rs.errors import CheckpointExistsError
from dcp_rs.integrations.transformers import save_pretrained

W = {"a": torch.full((3,), 1.001), "b": torch.zeros(2)}


def model(path: Path) -> Path:
    path.mkdir()
    save_file(W, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text("{}")
    return path


def same(path: Path) -> bool:
    loaded = load_file(path / "model.safetensors")
    return loaded.keys() == W.keys() and all(
        torch.equal(loaded[name], tensor) for name, tensor in W.items()
    )


def test_nothing_is_replaced(tmp_path: Path) -> None:
    base, out = model(tmp_path / "base"), tmp_path / "out"
    linked = tmp_path / "linked"
    linked.symlink_to(base)
    (tmp_path / "file").write_text("mine")
    for taken in (base, linked, tmp_path / "file"):
        with pytest.raises(CheckpointExistsError, match="exists: remove it first"):
            save_pretrained(base, taken)
    assert same(base)
    out.mkdir()
    save_pretrained(base, out)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    assert same(out)


def test_tokenizers_of_all_kinds_come_along(tmp_path: Path) -> None:
    """Those of Marian, PhoBERT, ProphetNet and Mistral have files of their own endings; templates but the first are in a folder."""
    base, out = model(tmp_path / "base"), tmp_path / "out"
    (base / "additional_chat_templates").mkdir()
    names = [
        "source.spm",
        "bpe.codes",
        "prophetnet.tokenizer",
        "tokenizer.model.v3",
        "additional_chat_templates/rag.jinja",
    ]
    for name in names:
        (base / name).write_text(name)
    for name in ("pytorch_model.bin", "model.onnx", "additional_chat_templates/x.bin"):
        (base / name).write_text("weights")
    save_pretrained(base, out)
    found = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    assert [name for name in found if name not in ("config.json", "model.safetensors")] == sorted(
        names
    )
    assert all((out / name).read_text() == name for name in names)


def test_an_adapter_is_one_file(tmp_path: Path) -> None:
    """That it was to be several was passed over."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "adapter_config.json").write_text("{}")
    dcp_rs.save(dict(W), tmp_path / "ckpt", no_dist=True)
    with pytest.raises(ValueError, match="shards=2: peft reads an adapter from one file"):
        save_pretrained(tmp_path / "ckpt", tmp_path / "out", config=tmp_path / "base", shards=2)
    save_pretrained(tmp_path / "ckpt", tmp_path / "out", config=tmp_path / "base", shards=1)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("config", "is_same", "left_out"),
    [
        ({"tie_word_embeddings": True}, True, True),
        ({"text_config": {"tie_word_embeddings": True}}, True, True),
        ({"tie_word_embeddings": True}, False, False),  # what was trained apart stays
        ({"tie_word_embeddings": False}, True, False),
        ({}, True, False),  # the default differs from model to model
    ],
)
def test_tied_weights_are_exported_once(tmp_path: Path, config, is_same, left_out) -> None:
    """Both names were, and the folder was twice as large as that of transformers."""
    embeddings = torch.randn(50, 8)
    head = embeddings.clone() if is_same else embeddings + 1
    state = {
        "model": {
            "model.embed_tokens.weight": embeddings,
            "lm_head.weight": head,
            "norm.weight": torch.ones(8),
        }
    }
    dcp_rs.save(state, tmp_path / "ckpt", no_dist=True)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    report = save_pretrained(
        tmp_path / "ckpt",
        tmp_path / "out",
        config=tmp_path / "config",
        rename={"model": ""},
        exclude="norm.*",
    )
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert ("lm_head.weight" not in names) == left_out
    assert {"model.embed_tokens.weight", "norm.weight"} <= names
    assert report.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if left_out else {})


def test_globs_of_an_iterator_choose_what_is_written(tmp_path: Path) -> None:
    real = model(tmp_path / "real")
    save_pretrained(real, tmp_path / "out", include=iter(["a"]), exclude=iter(["b"]))
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["a"]


def test_configurations_are_read_with_care(tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    (base / "config.json").write_text('{"x": Infinity, "text_config": 3}', "utf-8-sig")
    save_pretrained(base, tmp_path / "out")
    assert same(tmp_path / "out")
