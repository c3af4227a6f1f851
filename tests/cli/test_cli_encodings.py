"""The command line where nothing says that text is Unicode: old containers, cron, `LC_ALL=C`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcp_rs
from support.both import save_rs

STATE = {
    "größe": torch.arange(3.0),
    "层.0": torch.ones(2, 2),
    "plain": torch.zeros(1),
    "text": "ß🙂",
}

#: Python takes both for UTF-8 by itself, for names of files as for the terminal.
ENCODINGS = {"C": {"LC_ALL": "C"}, "none": {}}
UTF8 = {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("encodings")
    save_rs(STATE, folder / "模型")
    torch.save(STATE, folder / "模型.pt")
    dcp_rs.convert(folder / "模型", folder / "größe", to="safetensors", exclude="text")
    return folder


#: Runs commands, with a line between them in what they print.
DRIVER = """
import sys
from dcp_rs.cli import main
words = sys.argv[1:]
while words:
    end = words.index(";")
    try:
        main(words[:end])
    except SystemExit as ended:
        if ended.code:
            raise
    print("%%%", flush=True)
    words = words[end + 1 :]
"""


def run(world: Path, environment: dict[str, str], *commands: tuple[str, ...]) -> list[bytes]:
    """What each command prints; one process for all, as each takes a second to start."""
    outer = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("LC_", "LANG", "PYTHONUTF8", "PYTHONIO"))
    }
    words = [word for command in commands for word in (*command, ";")]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *words],
        env=outer | environment,
        cwd=world,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout.split(b"%%%\n")[:-1]


def without_times(text: bytes) -> object:
    document = json.loads(text)
    document.pop("seconds", None)
    return document


COMMANDS = [
    ("ls", "模型"),
    ("ls", "模型", "gr*", "--sort", "size"),
    ("ls", "模型.pt"),
    ("inspect", "模型"),
    ("inspect", "模型", "größe"),
    ("verify", "größe", "--allow-unverified"),
    ("diff", "模型", "模型.pt", "--include", "层.*"),
]


@pytest.fixture(scope="module")
def expected(world) -> list[object]:
    return [
        without_times(said)
        for said in run(world, UTF8, *((*command, "--json") for command in COMMANDS))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_command_says_the_same_everywhere(world, expected, encoding, tmp_path):
    page = tmp_path / "页.html"
    said = run(
        world,
        ENCODINGS[encoding],
        *((*command, "--json") for command in COMMANDS),
        ("ls", "模型"),
        ("inspect", "模型"),
        ("inspect", "模型", "--html", str(page)),
    )
    documents = [without_times(text) for text in said[: len(COMMANDS)]]
    assert documents == expected
    for command, document in zip(COMMANDS, documents, strict=True):
        assert ("größe" in json.dumps(document, ensure_ascii=False)) == (command[0] != "diff")
    listed, overview, _ = (text.decode().splitlines() for text in said[len(COMMANDS) :])
    assert [line.split()[-1] for line in listed[1:-1]] == ["größe", "plain", "text", "层.0"]
    assert overview[0] == "模型"
    assert any("version 1" in line for line in overview)
    assert any(line.endswith("████") for line in overview)  # a bar
    assert json.dumps("层.0")[1:-1] in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_commands_that_write_take_such_paths_and_names(world, tmp_path):
    new, file, back, exported = (str(tmp_path / name) for name in ("新", "新.pt", "回", "新-hf"))
    said = run(
        world,
        ENCODINGS["C"],
        ("convert", "模型", new, "--rename", "größe=大小"),
        ("convert", "模型", file, "--to", "torch"),
        ("convert", file, back),
        ("diff", back, "模型"),
        ("convert", "模型", exported, "--to", "safetensors", "--exclude", "te?t"),
        ("convert", "模型", str(tmp_path / "新-dcp"), "--to", "dcp"),
        ("index", exported, "--digests"),
        ("verify", exported, "--allow-unverified"),
        ("bench", exported, "--rounds", "1"),
    )
    assert b"the same: 4 entries" in said[3]
    assert b"all is well" in said[7]
    assert b"cannot" not in said[8]
    with dcp_rs.open(new) as checkpoint:
        assert torch.equal(checkpoint["大小"], STATE["größe"])
        assert torch.equal(checkpoint["层.0"], STATE["层.0"])
    with dcp_rs.open(exported) as checkpoint:
        assert set(checkpoint) == {"größe", "层.0", "plain"}


def test_errors_name_paths_that_can_be_opened(tmp_path):
    """Also those whose bytes are no text at all."""
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xe4"))
    save_rs({"w": torch.ones(3)}, odd)
    (data,) = odd.glob("g*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    with dcp_rs.open(odd) as checkpoint, pytest.raises(dcp_rs.errors.CorruptDataError) as raised:
        checkpoint["w"].clone()
    assert Path(raised.value.path).read_bytes() == data.read_bytes()
    assert Path(dcp_rs.verify(odd).problems[0].file) == data
    with dcp_rs.open(odd) as checkpoint:
        assert Path(checkpoint.path) == odd
