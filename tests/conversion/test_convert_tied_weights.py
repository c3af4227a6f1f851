"""Tied weights, which a folder of safetensors holds once."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dcp_rs
from support import assert_state_equal, random_tensor
from support.formats import load_hf


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
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(6, 4), "lm_head": torch.nn.Linear(4, 6, bias=False)}
    )
    model["lm_head"].weight = model["embed"].weight
    torch.save(model.state_dict(), tmp_path / "model.pt")
    dcp_rs.convert(tmp_path / "model.pt", tmp_path / "one.safetensors", to="safetensors")
    from safetensors.torch import load_model

    fresh = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(6, 4), "lm_head": torch.nn.Linear(4, 6, bias=False)}
    )
    fresh["lm_head"].weight = fresh["embed"].weight
    load_model(fresh, tmp_path / "one.safetensors")
    assert torch.equal(fresh["embed"].weight, model["embed"].weight)
    # Everyone else has both names, and torch still one memory.
    dcp_rs.convert(tmp_path / "x.pt", tmp_path / "y.pt", to="torch")
    again = torch.load(tmp_path / "y.pt")
    assert again["lm_head"].data_ptr() == again["embed"].data_ptr()


def test_tied_weights_keep_the_name_of_transformers(tmp_path: Path) -> None:
    weight, bias = random_tensor((6, 4), seed=1), random_tensor((6,), seed=2)
    models = {
        # (names of one tensor, in the order of the state dict) and the one that `save_pretrained`
        # keeps
        "llama": (("model.embed_tokens.weight", "lm_head.weight"), "model.embed_tokens.weight"),
        "sorted": (("lm_head.weight", "model.embed_tokens.weight"), "model.embed_tokens.weight"),
        "t5": (
            (
                "shared.weight",
                "encoder.embed_tokens.weight",
                "decoder.embed_tokens.weight",
                "lm_head.weight",
            ),
            "shared.weight",
        ),
        "bert": (
            ("embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
            "embeddings.word_embeddings.weight",
        ),
    }
    for model, (names, kept) in models.items():
        state = (
            {"lm_head.bias": bias} | dict.fromkeys(names, weight) | {"lm_head.decoder.bias": bias}
        )
        torch.save(state, tmp_path / f"{model}.pt")
        report = dcp_rs.convert(tmp_path / f"{model}.pt", tmp_path / model, to="safetensors")
        dropped = dict.fromkeys(set(names) - {kept}, kept) | {
            "lm_head.decoder.bias": "lm_head.bias"
        }
        assert report.tied == dropped
        assert set(load_hf(tmp_path / model)) == {kept, "lm_head.bias"}
        with safe_open(tmp_path / model / "model.safetensors", framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"} | dropped


def test_conjugates_and_negatives_of_one_memory_are_tensors_of_their_own(tmp_path: Path) -> None:
    """They were taken for one another: both had *some* signs changed, and nobody asked which."""
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = {
        "p": x,
        "a": x.conj(),
        "b": torch._neg_view(x),
        "c": torch._neg_view(x.conj()),
        "d": x.conj(),
    }
    torch.save(state, tmp_path / "x.pt")
    plain = {name: tensor.resolve_conj().resolve_neg() for name, tensor in state.items()}
    report = dcp_rs.convert(tmp_path / "x.pt", tmp_path / "y.pt")
    assert_state_equal(torch.load(tmp_path / "y.pt"), plain)
    report = dcp_rs.convert(tmp_path / "x.pt", tmp_path / "hf", to="safetensors")
    assert report.tied == {"d": "a"}
    assert_state_equal(load_hf(tmp_path / "hf"), {name: plain[name] for name in "pabc"})


@pytest.mark.parametrize("name", ["format", "DCP_SHARDING_INFO", "DCP_VERSION", "DCPRS"])
def test_a_tied_tensor_takes_no_word_of_the_header(tmp_path: Path, name: str) -> None:
    """What was noted of it stood for the format of the file, or for where its pieces are: the result did not open."""
    weight = torch.arange(4.0).reshape(2, 2)
    torch.save({"emb": weight, name: weight, "other": weight}, tmp_path / "src.pt")
    report = dcp_rs.convert(tmp_path / "src.pt", tmp_path / "out.safetensors")
    assert report.tied == {"other": "emb"}
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "other": "emb"}
    for loaded in (
        load_file(tmp_path / "out.safetensors"),
        dcp_rs.load_file(tmp_path / "out.safetensors"),
    ):
        assert loaded.keys() == {"emb", name}
        assert all(torch.equal(tensor, weight) for tensor in loaded.values())


@pytest.mark.parametrize("shards", [1, 2])
def test_header_metadata_is_kept(tmp_path: Path, shards: int) -> None:
    """But of where pieces are: they are whole."""
    said = {"format": "flax", "modelspec.title": "näh", "DCP_VERSION": "1.0"}
    state = {"a": torch.ones(3), "b": torch.zeros(2)}
    save_file(state, tmp_path / "src.safetensors", said)
    dcp_rs.convert(tmp_path / "src.safetensors", tmp_path / "out", to="safetensors", shards=shards)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == shards
    for path in files:
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "flax", "modelspec.title": "näh"}
    assert dcp_rs.load_file(tmp_path / "out").keys() == state.keys()
