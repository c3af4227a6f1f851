"""Notes: who runs, what is being saved, and what was committed or verified.

A note of a save lies beside its data, and has its id. It is believed in nothing but what it says of
that save, and need not be there.
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
from dcp_rs.checkpoint.locate import INDEX_NAME, is_data_file

__all__ = [
    "MOST",
    "RUN_NAME",
    "Owner",
    "files_of",
    "id_of",
    "is_note",
    "is_own",
    "of",
    "of_run",
    "of_save",
    "owner_of",
    "saved_name",
    "saving_name",
    "verified_name",
]

#: The note of the run, in its root.
RUN_NAME = ".dcprs-run.json"
#: Bytes. A longer note is none.
MOST = 1 << 20

_NOTE = re.compile(r"(?:(?:saving|saved)-([0-9a-f]{32})\.json)|verified-([0-9a-f]{32})")


@dataclass(frozen=True)
class Owner:
    """The process that began a run, or a save.

    Attributes:
        run: the id of its run; None of a save outside of any.
        host: its machine.
        pid: its number there.
        since: when it began, in seconds since 1970.
    """

    run: str | None
    host: str
    pid: int
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        return f"process {self.pid} on {self.host!r} since {since} UTC"


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


def is_own(name: str) -> bool:
    """Return whether a file in the folder of a step is of a save of this package."""
    return name == INDEX_NAME or is_data_file(name) or is_note(name)


def id_of(name: str) -> str | None:
    """The id of the save that a note is of; None of what is no note."""
    found = _NOTE.fullmatch(name)
    return None if found is None else found[1] or found[2]


def of_save(
    number: int, metrics: Mapping[str, float], run: str | None, files: Iterable[str]
) -> bytes:
    """Return the note of a save that begins now, with ``files`` of the user's beside its data."""
    noted = {
        "step": number,
        "saved": time.time(),
        "metrics": dict(metrics),
        "run": run,
        "files": sorted(files),
    }
    return json.dumps({**noted, "host": socket.gethostname(), "pid": os.getpid()}).encode()


def of_run(run: str) -> bytes:
    """The note of a run that begins now."""
    return json.dumps(
        {"run": run, "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    ).encode()


def of(path: Path, data: bytes) -> dict[str, Any]:
    """Return ``saved``, in seconds since 1970, and ``metrics`` of a note. One that cannot be read counts as none, with a warning."""
    noted = _parsed(data)
    try:
        metrics = {str(name): float(value) for name, value in noted["metrics"].items()}
        saved = float(noted["saved"])
        if math.isfinite(saved):
            return {"saved": saved, "metrics": metrics}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        pass
    warn_caller(
        f"{path} is no note of a save, so the step counts as one without metrics, and as old as its index"
    )
    return {}


def files_of(data: bytes | None) -> list[str]:
    """Return the names of the user's files that a note tells of."""
    files = _parsed(data or b"").get("files")
    return [name for name in files if isinstance(name, str)] if isinstance(files, list) else []


def owner_of(data: bytes | None) -> Owner | None:
    """Return the writer of a note; None if the note does not name one."""
    noted = _parsed(data or b"")
    try:
        run, host, pid = noted["run"], str(noted["host"])[:256], int(noted["pid"])
        since = float(noted["since"] if "since" in noted else noted["saved"])
        time.gmtime(since)
    except (ValueError, TypeError, KeyError, OverflowError, OSError):
        return None
    return Owner(run, host, pid, since) if run is None or isinstance(run, str) else None


def _parsed(data: bytes) -> dict[str, Any]:
    """The object that a note is; an empty one of what is none."""
    try:
        noted = json.loads(data) if len(data) <= MOST else None
    except (ValueError, RecursionError):
        return {}
    return noted if isinstance(noted, dict) else {}
