"""Steps in a folder and on a store alike. test_folder_steps.py and test_store_steps.py have the rest."""

import json
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsWriter
from dcp_rs.steps.retention import Policies, prune
from dcp_rs.steps.step_store import SkippedStep, Step
from support.roots import FolderRoot, StoreRoot, save_step, step_numbers


@pytest.fixture
def store(root):
    return root.store()


def test_missing_root_has_no_steps(store):
    assert store.look().steps == store.look().passed_over == []
    assert store.latest() is None
    assert store.sweep().left == []
    assert store.look_at(3) is None
    store.remove(3)


def test_step_has_an_index(root, store):
    for number in (20, 3, 100):
        save_step(store, number, {"loss": number / 2})
    root.write("step-5", b"a file")
    root.add_what_is_no_step()
    assert step_numbers(store) == [3, 20, 100]
    assert store.latest().number == 100
    step = store.look().steps[1]
    keys = [key for key in root.keys("step-20/") if key.endswith((".safetensors", ".dcprs"))]
    assert step == Step(
        number=20,
        path=store.folder(20),
        save_id=f"{20:032x}",
        saved=step.saved,
        nbytes=sum(len(root.read(key)) for key in keys),
        metrics={"loss": 10.0},
    )
    assert str(step.path) == f"{root.url}/step-20"
    assert step.written == step.nbytes
    with dcp_rs.open(step.path, **store.access) as checkpoint:
        assert checkpoint.save_id.replace("-", "") == step.save_id
    assert root.store().look() == store.look()


DAMAGE = {
    10: ("remove_index", "no index", "dcp_rs.index"),
    11: ("cut_data", "damaged", "has 100 bytes, and should have"),
    12: ("remove_data", "damaged", "is gone"),
    13: ("flip_index", "damaged", "corrupt index"),
}


def test_damaged_steps_are_skipped_and_never_removed(root, store):
    damage = dict(DAMAGE)
    if isinstance(root, StoreRoot):  # without an index it is the rest of a removal there
        damage.pop(10)
    for number in damage:
        save_step(store, number)
    assert step_numbers(store) == [*damage]
    for number, (harm, _, _) in damage.items():
        getattr(root, harm)(number)
    root.age()
    listing = store.look()
    assert listing.steps == []
    assert store.latest() is None
    for skipped, (number, (_, kind, why)) in zip(listing.passed_over, damage.items(), strict=True):
        assert (skipped.number, skipped.kind) == (number, kind)
        assert why in str(skipped)
    before = [root.keys(f"step-{number}/") for number in damage]
    save_step(store, 20)
    assert store.sweep().left == []
    assert prune(store, Policies(keep_last=1)).removed == []
    assert [root.keys(f"step-{number}/") for number in damage] == before


def test_killed_saves_are_swept_below_a_newer_step(root, store):
    """On a store, or without data, a day later: until then they may go on."""
    for number in (10, 11, 12, 13):
        save_step(store, number, settle=False)
    root.cut_data(11)
    root.remove_data(12)
    index = root.read("step-13/index.dcprs")
    for number in (10, 11, 12, 13):
        root.remove_index(number)
    if isinstance(root, FolderRoot):
        root.write("step-13/index.dcprs.0123456789abcdef.tmp", index)
        root.write(f"step-13/saving-{0:032x}.json.0123456789abcdef.tmp", b"{")
    kinds = [root.young, root.young, "unknown", root.young]  # of the third there is a note alone
    assert [found.kind for found in store.look().passed_over] == kinds
    assert store.latest() is None
    save_step(store, 5)
    assert store.sweep().left == []  # newer ones may be under way
    save_step(store, 20)
    if isinstance(root, StoreRoot):
        assert store.sweep().left == []
    root.age()
    for skipped in store.look().passed_over:
        assert skipped.kind == "unfinished"
        assert str(skipped) == f"step-{skipped.number}: its save did not finish"
    assert [found.number for found in store.sweep().left] == [10, 11, 12, 13]
    assert root.names() == ["step-20", "step-5"]
    save_step(store, 30, settle=False)
    root.remove_index(30)
    root.age()
    assert store.sweep().left == []
    assert root.names() == ["step-20", "step-30", "step-5"]


class Paused(RsWriter):
    """Waits with what it wrote, before the commit."""

    def __init__(self, path, **options):
        super().__init__(path, **options)
        self.written, self.go = threading.Event(), threading.Event()

    def finish(self, metadata, results):
        self.written.set()
        assert self.go.wait(60)
        super().finish(metadata, results)


def test_save_under_way_is_left_alone(root, store):
    store.begin(10, f"{10:032x}", {})
    writer = Paused(store.folder(10), **store.access)
    how = {"storage_writer": writer, "no_dist": True}
    thread = threading.Thread(target=dcp.save, args=({"w": torch.ones(2)},), kwargs=how)
    thread.start()
    try:
        assert writer.written.wait(60)
        save_step(store, 20)
        skipped = store.look_at(10)
        swept = store.sweep().left + prune(store, Policies(keep_last=1)).swept
    finally:
        writer.go.set()
        thread.join()
    assert isinstance(skipped, SkippedStep)
    assert skipped.kind == root.busy
    assert swept == []
    assert step_numbers(store) == [10, 20]


# --- notes of a save


def noted(**content):
    note = {"run": None, "saved": 1, "host": "here", "pid": 1, "metrics": {}} | content
    return json.dumps(note).encode()


BAD_NOTES = {
    "nothing": b"",
    "cut": b"{",
    "list": b"[]",
    "not text": b"\xff",
    "time in words": b'{"saved": "x", "metrics": {}}',
    "metric that is a list": noted(metrics={"a": []}),
    "metric that is too large": noted(metrics={"a": 10**400}),
    "infinite time": noted(saved=float("inf")),
    "file without a name": noted(files=["a", 1]),
    "process in words": noted(pid="the text of another"),
    "deep": b"[" * 100_000,
    "long": noted() + b" " * (1 << 20),
}


@pytest.mark.parametrize("note", BAD_NOTES.values(), ids=BAD_NOTES)
def test_bad_note_counts_as_none(root, store, note):
    save_step(store, 10, {"loss": 1.0})
    root.write(f"step-10/saved-{10:032x}.json", note)
    step = store.latest()
    assert step.metrics == {}
    assert abs(step.saved - root.modified("step-10/index.dcprs")) <= root.clock


def test_notes_of_another_save_are_ignored(root, store):
    save_step(store, 10, {"loss": 1.0})
    # Begun, and killed before its commit: the old one is there.
    store.begin(10, f"{11:032x}", {"loss": 0.0})
    assert store.latest().metrics == {"loss": 1.0}
    assert store.verify(store.latest()).ok
    assert store.latest().verified
    state = {"w": torch.ones(3)}
    dcp_rs.save(state, store.folder(10), save_id=f"{11:032x}", no_dist=True, **store.access)
    # Committed, and killed before that was noted.
    assert store.latest().metrics == {"loss": 0.0}
    assert not store.latest().verified
    store.settle(10, f"{11:032x}")
    assert store.latest().metrics == {"loss": 0.0}
    names = [key.removeprefix("step-10/") for key in root.keys("step-10/")]
    assert [name for name in names if name.startswith(("sav", "ver"))] == [f"saved-{11:032x}.json"]


def test_only_a_step_that_was_read_and_is_right_is_verified(root, store):
    save_step(store, 10)
    assert store.verify(store.latest()).ok
    assert store.latest().verified
    save_step(store, 20)
    root.flip_data(20)
    assert not store.verify(store.latest()).ok
    assert not store.latest().verified


# --- removal


def test_prune_keeps_the_latest_the_best_and_the_protected(store):
    for number, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0), (5, 4.0)):
        save_step(store, number, {"loss": loss})
    done = prune(store, Policies(keep_last=1, metric="loss"), protected={3})
    assert [step.number for step in done.removed] == [1, 4]
    assert done.problems == []
    assert step_numbers(store) == [2, 3, 5]


def test_prune_removes_nothing_before_it_verified_what_stays(root, store):
    for number in (1, 2, 3):
        save_step(store, number)
    policies = Policies(keep_last=1)
    root.flip_data(3)
    done = prune(store, policies, verify=True)
    assert done.removed == []
    assert "step 3 is damaged" in done.problems[0]
    assert "nothing was removed" in done.problems[1]
    save_step(store, 4)
    done = prune(store, policies, verify=True)
    assert [step.number for step in done.removed] == [1, 2, 3]
    assert [(step.number, step.verified) for step in store.look().steps] == [(4, True)]


def test_prune_counts_bytes(store):
    for number in range(1, 6):
        save_step(store, number)
    each = store.latest().nbytes
    assert [step.number for step in prune(store, Policies(max_bytes=3 * each)).removed] == [1, 2]
    assert step_numbers(store) == [3, 4, 5]
