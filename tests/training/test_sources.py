"""One function resumes from every kind of checkpoint, with the options that other loads have."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import dcp_rs
from dcp_rs.errors import PlanError
from dcp_rs.optim import PerRank, load_training_state, save_training_state, training_state
from support import assert_state_equal, run_ranks
from support.training import parallelize, quiet, train_step, whole_parameters


def job(seed=0, steps=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(steps):
        step(model, optimizer, scheduler)
    return model, optimizer, scheduler


def step(model, optimizer, scheduler):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.item()


def by_name(model, optimizer):
    return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)


def native(path, model, optimizer, scheduler):
    save_training_state(path, model, optimizer, {"scheduler": scheduler}, fsync=False)


def stock(path, model, optimizer, scheduler):
    """As torchtitan and many loops have it."""
    model_state, optimizer_state = by_name(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler}
    dcp.save(state, checkpoint_id=path, no_dist=True)


def stock_by_number(path, model, optimizer, scheduler):
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    dcp.save(state, checkpoint_id=path, no_dist=True)


def stock_of_other_names(path, model, optimizer, scheduler):
    model_state, optimizer_state = by_name(model, optimizer)
    app = {"net": model_state, "opt": optimizer_state, "sched": scheduler.state_dict()}
    dcp.save({"app": app}, checkpoint_id=path, no_dist=True)


def torch_file(path, model, optimizer, scheduler):
    state = {
        "epoch": 3,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(state, path)


def lightning_file(path, model, optimizer, scheduler):
    state = {
        "state_dict": {f"net.{key}": value for key, value in model.state_dict().items()},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
    }
    torch.save(state, path)


def accelerate_sharded(path, model, optimizer, scheduler):
    model_state, optimizer_state = by_name(model, optimizer)
    dcp.save({"model": model_state}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": optimizer_state}, checkpoint_id=path / "optimizer_0", no_dist=True)
    torch.save(scheduler.state_dict(), path / "scheduler.bin")


def accelerate_whole(path, model, optimizer, scheduler):
    path.mkdir()
    save_file(model.state_dict(), path / "model.safetensors")
    torch.save(optimizer.state_dict(), path / "optimizer.bin")
    torch.save(scheduler.state_dict(), path / "scheduler.bin")


APP = {"model": "app.net", "optimizer": "app.opt", "scheduler": "app.sched"}
LIGHTNING = {
    "model": "state_dict.net",
    "optimizer": "optimizer_states.0",
    "scheduler": "lr_schedulers.0",
}
SOURCES = {
    native: {},
    stock: {},
    stock_by_number: {},
    stock_of_other_names: {"names": APP},
    torch_file: {},
    lightning_file: {"names": LIGHTNING},
    accelerate_sharded: {},
    accelerate_whole: {},
}


@pytest.mark.parametrize("save", SOURCES, ids=lambda save: save.__name__)
def test_training_goes_on(ckpt, save):
    options = SOURCES[save]
    saved = job(steps=3)
    save(ckpt, *saved)
    resumed = job(seed=1)
    with quiet():
        load_training_state(ckpt, *resumed[:2], {"scheduler": resumed[2]}, **options)
    for _ in range(2):
        assert step(*saved) == step(*resumed)
    assert_state_equal(resumed[0].state_dict(), saved[0].state_dict())
    assert_state_equal(resumed[1].state_dict(), saved[1].state_dict())
    assert resumed[2].state_dict() == saved[2].state_dict()


def test_model_alone(ckpt, tmp_path):
    model, optimizer, _ = job()
    files = {
        "m.safetensors": lambda path: save_file(model.state_dict(), path),
        "m.pt": lambda path: torch.save(model.state_dict(), path),
        "folder": lambda path: dcp_rs.save(dict(model.state_dict()), path, fsync=False),
    }
    for name, save in files.items():
        save(tmp_path / name)
        other, _, _ = job(seed=1)
        load_training_state(tmp_path / name, other, None)
        assert_state_equal(other.state_dict(), model.state_dict())
    with pytest.raises(PlanError, match="holds a model alone: load it without an optimizer"):
        load_training_state(tmp_path / "m.safetensors", other, optimizer)
    with pytest.raises(PlanError, match="has no optimizer state"):
        load_training_state(tmp_path / "m.pt", other, optimizer)


class Language(nn.Module):
    """Names begin with "model.", as those of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.model = nn.Linear(2, 2)
        self.lm_head = nn.Linear(2, 2)


def test_model_whose_names_begin_with_model(tmp_path):
    model = Language()
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    dcp_rs.save(dict(model.state_dict()), tmp_path / "flat", fsync=False)
    save_training_state(tmp_path / "training", model, fsync=False)
    for name in ("m.safetensors", "flat", "training"):
        other = Language()
        load_training_state(tmp_path / name, other)
        assert_state_equal(other.state_dict(), model.state_dict())


def test_names_that_are_not_there(ckpt):
    model, optimizer, scheduler = job(steps=1)
    stock_of_other_names(ckpt, model, optimizer, scheduler)
    with pytest.raises(PlanError, match=r"'app.nets'.: the checkpoint has 'app'"):
        load_training_state(ckpt, model, names={"model": "app.nets"})
    with pytest.raises(TypeError, match=r"names= has 'optim': its keys are 'model', 'optimizer'"):
        load_training_state(ckpt, model, names={"optim": "app.opt"})
    with pytest.raises(PlanError, match=r"names=\{'optimizer': 'app.opt'\}"):
        load_training_state(ckpt, model, optimizer, names={"model": "app.net"})


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module."],
)
def test_prefixes_of_wrappers(ckpt, prefix):
    model, optimizer, _ = job(steps=1)
    state = {f"{prefix}{key}": value for key, value in model.state_dict().items()}
    names = list(state)
    osd = optimizer.state_dict()
    named = {
        "state": {name: osd["state"][at] for at, name in enumerate(names)},
        "param_groups": [osd["param_groups"][0] | {"params": names}],
    }
    dcp.save({"model": state, "optim": named}, checkpoint_id=ckpt, no_dist=True)
    other, resumed, _ = job(seed=1)
    with quiet():
        load_training_state(ckpt, other, resumed)
    assert_state_equal(other.state_dict(), model.state_dict())
    assert_state_equal(resumed.state_dict()["state"], osd["state"])


def test_prefix_within_a_name(ckpt):
    model, _, _ = job()
    compiled = nn.Sequential(torch.compile(model[0]), model[1])
    assert "0._orig_mod.weight" in compiled.state_dict()
    dcp.save({"model": compiled.state_dict()}, checkpoint_id=ckpt, no_dist=True)
    other, _, _ = job(seed=1)
    load_training_state(ckpt, other)
    assert_state_equal(other.state_dict(), model.state_dict())


class Module(nn.Module):
    """A part of a model that is called as DDP's is."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)


def test_part_that_is_called_module(ckpt):
    saved, model = Module(), Module()
    save_training_state(ckpt, saved, fsync=False)
    load_training_state(ckpt, model)
    assert_state_equal(model.state_dict(), saved.state_dict())


class Renamed(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.add_module(name, nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)


def test_rename_takes_optimizer_state_along(ckpt):
    torch.manual_seed(0)
    saved, model = Renamed("encoder"), Renamed("backbone")
    optimizer = torch.optim.AdamW(saved.parameters())
    for param in saved.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    save_training_state(ckpt, saved, optimizer, fsync=False)
    resumed = torch.optim.AdamW(model.parameters())
    for rename in (
        {"model.encoder": "model.backbone"},
        lambda name: name.replace("encoder", "backbone"),
    ):
        load_training_state(ckpt, model, resumed, rename=rename)
        assert all(map(torch.equal, model.parameters(), saved.parameters()))
        assert_state_equal(resumed.state_dict()["state"], optimizer.state_dict()["state"])
    with pytest.raises(PlanError, match=r"backbone"):
        load_training_state(ckpt, model, resumed)


def test_include_and_exclude(ckpt):
    model, optimizer, _ = job(steps=1)
    save_training_state(ckpt, model, optimizer, {"step": 3}, fsync=False)
    other, resumed, _ = job(seed=1)
    before = other[1].weight.clone()
    extra = {"step": 0}
    report = load_training_state(ckpt, other, resumed, extra, exclude=["model.1.*", "extra.*"])
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].weight, before)
    assert extra == {"step": 0}
    assert report.excluded == ["model.1.weight", "model.1.bias", "extra.step"]
    other, resumed, _ = job(seed=1)
    load_training_state(ckpt, other, resumed, include="model.*")
    assert not resumed.state
    assert torch.equal(other[1].weight, model[1].weight)


def test_globs_go_by_the_usual_names(ckpt):
    saved = job(steps=1)
    stock_of_other_names(ckpt, *saved)
    other, resumed, scheduler = job(seed=1)
    extra = {"scheduler": scheduler}
    load_training_state(ckpt, other, resumed, extra, names=APP, exclude=["optim.*", "extra.*"])
    assert not resumed.state
    assert scheduler.last_epoch == 0
    assert torch.equal(other[1].weight, saved[0][1].weight)


PARTS = ("model", "optimizer", "extra")


@pytest.mark.parametrize("part", PARTS)
def test_partial_by_part(ckpt, part):
    """What lacks in one part is left alone; in another one it is an error, and nothing has changed."""
    model, optimizer, _ = job(steps=1)
    state = training_state(model, optimizer, {"t": torch.ones(3), "step": 3})
    gone = {"model": ("model", "1.bias"), "extra": ("extra", "step")}.get(part)
    if gone is None:
        del state["optim"]["state"]["0.weight"]["exp_avg"]
    else:
        del state[gone[0]][gone[1]]
    dcp_rs.save(state, ckpt, fsync=False)
    other, resumed, _ = job(seed=1)
    extra = {"t": torch.zeros(3), "step": 0}
    for partial in (False, set(PARTS) - {part}):
        with pytest.raises(PlanError, match=r"1\.bias|exp_avg|extra\.step"):
            load_training_state(ckpt, other, resumed, extra, partial=partial)
        assert_state_equal(other.state_dict(), job(seed=1)[0].state_dict())
        assert not resumed.state
        assert extra["t"].tolist() == [0, 0, 0]
    for partial in ({part}, True):
        load_training_state(ckpt, other, resumed, extra, partial=partial)
        assert torch.equal(other[0].weight, model[0].weight)
        assert extra["t"].tolist() == [1, 1, 1]


def test_tensor_of_extra_of_another_shape_in_a_partial_load_of_the_model(ckpt):
    """The switch of the model left it alone, without a word."""
    model, _, _ = job()
    save_training_state(ckpt, model, None, {"t": torch.ones(3)}, fsync=False)
    extra = {"t": torch.zeros(2)}
    with pytest.raises(PlanError, match=r"'extra.t' has shape \(2,\) in extra, and \(3,\)"):
        load_training_state(ckpt, model, None, extra, partial={"model"})
    report = load_training_state(ckpt, model, None, extra, partial={"extra"})
    assert [mismatch.name for mismatch in report.shape_mismatched] == ["extra.t"]


@pytest.mark.parametrize("partial", ["model", {"optim"}, 3])
def test_partial_of_what_there_is_not(ckpt, partial):
    with pytest.raises(TypeError, match="partial="):
        load_training_state(ckpt, job()[0], partial=partial)


def test_model_on_meta(ckpt):
    """The load did nothing, and said that it loaded all of it."""
    save_training_state(ckpt, nn.Linear(2, 2), fsync=False)
    with pytest.raises(PlanError, match=r"on the meta device.*to_empty"):
        load_training_state(ckpt, nn.Linear(2, 2, device="meta"))


def test_manager_takes_the_same_options(tmp_path):
    model, optimizer, _ = job(steps=1)
    with dcp_rs.CheckpointManager(tmp_path) as manager:
        manager.save(1, training_state(model, optimizer, {"step": 1}))
        other, resumed, _ = job(seed=1)
        options = {"keep_settings": {"lr"}, "partial": {"extra"}, "include": ["model.*", "optim.*"]}
        resumed.param_groups[0]["lr"] = 0.7
        assert manager.load_training_state(other, resumed, {"more": 2}, **options) == 1
    assert torch.equal(other[0].weight, model[0].weight)
    assert resumed.param_groups[0]["lr"] == 0.7


def save_everywhere(path):
    model = parallelize("fsdp2", 0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with quiet():
        train_step(model, [optimizer], 0)
        model_state, optimizer_state = by_name(model, optimizer)
        extra = {"at": PerRank(Counter(dist.get_rank()), key=dist.get_rank())}
        save_training_state(f"{path}/native", model, optimizer, extra, fsync=False)
        dcp.save({"m": model_state, "o": optimizer_state}, checkpoint_id=f"{path}/stock")
        dcp.save({"model": model_state}, checkpoint_id=f"{path}/acc/pytorch_model_fsdp_0")
        dcp.save({"optimizer": optimizer_state}, checkpoint_id=f"{path}/acc/optimizer_0")
        losses = [train_step(model, [optimizer], at) for at in (1, 2)]
        return losses, whole_parameters(model)


class Counter:
    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def resume_everywhere(path, kinds):
    results = []
    for kind in kinds:
        for source, names in (
            ("native", {}),
            ("stock", {"model": "m", "optimizer": "o"}),
            ("acc", {}),
        ):
            with quiet():
                model = parallelize(kind, 9)
                params = [p for p in model.parameters() if p.requires_grad]
                optimizer = torch.optim.AdamW(params)
                load_training_state(f"{path}/{source}", model, optimizer, names=names)
                losses = [train_step(model, [optimizer], at) for at in (1, 2)]
                results.append((losses, whole_parameters(model)))
    return results


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (2, ["fsdp2", "fsdp1"]),
        pytest.param(4, ["fsdp1", "ddp"], marks=pytest.mark.slow),
        (1, ["plain"]),
    ],
)
def test_ranks_resume_from_every_source(tmp_path, ranks, kinds):
    losses, parameters = run_ranks(2, save_everywhere, tmp_path)[0]
    for got_losses, got in run_ranks(ranks, resume_everywhere, tmp_path, kinds)[0]:
        assert got_losses == pytest.approx(losses, rel=1e-5)
        for name, value in parameters.items():
            assert torch.allclose(got[name], value, atol=1e-6), name
