"""``progress=``: it hears the end, an error in it is the caller's, and ``True`` is a bar where somebody watches, and nothing elsewhere."""

import pickle
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcp_rs
import programs
from dcp_rs import RsLoadPlanner, RsReader, RsWriter
from support import assert_state_equal, blank, run_ranks
from support.both import save_rs, save_stock
from support.terminal import shown_on_a_terminal

#: Long enough to be asked about in between.
STATE = {"w": torch.arange(24 << 20, dtype=torch.int32), "step": 3}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("progress")
    save_rs(STATE, folder / "ours")
    save_stock(STATE, folder / "stock")
    return folder


class Seen(list[tuple[int, int | None]]):
    """What a callable heard."""

    def __call__(self, done: int, total: int | None) -> None:
        self.append((done, total))


def check(seen: Seen, total: int, told: int | None) -> None:
    assert seen == sorted(seen)
    assert seen[-1] == (total, told)
    assert {all_bytes for _, all_bytes in seen} == {told}


def test_verification_tells_of_its_end(world):
    for _ in range(3):
        seen = Seen()
        report = dcp_rs.verify(world / "ours", progress=seen)
        check(seen, report.bytes_verified, report.bytes_verified)
    assert report.bytes_verified > STATE["w"].nbytes


def test_an_index_tells_of_its_end(world, tmp_path):
    seen = Seen()
    dcp_rs.index(world / "stock", out=tmp_path / "adopted", digests=True, progress=seen)
    nbytes = dcp_rs.verify(tmp_path / "adopted", allow_external=True).bytes_verified
    check(seen, nbytes, nbytes)
    (world / "ours" / "index.dcprs").rename(tmp_path / "lost")
    seen.clear()
    dcp_rs.index(world / "ours", progress=seen)
    assert seen[-1][0] == dcp_rs.verify(world / "ours").bytes_verified
    # Nothing to do is nothing to tell.
    seen.clear()
    dcp_rs.index(world / "stock", out=tmp_path / "again", progress=seen)
    assert not seen


@pytest.mark.parametrize("source", ["ours", "stock"])
@pytest.mark.parametrize("planner", [RsLoadPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_load_tells_of_its_end(world, source, planner, dtype):
    """In place, and by way of slabs, where it is cast."""
    seen = Seen()
    state = {"w": torch.zeros(24 << 20, dtype=dtype), "step": 0}
    options = {"dtype_policy": "cast"} if planner is RsLoadPlanner else {}
    report = dcp_rs.load_state_dict(
        state, RsReader(world / source, progress=seen), planner=planner(**options), no_dist=True
    )
    assert_state_equal(state, {"w": STATE["w"].to(dtype), "step": 3})
    check(
        Seen(one for one in seen if one[1] == report.bytes_wanted),
        report.bytes_wanted,
        report.bytes_wanted,
    )
    assert seen[-1] == (report.bytes_wanted, report.bytes_wanted)
    seen.clear()
    dcp.load(blank(STATE), storage_reader=RsReader(world / source, progress=seen), no_dist=True)
    assert seen[-1][0] == seen[-1][1] > STATE["w"].nbytes


@pytest.mark.parametrize(
    "state", [STATE, {"w": STATE["w"].view(-1, 2).t()}, {"w": STATE["w"].double()}]
)
def test_a_save_tells_of_its_end(tmp_path, state):
    seen = Seen()
    writer = RsWriter(tmp_path / "dcp", progress=seen)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    check(seen, writer.report.bytes_written, writer.report.bytes_written)
    for save in (dcp_rs.save, lambda *args, **how: dcp_rs.async_save(*args, **how).result(60)):
        seen.clear()
        save(dict(state), tmp_path / "ckpt", progress=seen, no_dist=True)
        check(seen, writer.report.bytes_written, writer.report.bytes_written)


def test_readers_and_writers_go_to_other_processes_without_it(world):
    assert pickle.loads(pickle.dumps(RsReader(world, progress=print)))._source.progress is None
    assert (
        pickle.loads(pickle.dumps(RsWriter(world, progress=lambda *_: None)))._options.progress
        is None
    )


def test_error_of_progress_ends_the_work(world, tmp_path):
    def stop(done: int, total: int | None) -> None:
        raise ValueError(done, total)

    with pytest.raises(ValueError, match=r"\d+"):
        dcp_rs.verify(world / "ours", progress=stop)
    with pytest.raises(ValueError, match=r"\d+"):
        dcp_rs.load(blank(STATE), world / "ours", progress=stop, no_dist=True)
    with pytest.raises(ValueError, match=r"\d+"):
        dcp_rs.save(STATE, tmp_path / "ckpt", progress=stop, no_dist=True)
    assert not list((tmp_path / "ckpt").glob("*.safetensors"))
    with pytest.raises(ValueError, match=r"\d+"):
        dcp_rs.convert(world / "ours", tmp_path / "converted", progress=stop)
    assert not (tmp_path / "converted").exists()


def stop_on_one_rank(path: str) -> str:
    def stop(done: int, total: int | None) -> None:
        raise ValueError(done)

    state = {"w": torch.zeros(5_000)}
    rank = dist.get_rank()
    try:
        dcp_rs.load(state, path, progress=stop if rank == 1 else None)
    except Exception as error:  # noqa: BLE001  # which one it is, is the question
        return type(error).__name__
    return "nothing"


def test_error_of_progress_is_raised_on_all_ranks(ckpt):
    dcp_rs.save({"w": torch.arange(5_000.0)}, ckpt)
    assert run_ranks(2, stop_on_one_rank, ckpt) == ["ValueError"] * 2


# --- the bar

WORK = """
import sys
import dcp_rs
dcp_rs.verify(sys.argv[1], progress=True)
dcp_rs.convert(sys.argv[1], sys.argv[2], progress=True, overwrite=True)
import torch
state = {"w": torch.zeros(24 << 20, dtype=torch.int32), "step": 0}
dcp_rs.load(state, sys.argv[1], progress=True)
dcp_rs.save(state, sys.argv[2], progress=True)
"""


@pytest.mark.slow
def test_a_terminal_gets_a_bar_and_a_log_nothing(world, tmp_path):
    # The save replaces what another process converted, which is a warning.
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        WORK,
        str(world / "ours"),
        str(tmp_path / "new"),
    ]
    done = programs.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout + done.stderr == ""
    shown = shown_on_a_terminal(command, all_of_it=False, PYTHONIOENCODING="utf-8")
    lines = shown.split("\r")
    for what in ("verifying", "converting", "loading", "saving"):
        assert any(line.startswith(f"{what} ") for line in lines), what
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1] == "\x1b[K"  # nothing stays


def test_a_notebook_gets_a_bar_too(world, monkeypatch, capsys):
    """A kernel that is none: its stderr is no terminal."""
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    dcp_rs.load(blank(STATE), world / "ours", progress=True, no_dist=True)
    shown = capsys.readouterr().err
    assert shown.startswith("\rloading ")
    assert "101 MB of 101 MB" in shown.split("\r")[-1]
    assert shown.endswith("\n")
