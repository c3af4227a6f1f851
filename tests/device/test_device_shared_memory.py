"""Destinations that share memory of a device: filled as one after another, however late its streams are."""

import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsLoadPlanner
from dcp_rs.transfer.stage import stage
from support import assert_state_equal
from support.both import load_rs, save_rs
from support.simulated import host

VIEWS = {
    "a tie": lambda memory: memory,
    "above": lambda memory: memory[:400],
    "below": lambda memory: memory[200:],
    "columns": lambda memory: memory[:, 100:600],
    "tied again": lambda memory: memory.view(700, 1000),
    "turned": lambda memory: memory.t(),
}


def template(memory, order):
    return {"m": {name: VIEWS[name](memory) for name in order}}


def test_views_of_one_memory_are_filled_in_the_order_of_the_plan(ckpt, sim, device):
    stored = {
        name: torch.randn(value.shape)
        for name, value in template(torch.zeros(700, 1000), VIEWS)["m"].items()
    }
    save_rs({"m": stored}, ckpt)
    sim.delay = 2000
    for order in (tuple(VIEWS), tuple(reversed(VIEWS)), ("turned", "below", "a tie", "above")):
        for dtype in (torch.float32, torch.float64):
            want = torch.zeros(700, 1000, dtype=dtype)
            for name, view in template(want, order)["m"].items():
                view.copy_(stored[name])
            for planner in (RsLoadPlanner(dtype_policy="cast"), dcp.DefaultLoadPlanner()):
                got = torch.zeros(700, 1000, dtype=dtype, device=device)
                dcp.load(
                    template(got, order),
                    storage_reader=dcp_rs.RsReader(ckpt),
                    planner=planner,
                    no_dist=True,
                )
                assert_state_equal(host({"w": got}), {"w": want})


def test_memory_of_host_and_devices_is_apart(ckpt, sim, device, other_device):
    save_rs({"a": torch.ones(9), "b": torch.ones(9) + 1, "c": torch.ones(9) + 2}, ckpt)
    got = {
        "a": torch.zeros(9),
        "b": torch.zeros(9, device=device),
        "c": torch.zeros(9, device=other_device),
    }
    load_rs(got, ckpt)
    assert_state_equal(
        host(got), {"a": torch.ones(9), "b": torch.ones(9) + 1, "c": torch.ones(9) + 2}
    )


def test_tied_weights_come_down_once(sim, device):
    weight = torch.randn(900, 100, device=device)
    state = {"embed": weight.detach(), "head": weight.detach(), "t": weight.t()}
    copies = sim.copies
    staged = stage(state)
    assert sim.copies - copies <= 3  # two, and what makes the transposed one contiguous
    assert staged["embed"].data_ptr() == staged["head"].data_ptr()
    assert_state_equal(dict(staged), {name: value.cpu() for name, value in state.items()})
