"""Metadata beside the entries: safetensors headers, inputs of a merge, versions of modules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs._warnings import warn_caller
from dcp_rs.tensors.nesting import Container

#: The key for the inputs of a merge, in the planner data of a native checkpoint and in the
#: metadata of safetensors files.
MERGED_FROM = "dcp_rs.merged_from"
#: The key for the versions of modules in the planner data of an index: pairs of the path of a state
#: dict, and its modules. The reader of ``torch.save`` files writes it, too.
_VERSIONS = "dcp_rs.module_versions"
#: The key for the keys of planner data that an index cannot hold. The reader of stock checkpoints
#: writes it.
_LEFT_OUT = "dcp_rs.left_out"
#: The most of these keys in a message.
_SHOWN = 5
_SCALARS = (bool, int, float, str, type(None))


def safetensors_metadata(paths: Iterable[Path]) -> dict[str, str]:
    """Return ``__metadata__`` of safetensors files. Of several values, the first file's counts."""
    found: dict[str, str] = {}
    for path in paths:
        with path.open("rb") as file:
            text = file.read(int.from_bytes(file.read(8), "little"))
        found = (json.loads(text).get("__metadata__") or {}) | found
    return found


def merged_from(index: _core.Index) -> list[dict[str, Any]]:
    """Return ``path``, ``save_id`` and ``weight`` of each input of a merge; none of other files."""
    noted = None
    if index.source == "dcp-rs":
        root = index.planner_root()
        noted = root.get(MERGED_FROM) if isinstance(root, dict) else None
    elif index.source == "safetensors" and not index.is_remote:
        text = safetensors_metadata(index.file_paths()).get(MERGED_FROM)
        try:
            noted = None if text is None else json.loads(text)
        except ValueError:
            noted = None
    if not isinstance(noted, list):
        return []  # an entry of another program with that name
    return [
        one for one in noted if isinstance(one, dict) and {"path", "save_id", "weight"} <= set(one)
    ]


def planner_data(index: _core.Index) -> tuple[Any, list[Container] | None]:
    """Return the planner data that belongs to no entry, and the containers that an index lists.

    The containers are None if the format does not list them. An index has the versions of modules
    in its planner data. Here the containers have them.
    """
    root, nesting = index.planner_root(), index.nesting()
    noted = root.pop(_VERSIONS, None) if isinstance(root, dict) else None
    _pop_left_out(root)
    if nesting is None:
        return root, None
    versions: dict[str, dict[str, Any]] = {}
    for pair in noted if isinstance(noted, list) else ():
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], dict)):
            continue  # forged
        found = versions.setdefault(repr(pair[0]), {})
        for name, facts in pair[1].items():
            found.setdefault(name, facts if isinstance(facts, dict) else {"version": facts})
    return root, [Container(*one, versions.get(repr(one[1]))) for one in nesting]


def warn_of_left_out(index: _core.Index) -> None:
    """Warn of planner data that the reader of a stock checkpoint could not take."""
    if keys := _pop_left_out(index.planner_root()):
        warn_caller(
            f"{index.path}: this planner data is no plain data, and is left out: "
            f"{', '.join(map(repr, keys[:_SHOWN]))}{', ...' if keys[_SHOWN:] else ''}. Planners "
            "that need it have to read the folder with torch's FileSystemReader"
        )


def _pop_left_out(root: Any) -> list[Any]:
    found = root.pop(_LEFT_OUT, None) if isinstance(root, dict) else None
    return found if isinstance(found, list) else []


def with_versions(root: Any, containers: Iterable[Container]) -> Any:
    """Return planner data with the versions of modules that containers have."""
    noted = [
        (c.path, {str(name): _short(facts) for name, facts in c.versions.items()})
        for c in containers
        if c.versions
    ]
    return {**root, _VERSIONS: noted} if noted and isinstance(root, dict) else root


def _short(facts: Any) -> Any:
    """Return what is noted of a module as an index stores it: most have a version alone."""
    if not isinstance(facts, Mapping):
        return {}
    if facts.keys() == {"version"} and type(facts["version"]) is int:
        return facts["version"]
    return {str(key): value for key, value in facts.items() if type(value) in _SCALARS}
