"""Loads from a store onto the simulated device: slabs are filled by way of the same requests."""

import pytest
import torch

import dcp_rs
from dcp_rs._url import StorageOptions
from dcp_rs.checkpoint.locate import open_index
from support import assert_state_equal, threads
from support.object_server import Fault, object_server
from support.simulated import host, on
from support.slabs import SMALL, fill, state


@pytest.mark.parametrize("faulty", [False, True])
def test_load_from_a_store_arrives_on_the_device(ckpt, sim, device, faulty):
    want = state() | {"large": torch.randn(700, 1000)}
    dcp_rs.save(want, ckpt)
    with object_server() as server:
        server.put_folder(ckpt, "ckpt")
        options = StorageOptions.of(server.options())
        index = open_index(
            server.url("ckpt"), rank=None, allow_external=False, storage_options=options
        )
        if faulty:
            server.faults += [
                Fault(status=503, times=None, chance=0.1),
                Fault(cut=999, times=None, chance=0.1),
            ]
        got = on(device, want)
        fill(index, got, SMALL)
        assert_state_equal(host(got), want)
    assert threads.none_of("dcp-rs-slab")
