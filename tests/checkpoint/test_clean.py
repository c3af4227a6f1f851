"""What killed saves leave behind: it is told of, and removed when that is asked for, and nothing else is."""

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_rs
import programs
from crash.states import found_number, rank_state
from dcp_rs import _core
from dcp_rs.cli import main
from dcp_rs.errors import CheckpointNotFoundError, CorruptIndexError
from support import files_in, run_ranks
from support.places import TESTS


def save(path, number):
    dcp_rs.save(rank_state(number, 0), path, no_dist=True)


def names(leftovers):
    return [Path(leftover.path).name for leftover in leftovers]


class Paused(dcp_rs.RsWriter):
    """A save that goes on until it is told to end: its data is written, and not committed."""

    def __init__(self, path):
        super().__init__(path)
        self.written, self.go_on = threading.Event(), threading.Event()

    def finish(self, metadata, results):
        self.written.set()
        assert self.go_on.wait(60)
        super().finish(metadata, results)


KILLED = """
import os, sys, signal, torch, dcp_rs
sys.path.insert(0, sys.argv[1])
from crash.states import rank_state
class Killed(dcp_rs.RsWriter):
    def finish(self, metadata, results):
        os.kill(os.getpid(), signal.SIGKILL)
import torch.distributed.checkpoint as dcp
dcp.save(rank_state(2, 0), storage_writer=Killed(sys.argv[2]), no_dist=True)
"""


def kill_a_save(path):
    done = programs.run(
        [sys.executable, "-c", KILLED, TESTS, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_killed_save_is_told_of_and_removed(ckpt, capsys):
    save(ckpt, 1)
    kept = files_in(ckpt)
    kill_a_save(ckpt)
    temporary = ckpt / "index.dcprs.0123456789abcdef.tmp"
    temporary.write_bytes(b"half")
    (ckpt / "notes.txt").write_text("mine")
    (left,) = set(files_in(ckpt)) - {*kept, temporary, ckpt / "notes.txt"}

    report = dcp_rs.verify(ckpt)
    assert report.ok
    assert names(report.leftovers) == [left.name, temporary.name]
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(ckpt)])
    assert ended.value.code == 0
    assert "left behind  2 leftovers" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["inspect", str(ckpt), "--json"])
    inspected = json.loads(capsys.readouterr().out)["leftovers"]
    assert [entry["nbytes"] for entry in inspected] == [left.stat().st_size, 4]

    found = dcp_rs.clean(ckpt)
    assert names(found.found) == [left.name, temporary.name]
    assert found.nbytes == left.stat().st_size + 4
    assert found.removed == found.kept == []
    with pytest.raises(SystemExit):
        main(["clean", str(ckpt)])
    assert "to remove: run again with --yes" in capsys.readouterr().out
    assert left.exists()
    assert temporary.exists()

    with pytest.raises(SystemExit) as ended:
        main(["clean", str(ckpt), "--yes", "--json"])
    assert ended.value.code == 0
    removed = json.loads(capsys.readouterr().out)["removed"]
    assert [entry["kind"] for entry in removed] == ["data", "temporary index"]
    assert files_in(ckpt) == sorted([*kept, ckpt / "notes.txt"])
    assert found_number(ckpt, 1) == 1
    assert dcp_rs.verify(ckpt).leftovers == dcp_rs.clean(ckpt, yes=True).found == []


def test_a_save_that_waits_for_its_commit_is_left_alone(ckpt):
    save(ckpt, 1)
    writer = Paused(ckpt)
    thread = threading.Thread(
        target=dcp.save,
        args=(rank_state(2, 0),),
        kwargs={"storage_writer": writer, "no_dist": True},
    )
    thread.start()
    try:
        assert writer.written.wait(60)
        # Of another process, and of this one.
        there = f"import dcp_rs, sys; r = dcp_rs.clean({str(ckpt)!r}, yes=True, older_than=0); print(r.removed, r.kept[0].verdict)"
        other = programs.run(
            [sys.executable, "-c", there], capture_output=True, text=True, check=True
        )
        assert other.stdout == "[] in use\n"
        report = dcp_rs.clean(ckpt, yes=True)
        assert (report.removed, [kept.verdict for kept in report.kept]) == ([], ["in use"])
        assert "at work" in report.kept[0].why_kept
    finally:
        writer.go_on.set()
        thread.join()
    assert found_number(ckpt, 1) == 2
    assert dcp_rs.clean(ckpt).kept == []


def clean_while_others_save(path):
    rank = int(os.environ["RANK"])
    number, removed = 1, 0
    for number in range(1, 13):
        if rank < 2:
            dcp_rs.save(rank_state(10 * number + rank, 0), path, no_dist=True, fsync=False)
        else:
            removed += len(dcp_rs.clean(path, yes=True).removed)
    dist.barrier()
    return removed


def test_cleaning_while_others_save_harms_none(ckpt):
    save(ckpt, 1)
    run_ranks(3, clean_while_others_save, ckpt)
    assert dcp_rs.verify(ckpt).ok
    assert found_number(ckpt, 1) in (120, 121)
    dcp_rs.clean(ckpt, yes=True)
    assert len(files_in(ckpt)) == 2


def test_a_whole_save_without_its_index_is_kept(ckpt):
    kill_a_save(ckpt)
    report = dcp_rs.clean(ckpt, yes=True)
    assert report.removed == []
    assert [kept.verdict for kept in report.kept] == ["whole"]
    assert "dcp_rs.index" in report.kept[0].why_kept
    dcp_rs.index(ckpt)
    assert found_number(ckpt, 1) == 2


def test_where_the_index_cannot_be_read_nothing_is_removed(ckpt):
    save(ckpt, 1)
    kill_a_save(ckpt)
    before = files_in(ckpt)
    (ckpt / "index.dcprs").write_bytes(b"damaged")
    for yes in (False, True):
        with pytest.raises(CorruptIndexError):
            dcp_rs.clean(ckpt, yes=yes)
    assert files_in(ckpt) == before


def test_clean_keeps_young_files(ckpt):
    save(ckpt, 1)
    kill_a_save(ckpt)
    assert [kept.verdict for kept in dcp_rs.clean(ckpt, yes=True, older_than=3600).kept] == [
        "young"
    ]
    (left,) = dcp_rs.clean(ckpt).found
    os.utime(left.path, (0, 0))
    for long in (1e20, 10**400):  # the first was an InternalError
        assert names(dcp_rs.clean(ckpt, yes=True, older_than=long).kept) == names([left])
    assert names(dcp_rs.clean(ckpt, yes=True, older_than=3600).removed) == names([left])
    with pytest.raises(ValueError, match="older_than"):
        dcp_rs.clean(ckpt, older_than=-1)
    with pytest.raises(CheckpointNotFoundError):
        dcp_rs.clean(ckpt / "nowhere")


KILLED_CONVERSION = """
import os, sys, signal, dcp_rs
def killed(done, total):
    os.kill(os.getpid(), signal.SIGKILL)
dcp_rs.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], overwrite=True, skip_unsupported=True, progress=killed)
"""


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "safetensors", "torch"])
def test_a_killed_conversion_is_cleaned_up(ckpt, tmp_path, to):
    save(ckpt, 1)
    out = tmp_path / "out" / "result"
    command = [sys.executable, "-c", KILLED_CONVERSION, ckpt, out, to]
    assert programs.run(command, check=False).returncode == -signal.SIGKILL
    (place,) = out.parent.iterdir()
    report = dcp_rs.clean(out)
    assert (names(report.found), report.found[0].kind) == ([place.name], "conversion")
    # One that goes on.
    lock = _core.FolderLock(str(place))
    assert [kept.verdict for kept in dcp_rs.clean(out, yes=True).kept] == ["in use"]
    del lock
    assert names(dcp_rs.clean(out, yes=True).removed) == [place.name]
    assert list(out.parent.iterdir()) == []
    dcp_rs.convert(ckpt, out, to=to, skip_unsupported=True)
    assert dcp_rs.clean(out).found == []
    assert [entry.name for entry in out.parent.iterdir()] == ["result"]


# --- a folder that holds a model of somebody else


def a_model_of_others(folder, kind):
    folder.mkdir()
    if kind == "torch":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
        return ".metadata"
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    return "model.safetensors"


@pytest.mark.parametrize("kind", ["torch", "hugging face"])
def test_a_save_beside_a_model_of_others_says_so(ckpt, kind):
    name = a_model_of_others(ckpt, kind)
    state = {"w": torch.zeros(2)}
    calls = [
        lambda: dcp_rs.save(state, ckpt, no_dist=True),
        lambda: dcp.save(state, storage_writer=dcp_rs.RsWriter(ckpt), no_dist=True),
        lambda: dcp_rs.async_save(state, ckpt, no_dist=True).result(),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        (warning,) = [w for w in caught if "did not write" in str(w.message)]
        assert name in str(warning.message)
        assert warning.filename == __file__
    assert (ckpt / name).exists()


def test_a_save_to_a_folder_of_its_own_does_not_warn(ckpt):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in (1, 2):
            save(ckpt, number)
            (ckpt / "config.json").write_text("{}")
