"""Ways to read a checkpoint, each of which has to end in the same typed error."""

import pickle

import pytest
import torch

import dcp_rs
from dcp_rs.errors import DcpRsError
from support import blank, random_tensor

STATE = {
    "large": random_tensor((1 << 20, 3), torch.uint8, seed=1),
    "small": random_tensor((5, 3), seed=2),
    "step": 7,
}


def loaded(path, template=None, **options):
    """What `dcp_rs.load` makes of it."""
    template = blank(STATE) if template is None else template
    dcp_rs.load(template, path, **options)
    return template


def read_whole(path):
    with dcp_rs.open(path) as checkpoint:
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


def data_file(path):
    return next(path.glob("*.safetensors"))
