"""Every class of `dcp_rs.errors`: provoked, documented, pickled, and with its rank."""

import inspect
import os
import pickle
import re
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import CheckpointManager, RsSavePlanner, RsWriter, _core, errors
from support import rank_outcomes
from support.both import save_rs
from support.failures import without_torchs_collection
from support.object_server import Fault, object_server
from support.places import ROOT
from support.threads import copies_held_up, saves_held_up

DOCS = ROOT / "docs" / "errors.md"
CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.DcpRsError)
]


def not_found(path):
    dcp_rs.open(path)


def no_entry(path):
    save_rs({"w": torch.ones(1)}, path)
    dcp_rs.open(path)["v"]


def exists(path):
    save_rs({"w": torch.ones(1)}, path)
    dcp_rs.save({"w": torch.ones(1)}, path, overwrite=False, no_dist=True)


def replaced(path):
    save_rs({"w": torch.ones(1)}, path)
    checkpoint = dcp_rs.open(path)
    save_rs({"w": torch.ones(1)}, path)
    checkpoint["w"]


def corrupt_index(path):
    save_rs({"w": torch.ones(1)}, path)
    (path / "index.dcprs").write_bytes(b"damaged")
    dcp_rs.open(path)


def quantized(path):
    save_rs({"m.weight": torch.ones(2, 2)}, path)
    (path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "gptq", "bits": 4}}'
    )
    dcp_rs.open(path, dequantize=True)


def corrupt_data(path):
    save_rs({"w": torch.ones(1)}, path)
    next(path.glob("g*")).unlink()
    dcp_rs.load({"w": torch.ones(1)}, path, no_dist=True)


def unsupported(path):
    dcp_rs.save({"w": torch.empty(1, device="meta")}, path, no_dist=True)


def unsafe(path):
    save_rs({"value": Path("x")}, path)
    dcp_rs.load({"value": None}, path, no_dist=True)


def plan(path):
    save_rs({"w": torch.ones(1)}, path)
    dcp_rs.load({"other": torch.ones(1)}, path, no_dist=True)


def go_on_after_another(path):
    with CheckpointManager(path, no_dist=True) as old, CheckpointManager(path, no_dist=True) as new:
        old.save(1, {"w": torch.ones(1)})
        new.load({"w": torch.zeros(1)})
        old.save(2, {"w": torch.ones(1)})


def in_progress(path):
    with saves_held_up() as held:
        first = dcp_rs.async_save({"w": torch.ones(1)}, path, no_dist=True)
        try:
            dcp_rs.async_save({"w": torch.ones(1)}, path, no_dist=True)
        finally:
            held.go.set()
            first.result(60)


def change_what_is_copied(path):
    state = {"w": torch.ones(1)}
    with copies_held_up():
        future = dcp_rs.async_save(state, path, no_dist=True, async_staging=True)
        state["w"].add_(1)
    future.result(60)


def base(path):
    save_rs({"w": torch.ones(1)}, path)
    checkpoint = dcp_rs.open(path)
    checkpoint.close()
    checkpoint["w"]


def lose_rank(path):
    save_rs({"w": torch.ones(1)}, path)
    raise rank_outcomes(2, die_before_loading, path)[0].error


def panic(path):
    _core._panic(f"in {path}", False)


def from_a_store(spoil):
    """Opens a checkpoint on a server, and reads of it, after something was done to the server."""

    def provoke(path):
        save_rs({"w": torch.ones(1)}, path)
        with object_server() as server:
            server.put_folder(path, "ckpt")
            url = spoil(server) or server.url("ckpt")
            checkpoint = dcp_rs.open(url, storage_options=server.options(max_retries=0))
            checkpoint["w"]
            (key,) = (key for key in server.objects if key.endswith(".safetensors"))
            server.put(key, server.objects[key].data[:-1] + b"x")
            checkpoint["w"]

    return provoke


def busy(server):
    server.faults.append(Fault(status=503, times=None))


def forbidden(server):
    server.access_key = "another"


def elsewhere(server):
    return "s3://elsewhere/ckpt"


def changed(server):
    """Between the two reads, by :func:`from_a_store`."""


def unclear(path):
    with object_server() as server:
        state = {"w": torch.ones(1)}
        options = server.options(max_retries=0)
        dcp_rs.save(state, server.url("ckpt"), storage_options=options, no_dist=True)

        def is_index(request):
            return request.key.endswith("index.dcprs") and (
                request.method == "PUT" or not server.faults[0].times
            )

        server.faults.append(
            Fault(lose=True, matches=lambda request: request.method == "PUT" and is_index(request))
        )
        server.faults.append(Fault(reset=True, matches=is_index, times=None))
        dcp_rs.save(state, server.url("ckpt"), storage_options=options, no_dist=True)


ENGINE = {"io": "auto", "threads": 1, "verify": False, "max_inflight_bytes": 1 << 20}

PROVOKED = {
    errors.DcpRsError: base,
    errors.CheckpointNotFoundError: not_found,
    errors.CheckpointExistsError: exists,
    errors.EntryNotFoundError: no_entry,
    errors.CheckpointReplacedError: replaced,
    errors.CorruptIndexError: corrupt_index,
    errors.CorruptDataError: corrupt_data,
    errors.QuantizationError: quantized,
    errors.UnsupportedError: unsupported,
    errors.UnsafePickleError: unsafe,
    errors.PlanError: plan,
    errors.RunTakenOverError: go_on_after_another,
    errors.SaveInProgressError: in_progress,
    errors.StateChangedError: change_what_is_copied,
    errors.StorageError: from_a_store(busy),
    errors.StorageNotFoundError: from_a_store(elsewhere),
    errors.StoragePermissionError: from_a_store(forbidden),
    errors.StoragePreconditionError: from_a_store(changed),
    errors.StorageUnclearError: unclear,
    errors.InternalError: panic,
    errors.RankLostError: lose_rank,
}


def die_before_loading(path):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dcp_rs.load({"w": torch.ones(1)}, path)


def test_every_error_is_provoked():
    assert set(PROVOKED) == set(CLASSES)
    assert {cls.__name__ for cls in CLASSES} == set(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_names_file_tensor_and_place(ckpt, cls):
    with pytest.raises(cls) as raised:
        PROVOKED[cls](ckpt)
    error = raised.value
    assert type(error) is cls
    assert len(str(error)) > 15
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (str(copy), copy.path, copy.tensor, copy.offset) == (
        str(error),
        error.path,
        error.tensor,
        error.offset,
    )
    assert (
        error.path or error.tensor or cls in (errors.InternalError, errors.RankLostError)
    )  # which know of no file
    if error.tensor:
        assert error.tensor in str(error)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_is_documented(cls):
    section = re.search(
        rf"^## `{cls.__name__}`.*?(?=^## |\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL
    )
    assert section, f"docs/errors.md has no section {cls.__name__}"
    if cls is not errors.DcpRsError:
        assert "**Cause.**" in section[0]
        assert "**Way out.**" in section[0]
    assert cls.__doc__


def load_together(path):
    dcp_rs.load({"w": torch.ones(1)}, path)


def test_the_rank_is_named(ckpt):
    save_rs({"w": torch.ones(1)}, ckpt)
    next(ckpt.glob("g*")).unlink()
    for rank, outcome in enumerate(rank_outcomes(2, load_together, ckpt)):
        assert type(outcome.error) is errors.CorruptDataError
        assert outcome.error.__notes__ == [f"raised on ranks 0, 1; this is rank {rank}'s"]


def test_the_core_raises_no_class_of_its_own(ckpt):
    save_rs({"w": torch.ones(1)}, ckpt)
    index = _core.Index.open(str(ckpt), None, False)
    for call in (
        lambda: index.tensor(99),
        lambda: index.check_files([99]),
        lambda: index.first_chunk(99),
    ):
        with pytest.raises(errors.DcpRsError):
            call()


@pytest.mark.parametrize(
    ("call", "tensor"),
    [
        (
            lambda index, memory: index.read_chunks(
                [_core.Fill(0, [0], [9], memory, [1])], **ENGINE
            ),
            "w",
        ),
        (
            lambda index, memory: index.read_regions(
                [_core.Fill(0, [3], [9], memory, [1])], **ENGINE
            ),
            "w",
        ),
        (
            lambda index, memory: index.read_regions(
                [_core.Fill(0, [0], [4], memory, [0])], **ENGINE
            ),
            "w",
        ),
        (
            lambda index, memory: index.read_regions([_core.Fill(0, [0], [4], 0, [1])], **ENGINE),
            "w",
        ),
        (lambda index, _: index.touching(0, [0], [9]), "w"),
        (lambda index, _: index.locate([("w", [3], None)]), "w"),
        (lambda index, _: index.locate([("unknown", None, None)]), "unknown"),
        (lambda index, _: index.tensor(99), None),
    ],
)
def test_a_plan_error_of_the_core_says_where(ckpt, call, tensor):
    save_rs({"w": torch.ones(4)}, ckpt)
    index = _core.Index.open(str(ckpt), None, False)
    memory = torch.zeros(16)
    with pytest.raises(errors.PlanError) as raised:
        call(index, memory.data_ptr())
    assert (raised.value.path, raised.value.tensor) == (str(ckpt / "index.dcprs"), tensor)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.path, copy.tensor) == (raised.value.path, raised.value.tensor)
    assert torch.equal(memory, torch.zeros(16))


def save_by_our_planner(state, path):
    with without_torchs_collection():
        dcp.save(state, storage_writer=RsWriter(path), planner=RsSavePlanner(), no_dist=True)


@pytest.mark.parametrize(
    "value",
    [lambda: 0, threading.Lock(), {"deep": [threading.Lock()]}],
    ids=["function", "lock", "deep"],
)
@pytest.mark.parametrize("save", [partial(dcp_rs.save, no_dist=True), save_by_our_planner])
def test_a_value_that_does_not_pickle_is_named(ckpt, value, save):
    with pytest.raises(
        errors.UnsupportedError, match=r"value 'trainer\.thing.*' \(.*\) cannot be pickled: "
    ) as raised:
        save({"w": torch.ones(1), "trainer": {"thing": value}}, ckpt)
    assert raised.value.tensor.startswith("trainer.thing")
    assert list(ckpt.iterdir()) == []


def save_or_fail(path, how):
    """Both ranks go to different places that are no folders, or one of them does."""
    if how == "both":
        return dcp_rs.save({"w": torch.ones(1)}, path / "file" / str(dist.get_rank()))
    return dcp_rs.save(
        {"w": torch.ones(1)}, path / ("file" if dist.get_rank() else "folder") / "ckpt"
    )


def test_an_error_of_the_system_on_one_rank_is_that_error_on_all(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for outcome in rank_outcomes(2, save_or_fail, tmp_path, "one"):
        assert type(outcome.error) is NotADirectoryError
        assert outcome.error.__notes__[-1] == "raised on rank 1"
    for rank, outcome in enumerate(rank_outcomes(2, save_or_fail, tmp_path, "both")):
        assert type(outcome.error) is NotADirectoryError
        assert outcome.error.__notes__ == [f"raised on ranks 0, 1; this is rank {rank}'s"]


@pytest.mark.parametrize(
    "save", [dcp_rs.save, lambda *args, **more: dcp_rs.async_save(*args, **more).result()]
)
def test_an_error_of_the_system_in_one_process_is_that_error(tmp_path, save):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotADirectoryError):
        save({"w": torch.ones(1)}, tmp_path / "file" / "ckpt", no_dist=True)


def test_unsavable_entry_is_named(ckpt):
    with pytest.raises(errors.PlanError) as raised:
        dcp_rs.save({"w": torch.ones([1] * 65)}, ckpt, no_dist=True)
    assert raised.value.tensor == "w"
