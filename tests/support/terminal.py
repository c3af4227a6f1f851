"""What a process shows on a terminal."""

import os
import pty
import subprocess
from collections.abc import Sequence


def shown_on_a_terminal(
    command: Sequence[str], *, all_of_it: bool = True, **environment: str
) -> str:
    """What the command writes to a terminal of 80 columns: all of it, or what goes to stderr."""
    parent, child = pty.openpty()
    with subprocess.Popen(
        command,
        stdin=child,
        stdout=child if all_of_it else subprocess.DEVNULL,
        stderr=child,
        env={**os.environ, "COLUMNS": "80", **environment},
    ) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(parent)
    assert all_of_it or process.returncode == 0
    return shown.decode()
