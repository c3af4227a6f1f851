"""Every method that a user may override in torch's planners, overridden in ours: the same body does the same.

Each body stands in a subclass, on one object, in the class itself, or in a planner that wraps
another; each time stock does it too, and what was loaded or saved, and what the body saw, has to
agree. The methods are found in the installed torch: one that is new there fails
`test_no_method_is_forgotten` until it has a body in `support.hook_bodies`.
"""

import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, RsSavePlanner, RsWriter
from support import assert_state_equal, run_ranks
from support.hook_bodies import (
    LOADS,
    SAVES,
    count,
    notes,
    plan_with_a_smaller_state,
    set_up_and_forget,
)
from support.hooks import (
    WAYS,
    in_a_delegating_wrapper,
    in_a_forwarding_wrapper,
    in_a_subclass,
    inner,
    on_the_object,
    overridable,
)

LOAD, SAVE = overridable(DefaultLoadPlanner), overridable(DefaultSavePlanner)


def test_no_method_is_forgotten():
    assert set(LOADS) == LOAD
    assert set(SAVES) == SAVE


def state():
    w = torch.arange(12.0).reshape(3, 4)
    return {
        "w": w,
        "b": torch.arange(4.0),
        "v": -torch.arange(4.0),
        "spare": torch.full((4,), 9.0),
        "nest": {"t": w.t() + 1, "step": 7, "list": [torch.ones(2), torch.zeros(2)]},
        "note": "text",
    }


def blank_of(tree):
    if isinstance(tree, dict):
        return {key: blank_of(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [blank_of(value) for value in tree]
    return torch.full(tree.shape, -1.0) if isinstance(tree, torch.Tensor) else None


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state(), storage_writer=RsWriter(path / "ours"), no_dist=True)
        dcp.save(state(), storage_writer=dcp.FileSystemWriter(path / "stock"), no_dist=True)
    return path


def cases(table):
    return [
        pytest.param(name, body, id=f"{name}-{body.__name__}")
        for name, bodies in table.items()
        for body in bodies
    ]


def outcome(planner, run):
    """What came of a load or save: what it filled, what the body saw; or the error."""
    try:
        with warnings.catch_warnings(action="ignore"):
            got = run(planner)
    except BaseException as error:  # noqa: BLE001 - CheckpointException is none
        return None, [f"{type(error).__name__}: {error}"]
    return got, sorted(notes(planner))


def load_with(reader, planner):
    got = blank_of(state())
    dcp.load(got, storage_reader=reader, planner=planner, no_dist=True)
    made = vars(inner(planner)).get("made", {})
    return got, {key: made[key] for key in sorted(made)}


#: torch takes a state dict that lacks a name of the checkpoint for one of torch 2.3, flattens it
#: anew, and so undoes the filter (docs/differences.md).
FILTERS = {set_up_and_forget: ("w",), plan_with_a_smaller_state: ("nest", "t")}


def without_filtered(state, body):
    *path, last = FILTERS[body]
    node = state
    for key in path:
        node = node[key]
    node[last] = torch.full_like(node[last], -1.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "body"), cases(LOADS))
def test_loads_do_what_stock_does(folders, monkeypatch, name, body, way):
    """With torch's planner, hooks on the object, or patched in the class, were passed by."""

    def load(kind, reader):
        with monkeypatch.context() as patch:
            return outcome(way(kind, name, body, patch), partial(load_with, reader))

    stock, ours = dcp.FileSystemReader(folders / "stock"), RsReader(folders / "ours")
    want = load(DefaultLoadPlanner, stock)
    assert want[0] is not None, want[1]
    for kind, reader in (
        (DefaultLoadPlanner, ours),
        (RsLoadPlanner, stock),
        (RsLoadPlanner, ours),
    ):
        if body in FILTERS and kind is RsLoadPlanner and reader is ours:
            without_filtered(want[0][0], body)
        got = load(kind, reader)
        assert got[1] == want[1]
        assert_state_equal(got[0], want[0])


def save_with(path, writer, reader, planner):
    dcp.save(state(), storage_writer=writer(path), planner=planner, no_dist=True)
    got = {}
    dcp.state_dict_loader._load_state_dict(
        got, reader(path), no_dist=True, planner=dcp.default_planner._EmptyStateDictLoadPlanner()
    )
    return got


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "body"), cases(SAVES))
def test_saves_do_what_stock_does(tmp_path, monkeypatch, name, body, way):
    stock, ours = (dcp.FileSystemWriter, dcp.FileSystemReader), (RsWriter, RsReader)

    def save(number, kind, storage):
        with monkeypatch.context() as patch:
            planner = way(kind, name, body, patch)
            return outcome(planner, partial(save_with, tmp_path / str(number), *storage))

    want = save(0, DefaultSavePlanner, stock)
    others = (DefaultSavePlanner, ours), (RsSavePlanner, ours), (RsSavePlanner, stock)
    for number, (kind, storage) in enumerate(others, 1):
        got = save(number, kind, storage)
        assert got[1] == want[1]
        assert_state_equal(got[0], want[0])


def sharded_state():
    mesh = init_device_mesh("cpu", (2,))
    plain = state()
    rows = distribute_tensor(plain["w"], mesh, [Shard(0)], src_data_rank=None)
    columns = distribute_tensor(plain["nest"]["t"], mesh, [Shard(1)], src_data_rank=None)
    copies = distribute_tensor(plain["v"], mesh, [Replicate()], src_data_rank=None)
    return plain | {
        "w": rows,
        "v": copies,
        "nest": plain["nest"] | {"t": columns},
        f"own{dist.get_rank()}": torch.ones(2),
    }


def sharded_blank():
    def empty(value):
        if isinstance(value, DTensor):
            return DTensor.from_local(
                torch.full_like(value.to_local(), -1.0),
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        return (
            {k: empty(v) for k, v in value.items()} if isinstance(value, dict) else blank_of(value)
        )

    return empty(sharded_state())


def load_sharded(reader, planner):
    got = sharded_blank()
    dcp.load(got, storage_reader=reader, planner=planner)
    return got


def save_sharded(path, writer, reader, planner):
    dcp.save(sharded_state(), storage_writer=writer(path), planner=planner)
    got = {}
    dcp.state_dict_loader._load_state_dict(
        got, reader(path), no_dist=True, planner=dcp.default_planner._EmptyStateDictLoadPlanner()
    )
    return got


def of_all_ranks(result):
    """The result, with what the bodies saw on all ranks: which rank saves what several have is each planner's own choice."""
    value, what = result
    gathered = [None, None]
    dist.all_gather_object(gathered, what)
    return value, sorted(itertools.chain(*gathered))


def hooks_on_two_ranks(path, ways, kind):
    torch.set_num_threads(1)
    wrong = []
    table = LOADS if kind == "loads" else SAVES
    if kind == "loads":
        dcp_rs.save(sharded_state(), path / "ours", fsync=False)
        dcp.save(sharded_state(), storage_writer=dcp.FileSystemWriter(path / "stock"))
    for number, (way, name, body) in enumerate(
        (w, n, b) for w in ways for n, bodies in table.items() for b in bodies
    ):
        if kind == "loads":
            stock, ours = (
                partial(load_sharded, dcp.FileSystemReader(path / "stock")),
                partial(load_sharded, RsReader(path / "ours")),
            )
            bases = DefaultLoadPlanner, RsLoadPlanner
        else:
            stock = partial(
                save_sharded, path / f"stock{number}", dcp.FileSystemWriter, dcp.FileSystemReader
            )
            ours = partial(
                save_sharded, path / f"ours{number}", partial(RsWriter, fsync=False), RsReader
            )
            bases = DefaultSavePlanner, RsSavePlanner
        want = of_all_ranks(outcome(way(bases[0], name, body, None), stock))
        got = of_all_ranks(outcome(way(bases[1], name, body, None), ours))
        case = f"{name}-{body.__name__}-{way.__name__}"
        if body in FILTERS:
            continue
        if want[0] is None:
            wrong.append(f"{case}: stock: {want[1]}")
            continue
        if got[1] != want[1]:
            wrong.append(f"{case}: saw {got[1]}, stock {want[1]}")
        try:
            assert_state_equal(got[0], want[0])
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    return wrong


@pytest.mark.parametrize("kind", ["loads", "saves"])
@pytest.mark.parametrize(
    "ways",
    [
        (in_a_subclass,),
        pytest.param((on_the_object, in_a_forwarding_wrapper), marks=pytest.mark.slow),
    ],
    ids=["class", "others"],
)
def test_hooks_do_what_stock_does_on_two_ranks(tmp_path, kind, ways):
    for wrong in run_ranks(2, hooks_on_two_ranks, tmp_path, ways, kind):
        assert wrong == []


def test_a_wrapper_that_is_no_planner_by_its_class_is_called(ckpt):
    """`dcp_rs.save` and `dcp_rs.load` refused it."""
    planner = in_a_delegating_wrapper(RsSavePlanner, "finish_plan", count, None)
    dcp_rs.save(state(), ckpt, planner=planner, no_dist=True)
    assert notes(planner) == ["('called',)"]
    got = blank_of(state())
    planner = in_a_delegating_wrapper(RsLoadPlanner, "finish_plan", count, None)
    dcp_rs.load(got, ckpt, planner=planner, no_dist=True)
    assert notes(planner) == ["('called',)"]
    assert_state_equal(got, state())
