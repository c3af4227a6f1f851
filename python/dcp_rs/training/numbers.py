"""NumPy's numbers, which come into optimizers with learning rates and do not load under ``weights_only=True``."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

__all__ = ["plain_numbers"]


def plain_numbers(tree: Any) -> Any:
    """The tree with Python's numbers in place of NumPy's, where it has any in dicts, lists and tuples; itself otherwise."""
    numpy = sys.modules.get("numpy")
    return tree if numpy is None else _plain(tree, numpy.generic)


def _plain(tree: Any, number: type) -> Any:
    kind = type(tree)
    if issubclass(kind, number):
        return tree.item()
    if kind in (dict, OrderedDict):
        values: Any = tree.values()
    elif kind in (list, tuple):
        values = tree
    else:
        return tree
    plain = [_plain(value, number) for value in values]
    if all(one is other for one, other in zip(plain, values, strict=True)):
        return tree
    return kind(zip(tree, plain, strict=True)) if isinstance(tree, dict) else kind(plain)
