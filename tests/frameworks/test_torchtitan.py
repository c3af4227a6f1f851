"""torchtitan's training on 2 ranks, stopped and resumed, and its checkpoint manager by itself. `make test-frameworks` runs it."""

import logging
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-frameworks")

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torchtitan.components.checkpointer import CheckpointManager

import dcp_rs
from dcp_rs.errors import UnsupportedError
from dcp_rs.integrations.torchtitan import DcpRsCheckpointManager
from frameworks.launch import launch
from support import quantized

pytestmark = pytest.mark.timeout(1800)  # each run is a start of Python on every rank

RUN = Path(__file__).with_name("torchtitan_run.py")
STEPS, STOP = 8, 4
MODES = ["disabled", "async", "async_with_pinned_mem"]


# --- the trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with torchtitan's own manager, and no stop."""
    folder = tmp_path_factory.mktemp("stock")
    launch(RUN, "stock", folder, STEPS, ranks=2)
    assert (folder / "checkpoint" / f"step-{STEPS}" / ".metadata").is_file()
    return folder


def check_end(folder, whole, steps):
    for rank in range(2):
        mine, theirs = (torch.load(where / f"end-{rank}.pt") for where in (folder, whole))
        assert len(theirs["losses"]) == STEPS
        assert mine["losses"] == theirs["losses"][STEPS - steps :]
        assert mine["step"] == theirs["step"] == STEPS
        assert all(
            torch.equal(mine["model"][name], tensor) for name, tensor in theirs["model"].items()
        )


def test_resumed_training_is_the_training_that_was_not_stopped(tmp_path, whole):
    """Stopped in one mode, and resumed in another."""
    launch(RUN, "rs", tmp_path, STOP, "--checkpoint.async_mode", "async_with_pinned_mem", ranks=2)
    steps = tmp_path / "checkpoint"
    assert {step.name for step in steps.iterdir()} == {"step-2", "step-4"}
    assert (steps / "step-4" / "index.dcprs").is_file()
    launch(
        RUN,
        "rs",
        tmp_path,
        STEPS,
        "--checkpoint.async_mode",
        "async",
        "--checkpoint.verify",
        "True",
        ranks=2,
    )
    check_end(tmp_path, whole, STEPS - STOP)
    # Two are kept when a step is saved; after the last one torchtitan does not look.
    assert {step.name for step in steps.glob("step-*")} == {"step-4", "step-6", "step-8"}


def test_a_run_of_torchtitans_own_goes_on(tmp_path, whole):
    shutil.copytree(whole / "checkpoint" / "step-6", tmp_path / "checkpoint" / "step-6")
    launch(RUN, "rs", tmp_path, STEPS, ranks=2)
    check_end(tmp_path, whole, 2)
    assert (tmp_path / "checkpoint" / "step-8" / "index.dcprs").is_file()


# --- quantized models


@pytest.mark.parametrize("model", ["deepseek", "gpt_oss"])
def test_rs_reader_takes_the_place_of_torchs_quantized_reader(tmp_path, model):
    """Under torchtitan's own adapters: names, shapes and slices of 2 ranks, bit for bit."""
    from frameworks.torchtitan_quantized_run import MODELS

    state, make_adapter = MODELS[model]()
    stored: quantized.Tensors = {}
    for seed, (name, tensor) in enumerate(make_adapter().to_hf(state).items()):
        shape = tuple(tensor.shape)
        if name.endswith("_blocks"):
            parts, _ = quantized.mxfp4(name.removesuffix("_blocks"), *shape, seed=seed)
            # Torch's reader overflows where a scale is beyond these.
            stored |= {key: t if key == name else t % 64 + 96 for key, t in parts.items()}
        elif model == "deepseek" and "_proj" in name:
            parts, _ = quantized.fp8(name.removesuffix(".weight"), *shape, seed=seed)
            parts[name] = parts[name].float().nan_to_num().to(torch.float8_e4m3fn)
            stored |= parts
        else:
            stored[name] = torch.randn(shape).bfloat16()
    method = {"deepseek": "fp8", "gpt_oss": "mxfp4"}[model]
    quantized.write(tmp_path / "hf", stored, {"quant_method": method}, files=3)
    assert launch(RUN.with_name("torchtitan_quantized_run.py"), model, tmp_path / "hf", ranks=2)


# --- the manager


class Part:
    """An optimizer, a scheduler, a loader: what a manager knows of them."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)


class Adapter:
    """Names of Hugging Face, and an index of two files."""

    hf_assets_path = None

    def __init__(self, files):
        self.fqn_to_index_mapping = files

    def to_hf(self, state):
        return {f"model.{name}": tensor for name, tensor in state.items()}

    def from_hf(self, state):
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def make(tmp_path):
    made = []

    def make_manager(cls=DcpRsCheckpointManager, seed=0, files=None, **config):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        settings = {
            "enable": True,
            "interval": 1,
            "keep_latest_k": 0,
            "last_save_model_only": False,
        } | config
        manager = cls.Config(**settings).build(
            dataloader=Part(at=seed),
            model_parts=[model],
            optimizers=Part(moment=torch.randn(8, 8), lr=0.1 * seed),
            lr_schedulers=Part(last=seed),
            states={"train_state": Part(step=seed)},
            sd_adapter=Adapter(files),
            base_folder=str(tmp_path),
        )
        made.append(manager)
        return manager, model

    yield make_manager
    for manager in made:
        manager.close()


def state_of(manager, model):
    parts = {
        name: manager.states[name].state
        for name in ("optimizer", "dataloader", "lr_scheduler", "train_state")
    }
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, parts


def same(mine, theirs):
    assert mine[0].keys() == theirs[0].keys()
    assert all(torch.equal(mine[0][name], tensor) for name, tensor in theirs[0].items())
    moments = [state[1]["optimizer"].pop("moment") for state in (mine, theirs)]
    assert torch.equal(*moments)
    assert mine[1] == theirs[1]


@pytest.mark.parametrize("mode", MODES)
def test_save_of_each_mode_loads(make, mode):
    manager, model = make(seed=3, async_mode=mode)
    for step in (1, 2):
        assert manager.save(step)
        manager.maybe_wait_for_staging()
        want = state_of(manager, model)
        with torch.no_grad():
            model[0].weight.add_(1)  # what is under way has what was there when it began
    manager.maybe_wait_for_saving()
    fresh, other = make(seed=4)
    assert fresh.load()
    same(state_of(fresh, other), want)
    assert not make(seed=4, folder="elsewhere")[0].load()
    with pytest.raises(FileNotFoundError):
        fresh.load(step=7)


def test_a_failed_save_is_heard_of(make, tmp_path):
    manager, _ = make(async_mode="async")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "step-1").write_text("")

    def save_and_wait():
        manager.save(1)
        manager.maybe_wait_for_saving()

    with pytest.raises(OSError, match="step-1"):
        save_and_wait()


def test_the_newest_step_that_is_whole_is_found(make, tmp_path, caplog):
    manager, model = make(seed=1)
    for step in (1, 2, 3):
        manager.save(step)
    steps = tmp_path / "checkpoint"
    (steps / "step-4").mkdir()  # as a kill leaves it
    next((steps / "step-3").glob("*.safetensors")).unlink()
    (steps / "step-50-notes").mkdir()
    with caplog.at_level(logging.WARNING, logger="dcp_rs"):
        assert manager._find_load_step() == 2
    assert "step-4: its save did not finish" in caplog.text
    assert "step-3" in caplog.text
    assert "gone" in caplog.text
    # torchtitan's own manager sees none of them, and starts at the beginning: that is why there is
    # this one.
    assert make(CheckpointManager)[0]._find_load_step() == -1
    dcp.save(manager._flattened_model_states_sd(), checkpoint_id=steps / "step-9", no_dist=True)
    fresh, other = make(seed=5)
    assert fresh.load()
    same(state_of(fresh, other), state_of(manager, model))
    assert fresh._find_load_step(str(steps)) == 9
    assert fresh._find_load_step(str(tmp_path / "none")) == -1


@pytest.mark.parametrize("name", ["model.gguf", "index.dcprs"])
def test_a_newer_step_that_may_be_whole_is_an_error(make, tmp_path, name):
    """It was passed over with a line in the log: the job went on from an older step, and lost hours."""
    manager, _ = make(seed=1)
    for step in (1, 2):
        manager.save(step)
    newest = tmp_path / "checkpoint" / "step-2"
    if name == "index.dcprs":
        (newest / name).unlink()
    else:
        newest = tmp_path / "checkpoint" / "step-3"
        newest.mkdir()
        (newest / name).write_text("of something else")
    with pytest.raises(
        UnsupportedError, match=rf"cannot be resumed: {newest.name}: .*set checkpoint.load_step"
    ):
        manager._find_load_step()
    assert manager._find_load_step(max_step=1) == 1
    (newest / "__0_0.distcp").write_text(
        ""
    )  # torch's own save was killed: it is known not to be whole
    if name != "index.dcprs":
        assert manager._find_load_step() == 2


def wait_for_purge(manager):
    manager.purge_queue.put(None)
    manager.purge_thread.join(60)
    assert not manager.purge_thread.is_alive()


def test_old_steps_are_purged_and_the_last_that_is_whole_never(make, tmp_path):
    manager, _ = make(keep_latest_k=2)
    steps = tmp_path / "checkpoint"
    (steps / ".removing-step-0").mkdir(parents=True)  # as a kill leaves it
    for step in (1, 2, 3):
        manager.save(step)
    (steps / "step-4").mkdir()
    (steps / "step-5").mkdir()
    manager._purge_stale_checkpoints()
    wait_for_purge(manager)
    assert sorted(entry.name for entry in steps.iterdir()) == ["step-3", "step-4", "step-5"]
    assert dcp_rs.verify(steps / "step-3").ok
    manager._saved_last = "step-6"  # begun, and nothing of it is there
    manager._purge_stale_checkpoints()
    before = threading.active_count()
    manager.close()
    assert sorted(entry.name for entry in steps.glob("step-*")) == ["step-3", "step-5"]
    assert threading.active_count() <= before


def test_purge_and_look_of_later_releases(make, tmp_path, monkeypatch):
    manager, _ = make(keep_latest_k=2)
    monkeypatch.setattr(manager, "_is_purge_exempt", lambda step: step == 1, raising=False)
    for step in (1, 2, 3):
        dcp_rs.save({"w": torch.ones(2)}, tmp_path / "checkpoint" / f"step-{step}", no_dist=True)
    manager._purge_stale_checkpoints(saving_step=4, staging_dir_prefix=None)
    wait_for_purge(manager)
    assert sorted(entry.name for entry in (tmp_path / "checkpoint").iterdir()) == [
        "step-1",
        "step-3",
    ]
    assert manager._find_load_step(max_step=2) == 1
    assert manager._find_load_step(max_step=0) == -1


def test_a_name_in_another_form_is_no_step_to_load_or_to_purge(make, tmp_path):
    """It took the place of a step that is kept, and that step was removed for it."""
    manager, _ = make(keep_latest_k=2)
    steps = tmp_path / "checkpoint"
    for name in ("step-1", "step-2", "step-3", "step-0003", "step-004"):
        dcp_rs.save({"w": torch.ones(2)}, steps / name, no_dist=True)
    (steps / "step-004" / ".metadata").write_bytes(b"")
    assert manager._find_load_step() == 3
    manager._purge_stale_checkpoints(saving_step=3)
    wait_for_purge(manager)
    left = sorted(path.name for path in steps.iterdir())
    assert left == ["step-0003", "step-004", "step-2", "step-3"]


@pytest.mark.parametrize("files", [None, {"model.0.weight": 1, "model.1.weight": 2}])
def test_the_last_step_is_exported_for_hugging_face(make, tmp_path, files):
    how = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "bfloat16"}
    manager, model = make(seed=1, files=files, **how)
    assert manager.save(5, last_step=True)
    out = tmp_path / "checkpoint" / "step-5"
    names = sorted(file.name for file in out.iterdir())
    if files is None:
        assert names == ["model.safetensors"]
    else:
        shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        assert names == [*shards, "model.safetensors.index.json"]
    assert [entry.name for entry in (tmp_path / "checkpoint").iterdir()] == ["step-5"]
    exported = {}
    for file in out.glob("*.safetensors"):
        exported |= load_file(file)
    want = {f"model.{name}": tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert exported.keys() == want.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in want.items())
    fresh, other = make(seed=2, folder="other", initial_load_path=str(out), initial_load_in_hf=True)
    # What was exported in half precision loads into a model of half precision.
    other.bfloat16()
    fresh.states["model"].cached_state_dict = fresh.states["model"]._get_state_dict()
    assert fresh.load()
    assert all(
        torch.equal(tensor, want[f"model.{name}"]) for name, tensor in other.state_dict().items()
    )


def test_weights_of_hugging_face_begin_a_run(make, tmp_path):
    manager, model = make(
        seed=1, folder="run", initial_load_path=str(tmp_path / "hf"), initial_load_in_hf=True
    )
    want = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    (tmp_path / "hf").mkdir()
    save_file(
        {f"model.{name}": tensor for name, tensor in want.items()},
        tmp_path / "hf" / "model.safetensors",
    )
    assert manager.load()
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


def test_quantized_weights_begin_a_run(make, tmp_path):
    """The weights are decoded to float32, as by torchtitan's readers, with no step to bfloat16."""
    how = {"initial_load_in_hf": True, "initial_load_in_hf_quantized": True}
    manager, model = make(folder="run", initial_load_path=str(tmp_path / "hf"), **how)
    made = {
        "model.0": quantized.channel("model.0", 8, 8, seed=1, scale_shape=(8, 1)),
        "model.1": quantized.fp8("model.1", 4, 8, seed=2),
    }
    for stored, _ in made.values():
        weight = next(iter(stored))
        stored[weight] = stored[weight].float().nan_to_num().to(torch.float8_e4m3fn)
    plain = {"model.0.bias": torch.randn(8), "model.1.bias": torch.randn(4)}
    parts = {name: part for stored, _ in made.values() for name, part in stored.items()}
    quantized.write(tmp_path / "hf", parts | plain)
    assert manager.load()
    for name, (_, whole) in made.items():
        loaded = model.state_dict()[f"{name.removeprefix('model.')}.weight"]
        assert torch.equal(loaded, whole.nan_to_num())
        assert not torch.equal(loaded, loaded.bfloat16().float())
    for name, tensor in plain.items():
        assert torch.equal(model.state_dict()[name.removeprefix("model.")], tensor)


def test_a_manager_that_is_off_does_nothing_and_a_scheme_is_refused(make, tmp_path):
    manager, _ = make(enable=False)
    assert not manager.save(1)
    assert not manager.load()
    with pytest.raises(UnsupportedError, match="gs://"):
        make(folder="gs://bucket/run")
