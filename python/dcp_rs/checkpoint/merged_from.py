"""The note that :func:`dcp_rs.merge` leaves in its results: which inputs they were made of."""

from __future__ import annotations

import json
from typing import Any

from dcp_rs import _core
from dcp_rs.checkpoint.mapping import safetensors_metadata

__all__ = ["KEY", "merged_from"]

#: In the planner data of a native result, and in the metadata of safetensors files.
KEY = "dcp_rs.merged_from"


def merged_from(index: _core.Index) -> list[dict[str, Any]]:
    """Return ``path``, ``save_id`` and ``weight`` of each input of a merge; nothing for other checkpoints."""
    if index.source == "dcp-rs":
        root = index.planner_root()
        noted = root.get(KEY) if isinstance(root, dict) else None
    elif index.source == "safetensors" and not index.is_remote:
        text = safetensors_metadata(index.file_paths()).get(KEY)
        try:
            noted = None if text is None else json.loads(text)
        except ValueError:
            noted = None
    else:
        noted = None
    if not isinstance(noted, list):
        return []  # somebody else's entry of that name
    return [
        one for one in noted if isinstance(one, dict) and {"path", "save_id", "weight"} <= set(one)
    ]
