"""Commands on a store, whose options are given."""

import json

import pytest
import torch
from safetensors.torch import save_file

from dcp_rs import CheckpointManager
from support.commands import in_a_process


@pytest.fixture
def does(server):
    """Runs a command, and returns what it says."""
    given = [
        f"--storage-option={key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in server.options(max_retries=1).items()
    ]

    def run(*arguments, status=0):
        done = in_a_process(*arguments, *given)
        assert done.returncode == status, done
        return done.stdout or done.stderr

    return run


@pytest.mark.slow
def test_steps_and_prune(does, server):
    options = {"storage_options": server.options(), "no_dist": True}
    url = server.url("run")
    with CheckpointManager(url, **options) as manager:
        for step in (100, 200, 300, 400):
            manager.save(step, {"w": torch.full((1000,), float(step))}, metrics={"loss": step})
    del server.objects["run/step-400/index.dcprs"]
    for command in ("steps", "ls", "inspect"):
        found = json.loads(does(command, f"{url}/", "--json"))
        assert [step["path"] for step in found["steps"]] == [
            f"{url}/step-{number}" for number in (100, 200, 300)
        ]
        assert [(one["step"], one["kind"]) for one in found["passed_over"]] == [(400, "unknown")]
    assert "float32  [1000]" in does("ls", f"{url}/step-100")
    before = server.keys()
    prune = ("prune", url, "--keep-last", 1, "--keep-best", 1, "--metric", "loss", "--verify")
    assert "1 step, " in does(*prune)
    assert server.keys() == before
    does(*prune, "--yes")
    assert {key.split("/")[1] for key in set(before) - set(server.keys())} == {"step-200"}
    server.undeletable.update(server.keys("run/step-100/index"))
    said = does("prune", url, "--keep-last", 1, "--yes", status=1)
    assert "step 100 could not be removed" in said
    assert "has no folder step-N" in does("steps", server.url("nowhere"), status=2)


def test_clean(does, saved, server):
    """It warned where something could not be removed, and its exit status was 0."""
    url = server.url("runs/ckpt")
    data = next(key for key in server.keys("runs/ckpt/g") if key.endswith(".safetensors"))
    left = data.replace("g00000001", "g00000007")
    server.put(left, server.objects[data].data)
    remove = ("clean", url, "--older-than", 0, "--yes")
    assert [found["path"] for found in json.loads(does(*remove[:-1], "--json"))["found"]] == [
        server.url(left)
    ]
    server.undeletable.add(left)
    assert "AccessDenied" in json.loads(does(*remove, "--json", status=1))["failed"][0]
    server.undeletable.clear()
    said = does(*remove)
    assert server.url(left) in said
    assert "a lifecycle rule removes them" in said
    assert left not in server.objects


def test_index(does, server, tmp_path):
    save_file({"a": torch.randn(70, 10), "b": torch.arange(5)}, tmp_path / "model.safetensors")
    server.put_folder(tmp_path, "hf")
    told = json.loads(does("index", server.url("hf"), "--digests", "--json"))
    assert told["index"] == server.url("hf/index.dcprs")
    assert told["bytes"] == len(server.objects["hf/index.dcprs"].data)
    assert told["entries"] == 2
