"""What is noted beside the data of a save, by its id: while it is under way, once it is committed, and once it was verified.

Notes are believed in nothing but what they tell of that one save, and need not be there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["id_of", "is_note", "of", "of_save", "saved_name", "saving_name", "verified_name"]

_NOTE = re.compile(r"(?:(?:saving|saved)-([0-9a-f]{32})\.json)|verified-([0-9a-f]{32})")


def saving_name(save_id: str) -> str:
    """The name of the note of a save that is under way."""
    return f"saving-{save_id}.json"


def saved_name(save_id: str) -> str:
    """The name that it has once the save is committed."""
    return f"saved-{save_id}.json"


def verified_name(save_id: str) -> str:
    """The name of what says that all of a save was read, and was as its digests say."""
    return f"verified-{save_id}"


def is_note(name: str) -> bool:
    """Whether a file has the name of a note."""
    return _NOTE.fullmatch(name) is not None


def id_of(name: str) -> str | None:
    """The id of the save that a note is of; None of what is no note."""
    found = _NOTE.fullmatch(name)
    return None if found is None else found[1] or found[2]


def of_save(number: int, metrics: Mapping[str, float]) -> bytes:
    """The note of a save that begins now."""
    return json.dumps({"step": number, "saved": time.time(), "metrics": dict(metrics)}).encode()


def of(data: bytes) -> dict[str, Any]:
    """``saved``, in seconds since 1970, and ``metrics`` of a note; nothing of one that cannot be read."""
    try:
        noted = json.loads(data)
        metrics = {str(name): float(value) for name, value in noted["metrics"].items()}
        return {"saved": float(noted["saved"]), "metrics": metrics}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
