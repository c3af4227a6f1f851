"""Keys of an optimizer's state that are no text: DCP's checkpoints hold them as text, and the optimizer knows what they are."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from dcp_rs.tensors.nesting import TreePath, text_path

__all__ = ["keys_of", "unclear_in", "with_keys"]


def keys_of(tree: Any) -> dict[TreePath, Any]:
    """The last part of the path to whatever is in a tree, by the path as text."""
    found: dict[TreePath, Any] = {}
    _collect(tree, (), found)
    return found


def with_keys(path: TreePath, keys: Mapping[TreePath, Any]) -> TreePath:
    """The path with the keys that are known in place of the text that stands for them."""
    text = text_path(path)
    return tuple(keys.get(text[:end], part) if type(part) is str else part for end, part in enumerate(path, 1))


def unclear_in(path: TreePath, keys: Mapping[TreePath, Any]) -> str | None:
    """The first part of a path of text that is not among the known keys, and reads as if it was a number, a tuple or None; None if no part does."""
    text = text_path(path)
    for end, part in enumerate(path, 1):
        if type(part) is str and text[:end] not in keys and _reads_as_no_text(part):
            return part
    return None


def _collect(tree: Any, path: TreePath, found: dict[TreePath, Any]) -> None:
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            here = (*path, str(key))
            if type(key) is str:
                found[here] = key
            else:
                found.setdefault(here, (key,))
            _collect(child, here, found)
    elif isinstance(tree, list):
        for place, child in enumerate(tree):
            _collect(child, (*path, place), found)


def _reads_as_no_text(text: str) -> bool:
    if text.isidentifier() and text not in ("None", "True", "False"):
        return False
    try:
        return not isinstance(ast.literal_eval(text), str)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
