"""Reads of a checkpoint that may be damaged: each ends in a typed error, or in what was saved."""

import contextlib
import pickle

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs.errors import DcpRsError
from support import blank, random_tensor, same_bits

STATE = {
    "large": random_tensor((1 << 20, 3), torch.uint8, seed=1),
    "small": random_tensor((5, 3), seed=2),
    "step": 7,
}


#: Small enough to change each byte of its checkpoint.
SMALL_STATE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3, dtype=torch.bfloat16)},
    "count": torch.tensor(3),
    "value": "x",
}

SMALL_FLAT = {
    "model.w": SMALL_STATE["model"]["w"],
    "model.b": SMALL_STATE["model"]["b"],
    "count": SMALL_STATE["count"],
    "value": "x",
}


def loaded(path, template=None, **options):
    """What `dcp_rs.load` makes of it."""
    template = blank(STATE) if template is None else template
    dcp_rs.load(template, path, **options)
    return template


def read_whole(path, **options):
    with dcp_rs.open(path, **options) as checkpoint:
        return {name: checkpoint[name] for name in checkpoint}


WAYS = [loaded, read_whole]


def failure(kind, function, *args, **kwargs):
    """The error, which must be of this kind and survive pickling with all that it says."""
    with pytest.raises(kind) as raised:
        function(*args, **kwargs)
    error = raised.value
    assert isinstance(error, DcpRsError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    for name in ("path", "tensor", "offset"):
        assert getattr(copy, name) == getattr(error, name)
    assert str(copy) == str(error)
    assert "panick" not in str(error)
    return error


@contextlib.contextmanager
def without_torchs_collection():
    """Raise the error of the first rank that failed in place of torch's ``CheckpointException``."""
    try:
        yield
    except CheckpointException as collected:
        raise collected.failures[min(collected.failures)][0] from None


def data_file(path):
    return next(path.glob("*.safetensors"))


def outcome(path, want=SMALL_FLAT):
    """Return the name of the typed error, or "right"; anything else fails. `want` is None where the bytes may say anything."""
    try:
        got = read_whole(path, verify=True)
    except DcpRsError as error:
        return type(error).__name__
    if want is not None:
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert same_bits(got[name], value), name
    return "right"
