"""Steps on the disks of nodes: saved there, copied to other nodes, uploaded behind, and restored.

A node is a name and a folder, and some processes of this machine.
"""

import io
import json
import os
import re
import shutil
import signal
import threading
import time
import warnings
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

import dcp_rs
from dcp_rs import CheckpointManager
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    RankLostError,
    RunTakenOverError,
    StorageError,
    UnsupportedError,
)
from dcp_rs.steps.coordinator import Coordinator
from dcp_rs.steps.folder_store import FolderStepStore
from dcp_rs.steps.node_load import NodeLoad
from dcp_rs.steps.nodes import NodeStepStore
from dcp_rs.steps.object_store import ObjectStepStore
from support import rank_outcomes, run_ranks
from support.disk import SmallDisk
from support.object_server import Fault, object_server

ROWS = 24_000


@pytest.fixture
def server():
    with object_server() as store:
        yield store


def state_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(4.0 * ROWS).reshape(ROWS, 4) + step
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "whole": torch.full((10_000,), float(step)),
        "step": step,
    }


def manager_of(base, root, per_node=1, options=None, **more):
    """A manager of this rank; each node has a folder of its own under ``base``."""
    node = f"node{dist.get_rank() // per_node}"
    given = {} if options is None else {"storage_options": options}
    return CheckpointManager(root, local=Path(base) / node, node=node, **given, **more)


def loaded(manager, step=None, **options):
    state = state_of(-1)
    with warnings.catch_warnings(action="ignore"):
        found = manager.load(state, step, **options)
    want = state_of(-1 if found is None else found)
    assert torch.equal(state["rows"].to_local(), want["rows"].to_local())
    assert torch.equal(state["whole"], want["whole"])
    assert state["step"] == want["step"]
    return found


def save(base, root, steps, per_node=1, asynchronous=False, **options):
    with manager_of(base, root, per_node, **options) as manager:
        for step in steps:
            (manager.async_save if asynchronous else manager.save)(
                step, state_of(step), metrics={"loss": 1.0 / step}
            )
    return manager.tiers()


def resume(base, root, per_node=1, step=None, verify="auto", **options):
    """The step that was loaded, the bytes that were wanted, and those that came from the node."""
    with manager_of(base, root, per_node, **options) as manager:
        found = loaded(manager, step, verify=verify)
    report = manager.report
    if report is None:
        return found, 0, 0
    return found, report.bytes_wanted, sum(report.bytes_from_tiers.values())


def call(function, how):
    return function(**how)


def ranks(size, function, **how):
    return run_ranks(size, call, function, how)


def steps_at(root):
    return sorted(p.name for p in Path(root).glob("step-*") if (p / "index.dcprs").exists())


def steps_on(server):
    return sorted({k.split("/")[1] for k in server.keys("run/") if k.endswith("index.dcprs")})


def data_files(folder):
    return sorted(Path(folder).glob("*.safetensors"))


def got_data(server):
    return [r for r in server.requests if r.kind == "get" and r.key.endswith(".safetensors")]


def on_store(server, **more):
    return {"root": server.url("run"), "options": server.options(max_retries=0, **more)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_step_is_on_all_nodes_and_some_go_to_the_root(tmp_path, asynchronous):
    base, root = tmp_path / "nodes", tmp_path / "root"
    how = {"per_node": 2, "upload_every": 2, "asynchronous": asynchronous}
    for told in ranks(4, save, base=base, root=root, steps=[1, 2, 3, 4, 5], **how):
        assert (told.local_step, told.root_step, told.steps_behind) == (5, 5, 0)
    assert steps_at(root) == ["step-1", "step-3", "step-5"]
    for node in ("node0", "node1"):
        assert steps_at(base / node) == ["step-4", "step-5"]
        assert len(data_files(base / node / "step-5")) == 2
    assert dcp_rs.verify(root / "step-5").ok
    assert CheckpointManager(root, no_dist=True).steps()[0].metrics == {"loss": 1.0}
    shutil.rmtree(root)
    for found, _wanted, from_node in ranks(4, resume, base=base, root=root, per_node=2):
        assert found == 5
        assert from_node
    # The step is at the root again, since the restart went on with its upload.
    assert steps_at(root) == ["step-5"]


def test_copies_are_on_the_next_node(tmp_path):
    base, root = tmp_path / "nodes", tmp_path / "root"
    ranks(3, save, base=base, root=root, steps=[1, 2], copies=1, asynchronous=True)
    for node in range(3):
        names = [path.name for path in data_files(base / f"node{node}" / "step-2")]
        assert sorted(name.split("-")[2] for name in names) == sorted(
            f"r{rank:05d}" for rank in (node, (node - 1) % 3)
        )
        for path in data_files(base / f"node{node}" / "step-2"):
            assert path.read_bytes() == (root / "step-2" / path.name).read_bytes()
    assert steps_at(root) == ["step-1", "step-2"]


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_node_that_lost_its_disk_gets_its_files_from_others(tmp_path, server, gone):
    base, at, server.page = tmp_path / "nodes", on_store(server), 1_000
    ranks(4, save, base=base, steps=[1, 2], copies=1, upload_every=2, **at)
    shutil.rmtree(base / f"node{gone}")
    server.requests.clear()
    for rank, (found, wanted, from_node) in enumerate(ranks(4, resume, base=base, copies=1, **at)):
        assert found == 2
        assert wanted
        assert bool(from_node) == (rank != gone)
    assert len(server.requests) == 6  # as docs/design/023-local-disks.md says
    assert not got_data(server)
    # Its tensors were filled by other ranks: nothing went over its disk.
    assert steps_at(base / f"node{gone}") == ["step-2"]
    assert not data_files(base / f"node{gone}" / "step-2")


def state_of_kinds(step, rows=7, dtype=torch.float32):
    """Tensors of a rank that other ranks send in different ways."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide = torch.arange(64.0 * 4096).reshape(4096, 64).mul(step)
    tied = torch.full((3_000,), 2.0 * step)
    return {
        "columns": distribute_tensor(wide.clone(), mesh, [Shard(1)], src_data_rank=None),
        "lines": distribute_tensor(wide.clone(), mesh, [Shard(0)], src_data_rank=None),
        "turned": torch.arange(6_000.0).mul(step).reshape(60, 100).T,
        "cast": torch.full((40, 50), float(step)).to(dtype),
        "tied": tied,
        "tied again": tied,
        "none": torch.zeros(0, 4),
        "quantized": torch.quantize_per_tensor(torch.ones(50) * step, 0.5, 0, torch.qint8),
        "numbers": list(range(20_000 * step)),
        **{f"small {i}": torch.full((i,), float(step)) for i in range(rows)},
    }


def save_kinds(base, root):
    with manager_of(base, root, copies=1, upload_every=9) as manager:
        for step in (1, 2):
            manager.save(step, state_of_kinds(step))


def load_kinds(base, root, per_node=1, **options):
    state, want = state_of_kinds(3, dtype=torch.float64), state_of_kinds(2, dtype=torch.float64)
    with manager_of(base, root, per_node, copies=1) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert manager.load(state, dtype_policy="cast", **options) == 2
    for name, value in want.items():
        got = state[name]
        if name in ("columns", "lines"):
            assert torch.equal(got.to_local(), value.to_local())
        elif name == "numbers":
            assert got == value
        else:
            assert torch.equal(got, value), name


@pytest.mark.parametrize("size", [2, 3, 4])
def test_other_ranks_send_every_kind_of_entry(tmp_path, size):
    base, root = tmp_path / "nodes", tmp_path / "root"
    ranks(4, save_kinds, base=base, root=root)
    shutil.rmtree(base / ("node3" if size == 3 else "node2"))
    if size == 2:  # with all of the files, and two ranks on each node
        shutil.copytree(base / "node3", base / "node1", dirs_exist_ok=True)
    per_node = 4 // size if size == 2 else 1
    before = len(list(base.glob("*/step-2/*.safetensors")))
    ranks(4 if size == 2 else size, load_kinds, base=base, root=root, per_node=per_node)
    assert len(list(base.glob("*/step-2/*.safetensors"))) == before  # one attempt was enough


def trained(step, kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    for _ in range(step):
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Loader:
    """A loader of each rank's own documents."""

    def __init__(self, step):
        self.state = {"at": 100 * step + dist.get_rank(), "seen": torch.full((50_000,), step)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def extra_of(step):
    return {
        "step": step,
        "draws": dcp_rs.optim.RngState(),
        "loader": dcp_rs.optim.PerRank(Loader(step)),
        "mixture": {"weights": [step] * 10_000},
    }


def save_training(base, root, per_node, kind):
    with manager_of(base, root, per_node, copies=1, upload_every=9) as manager:
        for step in (1, 2):
            torch.manual_seed(0)
            parts = trained(step, kind)
            torch.manual_seed(100 * step + dist.get_rank())
            manager.save(step, dcp_rs.optim.training_state(*parts, extra_of(step)))


def load_training(base, root, per_node, kind):
    extra, found, wanted = extra_of(0), trained(1, kind), trained(2, kind)
    with manager_of(base, root, per_node, copies=1) as manager:
        with warnings.catch_warnings(action="ignore" if kind == "fsdp1" else "error"):
            assert manager.load_training_state(*found, extra=extra) == 2
        assert not manager.passed_over
    drawn = torch.rand(3)
    torch.manual_seed(200 + dist.get_rank())
    assert torch.equal(drawn, torch.rand(3))
    loader, same = extra["loader"].value.state, Loader(2).state
    assert loader["at"] == same["at"]
    assert torch.equal(loader["seen"], same["seen"])
    assert (extra["step"], extra["mixture"]) == (2, {"weights": [2] * 10_000})
    assert leaves(found) == leaves(wanted)


def leaves(parts):
    """The values of state dicts, in which those of tensors are lists."""
    with warnings.catch_warnings(action="ignore"):
        states = tree_leaves([part.state_dict() for part in parts])
    local = (value.to_local() if isinstance(value, DTensor) else value for value in states)
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in local]


@pytest.mark.parametrize(
    ("kind", "per_node", "lost"),
    [("fsdp2", 1, None), ("fsdp2", 1, "node2"), ("fsdp2", 2, "node0"), ("fsdp1", 1, "node1")],
)
def test_training_state_is_sent_without_its_files(tmp_path, kind, per_node, lost):
    """No node has all files, and each rank needs the settings and the versions of modules."""
    base, root = tmp_path / "nodes", tmp_path / "root"
    how = {"base": base, "root": root, "per_node": per_node, "kind": kind}
    ranks(4, save_training, **how)
    if lost is not None:
        shutil.rmtree(base / lost)
    nodes = [f"node{number}" for number in range(4 // per_node)]
    before = [len(data_files(base / node / "step-2")) for node in nodes]
    assert before == [0 if node == lost else 2 * per_node for node in nodes]
    ranks(4, load_training, **how)
    assert [len(data_files(base / node / "step-2")) for node in nodes] == before


@pytest.mark.parametrize("where", ["the root", "nowhere"])
def test_damaged_copy_of_a_lost_file_comes_from_the_next_place(tmp_path, where):
    """The rank that sends finds the damage, and no rank waits for it."""
    base, root = tmp_path / "nodes", tmp_path / "root"
    options = {"copies": 1, "upload_every": 1 if where == "the root" else 9}
    ranks(3, save, base=base, root=root, steps=[1, 2], **options)
    shutil.rmtree(base / "node0")
    copied = [path for path in data_files(base / "node1" / "step-2") if "r00000" in path.name]
    tear(copied[0], "flipped")
    found = {got[0] for got in ranks(3, resume, base=base, root=root, verify=True, **options)}
    assert found == {1 if where == "nowhere" else 2}


def load_while_a_rank_fails(base, root, how, victim):
    """Once all ranks know who sends, the files of one rank break, or its search for sources."""
    from dcp_rs.engine.peer_reads import PeerReads
    from dcp_rs.transfer.load import Load

    begin, search = PeerReads.__init__, PeerReads.source_of

    def begin_and_break(self, *args):
        begin(self, *args)
        for path in data_files(Path(base) / f"node{victim}" / "step-2"):
            tear(path, how)

    def fail(self, chunk):
        if how == "at once" or self.counts.wanted:
            raise OSError("the search failed")
        return search(self, chunk)

    def fail_to_read(self):
        raise OSError("the read failed")

    if dist.get_rank() == victim:
        if how in ("short", "missing"):
            PeerReads.__init__ = begin_and_break
        elif how == "own read":
            Load.run = fail_to_read
        else:
            PeerReads.source_of = fail
    manager = manager_of(base, root)
    try:
        with warnings.catch_warnings(action="ignore"):
            manager.load(state_of(-1), 2)
    except OSError as error:
        manager.close()
        return str(error), error.__notes__
    return None


def load_with_slow_peers(base, root):
    """No rank begins to send before it has read its own part."""
    from dcp_rs.engine.peer_reads import PeerReads
    from dcp_rs.transfer.load import Load

    has_read, run, fill = threading.Event(), Load.run, PeerReads.fill

    def run_and_tell(self):
        run(self)
        has_read.set()

    def wait_and_fill(self, targets):
        assert has_read.wait(20)
        fill(self, targets)

    Load.run, PeerReads.fill = run_and_tell, wait_and_fill
    return resume(base, root)[0]


def test_ranks_read_while_they_send(tmp_path):
    base, root = tmp_path / "nodes", tmp_path / "root"
    ranks(3, save, base=base, root=root, steps=[1, 2], copies=1, upload_every=9)
    shutil.rmtree(base / "node0")
    given = {"base": base, "root": root}
    outcomes = rank_outcomes(3, call, load_with_slow_peers, given, fresh=True)
    assert [outcome.value for outcome in outcomes] == [2, 2, 2]


@pytest.mark.parametrize(
    ("how", "victim"),
    [("short", 1), ("missing", 1), ("at once", 0), ("at once", 1), ("later", 0), ("own read", 1)],
)
def test_no_rank_waits_for_one_that_fails_while_ranks_send(tmp_path, how, victim):
    base, root = tmp_path / "nodes", tmp_path / "root"
    ranks(3, save, base=base, root=root, steps=[1, 2], copies=1, upload_every=9)
    shutil.rmtree(base / "node0")
    before = time.monotonic()
    given = {"base": base, "root": root, "how": how, "victim": victim}
    for outcome in rank_outcomes(3, call, load_while_a_rank_fails, given, fresh=True):
        why, notes = outcome.value
        if how in ("short", "missing"):
            assert "there is no step 2 in" in why
            assert "on the nodes: step-2: some of its files are nowhere" in notes
        else:
            assert why == ("the read failed" if how == "own read" else "the search failed")
    assert time.monotonic() - before < 60


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_other_numbers_of_nodes_after_the_loss_of_one(tmp_path, size):
    base, root = tmp_path / "nodes", tmp_path / "root"
    ranks(4, save, base=base, root=root, steps=[1, 2], copies=1, upload_every=5)
    shutil.rmtree(base / "node3")
    # One or two of the nodes have too few of the files between them.
    want = 2 if size > 2 else 1
    assert [got[0] for got in ranks(size, resume, base=base, root=root, copies=1)] == [want] * size


def test_without_copies_a_lost_node_costs_the_steps_since_the_last_upload(tmp_path, server):
    base, at = tmp_path / "nodes", on_store(server)
    ranks(3, save, base=base, steps=[1, 2, 3, 4, 5], upload_every=3, keep_local=3, **at)
    assert steps_on(server) == ["step-1", "step-4"]
    shutil.rmtree(base / "node1")
    for rank, (found, wanted, from_node) in enumerate(ranks(3, resume, base=base, **at)):
        assert found == 4
        assert from_node < wanted
        assert bool(from_node) == (rank != 1)


def test_all_nodes_gone(tmp_path, server):
    base, at = tmp_path / "nodes", on_store(server)
    ranks(3, save, base=base, steps=[1, 2], copies=1, **at)
    shutil.rmtree(base)
    assert [got[0] for got in ranks(2, resume, base=base, **at)] == [2, 2]


def tear(path, how):
    data = path.read_bytes()
    if how == "short":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        path.unlink()


@pytest.mark.parametrize("where", ["a node", "the root", "nowhere"])
@pytest.mark.parametrize("how", ["short", "flipped", "missing"])
def test_torn_file_of_a_node_comes_from_the_next_place(tmp_path, how, where):
    base, root = tmp_path / "nodes", tmp_path / "root"
    options = {
        "a node": {"copies": 1, "upload_every": 9},
        "the root": {},
        "nowhere": {"upload_every": 9},
    }[where]
    ranks(2, save, base=base, root=root, steps=[1, 2], **options)
    tear(data_files(base / "node0" / "step-2")[0], how)
    found = [got[0] for got in ranks(2, resume, base=base, root=root, verify=True, **options)]
    assert found == [1 if where == "nowhere" else 2] * 2
    if where == "a node":  # a file that is there, but damaged, is replaced
        there = [len(data_files(base / node / "step-2")) for node in ("node0", "node1")]
        assert there == [1 if how == "missing" else 2, 2]


def resume_in_part(base, root):
    with warnings.catch_warnings(record=True) as told, manager_of(base, root) as manager:
        warnings.simplefilter("always")
        assert manager.load(state_of(-1), verify=True) == 1
        return [step.number for step in manager.passed_over], [str(w.message) for w in told]


def test_damaged_step_of_the_nodes_is_told(tmp_path):
    base, root = tmp_path / "nodes", tmp_path / "root"
    ranks(2, save, base=base, root=root, steps=[1, 2], upload_every=9)
    tear(data_files(base / "node0" / "step-2")[0], "flipped")
    for rank, (skipped, told) in enumerate(ranks(2, resume_in_part, base=base, root=root)):
        assert skipped == [2]
        assert sum("not resumed from step-2" in text for text in told) == (rank == 0)


def save_and_die(base, root, at, victim, copies=1, **options):
    """Step 1 is saved; while step 2 is, one rank is killed."""
    from dcp_rs.steps import coordinator, exchange, nodes

    manager = manager_of(base, root, copies=copies, **options)
    manager.save(1, state_of(1))

    def die(*_args, **_kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        if at == "copy":
            exchange._send = die
        elif at == "prepare":
            nodes.sync = die
        elif at == "publish":
            nodes.Nodes._publish = die
        elif at == "after":
            # That of step 1 at the root may come meanwhile.
            committed = coordinator.Coordinator.committed
            coordinator.Coordinator.committed = lambda self, step, *more: (
                die() if step == 2 else committed(self, step, *more)
            )
    try:
        manager.save(2, state_of(2))
    except RankLostError:
        return "lost"
    return "saved"


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("at", ["copy", "prepare", "publish", "after"])
def test_node_that_dies_during_a_save_costs_that_step_at_most(tmp_path, at, victim):
    base, root = tmp_path / "nodes", tmp_path / "root"
    how = {"base": base, "root": root, "at": at, "victim": victim}
    before = time.monotonic()
    outcomes = rank_outcomes(3, call, save_and_die, how, fresh=True)
    assert time.monotonic() - before < 60
    assert {o.value for o in outcomes if o.error is None} == {"lost"}
    assert outcomes[victim].error is not None
    shutil.rmtree(base / f"node{victim}")
    found = {got[0] for got in ranks(3, resume, base=base, root=root, copies=1)}
    # Before the first node has the index, the step is nowhere.
    assert found == ({1} if at in ("copy", "prepare") else {2})


def save_and_fail(base, root):
    from dcp_rs.steps import nodes

    manager = manager_of(base, root, copies=1)
    manager.save(1, state_of(1))
    sync = nodes.sync

    def full(path):
        raise OSError(28, "No space left on device", os.fspath(path))

    if dist.get_rank() == 1:
        nodes.sync = full
    try:
        manager.save(2, state_of(2))
    except OSError as error:
        nodes.sync = sync
        assert not data_files(Path(base) / f"node{dist.get_rank()}" / "step-2")
        manager.save(3, state_of(3))
        manager.close()
        return error
    return None


def test_save_that_one_node_cannot_finish_is_on_none(tmp_path):
    base, root = tmp_path / "nodes", tmp_path / "root"
    outcomes = rank_outcomes(3, call, save_and_fail, {"base": base, "root": root}, fresh=True)
    for outcome in outcomes:
        assert isinstance(outcome.value, OSError), outcome
    assert [steps_at(base / f"node{node}") for node in range(3)] == [["step-1", "step-3"]] * 3


def save_while_the_root_is_gone(base, root, **options):
    manager = manager_of(base, root, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        try:
            manager.close()
        except StorageError as error:
            why = str(error)
        else:
            why = ""
    return why, [str(w.message) for w in told if "not at" in str(w.message)]


def resume_and_leave(base, root, **options):
    manager = manager_of(base, root, **options)
    found = loaded(manager)
    manager._release()
    return found


def test_root_out_of_reach_delays_no_save_and_is_told(tmp_path, server):
    base, at = tmp_path / "nodes", on_store(server, retry_timeout=1)
    server.faults = [Fault(status=503, times=None)]
    for why, told in ranks(2, save_while_the_root_is_gone, base=base, keep_local=1, **at):
        assert "1, 2, 3" in why
        # One warning for each step, however many attempts there were.
        steps = [re.search(r"step (\d) is on the nodes", text)[1] for text in told]
        assert sorted(steps) == ["1", "2", "3"]
    # What is still to go up outlives keep_local.
    assert steps_at(base / "node0") == ["step-1", "step-2", "step-3"]
    # A restart loads the newest step of the nodes meanwhile.
    assert ranks(2, resume_and_leave, base=base, **at) == [3, 3]
    server.faults = []
    assert [got[0] for got in ranks(2, resume, base=base, **at)] == [3, 3]
    assert steps_on(server) == ["step-1", "step-2", "step-3"]


@pytest.mark.parametrize("number", range(1, 14, 3))
def test_upload_that_is_cut_off_goes_on_and_sends_nothing_twice(tmp_path, server, number):
    base, at = tmp_path / "nodes", on_store(server, retry_timeout=1)
    count = 0

    def is_due(request):
        nonlocal count
        count += request.key.startswith("run")
        return count >= number

    server.faults = [Fault(reset=True, times=None, matches=is_due)]
    outcomes = rank_outcomes(2, call, save, {"base": base, "steps": [1], **at}, fresh=True)
    assert all(isinstance(o.error, StorageError) or o.error is None for o in outcomes)
    server.faults = []
    there = {key for key in server.keys("run/") if key.endswith(".safetensors")}
    server.requests.clear()
    assert [got[0] for got in ranks(2, resume, base=base, **at)] == [1, 1]
    assert steps_on(server) == ["step-1"]
    assert not {r.key for r in server.requests if r.kind == "put"} & there
    got = tmp_path / "got"
    server.get_folder("run/step-1", got)
    assert dcp_rs.verify(got).ok


def test_restart_uploads_the_files_of_a_lost_node_from_its_copies(tmp_path, server):
    base, at = tmp_path / "nodes", on_store(server, retry_timeout=1)
    server.faults = [Fault(status=503, times=None)]
    rank_outcomes(3, call, save, {"base": base, "steps": [1, 2], "copies": 1, **at}, fresh=True)
    server.faults = []
    shutil.rmtree(base / "node0")
    assert [got[0] for got in ranks(3, resume, base=base, copies=1, **at)] == [2, 2, 2]
    assert steps_on(server) == ["step-1", "step-2"]


def take_over(base, root):
    """The first rank runs; the second, a run of its own, takes its folder."""
    me = dist.get_rank()
    local = Path(base) / "node"
    manager = CheckpointManager(root / f"root{me}", local=local, no_dist=True)
    if me == 0:
        manager.save(1, {"step": 1})
    dist.barrier()
    if me == 1:
        state = {"step": 0}
        assert manager.load(state) == 1
        manager.save(2, {"step": 2})
    dist.barrier()
    if me == 0:
        with pytest.raises(RunTakenOverError):
            manager.save(3, {"step": 3})
    dist.barrier()
    manager.close()
    return steps_at(local)


def test_of_two_runs_in_one_folder_the_first_learns_that_it_is_over(tmp_path):
    for names in run_ranks(2, take_over, tmp_path / "nodes", tmp_path):
        assert names == ["step-1", "step-2"]


def go_back(base, root):
    with manager_of(base, root, upload_every=9, keep_local=9) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step))
    with manager_of(base, root, upload_every=9, keep_local=9) as manager:
        loaded(manager, 2)
        with warnings.catch_warnings(action="ignore"):
            manager.save(3, state_of(3))
    with manager_of(base, root) as manager:
        return loaded(manager)


def test_steps_after_one_that_the_run_went_back_to_count_as_older(tmp_path):
    assert ranks(2, go_back, base=tmp_path / "nodes", root=tmp_path / "root") == [3, 3]


def test_step_that_exists_is_replaced_by_force_alone(tmp_path):
    manager = CheckpointManager(tmp_path / "root", local=tmp_path / "node", no_dist=True)
    with manager:
        manager.save(1, {"x": torch.zeros(3)})
        with pytest.raises(CheckpointExistsError):
            manager.save(1, {"x": torch.ones(3)})
        manager.save(1, {"x": torch.ones(3)}, force=True)
    state = {"x": torch.zeros(3)}
    for path in (tmp_path / "root/step-1", tmp_path / "node/step-1"):
        dcp_rs.load(state, path)
        assert torch.equal(state["x"], torch.ones(3))
        assert len(data_files(path)) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("loads", "saves"), [([10], 11), ([None], 10), ([], 11)])
def test_latest_step_is_the_one_to_load_while_the_root_does_not_know_of_a_roll_back(
    tmp_path, loads, saves
):
    """It was the step that the run had left behind, which has the higher number."""
    root, options = tmp_path / "root", {"local": tmp_path / "node", "no_dist": True}
    with CheckpointManager(root, **options) as manager:
        for step in (10, 20):
            manager.save(step, {"x": torch.zeros(3)})
    manager = CheckpointManager(root, **options)
    for step in loads:  # if there is none, this is a new run in the folders of an old one
        manager.load({"x": torch.zeros(3)}, step)
    root.rename(tmp_path / "away")
    root.touch()  # the root cannot be reached
    manager.save(saves, {"x": torch.zeros(3)}, force=True)
    with pytest.raises(StorageError):
        manager.close()
    root.unlink()
    (tmp_path / "away").rename(root)
    manager = CheckpointManager(root, **options)
    assert manager.latest_step() == saves
    assert manager.load({"x": torch.zeros(3)}) == saves
    manager.close()


@pytest.mark.filterwarnings("ignore:.*count as newer")
def test_later_step_does_not_reach_the_root_while_the_run_goes_back(tmp_path, monkeypatch):
    """Its upload began in the middle of the load. Then the root refused the step in its place."""
    root, options = tmp_path / "root", {"local": tmp_path / "node", "no_dist": True}
    with CheckpointManager(root, **options) as manager:
        for step in (1, 4):
            manager.save(step, {"x": torch.zeros(3)})
    shutil.rmtree(root / "step-4")
    go_on, has_begun = threading.Event(), threading.Event()
    look, access, begin = NodeStepStore.look_at, NodeLoad.access, Coordinator.begin_upload

    def look_at(store, number):
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(60)
        return look(store, number)

    def read_while_it_begins(load, choice):
        if choice.step == 1:
            go_on.set()
            has_begun.wait(1)
        return access(load, choice)

    def begin_upload(coordinator, step, files, *, force):
        begin(coordinator, step, files, force=force)
        has_begun.set()

    monkeypatch.setattr(NodeStepStore, "look_at", look_at)
    monkeypatch.setattr(NodeLoad, "access", read_while_it_begins)
    monkeypatch.setattr(Coordinator, "begin_upload", begin_upload)
    with CheckpointManager(root, **options) as manager:
        state = {"x": torch.ones(3)}
        assert manager.load(state) == 4
        assert manager.load(state, 1) == 1
        manager.save(4, {"x": torch.ones(3)})
    with dcp_rs.open(root / "step-4") as checkpoint:
        assert checkpoint["x"].tolist() == [1.0, 1.0, 1.0]


def test_load_of_a_step_that_is_nowhere_ends_no_other_run(tmp_path):
    at = {"local": tmp_path / "node", "no_dist": True}
    with CheckpointManager(tmp_path / "root", **at) as running:
        running.save(1, {"x": torch.zeros(3)})
        for step, error in ((9, CheckpointNotFoundError), (-1, ValueError)):
            with CheckpointManager(tmp_path / "root", **at) as other, pytest.raises(error):
                other.load({"x": torch.zeros(3)}, step)
        running.save(2, {"x": torch.ones(3)})
    assert steps_at(tmp_path / "root") == ["step-1", "step-2"]


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("kind", [FolderStepStore, ObjectStepStore])
def test_upload_that_is_not_wanted_any_more_leaves_no_data(
    tmp_path, server, monkeypatch, kind, again
):
    """A step is saved again, or deleted, between the upload of its data and that of its index."""
    is_sent, go_on = threading.Event(), threading.Event()
    put_file = kind.put_file

    def put(store, path, to):
        put_file(store, path, to)
        is_sent.set()
        assert go_on.wait(60)

    def data():
        if kind is FolderStepStore:
            return data_files(tmp_path / "root/step-1")
        return [key for key in server.keys("run/step-1/") if key.endswith(".safetensors")]

    monkeypatch.setattr(kind, "put_file", put)
    root, options = tmp_path / "root", None
    if kind is ObjectStepStore:
        root, options = server.url("run"), server.options()
    with CheckpointManager(
        root, local=tmp_path / "node", storage_options=options, no_dist=True
    ) as manager:
        manager.save(1, {"x": torch.zeros(3)})
        assert is_sent.wait(60)
        assert len(data()) == 1
        if again:
            manager.save(1, {"x": torch.ones(3)}, force=True)
        else:
            manager.delete(1)
        go_on.set()
    assert len(data()) == again
    assert manager.latest_step() == (1 if again else None)


def test_delete_removes_a_step_everywhere(tmp_path):
    with CheckpointManager(tmp_path / "root", local=tmp_path / "node", no_dist=True) as manager:
        for step in (1, 2):
            manager.save(step, {"x": torch.zeros(3)}, extra_files={"readme": b"hello"})
    assert (tmp_path / "root/step-2/readme").read_bytes() == b"hello"
    with CheckpointManager(tmp_path / "root", local=tmp_path / "node", no_dist=True) as manager:
        manager.delete(2)
        assert manager.latest_step() == 1
        with pytest.raises(CheckpointNotFoundError):
            manager.delete(2)


def test_calls_come_at_each_commit(tmp_path):
    saved, uploaded = [], []
    with CheckpointManager(
        tmp_path / "root",
        local=tmp_path / "node",
        upload_every=2,
        no_dist=True,
        on_saved=saved.append,
        on_uploaded=uploaded.append,
    ) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"x": torch.zeros(3)})
        assert manager.latest_step() == 3
    assert [path.name for path in saved] == ["step-1", "step-2", "step-3"]
    assert saved[0].parent == tmp_path / "node"
    assert [path.name for path in uploaded] == ["step-1", "step-3"]
    assert uploaded[0].parent == tmp_path / "root"


def test_steps_command_shows_where_each_step_is(tmp_path):
    from dcp_rs.cli import main

    root, base = tmp_path / "root", tmp_path / "nodes"
    ranks(2, save, base=base, root=root, steps=[1, 2, 3], upload_every=2, copies=1)
    data_files(base / "node1" / "step-2")[0].unlink()

    def shown(*folders):
        given = [word for folder in folders for word in ("--local", str(base / folder))]
        with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as out:
            main(["steps", str(root), *given])
        return [" ".join(line.split()) for line in out.getvalue().splitlines()]

    total = sum(path.stat().st_size for path in data_files(base / "node0" / "step-2"))
    none = f"0 B of {total / 1000:.0f} kB"
    assert shown("node0", "node1") == [
        "step nodes files there copies at the root",
        "1 0 of 2 yes",
        f"2 2 of 2 2 of 2 0 {none}",
        "3 2 of 2 2 of 2 1 yes",
    ]
    assert shown("node1")[1:] == [
        "1 0 of 1 yes",
        f"2 1 of 1 1 of 2 {none}",
        "3 1 of 1 2 of 2 0 yes",
    ]


def test_inspect_shows_which_nodes_have_each_file(tmp_path, monkeypatch):
    from dcp_rs.cli import main

    root, base = tmp_path / "root", tmp_path / "nodes"
    ranks(2, save, base=base, root=root, steps=[1, 2], upload_every=2, copies=1)
    nodes = [str(base / "node0"), str(base / "node1")]
    data_files(base / "node0" / "step-2")[1].unlink()
    first, second = (path.name for path in data_files(base / "node1" / "step-2"))

    def run(*words):
        given = [word for node in nodes for word in ("--local", node)]
        with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as out:
            main(["inspect", *words, *given])
        return out.getvalue()

    for place in (base / "node0" / "step-2", root / "step-1"):  # the root has no step 2
        files = json.loads(run(str(place), "--json"))["files"]
        names = [path.name for path in data_files(base / "node1" / place.name)]
        where = {names[0]: nodes, names[1]: nodes if place.parent == root else nodes[1:]}
        assert {file["name"]: file["nodes"] for file in files} == where
    monkeypatch.chdir(root / "step-1")
    assert [file["nodes"] for file in json.loads(run(".", "--json"))["files"]] == [nodes, nodes]
    shown = [line.split() for line in run(str(base / "node0" / "step-2")).splitlines()]
    assert [line[-3:] for line in shown if first in line] == [[first, f"{nodes[0]},", nodes[1]]]
    assert [line[-2:] for line in shown if second in line] == [[second, nodes[1]]]
    shutil.rmtree(base / "node1" / "step-2")
    run(str(base / "node0" / "step-2"), "--html", str(tmp_path / "page.html"))
    data = json.loads(re.search("const data = (.*);", (tmp_path / "page.html").read_text())[1])
    assert sorted(zip((name for name, _ in data["files"]), data["nodes"], strict=True)) == [
        (first, nodes[:1]),
        (second, []),
    ]


@pytest.mark.parametrize("command", ["steps", "ls"])
def test_the_folder_of_a_node_is_no_run_of_damaged_steps(tmp_path, command):
    """Each step was called damaged, for want of the files of other nodes."""
    from dcp_rs.cli import main

    root, base = tmp_path / "root", tmp_path / "nodes"
    ranks(2, save, base=base, root=root, steps=[1, 2])
    node = base / "node0"
    with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as out:
        main([command, str(node)])
    *_, two, total = out.getvalue().splitlines()
    assert two.startswith("passed over  step-2: its data file g0")
    assert "This is the folder of a node" in two
    assert f"dcp-rs steps ROOT --local {node} counts its files" in two
    assert total == "0 steps, 0 B"
    with pytest.raises(CheckpointNotFoundError, match="This is the folder of a node"):
        dcp_rs.latest(node)
    with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as out:
        main(["steps", str(root)])
    assert "folder of a node" not in out.getvalue()


def make_unlike(root, local):
    try:
        CheckpointManager(root, local=local if dist.get_rank() else None)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_all_have_a_folder_are_refused(tmp_path):
    for why in run_ranks(2, make_unlike, tmp_path / "root", tmp_path / "node"):
        assert "not on ranks [0]" in why


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"upload_every": 0}, ValueError),
        ({"keep_local": 0}, ValueError),
        ({"copies": 2}, UnsupportedError),
        ({"reuse": True}, ValueError),
        ({"max_bytes": 5}, ValueError),
        ({"on_uploaded": "evaluate"}, TypeError),
        ({"local": "s3://bucket/run"}, UnsupportedError),
    ],
)
def test_invalid_options(tmp_path, options, error):
    with pytest.raises(error):
        CheckpointManager(tmp_path / "r", no_dist=True, **{"local": tmp_path / "n", **options})


def test_load_takes_no_options_of_the_manager(tmp_path, server):
    made = {"local": tmp_path / "n", "storage_options": server.options(), "no_dist": True}
    with CheckpointManager(server.url("run"), **made) as manager:
        manager.save(1, {"w": torch.ones(3)})
        for load in (
            manager.load,
            lambda state, **own: manager.load_training_state(**own, **state),
        ):
            state = {"model": torch.nn.Linear(1, 1)}
            with pytest.raises(TypeError, match="leave tiers= out"):
                load(state, tiers=[tmp_path])
            with pytest.raises(TypeError, match="give storage_options= to CheckpointManager"):
                load(state, storage_options=server.options())


# --- the root, behind


@pytest.fixture
def away(server, tmp_path):
    """A file. While it is there, the server refuses all requests."""
    flag = tmp_path / "away"
    server.faults = [Fault(status=503, times=None, matches=lambda _: flag.exists())]
    return flag


def turn(away, *, on):
    """Let the root be away, or not, from now on for all ranks."""
    dist.barrier()
    if dist.get_rank() == 0:
        away.touch() if on else away.unlink()
    dist.barrier()


def no_index(request):
    return request.method == "PUT" and request.key.endswith(".dcprs")


def save_without_the_index(base, root, **options):
    manager = manager_of(base, root, **options)
    manager.save(1, state_of(1))
    end = time.monotonic() + 30
    while (told := manager.tiers()).pending_bytes and time.monotonic() < end:
        time.sleep(0.05)
    where = [step.path.parent.name for step in manager.steps()]
    with pytest.raises(StorageError), warnings.catch_warnings(action="ignore"):
        manager.close()
    return told, where


def test_progress_of_uploads_is_told_in_bytes(tmp_path, server):
    base, at = tmp_path / "nodes", on_store(server, retry_timeout=1)
    server.faults = [Fault(status=503, times=None, matches=no_index)]
    for rank, (told, where) in enumerate(ranks(2, save_without_the_index, base=base, **at)):
        nbytes = sum(path.stat().st_size for path in base.glob("node?/step-1/*.safetensors"))
        assert (told.local_step, told.root_step, told.steps_behind) == (1, None, 1)
        assert (told.uploaded_bytes, told.pending_bytes) == (nbytes, 0)
        assert where == [f"node{rank}"]  # steps() has it already
    server.faults = [Fault(status=503, times=None)]
    manager = CheckpointManager(
        at["root"], storage_options=at["options"], local=base / "node0", no_dist=True
    )
    told = manager.tiers()
    assert (told.steps_behind, told.uploaded_bytes, told.pending_bytes) == (1, 0, nbytes)


def go_back_while_the_root_is_away(base, root, away, **options):
    with manager_of(base, root, keep_local=9, **options) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step))
    turn(away, on=True)
    manager = manager_of(base, root, keep_local=9, **options)
    loaded(manager, 2)
    before = time.monotonic()
    manager.save(3, state_of(3))
    seconds = time.monotonic() - before
    manager._release()
    return seconds


def test_save_after_going_back_waits_for_no_root_and_counts_as_newest(tmp_path, server, away):
    base, at = tmp_path / "nodes", on_store(server, retry_timeout=4)
    for seconds in ranks(2, go_back_while_the_root_is_away, base=base, away=away, **at):
        assert seconds < 4
    away.unlink()
    # The root has a step 4 that the run left behind, and nobody told it.
    assert ranks(2, resume_and_leave, base=base, **at) == [3, 3]


def go_back_with_uploads_ahead(base, root, away, **options):
    turn(away, on=True)
    manager = manager_of(base, root, keep_local=9, **options)
    for step in (1, 2, 3, 4):
        manager.save(step, state_of(step))
    loaded(manager, 2)
    with warnings.catch_warnings(action="ignore"):
        manager.save(3, state_of(3))
        turn(away, on=False)
        manager.close()


def fail_to_save_after_uploads(base, root, away, **options):
    manager = manager_of(base, root, keep_local=1, **options)
    turn(away, on=True)
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    before = steps_at(base / f"node{dist.get_rank()}")
    turn(away, on=False)
    end = time.monotonic() + 30
    while manager.tiers().steps_behind and time.monotonic() < end:
        time.sleep(0.05)
    dist.barrier()
    with SmallDisk(1000), pytest.raises(OSError, match="File too large"):
        manager.save(4, state_of(4))
    manager.close()
    return before


def test_save_on_a_full_disk_is_not_kept_from_space_by_uploaded_steps(tmp_path, server, away):
    """They went after the next save that succeeded, which there was none of any more."""
    base, at = tmp_path / "nodes", on_store(server, retry_timeout=1)
    for before in ranks(2, fail_to_save_after_uploads, base=base, away=away, **at):
        assert before == ["step-1", "step-2", "step-3"]
    for node in range(2):
        assert steps_at(base / f"node{node}") == ["step-3"]


def test_steps_that_a_run_left_behind_go_to_the_root_no_more(tmp_path, server, away):
    base, at = tmp_path / "nodes", on_store(server, retry_timeout=1)
    ranks(2, go_back_with_uploads_ahead, base=base, away=away, **at)
    assert steps_on(server) == ["step-1", "step-2", "step-3"]
    assert [got[0] for got in ranks(2, resume, base=base, **at)] == [3, 3]


def replace_with_one_node_ahead(base, root):
    with manager_of(base, root) as manager:
        for step in (20, 30):
            manager.save(step, state_of(step))
    with manager_of(base, root, keep_last=1) as manager:
        loaded(manager, 20)
        is_first = dist.get_rank() == 0
        with manager._nodes.uploads.paused() if is_first else nullcontext():
            for step in (25, 30):
                manager.save(step, state_of(step))
            while not is_first and manager._nodes.uploads.pending():
                time.sleep(0.01)
            dist.barrier()


@pytest.mark.filterwarnings("ignore:.*count as newer")
def test_step_that_is_replaced_at_the_root_stays_until_then(tmp_path):
    """It was removed with what another node had sent of the new one. No later step got there."""
    base, root = tmp_path / "nodes", tmp_path / "root"
    ranks(2, replace_with_one_node_ahead, base=base, root=root)
    assert steps_at(root) == ["step-20", "step-30"]
    assert dcp_rs.verify(root / "step-30").ok


def save_again_while_the_root_is_away(base, root, away, **options):
    with manager_of(base, root, **options) as manager:
        manager.save(1, {"x": torch.zeros(3)})
    turn(away, on=True)
    manager = manager_of(base, root, **options)
    state = {"x": torch.zeros(3)}
    with warnings.catch_warnings(action="ignore"):
        manager.load(state)
        manager.save(1, {"x": torch.ones(3)}, force=True)
    manager._release()
    turn(away, on=False)
    with manager_of(base, root, **options) as manager:
        found = manager.load(state)
    return found, state["x"].tolist()


def test_step_that_was_saved_again_is_newer_than_that_at_the_root(tmp_path, server, away):
    """The load took the old one from the root, as steps there count as newer than equal ones."""
    base, at = tmp_path / "nodes", on_store(server, retry_timeout=1)
    told = ranks(2, save_again_while_the_root_is_away, base=base, away=away, **at)
    assert told == [(1, [1.0, 1.0, 1.0])] * 2
    state = {"x": torch.zeros(3)}
    dcp_rs.load(state, server.url("run/step-1"), storage_options=server.options())
    assert state["x"].tolist() == [1.0, 1.0, 1.0]


def test_step_of_a_later_run_at_the_root_is_newer_than_that_on_the_nodes(tmp_path):
    for value, node in ((0.0, "old"), (1.0, "new")):
        with CheckpointManager(tmp_path / "root", local=tmp_path / node, no_dist=True) as manager:
            manager.save(1, {"x": torch.full((3,), value)}, force=True)
    state = {"x": torch.zeros(3)}
    with CheckpointManager(tmp_path / "root", local=tmp_path / "old", no_dist=True) as manager:
        assert manager.load(state) == 1
    assert state["x"].tolist() == [1.0, 1.0, 1.0]


def test_metrics_that_come_before_the_upload_go_with_it(tmp_path, server, away):
    at = on_store(server, retry_timeout=1)
    made = {"storage_options": at["options"], "no_dist": True, "metric": "accuracy"}
    away.touch()
    manager = CheckpointManager(at["root"], local=tmp_path / "node", upload_every=2, **made)
    for step in (1, 2):
        manager.save(step, {"x": torch.zeros(3)}, metrics={"loss": 1.0})
    manager.annotate(1, {"accuracy": 0.5})
    with pytest.raises(StorageError):
        manager.annotate(3, {"accuracy": 0.5})
    away.unlink()
    manager.annotate(2, {"accuracy": 0.25})  # it never goes to the root
    with pytest.raises(CheckpointNotFoundError):
        manager.annotate(3, {"accuracy": 0.5})
    manager.close()
    (step,) = CheckpointManager(at["root"], **made).steps()
    assert (step.number, step.metrics) == (1, {"loss": 1.0, "accuracy": 0.5})
    manager = CheckpointManager(at["root"], local=tmp_path / "node", **made)
    manager.annotate(1, {"accuracy": 0.75})
    assert manager.best_step() == 1
    assert [step.metrics for step in manager.steps()] == [
        {"loss": 1.0, "accuracy": 0.75},
        {"loss": 1.0, "accuracy": 0.25},
    ]
    manager.close()


# --- between the nodes


def exchange_files(base, broken):
    """Both ranks send a file to the other, while something of one of them is broken."""
    from dcp_rs.engine.ranks import RankGroup
    from dcp_rs.steps import exchange

    exchange._BLOCK = 1 << 16
    group = RankGroup()
    folder = Path(base) / str(group.rank)
    sizes = [0, 1, 200_000]
    transfers = [
        exchange.Transfer(f"{source}-{nbytes}", nbytes, source, 1 - source)
        for source in (0, 1)
        for nbytes in sizes
    ]
    folder.mkdir()
    for each in transfers:
        if each.source == group.rank:
            (folder / each.name).write_bytes(bytes([7]) * each.nbytes)
    if group.rank == 0 and broken == "short":
        (folder / "0-200000").write_bytes(b"")
    if group.rank == 1 and broken == "full":
        (folder / "0-1.0000000000000000.tmp").mkdir()
    opens, open_path = [], Path.open

    def noting_open(path, mode="r", **more):
        if mode == "rb":
            opens.append(path)
        return open_path(path, mode, **more)

    Path.open = noting_open
    try:
        unread = group.all_gather(lambda: exchange.send_files(group, transfers, folder, fsync=True))
    except OSError as error:
        return type(error)
    finally:
        Path.open = open_path
    # Only reads in sequence bring a file into the page cache in large folios.
    assert len(opens) == len(set(opens)), "a file was opened for each block"
    got = {
        path.name
        for path in folder.iterdir()
        if path.read_bytes() == bytes([7]) * int(path.name[2:])
    }
    return unread, got


@pytest.mark.parametrize("broken", [None, "short", "full"])
def test_files_go_from_node_to_node_or_their_error_does(tmp_path, broken):
    found = run_ranks(2, exchange_files, tmp_path, broken)
    names = {f"{source}-{nbytes}" for source in (0, 1) for nbytes in (0, 1, 200_000)}
    if broken == "full":
        assert found == [IsADirectoryError] * 2
        return
    lost = {"0-200000"} if broken else set()
    for unread, got in found:
        assert unread == [{2} if broken else set(), set()]
        assert got == names - lost
    assert not list(tmp_path.rglob("*.tmp"))


# --- costs


def counts_of(*calls):
    """The collectives of each call."""
    from collections import Counter

    from dcp_rs.engine.ranks import RankGroup

    counts = Counter()
    for name in ("_all_gather", "_gather", "_scatter", "_broadcast"):
        whole = getattr(RankGroup, name)

        def counted(self, value, name=name, whole=whole):
            counts[name] += 1
            return whole(self, value)

        setattr(RankGroup, name, counted)
    found = []
    for work in calls:
        counts.clear()
        work()
        found.append(dict(counts))
    return found


def count_collectives(base, root, **options):
    def save(step):
        manager.save(step, rows)
        while len(steps_at(root)) < step:  # a load would go on with the uploads
            time.sleep(0.01)

    manager = manager_of(base, root, **options)
    rows = {"rows": state_of(1)["rows"]}  # of each rank its own: no file has to be sent
    return counts_of(lambda: save(1), lambda: save(2), lambda: manager.load(rows), manager.close)


def count_collectives_of_a_load(base, root):
    manager = manager_of(base, root, copies=1)
    rows = {"rows": state_of(-1)["rows"]}
    return counts_of(lambda: manager.load(rows), manager.close)


@pytest.mark.parametrize(("size", "copies"), [(2, 0), (4, 1)])
def test_number_of_collectives(tmp_path, size, copies):
    """The numbers are those of docs/design/023-local-disks.md, for any number of ranks."""
    how = {"base": tmp_path / "nodes", "root": tmp_path / "root", "copies": copies}
    outcomes = rank_outcomes(size, call, count_collectives, how, fresh=True)
    for outcome in outcomes:
        first, second, load, close = outcome.value
        assert first == second == {"_all_gather": 4, "_gather": 4, "_scatter": 1, "_broadcast": 3}
        assert load == {"_all_gather": 6, "_gather": 4, "_scatter": 2, "_broadcast": 2}
        assert close == {"_all_gather": 2}
    if copies:
        shutil.rmtree(tmp_path / "nodes" / "node1")
        how = {"base": tmp_path / "nodes", "root": tmp_path / "root"}
        for outcome in rank_outcomes(size, call, count_collectives_of_a_load, how, fresh=True):
            load, close = outcome.value
            assert load == {"_all_gather": 8, "_gather": 4, "_scatter": 2, "_broadcast": 2}
            assert close == {"_all_gather": 2}
