"""Notes beside the data of a save: its metrics, its process, and the names of the user's files.

A note has the id of its save in its name, and counts for that save only. Notes may be missing.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_rs.checkpoint.folders import INDEX_NAME, is_data_file

#: The note of the run, in its root on a store. In a folder it is in the file of the lock.
RUN_NAME = ".dcprs-run.json"
#: The note of the saves that are older than all others, in the root.
OLDER_NAME = ".dcprs-older.json"
#: A longer file is no note.
MAX_BYTES = 1 << 20

_NAME = re.compile(r"(?:saving|saved|verified|annotated)-([0-9a-f]{32})(?:\.json)?")


@dataclass(frozen=True)
class Note:
    """Note of a run, or of a save.

    Attributes:
        run: the id of the run; None for a save outside of a run.
        saved: the time at which the run or the save began, in seconds since 1970.
        process: the process that began it, in words.
        metrics: the metrics of the save.
        files: the names of the user's files in the folder of the step.
        upload: whether the step, which is on nodes, is to go to the root as well; None for a save
            at the root.
        replaces: it may replace another save of the step there.
        went_back: later steps that were there may be of other runs, which its run left behind.
    """

    run: str | None
    saved: float
    process: str
    metrics: Mapping[str, float]
    files: frozenset[str]
    upload: bool | None = None
    replaces: bool = False
    went_back: bool = False


def saving_name(save_id: str) -> str:
    """Return the name of the note of a save that is under way."""
    return f"saving-{save_id}.json"


def saved_name(save_id: str) -> str:
    """Return the name of the same note after the commit."""
    return f"saved-{save_id}.json"


def verified_name(save_id: str) -> str:
    """Return the name of the note that a whole save matched its digests."""
    return f"verified-{save_id}"


def annotated_name(save_id: str) -> str:
    """Return the name of the note with the metrics that came after a save."""
    return f"annotated-{save_id}.json"


def id_of(name: str) -> str | None:
    """Return the id of the save of a note; None for another file."""
    found = _NAME.fullmatch(name)
    return None if found is None else found[1]


def is_own(name: str) -> bool:
    """Return whether this package gives files in the folder of a step such a name."""
    return name == INDEX_NAME or is_data_file(name) or id_of(name) is not None


def is_extra(name: str) -> bool:
    """Return whether a file of the user in the folder of a step may have such a name."""
    is_plain = name != "" and not name.startswith(".") and "/" not in name and "\0" not in name
    return is_plain and not is_own(name)


def write(run: str | None, **content: Any) -> bytes:
    """Return the note of a run, or of a save of a run, that begins now in this process."""
    process = {"saved": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    return json.dumps({"run": run, **process, **content}).encode()


def read(data: bytes | None) -> Note | None:
    """Return what a note says; None if it is missing or invalid."""
    try:
        note = json.loads(data if data and len(data) <= MAX_BYTES else b"")
        saved = float(note["saved"])
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(saved))
        return Note(
            run=None if note["run"] is None else str(note["run"]),
            saved=saved,
            process=f"process {int(note['pid'])} on {str(note['host'])[:256]!r} since {since} UTC",
            metrics={name: float(value) for name, value in note.get("metrics", {}).items()},
            files=frozenset(filter(is_extra, note.get("files", ()))),
            upload=note["upload"] is True if "upload" in note else None,
            replaces=note.get("replaces") is True,
            went_back=note.get("went_back") is True,
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError):
        return None
    except RecursionError:  # nested too deep
        return None
