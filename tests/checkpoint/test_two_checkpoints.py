"""A folder that holds a checkpoint of torch beside one of ours."""

import os
import warnings

import pytest

import dcp_rs
from support import assert_state_equal, blank
from support.both import save_rs, save_stock
from support.failures import STATE, WAYS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("newer", [".metadata", "index.dcprs"])
def test_a_checkpoint_of_torch_in_the_same_folder_is_warned_of(ckpt, way, newer):
    save_stock({"small": blank(STATE["small"])}, ckpt)
    save_rs(STATE, ckpt)
    times = {".metadata": 2_000_000_000, "index.dcprs": 2_000_000_000} | {newer: 2_000_000_001}
    for name, time in times.items():
        os.utime(ckpt / name, (time, time))
    said = rf"{ckpt} holds two checkpoints.*index\.dcprs.*\.metadata.*that of dcp-rs is read, {newer} is newer"
    with pytest.warns(UserWarning, match=said):
        got = way(ckpt)
    assert_state_equal(got["small"], STATE["small"])


@pytest.mark.parametrize("way", WAYS)
def test_an_index_over_a_checkpoint_of_torch_is_no_second_one(ckpt, way):
    save_stock(STATE, ckpt)
    dcp_rs.index(ckpt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed")
        way(ckpt)
