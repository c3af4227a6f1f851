"""``python -m crash`` in a process of its own: it forks, and tests have threads."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import programs
from support.places import TESTS


def kills(*arguments: Any) -> list[dict[str, Any]]:
    """The tallies, on one rank and on four."""
    done = programs.run(
        [sys.executable, "-m", "crash", "--json", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # Gloo of torch 2.8 prints whom it found
