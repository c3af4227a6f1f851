"""The calls that load."""

import warnings

import pytest
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from support.failures import without_torchs_collection


def _load_state_dict(state, path, planner):
    dcp_rs.load_state_dict(state, RsReader(path), planner=planner, no_dist=True)


def _load_by_torch(state, path, planner):
    dcp.load(state, storage_reader=RsReader(path), planner=planner, no_dist=True)


def _load_state_dict_by_torch(state, path, planner):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        dcp.load_state_dict(state, RsReader(path), planner=planner, no_dist=True)


DRIVERS = {
    "dcp_rs.load": None,
    "dcp_rs.load_state_dict": _load_state_dict,
    "dcp.load": _load_by_torch,
    "dcp.load_state_dict": _load_state_dict_by_torch,
}


@pytest.fixture(params=DRIVERS.values(), ids=DRIVERS)
def load(request):
    """Load a state dict from a path with the options of a load, and return the report."""

    def load(state, path, **options):
        if request.param is None:
            return dcp_rs.load(state, path, no_dist=True, **options)
        planner = RsLoadPlanner(**options)
        with without_torchs_collection():
            request.param(state, path, planner)
        return planner.report

    return load
