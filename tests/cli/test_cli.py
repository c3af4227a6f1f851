"""The command line: what each command does, its exit status."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import torch

import dcp_rs
import programs
from dcp_rs.cli import output
from support.both import save_rs
from support.commands import in_a_process
from support.files import flip


def test_ls(dcp_rs_cli, world: Path) -> None:
    for name in ("ckpt", "stock", "x.pt"):
        status, out, err = dcp_rs_cli("ls", world / name)
        lines = out.splitlines()
        assert (status, err) == (0, "")
        assert lines[0].split() == ["dtype", "shape", "chunks", "size", "name"]
        assert lines[-1].startswith("7 tensors, 8 values, ")
        # Of a file of torch.save a value is a few bytes of the pickle.
        assert name == "x.pt" or lines[-1].endswith(output.size(10508))
        assert "bfloat16 [8, 4] 1 64 B model.embedding.weight" in [
            " ".join(line.split()) for line in lines
        ]
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
    assert {entry["name"]: entry["dtype"] for entry in said["ls"]["entries"]}[
        "buffers.0"
    ] == "int64"
    assert said["inspect"]["files"][0]["chunks"] == 15
    assert said["entry"]["state_dict_path"] == ["model", "embedding.weight"]
    assert said["entry"]["pieces"][0]["sizes"] == [8, 4]
    assert said["verify"]["ok"]
    assert said["verify"]["problems"] == []
    assert len(said["convert"]["written"]) == 15
    assert said["index"]["source"] == "dcp"
    assert said["diff"]["same"]
    assert said["bench"]["same_bits"]
    assert {row["reader"] for row in said["bench"]["readers"]} >= {
        "dcp_rs.load",
        "dcp.load, RsReader",
    }


def test_verify_names_the_block(dcp_rs_cli, tmp_path: Path) -> None:
    save_rs({"small": torch.ones(3), "large": torch.arange(1 << 20)}, tmp_path / "ckpt")
    data = next((tmp_path / "ckpt").glob("*.safetensors"))
    flip(data, 4096 + (3 << 20) + 77)
    status, out, err = dcp_rs_cli("verify", tmp_path / "ckpt")
    assert (status, err) == (1, "")
    assert "tensor 'large', block 3" in out
    assert "1 problem" in out
    status, out, _ = dcp_rs_cli("verify", tmp_path / "ckpt", "--json")
    assert status == 1
    (problem,) = json.loads(out)["problems"]
    assert (problem["tensor"], problem["block"], problem["offset"]) == (
        "large",
        3,
        4096 + (3 << 20),
    )


def test_index_makes_others_verifiable(dcp_rs_cli, world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "hf", tmp_path / "hf")
    # The status was 0, and a gate in CI passed with nothing verified.
    status, out, _ = dcp_rs_cli("verify", tmp_path / "hf")
    assert status == 3
    assert dcp_rs_cli("verify", tmp_path / "hf", "--allow-unverified")[0] == 0
    for options, want in ((), 3), (("--allow-unverified",), 0):
        status, said, _ = dcp_rs_cli("verify", tmp_path / "hf", "--json", *options)
        assert (status, json.loads(said)["ok"]) == (want, None)
    assert not dcp_rs.verify(tmp_path / "hf")
    assert "without digests" in out
    assert "no damage found: the files are there and of the right size; nothing was verified" in out
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
        "cast": torch.ones(2),
    }
    a |= {
        "w": torch.zeros(3_000_000, dtype=torch.bfloat16),
        "nan": torch.tensor([float("nan"), 1.0]),
    }
    b = {
        **a,
        "shape": torch.ones(3),
        "dtype": torch.full((3,), 1.5, dtype=torch.float16),
        "lr": 0.2,
        "new": torch.ones(2),
        "cast": torch.ones(2).half(),
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
        "cast": "dtype",
        "lr": "value",
        "w": "elements",
    }
    assert (found["w"]["elements"], found["w"]["max_abs"]) == (2, 0.25)
    assert (found["dtype"]["a"], found["dtype"]["b"], found["dtype"]["max_abs"]) == (
        "float32",
        "float16",
        0.5,
    )
    assert (found["lr"]["a"], found["lr"]["b"]) == ("0.1", "0.2")
    status, out, _ = dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b.pt")
    assert status == 1
    assert "2 elements differ, by at most 0.25" in out
    assert "float32 | float16, by at most 0.5" in out
    assert "float32 | float16, equal elements" in out
    assert "7 of 10 entries differ" in out
    chosen = ["--include", "w", "--include", "same"]
    assert dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b.pt", *chosen)[0] == 1
    assert (
        dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b.pt", *chosen, "--tolerance", "0.25")[0]
        == 0
    )
    status, out, _ = dcp_rs_cli("diff", tmp_path / "a", tmp_path / "a")
    assert (status, out.startswith("the same: 9 entries")) == (0, True)


def test_convert_takes_all_options(dcp_rs_cli, world: Path, tmp_path: Path) -> None:
    options = (
        "--to safetensors --dtype fp16 --shards 2 --include model.* --include step "
        "--exclude *.0.* --include optimizer.* --rename model= --rename optimizer.state=adam "
        "--skip-unsupported"
    )
    convert = ("convert", world / "ckpt", tmp_path / "hf")
    status, out, err = dcp_rs_cli(*convert, *options.split())
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
    assert dcp_rs_cli(*convert, "--overwrite")[0] == 0
    for wrong, advice in (
        ((), "--overwrite"),
        (("--overwrite", "--to", "safetensors"), "--skip-unsupported"),
        (("--rename", "nonsense"), "OLD=NEW"),
    ):
        status, _, err = dcp_rs_cli(*convert, *wrong)
        assert (status, advice in err) == (2, True)


def test_the_help_says_which_commands_read_files_of_torch_save(dcp_rs_cli) -> None:
    for command in ("ls", "tree", "inspect", "stats", "convert", "verify", "index", "bench"):
        assert ("torch.save" in dcp_rs_cli(command, "--help")[1]) == (command != "bench")


def test_ls_shows_values_and_chooses_by_globs(dcp_rs_cli, world: Path) -> None:
    for name in ("ckpt", "stock", "x.pt"):
        ls = ("ls", world / name, "--values")
        status, out, err = dcp_rs_cli(*ls, "--include", "step", "--include", "name")
        assert (status, err) == (0, "")
        assert [line.split()[-2:] for line in out.splitlines()[1:-1]] == [
            ["name", "'ünïcode'"],
            ["step", "12"],
        ]
        left_out = ("--exclude", "optimizer.*", "--exclude", "model.*")
        _, out, _ = dcp_rs_cli(*ls, "*", *left_out, "--json")
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
    assert "no name matches: a pattern covers a whole name" in out


def test_a_number_that_python_does_not_write_out_hides_no_other_entry(
    dcp_rs_cli, tmp_path: Path
) -> None:
    torch.save({"big": 10**5000, "small": 7, "w": torch.ones(2)}, tmp_path / "x.pt")
    status, out, _ = dcp_rs_cli("ls", tmp_path / "x.pt", "--values", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)["entries"]}
    assert (status, entries["small"]["value"]) == (0, 7)
    assert "Unsupported operand" in entries["big"]["problem"]
    status, out, _ = dcp_rs_cli("ls", tmp_path / "x.pt", "--values")
    assert (status, len(out.splitlines())) == (0, 5)
    assert dcp_rs_cli("inspect", tmp_path / "x.pt", "big")[0] == 0
    assert dcp_rs_cli("inspect", tmp_path / "x.pt", "--html", tmp_path / "page.html")[0] == 0


def test_values_that_repeat_themselves_do_not_hang_a_listing(dcp_rs_cli, tmp_path: Path) -> None:
    """A list of ten lists of ten lists, 30 deep, in 597 bytes: `ls --json` walked all 10**30 of them."""
    shared: list[Any] = ["ha"]
    for _ in range(30):
        shared = [shared] * 10
    deep: list[Any] = []
    for _ in range(450):
        deep = [deep]
    torch.save(
        {"shared": (shared,), "text": (["ha" * 1000] * 1000,), "deep": (deep,), "ok": 7},
        tmp_path / "x.pt",
    )
    status, out, _ = dcp_rs_cli("ls", tmp_path / "x.pt", "--values", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)["entries"]}
    assert (status, entries["ok"]["value"]) == (0, 7)
    assert "problem" in entries["shared"]
    assert "repeats itself" in entries["text"]["problem"]
    assert dcp_rs_cli("ls", tmp_path / "x.pt", "--values")[0] == 0
    assert dcp_rs_cli("inspect", tmp_path / "x.pt", "shared", "--json")[0] == 0


def test_a_list_that_repeats_itself_takes_no_memory(dcp_rs_cli, tmp_path: Path) -> None:
    """A file of 5 kB took 3.2 GB: every reference was kept before it was counted."""
    cyclic: list[Any] = []
    cyclic.extend([cyclic] * 1000)
    torch.save({"v": cyclic}, tmp_path / "x.pt")
    dcp_rs_cli("ls", tmp_path / "x.pt", "--values")
    tracemalloc.start()
    status, out, _ = dcp_rs_cli("ls", tmp_path / "x.pt", "--values")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (status, "repeats itself" in out) == (0, True)
    assert peak < 10 << 20


def test_keys_that_are_no_text_are_not_shown_as_text(dcp_rs_cli, tmp_path: Path) -> None:
    """The text and the number were one key."""
    dcp_rs.save({"names": ({1: "a", "1": "b", None: 3},)}, tmp_path / "ckpt", no_dist=True)
    _, out, _ = dcp_rs_cli("ls", tmp_path / "ckpt", "--values", "--json")
    (entry,) = json.loads(out)["entries"]
    assert entry["repr"] == "({1: 'a', '1': 'b', None: 3},)"
    assert "value" not in entry


def test_json_escapes_what_a_terminal_could_take_for_a_command(dcp_rs_cli, tmp_path: Path) -> None:
    """U+009B (a terminal's CSI) and U+202E (right to left from here) came out raw."""
    said = "\x9b31m \u202e \U000e0001 ünï"
    torch.save({said: said}, tmp_path / "x.pt")
    _, out, _ = dcp_rs_cli("ls", tmp_path / "x.pt", "--values", "--json")
    assert out.replace("\n", "").isprintable()
    (entry,) = json.loads(out)["entries"]
    assert (entry["name"], entry["value"]) == (said, said)


def test_keys_of_all_kinds_are_told_apart(dcp_rs_cli, tmp_path: Path) -> None:
    dcp_rs.save({"state": {0: {"m": torch.ones(2)}, "1": {"m": torch.ones(3)}}}, tmp_path / "ckpt")
    shown = dcp_rs_cli("inspect", tmp_path / "ckpt", "state.0.m")[1]
    assert "['state'][0]['m']" in shown
    assert "['state']['1']['m']" in dcp_rs_cli("inspect", tmp_path / "ckpt", "state.1.m")[1]
    said = dcp_rs_cli("inspect", tmp_path / "ckpt", "state.0.m", "--json")[1]
    assert json.loads(said)["state_dict_path"] == [
        "state",
        [0],
        "m",
    ]  # a key, and no place in a list


def test_version_and_module() -> None:
    done = in_a_process("--version")
    assert (done.returncode, done.stdout) == (0, f"dcp-rs {dcp_rs.__version__}\n")
    done = in_a_process()
    assert done.returncode == 2
    assert "Usage" in done.stdout + done.stderr


def test_completion_is_there() -> None:
    environment = {
        **os.environ,
        "_DCP_RS_COMPLETE": "bash_complete",
        "COMP_WORDS": "dcp-rs in",
        "COMP_CWORD": "1",
    }
    done = in_a_process(env=environment)
    assert done.stdout.split() == ["plain,inspect", "plain,index"]


def test_looking_needs_no_torch(world: Path) -> None:
    script = (
        "import sys\nfrom dcp_rs.cli import main\n"
        "for command in (['ls'], ['inspect'], ['tree'], ['verify']):\n"
        "    try: main([*command, sys.argv[1]])\n"
        "    except SystemExit as ended: assert ended.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(world / "ckpt")],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )


def test_a_checkpoint_is_listed_with_little_imported(world: Path) -> None:
    script = (
        "import sys\nfrom dcp_rs.cli import main\n"
        "try: main(['ls', sys.argv[1]])\n"
        "except SystemExit as ended: assert ended.code == 0\n"
        "print([name for name in sys.modules if name.startswith(('torch', 'numpy', 'email', 'dcp_rs.steps'))])"
    )
    command = [sys.executable, "-c", script, str(world / "ckpt")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    save_rs({"w": torch.ones(1000)}, tmp_path / "src")
    script = (
        "import os, signal, sys\nimport dcp_rs.conversion\nfrom dcp_rs.conversion import job\n"
        "job.Job.advance = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from dcp_rs.cli import main\nmain(['convert', *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "src"), str(tmp_path / "dst")]
    done = programs.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert [entry.name for entry in tmp_path.iterdir()] == ["src"]


def test_convert_leaves_the_folder_only_when_told(dcp_rs_cli, world: Path, tmp_path: Path) -> None:
    """An index that names files elsewhere could bring them into a checkpoint that is published."""
    (tmp_path / "adopted").mkdir()
    dcp_rs.index(world / "hf", out=tmp_path / "adopted")
    status, _, err = dcp_rs_cli("convert", tmp_path / "adopted", tmp_path / "new")
    assert status == 2
    assert "outside its folder" in err
    assert not (tmp_path / "new").exists()
    status, _, err = dcp_rs_cli(
        "convert", tmp_path / "adopted", tmp_path / "new", "--allow-external"
    )
    assert (status, err) == (0, "")
    for command, *more in (
        ("verify", "--allow-unverified"),
        ("diff", world / "hf"),
        ("bench", "--rounds", "1"),
    ):
        status, _, err = dcp_rs_cli(command, tmp_path / "adopted", *more)
        assert status == 2
        assert "--allow-external" in err
        status, _, err = dcp_rs_cli(command, tmp_path / "adopted", *more, "--allow-external")
        assert (status, err) == (0, ""), command
    # To look at what an index says opens no file.
    assert dcp_rs_cli("ls", tmp_path / "adopted")[0] == 0
