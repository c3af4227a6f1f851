"""The help of commands, and messages in terms of the command line."""

import shutil
import subprocess

import click
import pytest
import torch

import dcp_rs
from dcp_rs._url import location
from dcp_rs.cli.app import all_commands
from dcp_rs.cli.output import for_command_line

COMMANDS = all_commands()


def takes_url(command):
    return any(
        isinstance(each, click.Argument) and getattr(each.type, "func", None) is location
        for each in command.params
    )


def test_most_commands_take_urls():
    assert len([name for name in COMMANDS if takes_url(COMMANDS[name])]) >= 10


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_what_takes_a_url_says_how_to_reach_the_store(name, dcp_rs_cli):
    """It stood in the help of no command."""
    status, out, _ = dcp_rs_cli(name, "--help")
    assert status == 0
    assert ("--storage-option" in out) == takes_url(COMMANDS[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name):
    for option in COMMANDS[name].params:
        if isinstance(option, click.Option):
            assert option.help, option.name
            assert option.help.endswith((".", "]")), option.name
            assert (
                option.metavar
                or option.is_flag
                or isinstance(option.type, click.Choice | click.FloatRange)
            ), option.name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_completes_in_each_shell(shell, dcp_rs_cli, tmp_path):
    status, out, _ = dcp_rs_cli("completion", shell)
    assert status == 0
    assert f"_DCP_RS_COMPLETE={shell}_complete" in out
    if shutil.which(shell):
        (tmp_path / "script").write_text(out)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=30)


@pytest.mark.parametrize(
    ("said", "here"),
    [
        (
            "keep_best= needs metric=, the name of the metric to compare",
            "--keep-best needs --metric, the name of the metric to compare",
        ),
        ("pass overwrite=True to replace it", "pass --overwrite to replace it"),
        ("dcp_rs.index(path, digests=True) adds them", "dcp-rs index --digests adds them"),
        ("dcp_rs.convert writes one", "dcp-rs convert writes one"),
        ("dcp_rs.verify(path) says which", "dcp-rs verify says which"),
        ("dcp_rs.open(path) reads it", "dcp_rs.open(path) reads it"),
        ("include='x.*' passes nothing", "--include 'x.*' passes nothing"),
        ("allow_external=True, weights_only=False", "--allow-external, --trust-pickles"),
        ("strict_values=True", "strict_values=True"),
        *(
            (f"no checkpoint at {path}", f"no checkpoint at {path}")
            for path in ("out/dtype=bf16,mode=max/ckpt", "rank=3/ckpt", "/x/rank=3/y", "/x/rank=3")
        ),
    ],
)
def test_messages_name_options(said, here):
    assert for_command_line(said) == here


def test_policies_are_named_as_options(dcp_rs_cli, tmp_path):
    """It said `keep_best= needs metric=`."""
    dcp_rs.save({"w": torch.ones(1)}, tmp_path / "step-1", no_dist=True)
    assert "--keep-best needs --metric" in dcp_rs_cli("prune", tmp_path, "--keep-best", "1")[2]


def test_a_metric_that_no_step_has_prunes_nothing(dcp_rs_cli, tmp_path):
    """All but the latest step went."""
    with dcp_rs.CheckpointManager(tmp_path, no_dist=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.ones(1)}, metrics={"loss": 1 / step})
    status, _, err = dcp_rs_cli("prune", tmp_path, "--keep-best", "1", "--metric", "los", "--yes")
    assert (status, err) == (2, "dcp-rs: no step has the metric 'los': they have 'loss'\n")
    assert len(list(tmp_path.glob("step-*"))) == 3


def test_an_entry_of_one_chunk_has_no_list_of_chunks(dcp_rs_cli, tmp_path):
    dcp_rs.save({"w": torch.ones(8, 8)}, tmp_path, no_dist=True)
    lines = dcp_rs_cli("inspect", tmp_path, "w")[1].splitlines()
    (file,) = tmp_path.glob("*.safetensors")
    assert lines[1] == "  float32 [8, 8], 256 B, 1 chunk in 1 file"
    assert lines[-1].startswith(f"  in the file  {file.name}, from byte ")
    assert len(lines) == 4
