"""The command line: what it prints, its exit status, and that it is plain text where nobody watches."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_rs
from dcp_rs.cli import cutmap, output
from support import nested_state, random_tensor, run_ranks
from support.both import save_rs, save_stock
from support.terminal import shown_on_a_terminal

COMMAND = [sys.executable, "-m", "dcp_rs"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A checkpoint of each kind, never changed."""
    folder = tmp_path_factory.mktemp("world")
    state = nested_state()
    save_rs(state, folder / "ckpt")
    save_stock(state, folder / "stock")
    torch.save(state, folder / "x.pt")
    dcp_rs.convert(folder / "ckpt", folder / "hf", to="safetensors", include="model.*")
    return folder


def in_a_process(*arguments: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)


def test_ls(dcp_rs_cli, world: Path) -> None:
    for name in ("ckpt", "stock", "x.pt"):
        status, out, err = dcp_rs_cli("ls", world / name)
        lines = out.splitlines()
        assert (status, err) == (0, "")
        assert lines[0].split() == ["dtype", "shape", "chunks", "size", "name"]
        assert lines[-1].startswith("7 tensors, 8 values, ")
        # Of a file of torch.save a value is a few bytes of the pickle.
        assert name == "x.pt" or lines[-1].endswith(output.size(10508))
        assert "bfloat16 [8, 4] 1 64 B model.embedding.weight" in [" ".join(line.split()) for line in lines]
    status, out, _ = dcp_rs_cli("ls", world / "ckpt", "model.*", "step", "--sort", "size")
    assert [line.split()[-1] for line in out.splitlines()[1:-1]] == [
        "step",
        "model.embedding.weight",
        "model.layers.0.weight",
    ]


def test_json_everywhere(dcp_rs_cli, world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "stock", tmp_path / "stock")
    commands = {
        "ls": ["ls", world / "ckpt"],
        "inspect": ["inspect", world / "ckpt"],
        "entry": ["inspect", world / "ckpt", "model.embedding.weight"],
        "page": ["inspect", world / "ckpt", "--html", tmp_path / "page.html"],
        "verify": ["verify", world / "ckpt"],
        "convert": ["convert", world / "ckpt", tmp_path / "new", "--to", "dcp"],
        "index": ["index", tmp_path / "stock"],
        "diff": ["diff", world / "ckpt", world / "stock"],
        "bench": ["bench", world / "ckpt", "--rounds", "1"],
    }
    said = {}
    for name, command in commands.items():
        status, out, err = dcp_rs_cli(*command, "--json")
        assert (status, err) == (0, ""), name
        said[name] = json.loads(out)
    assert said["ls"]["bytes"] == said["inspect"]["bytes"] == 10508
    assert {entry["name"]: entry["dtype"] for entry in said["ls"]["entries"]}["buffers.0"] == "int64"
    assert said["inspect"]["files"][0]["chunks"] == 15
    assert said["entry"]["state_dict_path"] == ["model", "embedding.weight"]
    assert said["entry"]["pieces"][0]["sizes"] == [8, 4]
    assert said["verify"]["ok"]
    assert said["verify"]["problems"] == []
    assert len(said["convert"]["written"]) == 15
    assert said["index"]["source"] == "dcp"
    assert said["diff"]["same"]
    assert said["bench"]["same_bits"]
    assert {row["reader"] for row in said["bench"]["readers"]} >= {"dcp_rs.load", "dcp.load, RsReader"}


def test_demo_in_json(dcp_rs_cli, monkeypatch) -> None:
    status, out, _ = dcp_rs_cli("demo", "--size-mb", "1", "--json")
    assert status == 0
    assert {row["action"] for row in json.loads(out)} == {"save", "restore", "open"}


def test_verify_names_the_block(dcp_rs_cli, tmp_path: Path) -> None:
    save_rs({"small": torch.ones(3), "large": torch.arange(1 << 20)}, tmp_path / "ckpt")
    data = next((tmp_path / "ckpt").glob("*.safetensors"))
    with data.open("r+b") as file:
        file.seek(4096 + (3 << 20) + 77)
        file.write(b"\xff")
    status, out, err = dcp_rs_cli("verify", tmp_path / "ckpt")
    assert (status, err) == (1, "")
    assert "tensor 'large', block 3" in out
    assert "1 problem" in out
    status, out, _ = dcp_rs_cli("verify", tmp_path / "ckpt", "--json")
    assert status == 1
    (problem,) = json.loads(out)["problems"]
    assert (problem["tensor"], problem["block"], problem["offset"]) == ("large", 3, 4096 + (3 << 20))


def test_index_makes_others_verifiable(dcp_rs_cli, world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "hf", tmp_path / "hf")
    status, out, _ = dcp_rs_cli("verify", tmp_path / "hf")
    assert status == 0
    assert "without digests" in out
    assert "the files are there and of the right size; nothing was verified" in out
    assert "all is well" not in out
    status, out, _ = dcp_rs_cli("index", tmp_path / "hf", "--digests")
    assert status == 0
    assert "no data was touched" in out
    status, _, err = dcp_rs_cli("index", tmp_path / "hf")
    assert status == 2
    assert "--overwrite" in err
    status, out, _ = dcp_rs_cli("verify", tmp_path / "hf")
    assert status == 0
    assert "without digests" not in out
    assert "all is well" in out
    shutil.copytree(world / "ckpt", tmp_path / "lost")
    (tmp_path / "lost" / "index.dcprs").unlink()
    status, _, err = dcp_rs_cli("ls", tmp_path / "lost")
    assert status == 2
    assert "dcp-rs index" in err
    assert dcp_rs_cli("index", tmp_path / "lost")[0] == 0
    assert dcp_rs_cli("diff", tmp_path / "lost", world / "ckpt")[0] == 0


def test_diff(dcp_rs_cli, tmp_path: Path) -> None:
    a = {
        "same": torch.ones(5),
        "gone": torch.ones(1),
        "shape": torch.ones(2),
        "dtype": torch.ones(3),
        "lr": 0.1,
        "n": 1,
    }
    a |= {"w": torch.zeros(3_000_000, dtype=torch.bfloat16), "nan": torch.tensor([float("nan"), 1.0])}
    b = {
        **a,
        "shape": torch.ones(3),
        "dtype": torch.full((3,), 1.5, dtype=torch.float16),
        "lr": 0.2,
        "new": torch.ones(2),
    }
    del b["gone"]
    b["w"] = a["w"].clone()
    b["w"][2_999_999] = -0.25
    b["w"][7] = 0.125
    save_rs(a, tmp_path / "a")
    torch.save(b, tmp_path / "b.pt")
    status, out, err = dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b.pt", "--json")
    assert (status, err) == (1, "")
    found = {difference["name"]: difference for difference in json.loads(out)["differences"]}
    assert {name: difference["kind"] for name, difference in found.items()} == {
        "gone": "only in a",
        "new": "only in b",
        "shape": "shape",
        "dtype": "dtype",
        "lr": "value",
        "w": "elements",
    }
    assert (found["w"]["elements"], found["w"]["max_abs"]) == (2, 0.25)
    assert (found["dtype"]["a"], found["dtype"]["b"], found["dtype"]["max_abs"]) == ("float32", "float16", 0.5)
    assert (found["lr"]["a"], found["lr"]["b"]) == ("0.1", "0.2")
    status, out, _ = dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b.pt")
    assert status == 1
    assert "2 elements differ, by at most 0.25" in out
    assert "6 of 9 entries differ" in out
    chosen = ["--include", "w", "--include", "same"]
    assert dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b.pt", *chosen)[0] == 1
    assert dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b.pt", *chosen, "--tolerance", "0.25")[0] == 0
    status, out, _ = dcp_rs_cli("diff", tmp_path / "a", tmp_path / "a")
    assert (status, out.startswith("the same: 8 entries")) == (0, True)


def test_convert_takes_all_options(dcp_rs_cli, world: Path, tmp_path: Path) -> None:
    status, out, err = dcp_rs_cli(
        *["convert", world / "ckpt", tmp_path / "hf", "--to", "safetensors", "--dtype", "fp16", "--shards", 2],
        *["--include", "model.*", "--include", "step", "--exclude", "*.0.*", "--include", "optimizer.*"],
        *["--rename", "model=", "--rename", "optimizer.state=adam", "--skip-unsupported"],
    )
    assert (status, err) == (0, "")
    assert "left out  step: is not a tensor" in out
    with dcp_rs.open(tmp_path / "hf") as made:
        assert set(made) == {
            "embedding.weight",
            "adam.embedding.weight.exp_avg",
            "adam.embedding.weight.exp_avg_sq",
            "adam.embedding.weight.step",
        }
        assert made["embedding.weight"].dtype == torch.float16
    status, _, err = dcp_rs_cli("convert", world / "ckpt", tmp_path / "hf")
    assert (status, "--overwrite" in err) == (2, True)
    assert dcp_rs_cli("convert", world / "ckpt", tmp_path / "hf", "--overwrite")[0] == 0
    status, _, err = dcp_rs_cli("convert", world / "ckpt", tmp_path / "x", "--to", "safetensors")
    assert (status, "--skip-unsupported" in err) == (2, True)
    status, _, err = dcp_rs_cli("convert", world / "ckpt", tmp_path / "x", "--rename", "nonsense")
    assert (status, "OLD=NEW" in err) == (2, True)


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
        ["convert", "{world}/ckpt", "s3://bucket/ckpt", "--to", "dcp"],
    ],
    ids=" ".join,
)
def test_errors_are_one_line(dcp_rs_cli, arguments: list[str], world: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (world / "empty").mkdir(exist_ok=True)
    status, out, err = dcp_rs_cli(*[argument.format(world=world) for argument in arguments])
    assert (status, out) == (2, "")
    assert err.startswith("dcp-rs: ")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_path_with_a_scheme_is_named_as_it_was_given(dcp_rs_cli) -> None:
    assert "ftp://host/ckpt: ftp:// is not supported" in dcp_rs_cli("verify", "ftp://host/ckpt")[2]
    assert "s3://bucket/ckpt: here paths of the file system" in dcp_rs_cli("index", "s3://bucket/ckpt")[2]


def test_the_help_says_which_commands_read_files_of_torch_save(dcp_rs_cli) -> None:
    for command in ("ls", "tree", "inspect", "stats", "convert", "verify", "index", "bench"):
        assert ("torch.save" in dcp_rs_cli(command, "--help")[1]) == (command != "bench")


def test_a_copy_of_an_indexed_folder_says_what_to_do(dcp_rs_cli, world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "stock", tmp_path / "stock")
    dcp_rs.index(tmp_path / "stock")
    shutil.copytree(tmp_path / "stock", tmp_path / "copy", copy_function=shutil.copy)
    status, out, _ = dcp_rs_cli("verify", tmp_path / "copy")
    assert status == 1
    assert "expected the file that was indexed, got another: the file was modified after it was indexed" in out
    assert "dcp-rs index --overwrite" in out
    assert dcp_rs_cli("index", tmp_path / "copy", "--overwrite")[0] == 0
    assert dcp_rs_cli("verify", tmp_path / "copy")[0] == 0


def test_a_file_that_was_cut_short_is_described_once(dcp_rs_cli, world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "ckpt", tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt").glob("*.safetensors")
    size = file.stat().st_size
    os.truncate(file, size - 10)
    out = dcp_rs_cli("verify", tmp_path / "ckpt")[1]
    assert out.splitlines()[0] == f"damaged  {file}: expected a file of {size} bytes, got one of {size - 10} bytes"
    file.unlink()
    out = dcp_rs_cli("verify", tmp_path / "ckpt")[1]
    assert out.splitlines()[0] == f"damaged  {file}: expected a file of {size} bytes, got none"


def test_two_checkpoints_in_one_folder_are_warned_of_in_one_line(dcp_rs_cli, world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "ckpt", tmp_path / "both")
    shutil.copy(world / "stock" / ".metadata", tmp_path / "both")
    status, out, err = dcp_rs_cli("ls", tmp_path / "both")
    assert (status, out) == (0, dcp_rs_cli("ls", world / "ckpt")[1])
    assert err.startswith(f"dcp-rs: warning: {tmp_path / 'both'} holds two checkpoints")
    assert len(err.splitlines()) == 1


def test_a_near_miss_is_suggested(dcp_rs_cli, world: Path) -> None:
    _, _, err = dcp_rs_cli("inspect", world / "ckpt", "model.embeding.weight")
    assert "did you mean 'model.embedding.weight'?" in err


def test_debug_shows_the_traceback(world: Path) -> None:
    for arguments in (["--debug", "ls", "nowhere"], ["ls", "nowhere", "--debug"]):
        done = in_a_process(*arguments)
        assert done.returncode != 0
        assert "Traceback" in done.stderr
        assert "CheckpointNotFoundError" in done.stderr


def test_no_escapes_when_piped(world: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS")}
    for arguments in (
        ["--help"],
        ["convert", "--help"],
        ["ls", world / "ckpt"],
        ["inspect", world / "ckpt"],
        ["inspect", world / "ckpt", "model.embedding.weight"],
        ["verify", world / "ckpt"],
        ["ls", "nowhere"],
    ):
        done = in_a_process(*arguments, env=environment)
        assert "\x1b" not in done.stdout + done.stderr, arguments
        assert "\r" not in done.stdout + done.stderr, arguments


def test_a_terminal_gets_colours_and_names_no_commands(world: Path, tmp_path: Path) -> None:
    save_rs({"evil\x1b[31mred\x07": torch.ones(3), "line\nbreak": torch.ones(3)}, tmp_path / "ckpt")
    for path, name in ((world / "ckpt", "model.embedding.weight"), (tmp_path / "ckpt", "evil\x1b[31mred\x07")):
        shown = on_a_terminal("ls", path)
        assert "\x1b[" in shown
        assert "\x1b[31mred" not in shown
        assert "\x07" not in shown
        assert r"evil\x1b[31mred\x07" in shown or path != tmp_path / "ckpt"
        shown = on_a_terminal("inspect", path, name)
        assert "┌" in shown
        assert "\x1b[31mred" not in shown


def on_a_terminal(*arguments: Any) -> str:
    return shown_on_a_terminal([*COMMAND, *map(str, arguments)], TERM="xterm-256color", NO_COLOR="")


def test_80_columns(world: Path, dcp_rs_cli) -> None:
    for arguments in (["inspect", world / "ckpt"], ["ls", world / "ckpt"], ["inspect", world / "ckpt", "buffers.0"]):
        _, out, _ = dcp_rs_cli(*arguments)
        long = [
            line
            for line in out.splitlines()
            if len(line) > 80 and ".safetensors" not in line and str(world) not in line
        ]
        assert not long


def status_into_true(*arguments: Any) -> tuple[int, str]:
    """The status of a command whose reader has had enough at once, and its errors."""
    line = " ".join(map(str, [*COMMAND, *arguments]))
    script = f"{line} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_head_changes_no_status(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "ckpt", tmp_path / "damaged")
    next((tmp_path / "damaged").glob("*.safetensors")).unlink()
    for command, status in (
        (["ls", world / "ckpt"], 0),
        (["ls", world / "ckpt", "--json"], 0),
        (["--help"], 0),
        (["verify", tmp_path / "damaged"], 1),
    ):
        assert status_into_true(*command) == (status, ""), command


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


def test_ls_shows_values_and_chooses_by_globs(dcp_rs_cli, world: Path) -> None:
    for name in ("ckpt", "stock", "x.pt"):
        status, out, err = dcp_rs_cli("ls", world / name, "--values", "--include", "step", "--include", "name")
        assert (status, err) == (0, "")
        assert [line.split()[-2:] for line in out.splitlines()[1:-1]] == [["name", "'ünïcode'"], ["step", "12"]]
        _, out, _ = dcp_rs_cli("ls", world / name, "*", "--exclude", "optimizer.*", "--exclude", "model.*", "--json")
        values = {entry["name"]: entry.get("value") for entry in json.loads(out)["entries"]}
        assert values == {
            "buffers.0": None,
            "buffers.1": None,
            "flag": True,
            "loss": "inf",
            "name": "ünïcode",
            "nothing": None,
            "step": 12,
        }
    status, out, _ = dcp_rs_cli("ls", world / "ckpt", "mod")
    assert status == 0
    assert "no name matches: a pattern is of whole names" in out


def test_keys_of_all_kinds_are_told_apart(dcp_rs_cli, tmp_path: Path) -> None:
    dcp_rs.save({"state": {0: {"m": torch.ones(2)}, "1": {"m": torch.ones(3)}}}, tmp_path / "ckpt")
    shown = dcp_rs_cli("inspect", tmp_path / "ckpt", "state.0.m")[1]
    assert "['state'][0]['m']" in shown
    assert "['state']['1']['m']" in dcp_rs_cli("inspect", tmp_path / "ckpt", "state.1.m")[1]
    said = dcp_rs_cli("inspect", tmp_path / "ckpt", "state.0.m", "--json")[1]
    assert json.loads(said)["state_dict_path"] == ["state", [0], "m"]  # a key, and no place in a list


def test_version_and_module() -> None:
    done = in_a_process("--version")
    assert (done.returncode, done.stdout) == (0, f"dcp-rs {dcp_rs.__version__}\n")
    done = in_a_process()
    assert done.returncode == 2
    assert "Usage" in done.stdout + done.stderr


def test_completion_is_there() -> None:
    environment = {**os.environ, "_DCP_RS_COMPLETE": "bash_complete", "COMP_WORDS": "dcp-rs in", "COMP_CWORD": "1"}
    done = in_a_process(env=environment)
    assert done.stdout.split() == ["plain,inspect", "plain,index"]


def test_looking_needs_no_torch(world: Path) -> None:
    script = (
        "import sys\nfrom dcp_rs.cli import main\n"
        "for command in (['ls'], ['inspect'], ['verify']):\n"
        "    try: main([*command, sys.argv[1]])\n"
        "    except SystemExit as ended: assert ended.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(world / "ckpt")], check=True, stdout=subprocess.DEVNULL, timeout=60
    )


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    save_rs({"w": torch.ones(1000)}, tmp_path / "src")
    script = (
        "import os, signal, sys\nimport dcp_rs.conversion\nfrom dcp_rs.conversion import job\n"
        "job.Job.advance = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from dcp_rs.cli import main\nmain(['convert', *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "src"), str(tmp_path / "dst")]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert [entry.name for entry in tmp_path.iterdir()] == ["src"]


def _save_grid(path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from dcp_rs import save

    mesh = init_device_mesh("cpu", (2, 2))
    save({"w": distribute_tensor(random_tensor((8, 6)), mesh, [Shard(0), Shard(1)])}, path)


def test_a_cut_is_drawn(dcp_rs_cli, tmp_path: Path) -> None:
    run_ranks(4, _save_grid, str(tmp_path / "ckpt"))
    status, out, _ = dcp_rs_cli("inspect", tmp_path / "ckpt", "w")
    assert status == 0
    assert out.count("│000111│") == 4
    assert out.count("│222333│") == 4
    assert "-r00003-f00000.safetensors" in out


def test_maps_of_any_shape() -> None:
    drawn = cutmap.draw((100,), [(0, (0,), (60,)), (5, (70,), (30,))], width=10)
    assert drawn.rows == ["000000·111"]
    assert (drawn.row_dim, drawn.column_dim, drawn.files) == (None, 0, {"0": 0, "1": 5})
    drawn = cutmap.draw((), [(3, (), ())])
    assert drawn.rows == ["0"]
    drawn = cutmap.draw((4, 2, 6, 2), [(i, (0, 0, i, 0), (4, 2, 1, 2)) for i in range(6)], width=8, height=8)
    assert (drawn.row_dim, drawn.column_dim, drawn.hidden) == (2, 3, [])
    assert drawn.rows == ["00", "11", "22", "33", "44", "55"]
    eight = [(4 * i + 2 * j + k, (i, j, k), (1, 1, 1)) for i in range(2) for j in range(2) for k in range(2)]
    drawn = cutmap.draw((2, 2, 2), eight)
    assert (drawn.rows, drawn.hidden) == (["02", "46"], [2])
    many = cutmap.draw((1000, 8), [(i, (i, 0), (1, 8)) for i in range(1000)], height=16)
    assert len(many.rows) == 16


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9995, "10.0 kB"),
        (99949, "99.9 kB"),
        (999499, "999 kB"),
        (999500, "1.00 MB"),
        (2280000000, "2.28 GB"),
        (10**16, "10000 TB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert output.size(nbytes) == text


def test_convert_leaves_the_folder_only_when_told(dcp_rs_cli, world: Path, tmp_path: Path) -> None:
    """An index that names files elsewhere could bring them into a checkpoint that is published."""
    (tmp_path / "adopted").mkdir()
    dcp_rs.index(world / "hf", out=tmp_path / "adopted")
    status, _, err = dcp_rs_cli("convert", tmp_path / "adopted", tmp_path / "new")
    assert status == 2
    assert "outside its folder" in err
    assert not (tmp_path / "new").exists()
    status, _, err = dcp_rs_cli("convert", tmp_path / "adopted", tmp_path / "new", "--allow-external")
    assert (status, err) == (0, "")
    for command, *more in (("verify",), ("diff", world / "hf"), ("bench", "--rounds", "1")):
        status, _, err = dcp_rs_cli(command, tmp_path / "adopted", *more)
        assert status == 2
        assert "--allow-external" in err
        status, _, err = dcp_rs_cli(command, tmp_path / "adopted", *more, "--allow-external")
        assert (status, err) == (0, ""), command
    # To look at what an index says opens no file.
    assert dcp_rs_cli("ls", tmp_path / "adopted")[0] == 0
