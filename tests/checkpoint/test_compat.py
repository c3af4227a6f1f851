"""The compat corpus: small checkpoints of every kind of save, of each format version, are read bit for bit for as long as there are releases."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import dcp_rs
from compat.build_v1 import ADOPTED, describe
from compat.everything import DTYPES, expected
from dcp_rs import RsReader, _core
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.errors import UnsupportedError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.nesting import like
from support import assert_state_equal, blank, run_ranks
from support.places import TESTS
from support.second_reader import SecondReader

CORPUS = TESTS / "compat" / "v1"
V1 = CORPUS / "everything"
KINDS = ["plain", "nested", "values", "cast", "sharded", "reused", *ADOPTED]

# sha256 over the names and contents of the files, in the order of their names: nothing in there
# ever changes.
V1_SHA256 = "4037dea5185a6427eeb763c80e0e6c8027be80b66ebf9554b60e3a5c422db597"


def test_the_files_are_those_that_were_committed():
    digest = hashlib.sha256()
    for file in sorted(path for path in CORPUS.rglob("*") if path.is_file()):
        digest.update(file.relative_to(CORPUS).as_posix().encode() + b"\0" + file.read_bytes())
    assert digest.hexdigest() == V1_SHA256


def copied(kind, tmp_path):
    """A copy of one kind, whose files are as old as its index says."""
    folder = Path(shutil.copytree(CORPUS / kind, tmp_path / kind))
    about = json.loads((CORPUS / f"{kind}.json").read_text("utf-8"))
    for name, time in about.get("mtimes", {}).items():
        os.utime(folder / name, ns=(time, time))
    return folder, about


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_save_comes_back(kind, tmp_path):
    folder, about = copied(kind, tmp_path)
    with dcp_rs.open(folder) as checkpoint:
        got = checkpoint.state_dict()
    assert describe(got) == ordered(about["state"], kind)
    template = emptied(got)
    dcp_rs.load(template, folder, verify=kind not in ("stock", "views"), io="buffered")
    assert describe(template) == describe(got)
    assert dcp_rs.verify(folder).ok is (
        None if kind in ("stock", "views") else True
    )  # those have no digests
    if kind not in ADOPTED:
        assert SecondReader.open(folder).save_id


def emptied(node):
    """The same containers, with nothing in the tensors, and other values."""
    if isinstance(node, torch.Tensor):
        return torch.zeros_like(node)
    if isinstance(node, dict):
        return like(node, ((key, emptied(value)) for key, value in node.items()))
    has_tensors = isinstance(node, list) and any(
        isinstance(entry, torch.Tensor | dict) for entry in node
    )
    return [emptied(entry) for entry in node] if has_tensors else ...


def ordered(state, kind):
    """Adopted checkpoints know no order: entries come by name."""
    if kind not in ADOPTED:
        return state
    items = [
        [key, ordered(value, kind) if "mapping" in value else value]
        for key, value in sorted(state["items"])
    ]
    return state | {"items": items}


@pytest.mark.parametrize("kind", ["plain", "nested", "values", "cast", "sharded", "reused"])
def test_every_kind_of_save_is_recovered(kind, tmp_path):
    folder, _ = copied(kind, tmp_path)
    want = dcp_rs.open(folder).save_id
    (folder / "index.dcprs").rename(tmp_path / "index")
    dcp_rs.index(folder)
    with dcp_rs.open(folder) as checkpoint:
        assert checkpoint.save_id == want
        entries = dict(checkpoint)
    folder, _ = copied(kind, tmp_path / "again")
    with dcp_rs.open(folder) as checkpoint:
        assert describe(entries) == describe(dict(checkpoint))


def test_rank_local_saves_of_old_versions(tmp_path):
    folder, about = copied("rank_local", tmp_path)
    for rank, state in enumerate(about["states"]):
        index = _core.Index.open(str(folder), rank, False)
        assert describe(Checkpoint(index, options=ReadOptions()).state_dict()) == describe_sorted(
            state
        )
        assert SecondReader.open(folder, rank).is_rank_local


def describe_sorted(state):
    """Torch's own planner keeps no order."""
    return state | {"items": sorted(state["items"])}


@pytest.mark.parametrize("mode", ["auto", "mmap", "direct", "buffered"])
def test_version_1_loads_into_a_state_dict(mode):
    want = expected()
    got = blank(want)
    dcp.load(got, storage_reader=RsReader(V1, io=mode, verify=True), no_dist=True)
    assert_state_equal(got, want)


def test_version_1_opens_as_a_mapping():
    want = expected()
    with dcp_rs.open(V1, verify=True) as checkpoint:
        for name in DTYPES:
            fqn = f"dtypes.{name}"
            if hasattr(torch, name):
                assert_state_equal(checkpoint[fqn], want["dtypes"][name])
            else:
                with pytest.raises(UnsupportedError, match=name):
                    checkpoint[fqn]
        assert_state_equal(checkpoint["sharded.rows"], want["sharded"]["rows"])
        assert [c.sizes for c in checkpoint.chunks("sharded.rows")] == [(3, 3), (2, 3)]
        assert_state_equal(
            checkpoint.get_slice("sharded.columns")[1:3, 2:6], want["sharded"]["columns"][1:3, 2:6]
        )
        assert checkpoint["values.text"] == want["values"]["text"]
        if all(hasattr(torch, name) for name in DTYPES):
            got = checkpoint.state_dict()
            # The state of the optimizer has its number for a key again, which DCP makes text.
            assert_state_equal(got, want)


def test_version_1_is_verified_whole():
    report = dcp_rs.verify(V1)
    assert report.ok
    assert report.bytes_without_digest == 0


def load_everything():
    want = expected()
    got = blank(want)
    dcp_rs.load(got, V1)
    assert_state_equal(got, want)


def test_version_1_loads_on_ranks_that_did_not_save_it():
    run_ranks(4, load_everything)


@pytest.mark.skipif(
    not all(hasattr(torch, name) for name in DTYPES), reason="a dtype that this torch lacks"
)
def test_version_1_tells_its_own_structure():
    got = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(got, storage_reader=RsReader(V1), planner=planner, no_dist=True)
    want = expected()
    want["optimizer"]["state"] = {"0": want["optimizer"]["state"][0]}
    assert_state_equal(got, want)


def test_the_second_reader_reads_version_1():
    reader = SecondReader.open(V1)
    assert reader.generation == 1
    with dcp_rs.open(V1) as checkpoint:
        assert set(reader.tensors) == set(checkpoint)
    from support.oracle import raw_bytes

    want = expected()
    flat = {f"dtypes.{k}": v for k, v in want["dtypes"].items()}
    flat |= {f"sharded.{k}": v for k, v in want["sharded"].items()}
    flat |= {f"shapes.{k}": v for k, v in want["shapes"].items()}
    flat |= {f"names.{k}": v for k, v in want["names"].items()}
    flat |= {"__metadata__": want["__metadata__"], "top/level": want["top/level"]}
    for name, tensor in flat.items():
        dtype, shape, raw = reader.read(name)
        assert (dtype, shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert raw == raw_bytes(tensor), name
    assert reader.tensors["parameter"].flags & 1
    assert reader.paths()["optimizer.state.0.step"] == ("optimizer", "state", "0", "step")


def test_a_reader_that_knows_no_links_would_refuse_the_one_that_has_some():
    raw = (CORPUS / "reused" / "index.dcprs").read_bytes()
    assert int.from_bytes(raw[24:32], "little") == 2
    index = _core.Index.open(str(CORPUS / "reused"), None, False)
    assert [linked for _, linked in index.use_of_files()] == [False, True]
