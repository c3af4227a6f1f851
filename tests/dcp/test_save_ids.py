"""Which save a data file is of: the coordinator says it to all ranks, and recovery goes by it."""

import json
import pickle
import shutil
import struct
import uuid

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_rs
from dcp_rs import RsReader, RsSavePlanner, RsWriter, _core
from dcp_rs.checkpoint.compare import compare
from dcp_rs.errors import CheckpointReplacedError, DcpRsError
from support import run_ranks
from support.both import HAS_RANK_LOCAL, save_stock


def told(file):
    """`DCPRS` in the header of a data file."""
    with file.open("rb") as data:
        (length,) = struct.unpack("<Q", data.read(8))
        return json.loads(json.loads(data.read(length))["__metadata__"]["DCPRS"])


def told_in(folder):
    return [told(file) for file in sorted(folder.glob("g*"), key=lambda file: file.name[26:])]


def state():
    rank = dist.get_rank()
    return {f"of.{rank}": torch.full((3,), float(rank)), "common": torch.ones(2)}


def save_often(path, planner, saves):
    ids = []
    writer = None
    for number in range(saves):
        # The writer of a loop may be a new one each time, or one for all.
        writer = writer if number == 2 else RsWriter(path)
        dcp.save(state(), storage_writer=writer, planner=planner())
        ids.append(writer.save_id)
    return ids


@pytest.mark.parametrize("planner", [DefaultSavePlanner, RsSavePlanner])
def test_all_ranks_write_what_the_coordinator_chose(ckpt, planner):
    ids = run_ranks(2, save_often, ckpt, planner, 4, fresh=True)
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 4
    index = _core.Index.open(str(ckpt), None, False)
    assert (index.save_id, index.generation) == (ids[0][-1], 4)
    files = told_in(ckpt)
    assert [(about["rank"], about["world_size"]) for about in files] == [(0, 2), (1, 2)]
    assert {(about["save_id"], about["generation"]) for about in files} == {(ids[0][-1], 4)}


def save_where_ranks_see_different_files(path):
    """What NFS may show: rank 1 does not see yet what rank 0 does."""
    if dist.get_rank() == 1:
        real, _core.next_generation = _core.next_generation, lambda _: 1
    try:
        dcp_rs.save(state(), path)
    finally:
        if dist.get_rank() == 1:
            _core.next_generation = real


def test_ranks_do_not_list_the_folder(ckpt):
    run_ranks(2, save_where_ranks_see_different_files, ckpt)
    run_ranks(2, save_where_ranks_see_different_files, ckpt)
    assert [about["generation"] for about in told_in(ckpt)] == [2, 2]
    (ckpt / "index.dcprs").unlink()
    dcp_rs.index(ckpt)
    assert dcp_rs.verify(ckpt).ok


def test_parts_of_two_saves_are_never_joined(tmp_path):
    """Both at once into an empty folder; of one, rank 0 came to its end, of the other rank 1."""
    run_ranks(2, save_often, tmp_path / "a", RsSavePlanner, 1)
    run_ranks(2, save_often, tmp_path / "b", RsSavePlanner, 1)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for part, rank in (("a", 0), ("b", 1)):
        shutil.copy(next((tmp_path / part).glob(f"*-r0000{rank}-*")), mixed)
    with pytest.raises(DcpRsError, match="generation 1 is not complete"):
        dcp_rs.index(mixed)
    # With all of both, the caller chooses.
    for part in ("a", "b"):
        for file in (tmp_path / part).glob("g*"):
            shutil.copy(file, mixed)
    with pytest.raises(DcpRsError, match="choose by save id"):
        dcp_rs.index(mixed)
    chosen = dcp_rs.open(tmp_path / "b").save_id
    dcp_rs.index(mixed, save_id=chosen)
    assert dcp_rs.open(mixed).save_id == chosen
    assert compare(mixed, tmp_path / "b").differences == []


def save_alone(path):
    dcp.save(state(), storage_writer=RsWriter(path), use_collectives=False)


@pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch has no rank-local saves")
def test_ranks_that_save_alone_choose_alone(ckpt):
    run_ranks(2, save_alone, ckpt)
    files = told_in(ckpt)
    assert [(about["rank"], about["world_size"]) for about in files] == [(0, 0), (1, 0)]
    assert len({about["save_id"] for about in files}) == 2


def test_the_id_of_a_stock_checkpoint_is_its_own(tmp_path):
    save_stock({"w": torch.ones(2)}, tmp_path)
    want = dcp.FileSystemReader(tmp_path).read_metadata().storage_meta.save_id
    assert RsReader(tmp_path).read_metadata().storage_meta.save_id == want
    assert dcp_rs.open(tmp_path).save_id == str(uuid.UUID(want)) == want
    dcp_rs.index(tmp_path)
    assert RsReader(tmp_path).read_metadata().storage_meta.save_id == want


def test_a_model_of_hugging_face_has_no_id(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert RsReader(tmp_path).read_metadata().storage_meta.save_id is None


@pytest.mark.parametrize("name", ["__metadata__~é", "__metadata__~x"])
def test_names_that_nobody_writes_into_headers_are_refused(ckpt, name):
    dcp_rs.save({"abc": torch.ones(2)}, ckpt)
    (file,) = ckpt.glob("g*")
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = data[8 : 8 + length].rstrip().replace(b'"abc"', f'"{name}"'.encode())
    header = header.replace(b'\\"abc\\":', f'\\"{name}\\":'.encode())
    file.write_bytes(data[:8] + header.ljust(length) + data[8 + length :])
    (ckpt / "index.dcprs").unlink()
    with pytest.raises(DcpRsError, match="a name that no tensor has in a header"):
        dcp_rs.index(ckpt)


def test_each_save_of_a_writer_that_is_sent_has_an_id(ckpt):
    """Torch's checkpoint process gets the same writer for every save."""
    writer = RsWriter(ckpt, fsync=False)
    ids, sent = set(), []
    for value in (1.0, 2.0):
        there = pickle.loads(pickle.dumps(writer))
        dcp.save({"w": torch.full((3,), value)}, storage_writer=there, no_dist=True)
        with dcp_rs.open(ckpt) as checkpoint:
            ids.add(checkpoint.save_id)
            sent.append(pickle.dumps(checkpoint))
    assert len(ids) == 2
    assert pickle.loads(sent[1])["w"].tolist() == [2, 2, 2]
    with pytest.raises(CheckpointReplacedError):
        pickle.loads(sent[0])  # it opened the second save
