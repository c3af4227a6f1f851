"""Steps in a folder: what only files, renames and locks can do. The rest is in test_step_stores.py."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsWriter, _core
from dcp_rs.errors import RunTakenOverError, UnsupportedError
from dcp_rs.steps import folder_store
from dcp_rs.steps.folder_store import FolderStepStore
from dcp_rs.steps.retention import Policies, prune
from dcp_rs.steps.step_store import Step
from support.roots import only_skipped, save_step, step_numbers


@pytest.fixture
def root(tmp_path):
    return FolderStepStore(tmp_path / "run")


def without_index(folder):
    (folder / "index.dcprs").unlink()


def remove_data(folder):
    next(folder.glob("g*.safetensors")).unlink()


def test_a_step_that_is_a_link_is_a_step_and_its_removal_that_of_the_link(root, tmp_path):
    save_step(root, 1)
    elsewhere = tmp_path / "elsewhere"
    root.folder(1).rename(elsewhere)
    root.folder(1).symlink_to(elsewhere)
    assert step_numbers(root) == [1]
    root.remove(1)
    assert step_numbers(root) == []
    assert dcp_rs.verify(elsewhere).ok


def test_a_lost_index_can_be_made_anew(root):
    without_index(save_step(root, 10))
    dcp_rs.index(root.folder(10))
    assert step_numbers(root) == [10]


class Paused(RsWriter):
    """Waits with what it wrote, before the commit."""

    def __init__(self, path):
        super().__init__(path)
        self.written, self.go = threading.Event(), threading.Event()

    def finish(self, metadata, results):
        self.written.set()
        assert self.go.wait(60)
        super().finish(metadata, results)


def test_a_save_that_has_begun_is_left_alone_before_it_writes_data(root):
    """Its note and the user's files were removed by a sweep from outside."""
    save_step(root, 20)
    root.begin(10, f"{10:032x}", {"loss": 1.0}, ["notes.txt"])
    root.put_files(10, {"notes.txt": b"the user's"})
    other = FolderStepStore(root.path)
    assert other.look_at(10).kind == "unknown"
    assert other.sweep().left == []
    assert sorted(path.name for path in root.folder(10).iterdir()) == [
        "notes.txt",
        f"saving-{10:032x}.json",
    ]
    other.take_over()  # which the save cannot survive
    root.run = "that of before"
    root.begin(10, f"{10:032x}", {"loss": 1.0}, ["notes.txt"])
    assert [found.number for found in other.sweep().left] == [10]
    assert not root.folder(10).exists()


class Looking(FolderStepStore):
    """Does something between a look and what follows from it."""

    def look(self, **how):
        listing = super().look(**how)
        self.meanwhile()
        return listing


def test_a_save_that_begins_after_the_look_is_left_alone(root):
    """Only the index was looked for under the lock: the data that the new save had written by then was removed."""
    data = next(save_step(root, 10, settle=False).glob("g*.safetensors"))
    os.truncate(data, 100)
    without_index(root.folder(10))
    save_step(root, 20)
    writer = Paused(root.folder(10))
    thread = threading.Thread(
        target=dcp.save,
        args=({"w": torch.ones(2)},),
        kwargs={"storage_writer": writer, "no_dist": True},
    )

    def begin():
        thread.start()
        assert writer.written.wait(60)

    looking = Looking(root.path)
    looking.meanwhile = begin
    try:
        assert [found.number for found in looking.sweep().left] == [10]
    finally:
        writer.go.set()
        thread.join()
    assert step_numbers(root) == [10, 20]


def test_a_removal_waits_for_a_commit_that_is_under_way(root):
    folder = save_step(root, 10, settle=False)
    save_step(root, 20)
    index = (folder / "index.dcprs").read_bytes()
    os.truncate(next(folder.glob("g*.safetensors")), 100)
    without_index(folder)
    lock = _core.FolderLock(os.fspath(folder))
    thread = threading.Thread(target=root.sweep)
    thread.start()
    thread.join(0.5)
    (folder / "index.dcprs").write_bytes(index)
    del lock
    thread.join(60)
    assert (folder / "index.dcprs").exists()


def test_a_step_that_cannot_be_looked_at_is_left_alone(root, monkeypatch):
    """As on a file system over a network: nothing says that its index is not there."""
    save_step(root, 10)
    save_step(root, 20)
    index, looked = root.folder(10) / "index.dcprs", folder_store._file_at

    def file_at(path):
        if os.fspath(path) == str(index):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return looked(path)

    monkeypatch.setattr(folder_store, "_file_at", file_at)
    (passed,) = root.sweep().passed_over
    monkeypatch.undo()
    assert passed.kind == "unreadable"
    assert "Stale file handle" in passed.why
    assert step_numbers(root) == [10, 20]


def test_a_step_whose_commit_comes_while_it_is_looked_at_is_left_alone(root, monkeypatch):
    folder = save_step(root, 10)
    save_step(root, 20)
    index = (folder / "index.dcprs").read_bytes()
    without_index(folder)
    (folder / f"saved-{10:032x}.json").rename(folder / f"saving-{10:032x}.json")
    looked = FolderStepStore._judge

    def look_before_the_commit(self, number, files, data):
        found = looked(self, number, files, data)
        if number == 10:
            (folder / "index.dcprs").write_bytes(index)
        return found

    monkeypatch.setattr(FolderStepStore, "_judge", look_before_the_commit)
    assert [found.number for found in root.sweep().left] == [10]
    monkeypatch.undo()
    assert step_numbers(root) == [10, 20]


def test_foreign_checkpoint_is_named_and_left_alone(root):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=root.folder(10), no_dist=True)
    (step,) = root.look().steps
    assert (step.number, step.is_stock, step.save_id) == (10, True, "")
    torch.save({"w": torch.ones(2)}, root.folder(10) / "model.pt")
    (root.folder(10) / ".metadata").unlink()
    passed = only_skipped(root)
    assert passed.kind == "foreign"
    assert "model.pt" in passed.why
    save_step(root, 20)
    assert root.sweep().left == []
    assert (root.folder(10) / "model.pt").exists()
    assert step_numbers(root) == [20]


def test_a_name_in_another_form_is_no_step(root):
    save_step(root, 7)
    root.folder(7).rename(root.path / "step-007")
    save_step(root, 7)
    assert step_numbers(root) == [7]
    assert [found.path.name for found in root.newest()] == ["step-7"]


def test_a_look_does_not_list_folders_with_a_name_in_another_form(root, monkeypatch):
    """It listed each by itself, and failed at one that cannot be read."""
    save_step(root, 7)
    (root.path / "step-008").mkdir()
    files_in = folder_store._files_in

    def refuse(folder):
        if folder.name == "step-008":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return files_in(folder)

    monkeypatch.setattr(folder_store, "_files_in", refuse)
    found = root.look()
    assert [step.number for step in found.steps] == [7]


# --- what is noted of a save


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_note_that_is_no_regular_file_is_none(root, make):
    """A pipe in the place of a note: whoever looked at the step waited for ever."""
    folder = save_step(root, 10, {"loss": 1.0})
    note = folder / f"saved-{10:032x}.json"
    note.unlink()
    make(note)
    assert root.latest().metrics == {}
    make(folder / f"saving-{11:032x}.json")
    root.begin(10, f"{12:032x}", {})
    root.settle(10, f"{12:032x}")
    without_index(folder)
    note.rename(folder / f"saving-{10:032x}.json")
    assert only_skipped(root).kind == "unfinished"


def test_a_note_of_a_run_that_is_damaged_is_that_of_another_run(root):
    root.take_over()
    (root.path / ".dcprs.lock").write_bytes(b"?" * 512)
    with pytest.raises(RunTakenOverError, match="by an unknown process"), root.holding():
        pass


def test_a_save_is_settled_beside_a_note_that_is_nested_too_deep(root):
    folder = save_step(root, 10)
    (folder / f"saving-{11:032x}.json").write_text("[" * 100_000)
    root.begin(10, f"{12:032x}", {})
    root.settle(10, f"{12:032x}")
    assert [path.name for path in folder.glob("sav*")] == [f"saved-{12:032x}.json"]


def test_a_note_that_is_renamed_during_a_look_is_read(root, monkeypatch):
    """The step had no metrics for that look, and a `prune` by the best of them might remove it."""
    folder, read = save_step(root, 10, {"loss": 1.0}, settle=False), FolderStepStore._read

    def settle_first(root, paths):
        monkeypatch.undo()
        root.settle(10, f"{10:032x}")
        return read(root, paths)

    monkeypatch.setattr(FolderStepStore, "_read", settle_first)
    assert root.latest().metrics == {"loss": 1.0}
    assert (folder / f"saved-{10:032x}.json").exists()


def test_a_note_that_is_renamed_while_its_folder_is_listed_is_read(root, monkeypatch):
    """It was listed, and gone when its length was asked for: the step had no metrics, and a warning said so."""
    folder, about = save_step(root, 10, {"loss": 1.0}, settle=False), folder_store._file_at
    note = folder / f"saving-{10:032x}.json"

    def settle_first(path):
        if os.fspath(path) == os.fspath(note) and note.exists():
            note.rename(folder / f"saved-{10:032x}.json")
        return about(path)

    monkeypatch.setattr(folder_store, "_file_at", settle_first)
    assert root.latest().metrics == {"loss": 1.0}


def test_notes_are_plain_json(root):
    folder = save_step(root, 10, {"loss": 0.5})
    notes = json.loads((folder / f"saved-{10:032x}.json").read_text())
    assert notes["step"] == 10
    assert notes["metrics"] == {"loss": 0.5}


# --- removal


def test_a_removal_that_was_cut_short_leaves_no_step(root):
    save_step(root, 10)
    save_step(root, 20)
    doomed = root.path / ".removing-step-10"
    root.folder(10).rename(doomed)
    remove_data(doomed)
    assert step_numbers(root) == [20]
    assert root.look().passed_over == []
    save_step(root, 10)  # again
    root.remove(10)
    assert step_numbers(root) == [20]
    root.sweep()
    assert sorted(p.name for p in root.path.iterdir()) == ["step-20"]
    save_step(root, 30).rename(root.path / ".removing-step-30")
    root.sweep()
    assert sorted(p.name for p in root.path.iterdir()) == ["step-20"]


def test_unchanged_steps_are_looked_at_once(root, monkeypatch):
    """Each save opened every index: with 1,500 steps, and nothing to remove, that took more than a second."""
    looked = []
    look = FolderStepStore._whole_step
    monkeypatch.setattr(
        FolderStepStore,
        "_whole_step",
        lambda root, number, *found: looked.append(number) or look(root, number, *found),
    )
    for number in (1, 2, 3):
        save_step(root, number)
    for number in (4, 5):
        save_step(root, number)
        assert [step.number for step in root.sweep().steps] == [*range(1, number + 1)]
    assert looked == [1, 2, 3, 4, 5]
    remove_data(root.folder(2))
    root.verify(root.look_at(3))
    looked.clear()
    root.sweep()
    assert looked == []
    found = root.look()
    assert set(looked) == {2, 3}
    assert [(step.number, step.verified) for step in found.steps] == [
        (1, False),
        (3, True),
        (4, False),
        (5, False),
    ]


def test_pruning_counts_only_what_is_whole(root):
    for number in (1, 2, 3):
        save_step(root, number)
    os.truncate(next(root.folder(2).glob("g*.safetensors")), 100)
    prune(root, Policies(keep_last=2))
    assert step_numbers(root) == [1, 3]


def test_a_damaged_newest_step_is_no_reason_to_keep_all_where_another_one_stays(root):
    for number in (1, 2, 3):
        save_step(root, number)
    with next(root.folder(3).glob("g*.safetensors")).open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"x")
    done = prune(root, Policies(keep_last=2), verify=True)
    assert [step.number for step in done.removed] == [1]
    assert len(done.problems) == 1
    assert [(step.number, step.verified) for step in root.look().steps] == [(2, True), (3, False)]


def test_undeletable_folder_does_not_keep_the_rest(root, monkeypatch):
    """On NFS a file that another process has open stays as `.nfsXXXX`: its folder ended each sweep, and nothing was ever removed again."""
    for number in (1, 2, 3):
        save_step(root, number)
    stuck = root.set_aside(1)
    left = save_step(root, 0, settle=False)
    without_index(left)
    removed = folder_store.shutil.rmtree

    def rmtree(path, *, ignore_errors=False):
        if path != stuck:
            removed(path)
        elif not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(folder_store.shutil, "rmtree", rmtree)
    done = prune(root, Policies(keep_last=1))
    assert [step.number for step in done.removed] == [2]
    assert [found.number for found in done.swept] == [0]
    (problem,) = done.problems
    assert str(stuck) in problem
    assert "Directory not empty" in problem
    assert sorted(p.name for p in root.path.iterdir()) == [stuck.name, "step-3"]
    monkeypatch.undo()
    assert prune(root, Policies(keep_last=1)).problems == []
    assert sorted(p.name for p in root.path.iterdir()) == ["step-3"]


def test_failed_removal_is_reported(root, monkeypatch):
    for number in (1, 2):
        save_step(root, number)

    def rename(path, to):
        raise OSError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", rename)
    done = prune(root, Policies(keep_last=1))
    assert done.removed == []
    assert len(done.problems) == 1
    assert step_numbers(root) == [1, 2]


def test_a_root_with_a_scheme_is_refused():
    with pytest.raises(UnsupportedError, match="s3://"):
        FolderStepStore("s3://bucket/run")


def test_the_best_step_stays_where_its_note_cannot_be_read(root, monkeypatch):
    """One passing error at its note: it counted as a step without metrics, was not the best any more, and was removed."""
    for number, loss in ((10, 0.1), (20, 0.5), (30, 0.4)):
        save_step(root, number, {"loss": loss})
    note, read = root.folder(10) / f"saved-{10:032x}.json", folder_store._read_file

    def fail_once(path):
        if path == note:
            monkeypatch.undo()
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(folder_store, "_read_file", fail_once)
    policies = Policies(keep_best=1, keep_last=1, metric="loss")
    assert [step.number for step in prune(root, policies).removed] == [20]
    assert step_numbers(root) == [10, 30]
    assert prune(root, policies).removed == []
    assert root.look().steps[0].metrics == {"loss": 0.1}


def test_a_step_that_is_saved_again_while_it_is_looked_at_is_whole(root, monkeypatch):
    """Its index was read before, and its data looked for afterwards: the newest step counted as damaged, and was passed over."""
    save_step(root, 10)
    folder, read = save_step(root, 20), FolderStepStore._read

    def save_again(root, paths):
        if folder / "index.dcprs" in paths:
            monkeypatch.undo()
            dcp_rs.save({"w": torch.zeros(1000)}, folder, save_id=f"{21:032x}", no_dist=True)
        return read(root, paths)

    monkeypatch.setattr(FolderStepStore, "_read", save_again)
    found = root.look_at(20)
    assert isinstance(found, Step)
    assert found.save_id == f"{21:032x}"
