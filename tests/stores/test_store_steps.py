"""Steps on a store: what only objects and requests can do. The rest is in test_step_stores.py."""

import pytest
import torch

import dcp_rs
from dcp_rs.errors import (
    CheckpointNotFoundError,
    RunTakenOverError,
    StorageError,
    StoragePermissionError,
    StoragePreconditionError,
)
from dcp_rs.steps.object_store import step_store_at
from dcp_rs.steps.retention import Policies, prune
from dcp_rs.steps.step_store import Step
from support.object_server import Fault
from support.roots import StoreRoot, only_skipped, save_step, step_numbers


@pytest.fixture
def run(server):
    return StoreRoot(server)


@pytest.fixture
def root(run):
    return run.store()


def steps_on(server):
    return sorted(
        {int(key.split("/")[1].removeprefix("step-")) for key in server.keys("run/step-")}
    )


# --- looking


def test_the_latest_is_found_without_a_look_at_all_others(root, server):
    for number in range(1, 8):
        save_step(root, number)
    fresh = step_store_at(server.url("run"), server.options())
    begin = len(server.requests)
    assert fresh.latest().number == 7
    assert {request.key for request in server.requests[begin:] if request.kind == "get"} == {
        "run/step-7/index.dcprs",
        f"run/step-7/saved-{7:032x}.json",
    }
    begin = len(server.requests)
    assert fresh.latest().number == 7  # what did not change is not read again
    assert {request.kind for request in server.requests[begin:]} == {"list"}


def replacement(server):
    """A function that puts another save in place of step 10, as somebody else does between two requests."""
    elsewhere = step_store_at(server.url("elsewhere"), server.options())
    state = {"w": torch.zeros(77)}
    dcp_rs.save(state, elsewhere.folder(10), save_id=f"{11:032x}", no_dist=True, **elsewhere.access)

    def replace():
        for key in server.keys("run/step-10/g"):
            del server.objects[key]
        for key in server.keys("elsewhere/"):
            server.objects[key.replace("elsewhere", "run")] = server.objects.pop(key)

    return replace


def test_a_step_that_is_replaced_while_it_is_looked_at_is_not_damaged(root, server):
    save_step(root, 10)
    replace = replacement(server)

    def replaces(request):
        if request.kind == "get" and request.key == "run/step-10/index.dcprs":
            replace()
        return False

    server.faults.append(Fault(matches=replaces))
    step = step_store_at(server.url("run"), server.options()).look_at(10)
    assert isinstance(step, Step)
    assert step.save_id == f"{11:032x}"


@pytest.mark.parametrize("gone", ["index.dcprs", f"saved-{10:032x}.json"])
def test_a_file_that_is_only_in_the_listing_concerns_its_step_alone(root, server, gone):
    """On a file system over a network a listing may be old. All looks failed."""
    for number in (10, 20):
        save_step(root, number, {"loss": 1.0})
    read = []

    def is_gone(request):
        if request.kind == "get":
            read.append(request.key)
        return request.key == f"run/step-10/{gone}"

    server.faults.append(Fault(status=404, code="NoSuchKey", times=None, matches=is_gone))
    fresh = step_store_at(server.url("run"), server.options())
    found = fresh.look()
    assert found.steps[-1].metrics == {"loss": 1.0}
    assert read.count("run/step-20/index.dcprs") == 1
    if gone == "index.dcprs":
        assert [(step.number, step.kind) for step in found.passed_over] == [(10, "damaged")]
    else:
        assert found.steps[0].metrics == {}
    server.faults.clear()
    assert fresh.look().steps[0].metrics == {"loss": 1.0}


def test_a_save_that_ends_after_the_look_of_a_sweep_is_left_alone(run, root, server, monkeypatch):
    """The sweep removed the new index as well, and with it the step."""
    save_step(root, 10, settle=False)
    run.remove_index(10)
    save_step(root, 20)
    run.age()
    other, look = step_store_at(server.url("run"), server.options()), root.look

    def look_and_save(**how):
        listing = look(**how)
        save_step(other, 10, save_id=f"{11:032x}")
        return listing

    monkeypatch.setattr(root, "look", look_and_save)
    assert [found.number for found in root.sweep().left] == [10]
    monkeypatch.undo()
    assert step_numbers(root) == [10, 20]


def test_foreign_objects_are_named_and_left_alone(run, root, server):
    server.put("run/step-10/model.txt", b"mine")
    server.put("run/step-11/deeper/thing", b"mine")
    server.put("run/step-007/index.dcprs", b"")
    save_step(root, 20)
    run.age()
    assert [(found.number, found.kind) for found in root.look().passed_over] == [
        (10, "unfinished"),
        (11, "unfinished"),
    ]
    assert root.sweep().left == []
    assert {"run/step-10/model.txt", "run/step-11/deeper/thing"} < set(server.keys())


def test_files_of_the_user_beside_a_killed_save_are_no_checkpoint_of_others(run, root, server):
    root.begin(10, f"{10:032x}", {}, ["config.json"])
    root.put_files(10, {"config.json": b"{}"})
    assert "run/step-10/config.json" in server.objects
    assert only_skipped(root).kind == "unknown"
    save_step(root, 20)
    run.age()
    assert [found.number for found in root.sweep().left] == [10]
    assert steps_on(server) == [20]


def test_a_store_that_does_not_answer_says_nothing_of_a_step(root, server):
    save_step(root, 10)
    save_step(root, 20)
    for kind in ("list", "get"):
        server.faults[:] = [
            Fault(status=503, times=None, matches=lambda request, kind=kind: request.kind == kind)
        ]
        fresh = step_store_at(server.url("run"), server.options(max_retries=1))
        for look in (fresh.look, fresh.latest):
            with pytest.raises(StorageError, match="503"):
                look()
    server.faults.clear()
    assert step_numbers(root) == [10, 20]


# --- what is noted of a save


def test_a_note_that_is_too_long_is_not_fetched(root, server):
    """It was fetched whole, whatever its length."""
    save_step(root, 10, {"loss": 1.0})
    note = f"run/step-10/saved-{10:032x}.json"
    server.put(note, b" " * (1 << 20) + b"{}")
    begin = len(server.requests)
    assert step_store_at(server.url("run"), server.options()).latest().metrics == {}
    assert note not in {request.key for request in server.requests[begin:] if request.kind == "get"}


@pytest.mark.parametrize("name", [".dcprs-run.json", ".dcprs-older.json"])
def test_a_note_of_the_run_that_is_too_long_is_none(root, server, name):
    """All of it was fetched, up to 4 GiB."""
    save_step(root, 10, {"loss": 1.0})
    server.put(f"run/{name}", b" " * (12 << 20) + b"{}")
    assert root._read([root.path / name]) == [b""]
    assert root.latest().number == 10


def test_a_note_stays_as_long_as_a_file_that_it_names(root, server):
    """Once it is gone, nothing tells that the file was put there by a killed save."""
    root.begin(10, f"{11:032x}", {}, ["config.json"])
    root.put_files(10, {"config.json": b"{}"})
    save_step(root, 10, settle=False)
    server.undeletable.add("run/step-10/config.json")
    with pytest.raises(StoragePermissionError):
        root.settle(10, f"{10:032x}")
    assert f"run/step-10/saving-{11:032x}.json" in server.objects
    assert f"run/step-10/saved-{10:032x}.json" in server.objects
    server.undeletable.clear()


def test_a_note_that_is_gone_after_the_commit_is_an_error(root, server):
    save_step(root, 10, settle=False)
    del server.objects[f"run/step-10/saving-{10:032x}.json"]
    with pytest.raises(FileNotFoundError, match="saving-"):
        root.settle(10, f"{10:032x}")


# --- removal


def test_a_removal_takes_all_of_a_step_and_the_index_first(root, server):
    save_step(root, 10)
    save_step(root, 20)
    server.put("run/step-10/config.json", b"{}")
    server.put("run/step-10/a/b/c", b"deep")
    begin = len(server.requests)
    root.remove(10)
    assert steps_on(server) == [20]
    deleted = [request.key for request in server.requests[begin:] if request.kind == "delete"]
    assert deleted[0] == "run/step-10/index.dcprs"
    assert deleted[-1] == f"run/step-10/saved-{10:032x}.json"


class CutAfter(Fault):
    """Nothing that changes the store is done any more after so many requests that did: what a kill comes to."""

    def __init__(self, count):
        self.left = count
        super().__init__(status=403, code="AccessDenied", times=None, matches=self.is_over)

    def is_over(self, request):
        self.left -= request.kind in ("put", "delete")
        return self.left < 0 and request.kind in ("put", "delete")


def test_a_removal_that_is_cut_short_anywhere_leaves_a_step_or_none_and_is_finished(
    run, root, server
):
    save_step(root, 20)
    was_step = []
    for count in range(20):
        save_step(root, 10, {"loss": 1.0})
        server.faults[:] = [CutAfter(count)]
        try:
            root.remove(10)
        except StoragePermissionError:
            pass
        else:
            break
        finally:
            server.faults.clear()
        fresh = step_store_at(server.url("run"), server.options())
        found = fresh.look_at(10)
        was_step.append(isinstance(found, Step))
        if isinstance(found, Step):
            assert found.metrics == {"loss": 1.0}
        else:
            assert found.kind == "unknown"  # for a day
            assert step_numbers(fresh) == [20]
            fresh.sweep()
            assert 10 in steps_on(server)
            if count % 2:  # another save goes there before
                save_step(fresh, 10, {"loss": 2.0}, save_id=f"{99:032x}")
                assert fresh.look_at(10).metrics == {"loss": 2.0}
        run.age()
        fresh.sweep()
        fresh.sweep()  # the first still went by a listing of its own
        if 10 in step_numbers(fresh):
            assert dcp_rs.verify(fresh.folder(10), **fresh.access).ok
            fresh.remove(10)
        assert steps_on(server) == [20]
    else:
        pytest.fail("the removal never came to its end")
    # The index first: before it a step, from then on none.
    assert was_step == [True, *[False] * (len(was_step) - 1)]
    assert len(was_step) >= 3


def test_a_removal_that_could_not_begin_leaves_the_step(root, server):
    save_step(root, 10)
    save_step(root, 20)
    server.undeletable.add("run/step-10/index.dcprs")
    with pytest.raises(StoragePermissionError):
        root.remove(10)
    done = prune(root, Policies(keep_last=1))
    assert done.removed == []
    assert "step 10 could not be removed" in done.problems[0]
    assert step_numbers(root) == [10, 20]
    server.undeletable.clear()
    assert [step.number for step in prune(root, Policies(keep_last=1)).removed] == [10]
    assert steps_on(server) == [20]


def test_a_step_that_is_saved_anew_meanwhile_is_not_removed(root, server):
    save_step(root, 10)
    replace = replacement(server)

    index_read = []

    def saves(request):
        if index_read == [True]:
            index_read.append(False)
            replace()
        elif request.kind == "get" and request.key == "run/step-10/index.dcprs":
            index_read.append(True)
        return False

    server.faults.append(Fault(matches=saves))
    with pytest.raises(StoragePreconditionError, match="it was left alone"):
        root.remove(10)
    server.faults.clear()
    assert root.look_at(10).save_id == f"{11:032x}"
    assert dcp_rs.verify(root.folder(10), **root.access).ok


def test_a_step_that_another_process_removes_meanwhile(root, server):
    """A prune beside a job raised an InternalError: the index was listed, and not there to read."""
    save_step(root, 10)

    def removes(request):
        if request.kind == "get" and request.key == "run/step-10/index.dcprs":
            for key in server.keys("run/step-10/"):
                del server.objects[key]
        return False

    server.faults.append(Fault(matches=removes))
    root.remove(10)
    assert root.look_at(10) is None


@pytest.mark.filterwarnings("ignore:the store of")
@pytest.mark.parametrize("ignores_conditions", [False, True])
def test_a_removal_whose_answer_is_lost_spares_a_save_that_follows(
    root, server, ignores_conditions
):
    """It was tried again blindly, and removed the index of the save that had come since."""
    server.ignores_conditions = ignores_conditions
    save_step(root, 10)
    replace = replacement(server)
    asked = []

    def saves(request):
        if len(asked) == 1:
            asked.append("another")
            replace()
        elif not asked and request.kind == "delete" and request.key == "run/step-10/index.dcprs":
            asked.append("removed")
            return True
        return False

    server.faults.append(Fault(lose=True, matches=saves, times=None))
    with pytest.raises(StoragePreconditionError, match="it was left alone"):
        root.remove(10)
    server.faults.clear()
    for _ in range(2):
        assert root.look_at(10).save_id == f"{11:032x}"
        assert dcp_rs.verify(root.folder(10), **root.access).ok
        root.sweep()


@pytest.mark.parametrize("taken_over", [False, True])
def test_killed_save_of_an_earlier_run_is_removed_at_once(run, root, server, taken_over):
    """It stayed for a day, although it cannot commit any more."""
    root.take_over()
    save_step(root, 10, settle=False)
    run.remove_index(10)
    fresh = run.store()
    if taken_over:
        fresh.take_over()
    save_step(fresh, 20)
    assert fresh.look_at(10).kind == ("unfinished" if taken_over else "unknown")
    fresh.sweep()
    assert steps_on(server) == ([20] if taken_over else [10, 20])


def test_save_that_a_later_run_began_is_no_leftover(run, root, server):
    """A run that was taken over finds its files at the step that the later run saves."""
    root.take_over()
    save_step(root, 20)
    later = run.store()
    later.take_over()
    save_step(later, 10, settle=False)
    run.remove_index(10)
    with pytest.raises(RunTakenOverError):
        root.sweep()
    assert server.keys("run/step-10/g")


def test_a_bucket_that_is_not_there(server):
    root = step_store_at("s3://nowhere/run", server.options())
    with pytest.raises((StorageError, CheckpointNotFoundError)):
        root.look()
