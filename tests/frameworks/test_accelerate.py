"""FSDP2 by accelerate and by the Trainer of transformers, on 2 ranks; what is merged of it. `make test-frameworks` runs it."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-frameworks")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: make test-frameworks"
)

from accelerate.utils import merge_fsdp_weights as merge_by_accelerate
from safetensors.torch import load_file

import dcp_rs
from dcp_rs.errors import CheckpointNotFoundError, UnsupportedError
from dcp_rs.integrations.accelerate import merge_fsdp_weights
from frameworks.launch import launch

pytestmark = pytest.mark.timeout(1200)  # each run is a start of Python on every rank

RUN = Path(__file__).with_name("accelerate_run.py")
STEPS, STOP = 8, 4
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs, each made once: its folder, and its end."""
    made = {}

    def run_of(how, steps, checkpoint=None):
        key = how, steps, checkpoint
        if key not in made:
            folder = tmp_path_factory.mktemp(how)
            launch(RUN, how, folder, steps, *([] if checkpoint is None else [checkpoint]), ranks=2)
            made[key] = folder, torch.load(folder / "end.pt")
        return made[key]

    return run_of


def check_end(resumed, whole):
    assert len(whole["losses"]) == STEPS
    assert resumed["losses"][-(STEPS - STOP) :] == whole["losses"][STOP:]
    assert list(resumed["model"]) == list(whole["model"])
    for name, tensor in whole["model"].items():
        assert torch.equal(resumed["model"][name], tensor), name


@pytest.mark.parametrize(("how", "name"), [("hand", "step"), ("trainer", "checkpoint")])
def test_resumed_training_is_the_training_that_was_not_stopped(run, how, name):
    _, whole = run(f"{how}-stock", STEPS)
    folder, _ = run(f"{how}-rs", STOP)
    for part in (MODEL, OPTIMIZER):
        assert (folder / f"{name}-{STOP}" / part / "index.dcprs").is_file()
        assert not (folder / f"{name}-{STOP}" / part / ".metadata").exists()
    _, resumed = run(f"{how}-rs", STEPS, folder / f"{name}-{STOP}")
    check_end(resumed, whole)


def test_a_run_of_accelerates_own_goes_on(run):
    folder, whole = run("hand-stock", STEPS)
    assert (folder / f"step-{STOP}" / MODEL / ".metadata").is_file()
    check_end(run("hand-rs", STEPS, folder / f"step-{STOP}")[1], whole)


def test_weights_are_merged_as_by_accelerate(run, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    step = f"step-{STOP}"
    stock, ours = run("hand-stock", STEPS)[0] / step, run("hand-rs", STOP)[0] / step
    for safe, file, load in (
        (True, "model.safetensors", load_file),
        (False, "pytorch_model.bin", torch.load),
    ):
        merge_by_accelerate(stock / MODEL, tmp_path / "want", safe_serialization=safe)
        want = load(tmp_path / "want" / file)
        for source in (stock, ours):
            merge_fsdp_weights(str(source / MODEL), tmp_path / "got" / "deep", safe)
            got = load(tmp_path / "got" / "deep" / file)
            assert set(got) == set(want)
            assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "got" / "deep")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "got" / "deep")
    assert torch.equal(model.lm_head.weight, want["lm_head.weight"])


def test_the_state_of_an_optimizer_is_merged_as_by_accelerate(run, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    step = f"step-{STOP}"
    stock, ours = run("hand-stock", STEPS)[0] / step, run("hand-rs", STOP)[0] / step
    merge_by_accelerate(stock / OPTIMIZER, tmp_path / "want", safe_serialization=False)
    want = torch.load(tmp_path / "want" / "pytorch_model.bin")
    for source in (stock, ours):
        merge_fsdp_weights(source / OPTIMIZER, tmp_path / "got", safe_serialization=False)
        got = torch.load(tmp_path / "got" / "pytorch_model.bin")
        assert got["param_groups"] == want["param_groups"]
        assert set(got["state"]) == set(want["state"])
        for name, moments in want["state"].items():
            assert set(got["state"][name]) == set(moments)
            assert all(
                torch.equal(got["state"][name][key], tensor) for key, tensor in moments.items()
            )
    with pytest.raises(UnsupportedError, match="param_groups"):
        merge_fsdp_weights(ours / OPTIMIZER, tmp_path / "safe")
    with pytest.raises(CheckpointNotFoundError, match=f"pass .*{MODEL} or .*{OPTIMIZER}"):
        merge_fsdp_weights(ours, tmp_path / "safe")
    with pytest.raises(CheckpointNotFoundError):
        merge_fsdp_weights(tmp_path / "none", tmp_path / "safe")
    assert not any((tmp_path / "safe").iterdir())


def test_merged_checkpoint_is_removed_on_request(tmp_path):
    state = {"model": {"w": torch.arange(6.0)}}
    dcp_rs.save(state, tmp_path / "ckpt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    for _ in range(2):
        merge_fsdp_weights(tmp_path / "ckpt", tmp_path / "out")
    merge_fsdp_weights(tmp_path / "ckpt", tmp_path / "out", remove_checkpoint_dir=True)
    assert not (tmp_path / "ckpt").exists()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], state["model"]["w"])
    assert (tmp_path / "out" / "config.json").exists()
