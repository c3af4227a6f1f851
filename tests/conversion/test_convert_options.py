"""What a conversion is told: which entries, their names, their type, whom to show its progress."""

import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dcp_rs
from dcp_rs.errors import CheckpointExistsError, PlanError, UnsafePickleError, UnsupportedError
from support import assert_state_equal, nested_state, random_tensor
from support.formats import judge, load_hf, make


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


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("x.pt", "torch"),
        ("x.pth", "torch"),
        ("x.bin", "torch"),
        ("x.safetensors", "safetensors"),
        ("x", "dcp-rs"),
    ],
)
def test_the_format_is_what_the_name_ends_in(name: str, to: str, tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 4)}
    make("dcp", state, tmp_path / "src")
    dcp_rs.convert(tmp_path / "src", tmp_path / name)
    assert (tmp_path / name).is_file() == (to != "dcp-rs")
    assert_state_equal(judge_one(tmp_path / name), state)
    dcp_rs.convert(
        tmp_path / "src", tmp_path / name, to="dcp-rs", overwrite=True
    )  # said, it is that
    assert (tmp_path / name / "index.dcprs").is_file()


def test_the_name_of_the_current_folder_does_not_tell_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of torch took the place of the folder."""
    state = {"w": torch.randn(3, 4)}
    make("dcp", state, tmp_path / "src")
    for name in ("run.bin", "run.safetensors"):
        (tmp_path / name).mkdir()
        for to in (None, "safetensors"):
            monkeypatch.chdir(tmp_path / name)
            dcp_rs.convert("../src", ".", to=to, overwrite=True)
            assert_state_equal(judge_one(tmp_path / name), state)


@pytest.mark.parametrize(("name", "to"), [("run.bin", None), ("run", "torch")])
def test_a_file_does_not_take_the_place_of_an_empty_folder(
    tmp_path: Path, name: str, to: str | None
) -> None:
    make("dcp", {"w": torch.ones(3)}, tmp_path / "src")
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointExistsError, match="exists; overwrite=True"):
        dcp_rs.convert(tmp_path / "src", tmp_path / name, to=to)
    dcp_rs.convert(tmp_path / "src", tmp_path / name, to=to, overwrite=True)
    assert (tmp_path / name).is_file()


def test_storage_options_without_a_store_are_an_error(tmp_path: Path) -> None:
    """They were ignored: who forgot s3:// wrote to the disk."""
    src, options = make("dcp", {"w": torch.ones(3)}, tmp_path / "src"), {"region": "x"}
    for given in ({"storage_options": options}, {"out_storage_options": options}):
        with pytest.raises(UnsupportedError, match="has no storage_options"):
            dcp_rs.convert(src, tmp_path / "out", **given)
        with pytest.raises(UnsupportedError, match="has no storage_options"):
            dcp_rs.merge([src, src], tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def judge_one(path: Path) -> dict[str, torch.Tensor]:
    if path.is_dir():
        return dict(dcp_rs.open(path).state_dict())
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


def test_a_value_whose_class_is_not_allowed_is_left_out_by_name(tmp_path: Path) -> None:
    blocked = type("Blocked", (), {"__reduce__": lambda _: (os.system, ("touch owned",))})
    torch.save({"w": torch.ones(2), "args": Namespace(lr=1), "evil": blocked()}, tmp_path / "x.pt")
    words = r"posix\.system whose module posix is blocked\. Nothing was executed\. Leave it out \(exclude=\)"
    with pytest.raises(UnsafePickleError, match=words):
        dcp_rs.convert(tmp_path / "x.pt", tmp_path / "out", exclude="args")
    with pytest.raises(UnsafePickleError, match=r"argparse\.Namespace was not an allowed"):
        dcp_rs.convert(tmp_path / "x.pt", tmp_path / "out", exclude="evil")
    dcp_rs.convert(tmp_path / "x.pt", tmp_path / "out", exclude=["args", "evil"])
    assert set(dcp_rs.open(tmp_path / "out")) == {"w"}


def test_a_value_that_is_left_out_anyway_need_not_be_allowed(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "args": Namespace(lr=1)}, tmp_path / "x.pt")
    how = {"to": "safetensors", "skip_unsupported": True}
    report = dcp_rs.convert(tmp_path / "x.pt", tmp_path / "out", **how)
    assert report.skipped == {"args": "is not a tensor"}
    assert set(load_hf(tmp_path / "out")) == {"w"}


@pytest.mark.parametrize(
    "write", [dcp_rs.convert, lambda path, out, **of: dcp_rs.merge([path], out, **of)]
)
def test_rename_that_fits_no_name_warns(tmp_path: Path, write) -> None:
    """The names were as before, without a word."""
    make("torch", {"model": {"w": torch.ones(2)}}, tmp_path / "x.pt")
    with pytest.warns(
        UserWarning, match=r"^rename=\{'modle': ''\} renames no entry: .*'model\.w'$"
    ):
        write(tmp_path / "x.pt", tmp_path / "out", rename={"modle": ""})
    with dcp_rs.open(tmp_path / "out") as made:
        assert set(made) == {"model.w"}


def test_choosing_and_renaming(tmp_path: Path) -> None:
    make("dcp-rs", nested_state(), tmp_path / "src")
    dcp_rs.convert(
        tmp_path / "src",
        tmp_path / "hf",
        to="safetensors",
        include="model.*",
        exclude="*.0.*",
        rename={"model": ""},
    )
    assert set(load_hf(tmp_path / "hf")) == {"embedding.weight"}
    renames = {"model": "module.net", "model.layers": "blocks", "": "all"}
    dcp_rs.convert(
        tmp_path / "src", tmp_path / "new", include=["model.*", "step", "modelx*"], rename=renames
    )
    with dcp_rs.open(tmp_path / "new") as made:
        assert set(made) == {"module.net.embedding.weight", "blocks.0.weight", "all.step"}
    dcp_rs.convert(
        tmp_path / "src", tmp_path / "x.pt", to="torch", include="model.*", rename=str.upper
    )
    assert set(torch.load(tmp_path / "x.pt")) == {"MODEL.EMBEDDING.WEIGHT", "MODEL.LAYERS.0.WEIGHT"}
    with pytest.raises(PlanError, match=r"both be named 'x'"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "clash", rename=lambda _: "x")
    with pytest.raises(PlanError, match=r"none of the 15 entries is wanted by include='absent\*'$"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "none", include="absent*")
    with pytest.raises(PlanError, match=r"is wanted by include='absent\*'$"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "none", include=["absent*"])
    assert {entry.name for entry in tmp_path.iterdir()} == {"src", "hf", "new", "x.pt"}


@pytest.mark.parametrize("name", ["x.gguf", "x.npz", "x.onnx"])
def test_an_ending_of_other_files_is_an_error(name: str, tmp_path: Path) -> None:
    """A folder of dcp-rs was written under this name."""
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    for write in (dcp_rs.convert, lambda path, out: dcp_rs.merge([path, path], out)):
        with pytest.raises(ValueError, match=r"no \.\w+ files are written; choose .* with to="):
            write(tmp_path / "x.pt", tmp_path / name)
    assert not (tmp_path / name).exists()
    dcp_rs.convert(tmp_path / "x.pt", tmp_path / name, to="dcp-rs")
    assert set(dcp_rs.open(tmp_path / name)) == {"w"}


@pytest.mark.parametrize("source", ["torch", "dcp-rs", "dcp"])
def test_part_of_a_container_stays_nested(tmp_path: Path, source: str) -> None:
    inner = {
        "state": {"w": {"step": torch.tensor(2.0), "exp_avg": torch.ones(3)}},
        "param_groups": [{"lr": 0.1, "params": ["w"]}],
    }
    make(source, {"optimizer": inner, "model": {"w": torch.ones(2)}}, tmp_path / "src")
    dcp_rs.convert(
        tmp_path / "src",
        tmp_path / "out.pt",
        to="torch",
        include="optimizer.*",
        rename={"optimizer": ""},
    )
    assert_state_equal(torch.load(tmp_path / "out.pt"), inner)
    dcp_rs.convert(
        tmp_path / "src", tmp_path / "out", include="optimizer.*", rename={"optimizer": ""}
    )
    assert_state_equal(dcp_rs.open(tmp_path / "out").state_dict(), inner)
    # Where names come from several places they are names, and no nesting.
    dcp_rs.convert(
        tmp_path / "src",
        tmp_path / "all.pt",
        to="torch",
        rename={"optimizer": ""},
        include=["model.w", "*.step"],
    )
    assert_state_equal(
        torch.load(tmp_path / "all.pt"),
        {"state.w.step": torch.tensor(2.0), "model": {"w": torch.ones(2)}},
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"to": "zarr"}, "to='zarr'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"dtype": "bf17"}, "dtype='bf17'"),
        ({"dtype": torch.int32}, "dtype=torch.int32"),
        ({"dtype": "__path__"}, "dtype='__path__'"),
        ({"dtype": ["bf16"]}, r"dtype=\['bf16'\]"),
        ({"shards": 0}, "shards=0"),
        ({"shards": True}, "shards=True"),
        ({"to": "torch", "shards": 2}, "is one file"),
    ],
)
def test_options_are_checked_first(options: dict, match: str, tmp_path: Path) -> None:
    make("dcp-rs", {"w": torch.ones(3)}, tmp_path / "src")
    with pytest.raises(ValueError, match=match):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", **options)
    assert not (tmp_path / "dst").exists()


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    make("dcp-rs", nested_state(), tmp_path / "src")
    for to in ("dcp-rs", "dcp", "torch"):
        seen = []
        report = dcp_rs.convert(
            tmp_path / "src",
            tmp_path / to,
            to=to,
            dtype="fp64",
            progress=lambda *now, seen=seen: seen.append(now),
        )
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert {total for _, total in seen} == {report.bytes}
        assert seen[-1] == (report.bytes, report.bytes)


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch"])
def test_the_bytes_of_values_are_those_that_are_written(to: str, tmp_path: Path) -> None:
    """A file of torch stores values otherwise, and that was counted."""
    state = {"w": torch.ones(3), "step": 7, "args": {"lr": 0.1, "name": "x" * 500}}
    seen: list[tuple[int, int]] = []
    how = {"to": to, "progress": lambda *now: seen.append(now)}
    source = make("torch", state, tmp_path / "x.pt")
    report = dcp_rs.convert(source, tmp_path / to, **how)
    assert seen[-1] == (report.bytes, report.bytes)
    dcp_rs.convert(source, tmp_path / "stored")
    assert report.bytes == dcp_rs.convert(tmp_path / "stored", tmp_path / "again").bytes


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch"])
def test_a_name_that_would_be_in_and_at_once_another_is_refused(to: str, tmp_path: Path) -> None:
    empty = {} if to == "dcp" else {"empty": {}}  # which DCP cannot hold
    source = make(
        "torch", {"a": {"b": torch.ones(2)}, "x": torch.ones(3)} | empty, tmp_path / "x.pt"
    )
    for name in ("a", *empty):
        rename = {"x": name}
        with pytest.raises(PlanError, match="contradict each other"):
            dcp_rs.convert(source, tmp_path / "out", to=to, rename=rename)
        assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]
    # Beside each other they are two.
    dcp_rs.convert(source, tmp_path / "out.pt", to="torch", rename={"x": "a.c"})
    judge("torch", tmp_path / "out.pt", {"a": {"b": torch.ones(2)}, "a.c": torch.ones(3)} | empty)


def test_names_without_nesting_may_be_the_beginnings_of_others(tmp_path: Path) -> None:
    state = {"a": torch.ones(1), "a.b": torch.ones(2), "x": torch.ones(3)}
    make("safetensors", state, tmp_path / "src")
    want = {"a": state["a"], "a.b": state["a.b"], "a.b.c": state["x"]}
    for to in ("dcp-rs", "dcp", "torch"):
        dcp_rs.convert(tmp_path / "src", tmp_path / to, to=to, rename={"x": "a.b.c"})
        judge(to, tmp_path / to, want)


def test_globs_of_an_iterator_choose_containers_too(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "none": {}, "out": {"w": torch.ones(2)}, "gone": {}}
    dcp_rs.save(state, tmp_path / "src")
    how = {"include": iter(["*"]), "exclude": (glob for glob in ["out*", "gone"])}
    dcp_rs.convert(tmp_path / "src", tmp_path / "dst", **how)
    with dcp_rs.open(tmp_path / "dst") as checkpoint:
        assert_state_equal(checkpoint.state_dict(), {"w": torch.ones(2), "none": {}})
