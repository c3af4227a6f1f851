"""Notes beside the data of a save: its metrics, its process, and files of the user.

A note has the id of its save in its name, and counts for that save only. Notes may be missing.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.folders import INDEX_NAME, is_data_file

__all__ = [
    "MAX_BYTES",
    "RUN_NAME",
    "Owner",
    "files_of",
    "id_of",
    "is_extra",
    "is_note",
    "is_own",
    "note_of_run",
    "note_of_save",
    "owner_of",
    "saved_name",
    "saving_name",
    "time_and_metrics",
    "verified_name",
]

#: The note of the run, in its root.
RUN_NAME = ".dcprs-run.json"
#: A longer file is not a note.
MAX_BYTES = 1 << 20

_NOTE = re.compile(r"(?:(?:saving|saved)-([0-9a-f]{32})\.json)|verified-([0-9a-f]{32})")


@dataclass(frozen=True)
class Owner:
    """Process that began a run, or a save.

    Attributes:
        run: the id of its run; None for a save outside of a run.
        host: the machine.
        pid: the process id on that machine.
        since: the start, in seconds since 1970.
    """

    run: str | None
    host: str
    pid: int
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        return f"process {self.pid} on {self.host!r} since {since} UTC"


def saving_name(save_id: str) -> str:
    """Return the name of the note of a save that is under way."""
    return f"saving-{save_id}.json"


def saved_name(save_id: str) -> str:
    """Return the name of the same note after the commit."""
    return f"saved-{save_id}.json"


def verified_name(save_id: str) -> str:
    """Return the name of the note that a whole save matched its digests."""
    return f"verified-{save_id}"


def is_note(name: str) -> bool:
    """Return whether a file has the name of a note."""
    return _NOTE.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """Return whether this package gives files in the folder of a step such a name."""
    return name == INDEX_NAME or is_data_file(name) or is_note(name)


def is_extra(name: str) -> bool:
    """Return whether a file of the user in the folder of a step may have such a name."""
    is_plain = name != "" and not name.startswith(".") and "/" not in name and "\0" not in name
    return is_plain and not is_own(name)


def id_of(name: str) -> str | None:
    """Return the id of the save of a note; None for another file."""
    found = _NOTE.fullmatch(name)
    return None if found is None else found[1] or found[2]


def note_of_save(
    number: int, metrics: Mapping[str, float], run: str | None, files: Iterable[str]
) -> bytes:
    """Return the note of a save that begins now, with the names of the user's files."""
    content = {"step": number, "saved": time.time(), "metrics": dict(metrics), "run": run}
    return _encode({**content, "files": sorted(files)})


def note_of_run(run: str) -> bytes:
    """Return the note of a run that begins now."""
    return _encode({"run": run, "since": time.time()})


def _encode(content: dict[str, Any]) -> bytes:
    return json.dumps({**content, "host": socket.gethostname(), "pid": os.getpid()}).encode()


def time_and_metrics(path: Path, data: bytes) -> dict[str, Any]:
    """Return ``saved``, in seconds since 1970, and ``metrics`` of a note.

    An invalid note gives an empty dict, with a warning.
    """
    note = _parse(data)
    try:
        metrics = {str(name): float(value) for name, value in note["metrics"].items()}
        saved = float(note["saved"])
        if math.isfinite(saved):
            return {"saved": saved, "metrics": metrics}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        pass
    warn_caller(
        f"{path} is no note of a save, so the step has no metrics, and is as old as its index"
    )
    return {}


def files_of(data: bytes | None) -> list[str]:
    """Return the names of the user's files in a note."""
    files = _parse(data or b"").get("files")
    if not isinstance(files, list):
        return []
    return [name for name in files if isinstance(name, str) and is_extra(name)]


def owner_of(data: bytes | None) -> Owner | None:
    """Return the process that wrote a note; None if the note does not name one."""
    note = _parse(data or b"")
    try:
        run, host, pid = note["run"], str(note["host"])[:256], int(note["pid"])
        since = float(note["since"] if "since" in note else note["saved"])
        time.gmtime(since)
    except (ValueError, TypeError, KeyError, OverflowError, OSError):
        return None
    return Owner(run, host, pid, since) if run is None or isinstance(run, str) else None


def _parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a note; an empty dict if there is none."""
    try:
        note = json.loads(data) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}
