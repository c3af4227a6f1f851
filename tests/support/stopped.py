"""A call in a process of its own, which a test stops while a store says nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import programs
from support.object_server import ObjectServer, Request
from support.places import TESTS

_PROGRAM = """
import signal, sys
sys.path[:0] = [{tests!r}, {stores!r}]
import torch, dcp_rs
signal.signal(signal.SIGINT, signal.default_int_handler)
{setup}
print("begin", flush=True)
try:
    {call}
    print("done", flush=True)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def begin(
    server: ObjectServer, matches: Callable[[Request], bool], call: str, setup: str = ""
) -> Any:
    """Start a call, and wait until the store is asked for what matches."""
    mark = len(server.asked())
    tests, stores = str(TESTS), str(TESTS / "stores")
    program = _PROGRAM.format(tests=tests, stores=stores, setup=setup, call=call)
    process = programs.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begin\n"
    deadline = time.monotonic() + 60
    while not any(matches(request) for request in server.asked()[mark:]):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    return process


def interrupt(process: Any) -> None:
    """Send Ctrl-C to a call whose store is silent for a minute, and expect that it ends soon."""
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "stopped\n"
    took = time.monotonic() - began
    assert process.wait(30) == 0
    assert took < 20  # a second is promised, and a busy machine gets some more
