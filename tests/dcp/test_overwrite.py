"""Saving where something is already: what is replaced, what is removed, and what nobody may touch."""

import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.errors import CheckpointExistsError
from support import assert_state_equal, blank, files_in, nested_state, random_tensor, run_ranks
from support.both import load_rs, save_rs

FOREIGN = {
    "notes.txt": b"mine",
    "model.safetensors": b"also mine",
    "g00000007-0123456789abcdef-r00000-f00000.safetensors.bak": b"looks like ours",
    "index.dcprs.bak": b"a copy",
    ".metadata": b"stock",
    "__0_0.distcp": b"stock too",
}


def data_files(path):
    return sorted(file.name for file in path.glob("g*.safetensors"))


def save_many(path, seed, io="auto"):
    rank = int(os.environ["RANK"])
    state = {"common": random_tensor((9,), seed=seed), f"of.{rank}": random_tensor((5,), seed=rank)}
    dcp.save(state, storage_writer=RsWriter(path, io=io))


def test_the_files_of_the_replaced_checkpoint_are_removed(ckpt):
    run_ranks(4, save_many, ckpt, 1)
    first = data_files(ckpt)
    assert len(first) == 4
    run_ranks(2, save_many, ckpt, 2)
    second = data_files(ckpt)
    assert len(second) == 2
    assert not set(first) & set(second)
    assert [file.name for file in files_in(ckpt)] == [*second, "index.dcprs"]
    got = load_rs({"common": torch.zeros(9)}, ckpt)
    assert_state_equal(got["common"], random_tensor((9,), seed=2))


def test_files_of_others_stay_as_they_are(ckpt):
    ckpt.mkdir()
    for name, data in FOREIGN.items():
        (ckpt / name).write_bytes(data)
    (ckpt / "folder").mkdir()
    for seed in range(2):
        save_rs(nested_state(seed), ckpt)
        for name, data in FOREIGN.items():
            assert (ckpt / name).read_bytes() == data
        assert (ckpt / "folder").is_dir()
        want = nested_state(seed)
        assert_state_equal(load_rs(blank(want), ckpt), want)
    assert len(data_files(ckpt)) == 1


def test_generations_count_on_from_any_file_that_is_there(ckpt):
    save_rs({"w": torch.ones(1)}, ckpt)
    left_over = "g00000041-0123456789abcdef-r00000-f00000.safetensors"
    (ckpt / left_over).write_bytes(b"of a save that was killed")
    save_rs({"w": torch.ones(1)}, ckpt)
    assert [name[:9] for name in data_files(ckpt)] == ["g00000041", "g00000042"]


def test_overwriting_may_be_refused(ckpt):
    save_rs({"w": torch.ones(1)}, ckpt, overwrite=False)
    before = {file.name: file.read_bytes() for file in ckpt.iterdir()}
    with pytest.raises(CheckpointException) as raised:
        save_rs({"w": torch.zeros(1)}, ckpt, overwrite=False)
    assert type(raised.value.failures[0][0]) is CheckpointExistsError
    assert {file.name: file.read_bytes() for file in ckpt.iterdir()} == before
    save_rs({"w": torch.zeros(1)}, ckpt)
    assert load_rs({"w": torch.ones(1)}, ckpt)["w"] == 0


def test_a_folder_in_a_folder_that_is_not_there_yet(tmp_path):
    path = tmp_path / "a" / "b" / "ckpt ü"
    save_rs({"w": torch.ones(1)}, str(path))
    assert load_rs({"w": torch.zeros(1)}, str(path))["w"] == 1


def test_a_relative_path_stays_what_it_was_when_the_folder_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rs({"w": torch.ones(1)}, "ckpt")
    assert load_rs({"w": torch.zeros(1)}, "ckpt")["w"] == 1


class Interrupting(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if write_item.index.fqn == "z":
            raise KeyboardInterrupt
        return super().resolve_data(write_item)


def test_a_save_that_fails_changes_nothing(ckpt):
    save_rs({"w": torch.ones(1)}, ckpt)
    before = {file.name: file.read_bytes() for file in ckpt.iterdir()}
    with pytest.raises(BaseException):  # noqa: B017, PT011 - torch wraps even KeyboardInterrupt
        dcp.save(
            {"w": torch.ones(1), "z": torch.ones(1)},
            storage_writer=RsWriter(ckpt),
            planner=Interrupting(),
            no_dist=True,
        )
    assert {file.name: file.read_bytes() for file in ckpt.iterdir()} == before


def test_a_save_that_fails_at_the_commit_leaves_the_old_checkpoint(ckpt, monkeypatch):
    save_rs({"w": torch.ones(1)}, ckpt)
    before = data_files(ckpt)
    monkeypatch.setattr(
        "dcp_rs.engine.destination._core.commit_indexes",
        lambda *_, **__: (_ for _ in ()).throw(OSError(28, "disk full")),
    )
    with pytest.raises(CheckpointException, match="disk full"):
        save_rs({"w": torch.zeros(1)}, ckpt)
    with pytest.raises(OSError, match="disk full") as raised:
        dcp_rs.save({"w": torch.zeros(1)}, ckpt)
    assert raised.value.errno == 28
    monkeypatch.undo()
    assert data_files(ckpt) == before
    assert load_rs({"w": torch.zeros(1)}, ckpt)["w"] == 1
    save_rs({"w": torch.full((1,), 2.0)}, ckpt)
    assert load_rs({"w": torch.zeros(1)}, ckpt)["w"] == 2


def test_a_folder_without_write_permission(ckpt):
    ckpt.mkdir()
    ckpt.chmod(0o500)
    try:
        if os.access(ckpt, os.W_OK):
            pytest.skip("root may write anywhere")
        with pytest.raises(CheckpointException, match="Permission denied"):
            save_rs({"w": torch.ones(1)}, ckpt)
    finally:
        ckpt.chmod(0o700)


def test_saves_leave_no_temporary_files_and_no_open_ones(ckpt):
    save_rs(nested_state(), ckpt)  # what is opened once is open now
    before = set(os.listdir("/proc/self/fd"))
    for seed in range(3):
        save_rs(nested_state(seed), ckpt)
        load_rs(blank(nested_state()), ckpt)
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert all(file.suffix in (".safetensors", ".dcprs") for file in files_in(ckpt))


def test_a_tensor_read_before_keeps_its_values(ckpt):
    """Overwriting removes the file that a zero-copy tensor is a view of, not its bytes."""
    save_rs({"w": torch.ones(1000)}, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        old = checkpoint["w"]
        save_rs({"w": torch.zeros(1000)}, ckpt)
        assert torch.equal(checkpoint["w"], torch.ones(1000))
    assert torch.equal(old, torch.ones(1000))
    assert torch.equal(load_rs({"w": torch.ones(1000)}, ckpt)["w"], torch.zeros(1000))


def test_a_file_that_cannot_be_removed_is_a_warning(ckpt, monkeypatch):
    save_rs({"w": torch.ones(1)}, ckpt)
    commit = dcp_rs.engine.destination._core.commit_indexes
    monkeypatch.setattr(
        "dcp_rs.engine.destination._core.commit_indexes",
        lambda *args, **kwargs: (commit(*args, **kwargs)[0], ["remove x: busy"]),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_rs({"w": torch.ones(1)}, ckpt)
    assert any("remove x: busy" in str(warning.message) for warning in caught)


def test_the_metadata_that_save_returns(ckpt):
    metadata = dcp.save(nested_state(), storage_writer=RsWriter(ckpt), no_dist=True)
    read = RsReader(ckpt).read_metadata()
    assert set(metadata.state_dict_metadata) == set(read.state_dict_metadata)
    assert metadata.storage_meta.save_id == read.storage_meta.save_id


def save_unless_there(path, others):
    """A save that refuses to replace anything, while another one to the same path is committed."""
    rank = int(os.environ.get("RANK", "0"))
    done = []

    def other(*_):
        if rank == 0 and others and not done:
            done.append(1)
            dcp_rs.save({"w": torch.full((1000,), 7.0)}, path, overwrite=False, no_dist=True)

    try:
        dcp_rs.save(
            {"w": torch.ones(1000), f"of.{rank}": torch.ones(3)},
            path,
            overwrite=False,
            progress=other,
        )
    except CheckpointExistsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoint_committed_meanwhile_is_replaced_on_request(ckpt, ranks):
    run = (
        (lambda *args: [save_unless_there(*args)])
        if ranks == 1
        else (lambda *args: run_ranks(2, save_unless_there, *args))
    )
    for refusal in run(ckpt, True):
        assert "was created meanwhile" in refusal
    assert len(data_files(ckpt)) == 1
    assert dcp_rs.verify(ckpt)
    assert torch.equal(load_rs({"w": torch.zeros(1000)}, ckpt)["w"], torch.full((1000,), 7.0))
    for refusal in run(ckpt, False):
        assert "overwrite=False" in refusal
