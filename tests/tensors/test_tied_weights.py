"""Models with tied weights, from checkpoints that hold them under one name: those of Hugging Face, above all."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_model
from torch import nn

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, _core
from dcp_rs.errors import PlanError
from support import assert_state_equal, run_ranks
from support.both import save_stock
from support.forged import save_items, whole_item


class Model(nn.Module):
    """An embedding, a layer, and an output layer that is tied to the embedding."""

    def __init__(self, *, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(50, 8), "layer": nn.Linear(8, 8)})
        self.lm_head = nn.Linear(8, 50, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight


HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def without_head(model):
    return {name: value for name, value in model.state_dict().items() if name != HEAD}


@pytest.fixture(params=["safetensors", "transformers", "stock", "native"])
def one_name(request, tmp_path):
    """A checkpoint of ``Model(seed=1)`` that holds its tied weights once; the first under the head's name."""
    model, path = Model(seed=1), tmp_path / request.param
    match request.param:
        case "safetensors":
            path.mkdir()
            save_model(model, path / "model.safetensors")
        case "transformers":
            torch.save(model.state_dict(), tmp_path / "model.pt")
            dcp_rs.convert(tmp_path / "model.pt", path, to="safetensors")
        case "stock":
            save_stock(without_head(model), path)
        case "native":
            dcp_rs.save(without_head(model), path, fsync=False)
    return path


def test_a_tied_model_loads(one_name):
    model, want = Model(), Model(seed=1)
    planner = RsLoadPlanner()
    state = model.state_dict()
    dcp_rs.load_state_dict(state, RsReader(one_name), planner=planner)
    assert_state_equal(dict(model.state_dict()), dict(want.state_dict()))
    held, other = (HEAD, EMBED) if one_name.name == "safetensors" else (EMBED, HEAD)
    assert planner.report.tied == {other: held}
    assert planner.report.missing == []


@pytest.mark.parametrize("read_items", [False, True])
def test_replaced_tensors_stay_tied(one_name, read_items):
    class Items(RsLoadPlanner):
        def resolve_tensor(self, read_item):
            return super().resolve_tensor(read_item)

    want = {name: value.to(torch.bfloat16) for name, value in Model(seed=1).state_dict().items()}
    for device in ("cpu", "meta"):
        with torch.device(device):
            state = Model().state_dict()
        planner = (Items if read_items else RsLoadPlanner)(dtype=torch.bfloat16, assign=True)
        dcp_rs.load_state_dict(state, RsReader(one_name), planner=planner)
        assert_state_equal(dict(state), want)
        assert state[HEAD].data_ptr() == state[EMBED].data_ptr()


def test_only_the_same_memory_counts(tmp_path):
    weight = torch.zeros(6, 6)
    dcp_rs.save({"w": torch.ones(6, 6), "other": torch.ones(6, 6)}, tmp_path, fsync=False)
    for view in (weight[:3], weight.t(), weight.view(torch.int32), weight.clone(), weight.view(36)):
        with pytest.raises(PlanError, match="has no 'x'"):
            dcp_rs.load({"w": weight, "x": view}, tmp_path)
        planner = RsLoadPlanner(allow_partial_load=True)
        dcp_rs.load_state_dict({"w": weight, "x": view}, RsReader(tmp_path), planner=planner)
        assert planner.report.missing == ["x"]
        assert planner.report.tied == {}
    with pytest.raises(PlanError, match="has no 'x'"):  # what is there is not wanted
        dcp_rs.load({"w": weight, "x": weight, "other": torch.zeros(6, 6)}, tmp_path, exclude="w")
    small = torch.zeros(5, 6)
    planner = RsLoadPlanner(allow_partial_load=True)
    dcp_rs.load_state_dict(
        {"w": small, "x": small, "other": weight, "y": weight}, RsReader(tmp_path), planner=planner
    )
    assert planner.report.missing == ["x"]
    assert planner.report.tied == {"y": "other"}


def _fsdp(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(Model(), mesh=mesh)
    state = model.state_dict()
    planner = RsLoadPlanner()
    dcp.load(state, storage_reader=RsReader(path), planner=planner)
    return {
        name: value.full_tensor() for name, value in model.state_dict().items()
    }, planner.report.tied


def test_under_fsdp(tmp_path):
    model = Model(seed=1)
    save_model(model, tmp_path / "model.safetensors")
    for got, tied in run_ranks(2, _fsdp, str(tmp_path / "model.safetensors")):
        assert_state_equal(got, dict(model.state_dict()))
        assert tied == {EMBED: HEAD}


def test_a_tied_tensor_of_which_a_part_is_stored_loads_without_it(tmp_path):
    """A comparison for a warning read elements that are not stored, and raised."""
    rows = torch.arange(8.0).reshape(8, 1)
    whole = whole_item("embed", rows, path=("embed",), position=0)
    place = {"shape": (8, 1), "offsets": (0, 0), "sizes": (4, 1), "path": ("head",), "position": 1}
    part = _core.SaveItem("head", 16, dtype="float32", **place)
    address = rows.data_ptr()
    parts = [_core.Part(0, 0, address, 32), _core.Part(1, 0, address, 16)]
    save_items(tmp_path, [whole, part], parts, ["embed", "head"])
    weight = torch.full((8, 1), -1.0)
    state = {"embed": weight, "head": weight}
    report = dcp_rs.load(state, tmp_path, allow_partial_load=True, no_dist=True)
    assert weight.equal(rows)
    assert report.incomplete == ["head"]
