"""The command line in a process of its own."""

import subprocess
import sys
from typing import Any

import programs

COMMAND = [sys.executable, "-m", "dcp_rs"]


def in_a_process(*arguments: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return programs.run(command, capture_output=True, text=True, timeout=120, check=False, **more)
