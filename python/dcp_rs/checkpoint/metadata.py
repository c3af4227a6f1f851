"""Metadata beside the entries: that of safetensors headers, and the inputs of a merge."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dcp_rs import _core

__all__ = ["MERGED_FROM", "merged_from", "safetensors_metadata"]

#: The key for the inputs of a merge, in the planner data of a native checkpoint and in the
#: metadata of safetensors files.
MERGED_FROM = "dcp_rs.merged_from"


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
