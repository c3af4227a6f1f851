"""Errors of the command line: one line each, that says what to do."""

import json
import os
import shutil
from pathlib import Path

import pytest

import dcp_rs
from support.commands import in_a_process


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "nowhere"],
        ["ls"],
        ["ls", "nowhere", "--frob"],
        ["frob"],
        ["inspect", "{world}/ckpt", "model.embeding.weight"],
        ["inspect", "{world}/ckpt", "step", "--html", "x.html"],
        ["verify", "{world}/empty"],
        ["diff", "{world}/ckpt", "nowhere"],
        ["convert", "{world}/ckpt", "{world}/ckpt"],
        ["convert", "{world}/ckpt", "x", "--dtype", "bf17"],
        ["convert", "{world}/ckpt", "x", "--shards", "0"],
        ["bench", "{world}/x.pt"],
        ["bench", "{world}/ckpt", "--include", "nothing.*"],
        ["index", "nowhere"],
        ["ls", "ftp://host/ckpt"],
        ["ls", "s3://bucket/ckpt", "--storage-option", "aws_region"],
        ["inspect", "{world}/ckpt", "--html", "-"],
        ["convert", "{world}/ckpt", "s3://bucket/ckpt", "--to", "dcp"],
    ],
    ids=" ".join,
)
def test_errors_are_one_line(
    dcp_rs_cli, arguments: list[str], world: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (world / "empty").mkdir(exist_ok=True)
    status, out, err = dcp_rs_cli(*[argument.format(world=world) for argument in arguments])
    assert (status, out) == (2, "")
    assert err.startswith("dcp-rs: ")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["convert", "merge"])
def test_only_globs_that_were_given_are_named(
    dcp_rs_cli, command: str, world: Path, tmp_path: Path
) -> None:
    inputs = [world / "ckpt"] * (2 if command == "merge" else 1)
    out = ["-o"] if command == "merge" else []
    _, _, err = dcp_rs_cli(command, *inputs, *out, tmp_path / "out", "--include", "nothing.*")
    assert "--include" in err
    assert "exclude" not in err
    assert "None" not in err


def test_errors_need_no_new_click(dcp_rs_cli, monkeypatch) -> None:
    """Click 8.1 lacks this class: each error ended in an AttributeError."""
    monkeypatch.delattr("click.exceptions.NoArgsIsHelpError", raising=False)
    status, out, err = dcp_rs_cli("ls", "nowhere")
    assert (status, out, len(err.splitlines())) == (2, "", 1)


def test_a_path_with_a_scheme_is_named_as_it_was_given(dcp_rs_cli) -> None:
    assert "ftp://host/ckpt: ftp:// is not supported" in dcp_rs_cli("verify", "ftp://host/ckpt")[2]
    said = dcp_rs_cli("index", "ckpt", "--out", "s3://bucket/ckpt")[2]
    assert "s3://bucket/ckpt: this needs a local path" in said


def test_a_copy_of_an_indexed_folder_says_what_to_do(
    dcp_rs_cli, world: Path, tmp_path: Path
) -> None:
    shutil.copytree(world / "stock", tmp_path / "stock")
    dcp_rs.index(tmp_path / "stock")
    shutil.copytree(tmp_path / "stock", tmp_path / "copy", copy_function=shutil.copy)
    status, out, _ = dcp_rs_cli("verify", tmp_path / "copy")
    assert status == 1
    assert (
        "expected the file that was indexed, got another: the file was modified after it was indexed"
        in out
    )
    assert "dcp-rs index --overwrite" in out
    assert dcp_rs_cli("index", tmp_path / "copy", "--overwrite")[0] == 0
    assert dcp_rs_cli("verify", tmp_path / "copy", "--allow-unverified")[0] == 0


def test_a_file_that_was_cut_short_is_described_once(
    dcp_rs_cli, world: Path, tmp_path: Path
) -> None:
    shutil.copytree(world / "ckpt", tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt").glob("*.safetensors")
    size = file.stat().st_size
    os.truncate(file, size - 10)
    out = dcp_rs_cli("verify", tmp_path / "ckpt")[1]
    assert (
        out.splitlines()[0]
        == f"damaged  {file}: expected a file of {size} bytes, got one of {size - 10} bytes"
    )
    file.unlink()
    out = dcp_rs_cli("verify", tmp_path / "ckpt")[1]
    assert out.splitlines()[0] == f"damaged  {file}: expected a file of {size} bytes, got none"


def test_two_checkpoints_in_one_folder_are_warned_of_in_one_line(
    dcp_rs_cli, world: Path, tmp_path: Path
) -> None:
    shutil.copytree(world / "ckpt", tmp_path / "both")
    shutil.copy(world / "stock" / ".metadata", tmp_path / "both")
    status, out, err = dcp_rs_cli("ls", tmp_path / "both")
    assert (status, out) == (0, dcp_rs_cli("ls", world / "ckpt")[1])
    assert err.startswith(f"dcp-rs: warning: {tmp_path / 'both'} holds two checkpoints")
    assert len(err.splitlines()) == 1


def test_debug_shows_the_traceback(world: Path) -> None:
    for arguments in (["--debug", "ls", "nowhere"], ["ls", "nowhere", "--debug"]):
        done = in_a_process(*arguments)
        assert done.returncode != 0
        assert "Traceback" in done.stderr
        assert "CheckpointNotFoundError" in done.stderr


def test_errors_under_json_are_json(dcp_rs_cli, world: Path) -> None:
    status, out, err = dcp_rs_cli("inspect", world / "ckpt", "model.embeding.weight", "--json")
    assert status == 2
    error = json.loads(out)["error"]
    assert (error["type"], error["tensor"]) == ("EntryNotFoundError", "model.embeding.weight")
    assert "did you mean 'model.embedding.weight'?" in error["message"]
    assert err == f"dcp-rs: {error['message']}\n"
    status, out, _ = dcp_rs_cli("ls", "--json", world / "ckpt", "--frob")
    assert (status, "--frob" in json.loads(out)["error"]["message"]) == (2, True)
    assert dcp_rs_cli("ls", world / "nowhere")[1] == ""


def test_a_benchmark_takes_no_more_than_the_free_memory(
    dcp_rs_cli, world: Path, monkeypatch
) -> None:
    monkeypatch.setattr("dcp_rs.cli.commands.bench._free_memory", lambda: 100)
    status, _, err = dcp_rs_cli("bench", world / "ckpt")
    assert (status, "do not fit in 100 B of free memory" in err) == (2, True)


def test_an_option_of_a_store_with_a_slash_for_a_colon_is_refused(dcp_rs_cli) -> None:
    """It counted as the option of a store that is not there."""
    said = dcp_rs_cli("ls", "s3://bucket/x", "--storage-option", "s3://other/aws_region=x")[2]
    assert '"s3://other/aws_region" is not known' in said
