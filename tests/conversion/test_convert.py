"""Conversion in every direction, judged by stock readers: what comes back is what was there."""

import pickle
from pathlib import Path

import pytest
import torch

import dcp_rs
from dcp_rs.errors import UnsupportedError
from support import assert_state_equal, dtypes_state, nested_state, random_tensor
from support.formats import SOURCES, judge, leftovers, load_hf, make
from support.places import STOCK
from support.states import can_copy


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
def test_an_empty_tensor_without_chunks_survives(to: str, tmp_path: Path) -> None:
    """There was nothing to copy, and so its name was lost."""
    state = {"w": torch.ones(3), "empty": torch.zeros(0, 4)}
    path = make("dcp", state, tmp_path / "src") / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["empty"].chunks.clear()
    metadata.storage_data = {
        place: info for place, info in metadata.storage_data.items() if place.fqn != "empty"
    }
    path.write_bytes(pickle.dumps(metadata))
    dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to)
    judge(to, tmp_path / "dst", state)
    dcp_rs.merge([tmp_path / "src", tmp_path / "src"], tmp_path / "sum", to=to)
    judge(to, tmp_path / "sum", state)


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
@pytest.mark.parametrize("source", [*SOURCES, "safetensors"])
@pytest.mark.parametrize("shards", [1, 3])
def test_flat_tensors_survive(source: str, to: str, shards: int, tmp_path: Path) -> None:
    state = {f"layers.{i}.w": random_tensor((3, i, 5), torch.bfloat16, seed=i) for i in range(7)}
    state |= {
        "scalar": random_tensor((), torch.int64),
        "big": random_tensor((1023, 1025, 3), torch.float32, 9),
    }
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
    dcp_rs.convert(
        tmp_path / "before.pt", tmp_path / "between", to="dcp" if way == "dcp" else "dcp-rs"
    )
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
    report = dcp_rs.convert(
        tmp_path / "src", tmp_path / "dst", to="safetensors", skip_unsupported=True
    )
    assert {"complex128", "complex32"} <= set(report.skipped)
    assert_state_equal(
        load_hf(tmp_path / "dst"),
        {name: t for name, t in state.items() if name not in report.skipped},
    )
    assert len(report.written) >= 16


@pytest.mark.parametrize(
    "case",
    sorted(p.parent for p in STOCK.glob("*/*/.metadata") if "nested" in p.parts[-2]),
    ids=lambda p: p.parts[-2],
)
def test_checkpoint_of_older_torch_converts(case: Path, tmp_path: Path) -> None:
    dcp_rs.convert(case, tmp_path / "dst")
    with dcp_rs.open(case) as old, dcp_rs.open(tmp_path / "dst") as new:
        assert_state_equal(new.state_dict(), old.state_dict())


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


def test_tensors_that_raw_bytes_cannot_hold(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    torch.save({"s": sparse, "t": torch.ones(2)}, tmp_path / "x.pt")
    dcp_rs.convert(tmp_path / "x.pt", tmp_path / "ckpt")
    dcp_rs.convert(tmp_path / "ckpt", tmp_path / "y.pt", to="torch")
    assert torch.equal(torch.load(tmp_path / "y.pt")["s"].to_dense(), torch.eye(3))
    with pytest.raises(UnsupportedError, match="'s' is not a tensor"):
        dcp_rs.convert(tmp_path / "x.pt", tmp_path / "hf", to="safetensors")


@pytest.mark.parametrize("source", ["dcp-rs", "torch"])
def test_requires_grad_is_kept(source: str, tmp_path: Path) -> None:
    """Of complex numbers that was lost: in a file of torch.save, and where a save took a part of a tensor or its conjugate."""
    kinds = (torch.float32, torch.bfloat16, torch.complex64, torch.complex128)
    state = {str(dtype): torch.ones(4, dtype=dtype, requires_grad=True) for dtype in kinds}
    state["float8"] = torch.nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))
    state |= {f"part of {name}": tensor[::2] for name, tensor in state.items()}
    state |= {
        "conjugate": torch.ones(2, dtype=torch.complex64, requires_grad=True).conj(),
        "none": torch.ones(2),
    }
    if source == "torch":  # which does not save what a graph made
        state = {
            name: tensor.detach().requires_grad_(tensor.requires_grad)
            for name, tensor in state.items()
        }
    src = make(source, state, tmp_path / "src")
    dcp_rs.convert(src, tmp_path / "out.pt")
    again = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {name for name, tensor in again.items() if tensor.requires_grad} == state.keys() - {
        "none"
    }
    assert_state_equal(
        {name: tensor.detach() for name, tensor in again.items()},
        {n: t.detach() for n, t in state.items()},
    )
