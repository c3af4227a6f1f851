"""``show``, lists of checkpoints, and commands that people guess."""

import json
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from support.both import save_in_two_chunks, save_rs, save_stock


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    state = {
        "w": torch.arange(6.0).view(2, 3),
        "half": torch.tensor([0.5, float("nan")], dtype=torch.bfloat16, requires_grad=True),
        "byte": torch.tensor([[1, 2]], dtype=torch.uint8),
        "none": torch.empty(0, 3),
        "zero": torch.tensor(7),
        "step": {"at": 3},
    }
    save_rs(state, folder / "ckpt")
    return folder / "ckpt"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("w",), "float32 [2, 3]\n[[0., 1., 2.],\n [3., 4., 5.]]\n"),
        (("w", "--slice", "1,1:"), "float32 [2]\n[4., 5.]\n"),
        (("w", "--slice", "[:1, -1]"), "float32 [1]\n[2.]\n"),
        (("half",), "bfloat16 [2]\n[0.5000,    nan]\n"),
        (("byte",), "uint8 [1, 2]\n[[1, 2]]\n"),
        (("none",), "float32 [0, 3]\n[]\n"),
        (("zero",), "int64 []\n7\n"),
        (("step.at",), "3\n"),
    ],
)
def test_show_prints_elements(arguments, printed, shown, dcp_rs_cli):
    assert dcp_rs_cli("show", shown, *arguments) == (0, printed, "")


def test_show_prints_json(shown, dcp_rs_cli):
    said = [
        json.loads(dcp_rs_cli("show", shown, name, "--json")[1]) for name in ("half", "step.at")
    ]
    assert said == [
        {"name": "half", "dtype": "bfloat16", "shape": [2], "elements": [0.5, "nan"]},
        {"name": "step.at", "value": 3},
    ]


def test_json_has_numbers_of_every_dtype_exactly(tmp_path: Path, dcp_rs_cli):
    """Those of float64 went through float32, and complex ones ended with a TypeError."""
    state = {
        "float64": torch.tensor([0.1, 1e300], dtype=torch.float64),
        "complex64": torch.tensor([[1 + 2j], [0.5j]]),
        "complex32": torch.tensor([1 - 1j]).to(torch.complex32),
    }
    torch.save(state, tmp_path / "x.pt")
    said = {
        name: json.loads(dcp_rs_cli("show", tmp_path / "x.pt", name, "--json")[1])["elements"]
        for name in state
    }
    assert said == {
        "float64": [0.1, 1e300],
        "complex64": [[[1, 2]], [[0, 0.5]]],
        "complex32": [[1, -1]],
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dtype_that_torch_cannot_print_is_an_error(as_json, tmp_path: Path, dcp_rs_cli):
    tensor = torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"four": tensor}, tmp_path / "x.pt")
    status, _, err = dcp_rs_cli("show", tmp_path / "x.pt", "four", *["--json"] * as_json)
    assert status == 2
    assert "'four' is of dtype float4_e2m1fn_x2, which torch cannot print" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "ckpt", "ww"), "there is no entry 'ww'"),
        (("show", "ckpt", "w", "--slice", "first"), "not an index such as '0,2:5'"),
        (("show", "ckpt", "w", "--slice", "5"), "5"),
        (("show", "ckpt", "step.at", "--slice", "5"), "leave --slice out"),
        (("cat", "ckpt"), "there is no command 'cat': use show"),
        (("info", "ckpt"), "there is no command 'info': use inspect"),
        (("frobnicate", "ckpt"), "there is no command 'frobnicate' (dcp-rs --help)"),
    ],
)
def test_mistakes_are_told(arguments, words, shown, dcp_rs_cli, monkeypatch):
    monkeypatch.chdir(shown.parent)
    status, out, err = dcp_rs_cli(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_value_that_is_refused_is_an_error(as_json, tmp_path: Path, dcp_rs_cli):
    """The command ended with 0, and advised options that it does not have. So did ls."""
    torch.save({"w": torch.ones(2), "at": PurePosixPath("x")}, tmp_path / "x.pt")
    status, out, err = dcp_rs_cli("show", tmp_path / "x.pt", "at", *["--json"] * as_json)
    assert status == 2
    assert "pathlib.PurePosixPath was not an allowed global" in err
    assert (json.loads(out)["error"]["tensor"] == "at") if as_json else out == ""
    listed = dcp_rs_cli("ls", tmp_path / "x.pt", "--values")[1]
    assert "pathlib.PurePosixPath was not an allowed global" in listed
    assert "--" not in err + listed


def test_folder_of_checkpoints_is_listed(tmp_path: Path, dcp_rs_cli):
    """Readable checkpoints of torch were an error. Those of transformers without safetensors were left out."""
    save_stock({"w": torch.ones(2)}, tmp_path / "checkpoint-100")
    (tmp_path / "checkpoint-8").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "checkpoint-8" / "pytorch_model.bin")
    torch.save({"s": torch.ones(2)}, tmp_path / "checkpoint-8" / "optimizer.pt")
    dcp_rs.save({"w": torch.ones(2), "step": 1}, tmp_path / "checkpoint-9", no_dist=True)
    (tmp_path / "checkpoint-99").mkdir()
    (tmp_path / "checkpoint-99" / ".metadata").write_bytes(b"cut off")
    status, out, _ = dcp_rs_cli("ls", tmp_path)
    assert status == 0
    lines = out.splitlines()
    names = ["checkpoint-8", "checkpoint-9", "checkpoint-100"]
    assert [one.split()[-1] for one in lines[1:4]] == names
    assert "torch.save" in lines[1]
    assert "stock DCP" in lines[3]
    assert lines[4].startswith("does not open  ")
    assert "checkpoint-99" in lines[4]
    assert lines[5] == "4 checkpoints"
    found = json.loads(dcp_rs_cli("ls", tmp_path, "--json")[1])["checkpoints"]
    assert [one.get("format") for one in found] == ["torch", "dcp-rs", None, "dcp"]


def test_chunks_of_a_tensor_are_listed_with_their_files(tmp_path: Path, dcp_rs_cli):
    save_in_two_chunks("w", tmp_path / "ckpt")
    status, out, _ = dcp_rs_cli("inspect", tmp_path / "ckpt", "w")
    assert status == 0
    for row, chunk in zip(
        out.splitlines()[-2:], dcp_rs.open(tmp_path / "ckpt").chunks("w"), strict=True
    ):
        assert f"{list(chunk.offsets)}  {list(chunk.sizes)}" in row
        assert row.endswith(f"{chunk.offset:,}  {chunk.file}")


def test_numbers_of_parameters_are_numbers(tmp_path: Path, dcp_rs_cli):
    """Stock DCP stores them as text, and a load turns them into numbers again."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    out = dcp_rs_cli("inspect", tmp_path / "stock", "optim.state.0.exp_avg")[1]
    assert "['optim']['state'][0]['exp_avg']" in out
    state = dcp_rs.open(tmp_path / "stock").state_dict()
    assert list(state["optim"]["state"]) == [0]


def test_training_state_is_told_how_to_become_a_model(tmp_path: Path, dcp_rs_cli):
    """The advice was --skip-unsupported, which exports the moments of the optimizer."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    dcp_rs.optim.save_training_state(tmp_path / "train", model, optimizer, no_dist=True)
    status, _, err = dcp_rs_cli(
        "convert", tmp_path / "train", tmp_path / "hf", "--to", "safetensors"
    )
    assert status == 2
    advice = "--include 'model.*' and --rename model= take the model alone; --skip-unsupported"
    assert advice in err
    options = "--to", "safetensors", "--include", "model.*", "--rename", "model="
    assert dcp_rs_cli("convert", tmp_path / "train", tmp_path / "hf", *options)[0] == 0
    with dcp_rs.open(tmp_path / "hf") as written:
        assert set(written) == {"weight", "bias"}
