"""Entry point x step x failing rank x kind of error: every rank ends, with that error, and knows the rank."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, RsWriter
from dcp_rs.engine.broadcast_read import _Exchange
from dcp_rs.engine.load import _prepare, plan_reads
from dcp_rs.engine.save import write_files
from dcp_rs.engine.writes import plan_locally
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    DcpRsError,
    PlanError,
    RankLostError,
    UnsafePickleError,
)
from dcp_rs.optim import load_training_state, save_training_state
from support import RankDiedError, rank_outcomes, run_ranks
from support.disk import SmallDisk
from support.faults import Breaks, MishapError, die_in, watched

SIZE = 3
BIG = 200_000
#: What the culprit raises by step; others get the same, or, of what does not unpickle, its text.
LOAD_STEPS = {
    "options": ValueError,
    "state_dict": MishapError,
    "metadata": CheckpointNotFoundError,
    "plan": PlanError,
    "values": UnsafePickleError,
    "data": CorruptDataError,
    "load_state_dict": MishapError,
}
SAVE_STEPS = {
    "options": ValueError,
    "state_dict": MishapError,
    "plan": DcpRsError,
    "values": DcpRsError,
    "data": OSError,
    "commit": Exception,
}
#: Where torch's own driver passes an error on.
TORCHS = ("metadata", "plan", "values", "data", "commit")


def load_cell(folder, step, how, group=None):
    """A load that fails in a step; on ranks that do not, ``step`` is None."""
    path = folder / ({"metadata": "nowhere", "data": "damaged"}.get(step, "whole"))
    state = {"w": torch.zeros(BIG), "own": torch.zeros(10), "s": Breaks(step)}
    if step == "plan":
        state["unknown"] = torch.zeros(2)
    if step == "values":
        state["bad"] = None
    options = {"verify": True, **({"threads": -1} if step == "options" else {})}
    if how == "dcp.load":
        return dcp.load(state, storage_reader=RsReader(path, **options), planner=RsLoadPlanner())
    if how == "load_state_dict":
        state["s"] = state["s"].state_dict()
        return dcp_rs.load_state_dict(state, RsReader(path, **options))
    if how in ("all", "node"):
        options |= {"replicas": how, "max_inflight_bytes": 1 << 18}
    return dcp_rs.load(state, path, process_group=group, no_dist=how == "no_dist", **options)


def save_cell(path, step, how):
    rank = dist.get_rank()
    state = {"w": torch.ones(BIG), f"own{rank}": torch.ones(BIG), "s": Breaks(step)}
    if step == "plan":
        state["m"] = torch.empty(2, device="meta")
    if step == "values":
        state["v"] = lambda: 0
    if step == "commit" and rank == 0:
        (path / "index.dcprs" / "in the way").mkdir(parents=True)
    options = {"fsync": False, **({"threads": -1} if step == "options" else {})}
    with SmallDisk(1 << 16 if step == "data" else None):
        if how == "dcp.save":
            return dcp.save(state, storage_writer=RsWriter(path, **options))
        if how == "async_save":
            return dcp_rs.async_save(state, path, **options).result(120)
        return dcp_rs.save(state, path, no_dist=how == "no_dist", **options)


def optim_cell(folder, step, how):
    model = torch.nn.Linear(30, 20)
    other = torch.nn.Linear(30, 21 if step == "plan" else 20)
    optimizer = torch.optim.SGD(
        (other if step == "optimizer" else model).parameters(), momentum=0.5
    )
    extra = {"s": Breaks(step)}
    if how == "save":
        return save_training_state(folder / "new", model, optimizer, extra, fsync=False)
    path = folder / ("nowhere" if step == "metadata" else "training")
    return load_training_state(path, other if step == "plan" else model, optimizer, extra)


def prepare(folder):
    """The checkpoints that are loaded; one of them is damaged in its data."""
    state = {
        "w": torch.arange(float(BIG)),
        "own": torch.ones(10),
        "s": {"value": torch.ones(3)},
        "bad": Path("x"),
    }
    dcp_rs.save(state, folder / "whole", no_dist=True, fsync=False)
    shutil.copytree(folder / "whole", folder / "damaged", copy_function=shutil.copy2)
    (data,) = (folder / "damaged").glob("*.safetensors")
    raw = bytearray(data.read_bytes())
    at = raw.index(torch.arange(1000.0, 1100.0).numpy().tobytes())
    raw[at] ^= 0xFF
    data.write_bytes(raw)
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    save_training_state(
        folder / "training", model, optimizer, {"s": Breaks(None)}, no_dist=True, fsync=False
    )


def cells_of(folder, culprit):  # noqa: C901 - a table
    """Each cell as (how it is called, which error is expected, on which ranks)."""
    mine = dist.get_rank() == culprit
    group = dist.new_group([0, 2])
    everyone, pair, alone = range(SIZE), (0, 2), (culprit,)
    cells, expected = {}, {}

    def add(name, cell, error, ranks=everyone):
        cells[name], expected[name] = cell, (error, ranks)

    for step, error in LOAD_STEPS.items():
        here = step if mine else None
        load = partial(load_cell, folder, here)
        for how in ("load", "all", "node"):
            add(f"{how}: {step}", lambda load=load, how=how: load(how), error)
        if step not in ("options", "load_state_dict", "state_dict"):
            add(f"load_state_dict: {step}", lambda load=load: load("load_state_dict"), error)
        if step in TORCHS:
            kind = CheckpointException
            add(f"dcp.load: {step}", lambda load=load: load("dcp.load"), kind)
        for how in ("load", "all"):
            # The rank outside does nothing meanwhile.
            def in_group(load=load, how=how):
                if dist.get_rank() in pair:
                    load(how, group)

            add(f"{how} in a group: {step}", in_group, error, pair)
        add(f"no_dist: {step}", lambda load=load: load("no_dist"), error, alone)
    for step, error in SAVE_STEPS.items():
        if step == "commit" and culprit:
            continue  # the coordinator's alone
        here = step if mine else None
        for how in ("save", "async_save", *(("dcp.save",) if step in TORCHS else ())):
            path = folder / f"{how}-{step}"
            kind = CheckpointException if how == "dcp.save" else error
            add(
                f"{how}: {step}",
                lambda here=here, how=how, path=path: save_cell(path, here, how),
                kind,
            )
    for step, error in {"state_dict": MishapError, "optimizer": PlanError}.items():
        here = step if mine else None
        add(f"optim save: {step}", lambda here=here: optim_cell(folder, here, "save"), error)
    for step, error in {
        "metadata": CheckpointNotFoundError,
        "plan": PlanError,
        "load_state_dict": MishapError,
    }.items():
        here = step if mine else None
        add(f"optim load: {step}", lambda here=here: optim_cell(folder, here, "load"), error)
    return cells, expected


def run_cells(folder, culprit):
    """The cells that did not end as they should, and why."""
    cells, expected = cells_of(folder, culprit)
    wrong = []
    for name, error in watched(cells).items():
        kind, ranks = expected[name]
        if dist.get_rank() not in ranks:
            fine = error is None
        elif kind is CheckpointException:
            fine = isinstance(error, kind) and list(error.failures) == [culprit]
        else:
            travels = kind is not MishapError or dist.get_rank() == culprit
            named = f"raised on rank {culprit}" in getattr(error, "__notes__", ())
            fine = isinstance(error, kind if travels else DcpRsError) and (named or len(ranks) == 1)
            fine = fine and (travels or "a mishap" in str(error))
        if not fine:
            wrong.append((name, repr(error), getattr(error, "__notes__", None)))
    return len(cells), wrong


@pytest.mark.filterwarnings("ignore:value 'bad'")
@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.slow), SIZE - 1])
def test_an_error_on_one_rank_is_raised_on_all(tmp_path, culprit):
    prepare(tmp_path)
    for count, wrong in run_ranks(SIZE, run_cells, tmp_path, culprit, timeout=240):
        assert wrong == []
        assert count > 50


def die(folder, culprit, entry, step):
    """A rank that is killed in a step. The others do not end by themselves: nobody hears of it by that."""
    here = step if dist.get_rank() == culprit else None
    if here in DEADLY:
        die_in(*DEADLY[here])
    state = {"w": torch.zeros(BIG), "s": Breaks(here, "killed")}
    if entry == "save":
        dcp_rs.save(state, folder / "new", fsync=False)
    elif entry == "async_save":
        dcp_rs.async_save(state, folder / "new", fsync=False).result(60)
    else:
        options = {"replicas": "all", "max_inflight_bytes": 1 << 18} if entry == "all" else {}
        dcp_rs.load(state, folder / "whole", **options)


#: Functions that a rank is killed in, and the number of the call.
DEADLY = {
    "look up": (plan_reads, 1),
    "read": (_prepare, 1),
    "exchange": (_Exchange._unpack, 2),  # in its second round, with what was received
    "describe": (plan_locally, 1),
    "write": (write_files, 1),
}
DEATHS = [
    (entry, step, culprit)
    for entry, steps in {
        "load": ("look up", "read"),
        "all": ("look up", "read", "exchange"),
        "save": ("describe", "write"),
        "async_save": ("describe", "write"),
    }.items()
    for step in ("state_dict", *steps)
    for culprit in (0, 2)
]
#: One of each kind runs always.
OFTEN = [("all", "exchange", 1), ("save", "write", 0)]


@pytest.mark.filterwarnings("ignore:value 'bad'")
@pytest.mark.parametrize(
    ("entry", "step", "culprit"),
    [
        *OFTEN,
        *(pytest.param(*death, marks=pytest.mark.slow) for death in DEATHS if death not in OFTEN),
    ],
)
def test_a_rank_that_is_killed_is_missed_by_all(tmp_path, entry, step, culprit):
    prepare(tmp_path)
    outcomes = rank_outcomes(SIZE, die, tmp_path, culprit, entry, step, timeout=60)
    assert isinstance(outcomes.pop(culprit).error, RankDiedError)
    for outcome in outcomes:
        assert type(outcome.error) is RankLostError, outcome
