"""A file of torch.save, loaded onto a device."""

import pytest
import torch

import dcp_rs
from dcp_rs import RsLoadPlanner
from support import ALL_DTYPES, assert_state_equal, random_tensor
from support.simulated import host, on
from support.torch_files import tensors, whole


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_onto_a_device(tmp_path, sim, device, zipped):
    path = tmp_path / "checkpoint.pth"
    state = whole()
    if zipped:
        state["dtypes"] = {str(dtype): random_tensor((37, 5), dtype) for dtype in ALL_DTYPES}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    want = {name: value.resolve_conj().contiguous() for name, value in tensors(state)}
    got = on(device, want)
    sim.delay = 300
    report = dcp_rs.load(got, path, no_dist=True)
    sim.delay = 0
    assert_state_equal(host(got), want)
    assert report.bytes_wanted == sum(value.nbytes for value in want.values())
    with dcp_rs.open(path, device=device) as opened:
        sim.delay = 300
        streamed = dict(opened.stream())
        rows = opened.get_slice("rows")[100:300]
        sim.delay = 0
        assert {value.device for name, value in streamed.items() if name != "step"} == {device}
        assert_state_equal(host({name: streamed[name] for name in want}), want)
        assert_state_equal(host({"rows": rows}), {"rows": want["rows"][100:300]})
    planner = RsLoadPlanner(checkpoint=path)
    half = planner.resolve_tensor("rows", device=device, dtype=torch.bfloat16)
    assert half.device == device
    assert_state_equal(host({"rows": half}), {"rows": want["rows"].bfloat16()})
