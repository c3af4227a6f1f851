"""The golden checkpoint of each format version is read bit for bit, by every way of reading, for as long as there are releases."""

import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import dcp_rs
from dcp_rs import RsReader
from dcp_rs.errors import UnsupportedError
from golden.build_v1 import DTYPES, expected
from support import assert_state_equal, blank, run_ranks
from support.second_reader import SecondReader

V1 = Path(__file__).parent / "golden" / "v1"

# sha256 over the names and contents of the files, in the order of their names: nothing in there ever changes.
V1_SHA256 = "3bb60c551fead1ef35a525be0e5dacc5bc2754594c7f4205cc878aa67fe92040"


def test_the_files_are_those_that_were_committed():
    digest = hashlib.sha256()
    for file in sorted(V1.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    assert digest.hexdigest() == V1_SHA256


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
        assert_state_equal(checkpoint.get_slice("sharded.columns")[1:3, 2:6], want["sharded"]["columns"][1:3, 2:6])
        assert checkpoint["values.text"] == want["values"]["text"]
        if all(hasattr(torch, name) for name in DTYPES):
            got = checkpoint.state_dict()
            # The state of the optimizer has its number for a key again, which DCP makes text.
            assert_state_equal(got, want)


def test_version_1_is_verified_whole():
    report = dcp_rs.verify(V1)
    assert report.ok
    assert report.bytes_without_digest == 0


def load_golden():
    want = expected()
    got = blank(want)
    dcp_rs.load(got, V1)
    assert_state_equal(got, want)


def test_version_1_loads_on_ranks_that_did_not_save_it():
    run_ranks(4, load_golden)


@pytest.mark.skipif(not all(hasattr(torch, name) for name in DTYPES), reason="a dtype that this torch lacks")
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
    from support.compare import raw_bytes

    want = expected()
    flat = {f"dtypes.{k}": v for k, v in want["dtypes"].items()}
    flat |= {f"sharded.{k}": v for k, v in want["sharded"].items()}
    flat |= {f"shapes.{k}": v for k, v in want["shapes"].items()}
    flat |= {f"names.{k}": v for k, v in want["names"].items()}
    flat |= {"__metadata__": want["__metadata__"], "top/level": want["top/level"]}
    for name, tensor in flat.items():
        dtype, shape, raw = reader.read(name)
        assert (dtype, shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert raw == raw_bytes(tensor).numpy().tobytes(), name
    assert reader.tensors["parameter"].flags & 1
    assert reader.paths()["optimizer.state.0.step"] == ("optimizer", "state", "0", "step")
