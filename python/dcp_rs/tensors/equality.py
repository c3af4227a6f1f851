"""Equality of values to the bit, with NaN payloads and negative zeros."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import as_integers
from dcp_rs.tensors.memory import flat_bytes
from dcp_rs.tensors.nesting import kind_of


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same types and bits throughout.

    The order of a dict does not count; that of an ``OrderedDict`` does. Keys, and the elements of
    sets, are compared by their ``repr``, and values without elements by their pickles.

    Raises:
        Exception: the values cannot be compared. The exception may be of any type.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _same_tensors(one, other)
    if isinstance(one, Mapping):
        return _same_mappings(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    dump = pickle.dumps if type(one).__module__ == "builtins" else _dump
    return dump(one) == dump(other)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in row-major order as a row of bytes in host memory."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    # torch copies no dtypes of bits.
    as_stored = plain.view(torch.uint8) if plain.element_size() == 1 else as_integers(plain)
    return flat_bytes(as_stored.contiguous())


def _dump(value: Any) -> bytes:
    return pickles.dump("", value)


def _same_mappings(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    # Python takes the keys 1, 1.0 and True for equal.
    mine, others = ({repr(key): value for key, value in each.items()} for each in (one, other))
    return (
        len(one) == len(other) == len(mine)
        and mine.keys() == others.keys()
        and (not isinstance(one, OrderedDict) or list(mine) == list(others))
        and kind_of(one) == kind_of(other)
        and all(same(value, others[key]) for key, value in mine.items())
        and same(getattr(one, "__dict__", None), getattr(other, "__dict__", None))
    )


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) not in PLAIN_TYPES:
        return _dump(one) == _dump(other)

    def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.shape, tensor.layout, tensor.device, tensor.requires_grad

    if facts(one) != facts(other) or not same(vars(one), vars(other)):
        return False
    if one.is_meta:
        return True
    if one.is_quantized or one.layout != torch.strided:
        # The clones hold no more than their elements.
        return _dump(one.detach().clone()) == _dump(other.detach().clone())
    return torch.equal(raw_bytes(one), raw_bytes(other))
