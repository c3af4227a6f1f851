"""What a load and a save say of themselves: in a report, and in the log `dcp_rs`."""

import json
import logging
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
from dcp_rs import CheckpointManager, LoadReport, RsLoadPlanner, RsReader, RsWriter, SaveReport
from dcp_rs.checkpoint.compare import compare
from dcp_rs.steps.folder_store import FolderStepStore
from dcp_rs.steps.retention import Policies, prune
from support import run_ranks
from support.both import save_rs, save_stock

STATE = {"w": torch.arange(300_000.0), "b": torch.ones(7, 3, dtype=torch.float64), "step": 3}
TENSOR_BYTES = 1_200_000 + 168


def blank():
    return {"w": torch.zeros(300_000), "b": torch.zeros(7, 3, dtype=torch.float64), "step": 0}


@pytest.mark.parametrize("save", [save_rs, save_stock])
@pytest.mark.parametrize("planner", [RsLoadPlanner, DefaultLoadPlanner])
def test_a_reader_reports_its_load(ckpt, save, planner):
    save(STATE, ckpt)
    reader = RsReader(ckpt)
    assert reader.report is None
    dcp.load(blank(), storage_reader=reader, planner=planner(), no_dist=True)
    report = reader.report
    assert isinstance(report, LoadReport)
    assert report.path == str(ckpt)
    values = report.bytes_wanted - TENSOR_BYTES
    assert 0 < values < 5000
    assert report.bytes_read >= report.bytes_wanted
    assert list(report.phases) == ["metadata", "plan", "read"]
    assert abs(sum(report.phases.values()) - report.seconds) < 1e-3
    assert all(seconds >= 0 for seconds in report.phases.values())
    assert str(report).startswith(f"loaded 1.20 MB from {ckpt} in ")
    assert "\n" not in str(report)
    assert json.loads(json.dumps(report.to_dict()))["bytes_wanted"] == report.bytes_wanted


def test_load_returns_what_was_cast_and_lacking(ckpt):
    save_rs(STATE, ckpt)
    state = {"w": torch.zeros(300_000, dtype=torch.bfloat16), "new": torch.zeros(2)}
    planner = RsLoadPlanner(dtype_policy="cast", allow_partial_load=True)
    report = dcp_rs.load_state_dict(state, RsReader(ckpt), planner=planner, no_dist=True)
    assert report is planner.report
    assert [mismatch.name for mismatch in report.dtype_mismatched] == ["w"]
    assert report.missing == ["new"]
    assert report.bytes_wanted == 1_200_000
    assert ", 1 cast, 1 missing (" in str(report)
    assert dcp_rs.load_state_dict(blank(), RsReader(ckpt), no_dist=True).bytes_wanted > TENSOR_BYTES


def test_a_part_of_a_tensor_counts_as_a_part(ckpt):
    save_rs(STATE, ckpt)
    report = dcp_rs.load({"b": torch.zeros(7, 3, dtype=torch.float64)}, ckpt, no_dist=True)
    assert report.bytes_wanted == 168
    assert report.bytes_read < 100_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # in place, and through slabs
def test_a_load_tells_which_way_the_bytes_came(ckpt, dtype):
    save_rs(STATE, ckpt)
    for io in ("mmap", "buffered", "auto"):
        report = dcp_rs.load_state_dict(
            {"w": torch.zeros(300_000, dtype=dtype)},
            RsReader(ckpt, io=io),
            planner=RsLoadPlanner(dtype_policy="cast"),
            no_dist=True,
        )
        assert report.bytes_read == 1_200_000
        if io != "auto":  # which takes what this file system is best at
            assert (report.bytes_mapped, report.bytes_direct) == (
                1_200_000 if io == "mmap" else 0,
                0,
            )
        assert report.requests >= 1


def test_a_writer_reports_its_save(ckpt):
    writer = RsWriter(ckpt)
    assert writer.report is None
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    report = writer.report
    assert isinstance(report, SaveReport)
    assert (report.path, report.entries) == (str(ckpt), 3)
    assert TENSOR_BYTES < report.bytes_written < TENSOR_BYTES + 5000
    assert list(report.phases) == ["plan", "write", "commit"]
    assert str(report).startswith(f"saved 1.20 MB to {ckpt} in ")


def test_metadata_of_a_save_has_a_report(ckpt):
    metadata = dcp_rs.save(STATE, ckpt, no_dist=True)
    assert isinstance(metadata, Metadata)
    assert set(metadata.state_dict_metadata) == set(STATE)
    assert TENSOR_BYTES < metadata.report.bytes_written < TENSOR_BYTES + 5000
    assert f"<3 entries of {ckpt}" in repr(metadata)
    assert " object at 0x" not in repr(metadata)


def test_an_open_checkpoint_reports_what_was_read_of_it(ckpt):
    run_ranks(2, save_sharded, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert checkpoint.report.bytes_read == 0
        checkpoint["whole"]  # where it lies
        assert checkpoint.report.bytes_read == 0
        checkpoint["w"]  # is put together
        assert checkpoint.report.bytes_wanted == checkpoint.report.bytes_read == 8000
        checkpoint.get_slice("w")[998:1002]
        assert checkpoint.report.bytes_wanted == 8000 + 4 * 4
        checkpoint["step"]
        report = checkpoint.report
        assert 8016 < report.bytes_wanted < 10_000
        assert report.requests >= 2
        assert report.to_dict()["path"] == str(ckpt)
        dict(checkpoint.stream())
        assert checkpoint.report.bytes_wanted > report.bytes_wanted + 8000 + 800


def save_sharded(path):
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(2000.0), mesh, [Shard(0)])
    dcp_rs.save({"w": rows, "whole": torch.ones(200), "step": 3}, path)


def test_the_log_has_a_line_for_each(ckpt, caplog):
    with caplog.at_level(logging.INFO, logger="dcp_rs"):
        dcp_rs.save(STATE, ckpt, no_dist=True)
        dcp_rs.load(blank(), ckpt, no_dist=True)
    lines = [record.getMessage() for record in caplog.records if record.name == "dcp_rs"]
    assert [line.split()[0] for line in lines] == ["saved", "loaded"]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="dcp_rs"):
        dcp_rs.load(blank(), ckpt, no_dist=True)
    assert {"metadata", "plan", "read"} <= {
        record.getMessage().split()[0] for record in caplog.records
    }
    caplog.clear()
    dcp_rs.load(blank(), ckpt, no_dist=True)
    assert not [record for record in caplog.records if record.name == "dcp_rs"]


def load_with_logs(path):
    """The lines of this rank's log, at INFO and at DEBUG."""
    lines: dict[str, list[str]] = {"INFO": [], "DEBUG": []}
    handler = logging.Handler()
    rank = f"rank {dist.get_rank()}: "

    def emit(record):
        assert record.getMessage().startswith(rank)
        lines[record.levelname].append(record.getMessage().removeprefix(rank).split()[0])

    handler.emit = emit  # type: ignore[method-assign]
    log = logging.getLogger("dcp_rs")
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        state = {"w": torch.full((4,), float(dist.get_rank()))}
        dcp_rs.save(state, path)
        report = dcp_rs.load(state, path)
    finally:  # the process serves other tests
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return (
        lines["INFO"],
        [line for line in lines["DEBUG"] if line in ("saved", "loaded")],
        report.bytes_wanted,
    )


def test_one_rank_speaks_for_all(ckpt):
    """And each line says whose it is: a file in which the lines of 512 ranks met told of none."""
    first, second = run_ranks(2, load_with_logs, ckpt)
    assert first == (["saved", "loaded"], [], 16)
    assert second == ([], ["saved", "loaded"], 16)


def save_in_the_background(path):
    """What two saves, one after the other, say of themselves on this rank."""
    said = []
    for size in (1000, 5000):
        state = {
            "all": torch.ones(10),
            f"of {dist.get_rank()}": torch.ones(size * (1 + dist.get_rank())),
        }
        future = dcp_rs.async_save(state, f"{path}/{size}")
        assert not future.cancel()
        future.result(150)
        report = future.report
        assert isinstance(report, SaveReport)
        assert report.path == f"{path}/{size}"
        assert report.seconds > 0
        said.append((report.bytes_written, report.entries, list(report.phases)))
    return said


def test_a_save_in_the_background_reports_too(ckpt):
    """Each rank reports its own bytes."""
    first, second = run_ranks(2, save_in_the_background, ckpt)
    assert [phases for *_, phases in first] == [["plan", "write", "commit"]] * 2
    assert [phases for *_, phases in second] == [["plan", "write"]] * 2
    assert [entries for _, entries, _ in first] == [3, 3]
    assert [nbytes // 4000 for nbytes, *_ in first] == [1, 5]
    assert [nbytes // 8000 for nbytes, *_ in second] == [1, 5]


def test_a_save_in_the_background_that_fails_has_no_report(ckpt):
    future = dcp_rs.async_save({"w": torch.empty(1, device="meta")}, ckpt, no_dist=True)
    assert future.exception(60) is not None
    assert future.report is None


def test_every_report_is_of_plain_types_and_tells_its_speed(ckpt, tmp_path):
    saved = dcp_rs.save(STATE, ckpt, no_dist=True).report
    state = {"w": torch.zeros(300_000, dtype=torch.bfloat16)}
    cast = dcp_rs.load(state, ckpt, dtype_policy="cast", no_dist=True)
    converted = dcp_rs.convert(ckpt, tmp_path / "out", to="safetensors", skip_unsupported=True)
    with dcp_rs.open(ckpt) as checkpoint:
        checkpoint["b"]
        read = checkpoint.report
    timed = [saved, cast, converted, dcp_rs.verify(ckpt), compare(ckpt, ckpt)]
    with CheckpointManager(tmp_path / "run", no_dist=True, fsync=False) as manager:
        for step in (1, 2):
            manager.save(step, STATE)
    pruned = prune(FolderStepStore(tmp_path / "run"), Policies(keep_last=1))
    assert [step.number for step in pruned.removed] == [1]
    for report in (*timed, read, dcp_rs.clean(ckpt), pruned):
        told = json.loads(json.dumps(report.to_dict()))
        assert told.keys() == {known.name for known in fields(report)}
    for report in timed:
        assert "seconds=" in repr(report)
    assert cast.to_dict()["dtype_mismatched"] == [
        {"name": "w", "expected": "torch.bfloat16", "got": "torch.float32"}
    ]


def test_metadata_of_a_save_prints_its_report(tmp_path):
    """It printed 600 characters of torch's metadata."""
    saved = dcp_rs.save({"w": torch.ones(2)}, tmp_path / "ckpt", no_dist=True)
    assert str(saved) == str(saved.report)
    assert repr(saved).startswith("SavedMetadata(state_dict_metadata=")
