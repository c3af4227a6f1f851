"""Child processes of the tests: Python programs forked from one server that has imported torch.

`run` and `Popen` are those of `subprocess`, for commands that begin with `sys.executable`. One
server is started for the whole test run, and shared by the processes that share the tests.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from programs.fork_server import LENGTH, NUMBER

#: The variable with the server's address, for the processes that share the tests.
ADDRESS = "DCP_RS_TESTS_FORK_SERVER"
START_TIMEOUT = 600.0  # seconds: a busy machine takes its time to import torch
_SERVER = Path(__file__).with_name("fork_server.py")

_server: subprocess.Popen[bytes] | None = None
_folder: tempfile.TemporaryDirectory[str] | None = None


def start_server() -> None:
    """Start the server of this test run, unless there is one. Does not wait until it is ready."""
    global _server, _folder  # noqa: PLW0603 - one a test run, by design
    if ADDRESS in os.environ:
        return
    _folder = tempfile.TemporaryDirectory(prefix="dcp-rs-fork-")
    os.environ[ADDRESS] = str(Path(_folder.name) / "socket")
    _server = subprocess.Popen(
        [sys.executable, str(_SERVER), os.environ[ADDRESS]], stdin=subprocess.PIPE
    )


def stop_server() -> None:
    """End the server that this process started."""
    global _server, _folder  # noqa: PLW0603
    if _server is not None:
        assert _server.stdin is not None
        _server.stdin.close()
        _server.wait()
        os.environ.pop(ADDRESS, None)
    if _folder is not None:
        _folder.cleanup()
    _server = _folder = None


def _connect() -> socket.socket:
    start_server()
    end = time.monotonic() + START_TIMEOUT
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(os.environ[ADDRESS])
        except OSError:
            connection.close()
            if time.monotonic() > end or (_server is not None and _server.poll() is not None):
                raise
            time.sleep(0.05)
        else:
            return connection


class Program:
    """A forked program: its number, and its exit status once it has ended."""

    def __init__(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        self._connection = _connect()
        self._status: int | None = None
        data = pickle.dumps(request)
        socket.send_fds(self._connection, [LENGTH.pack(len(data))], list(descriptors))
        self._connection.sendall(data)
        self.pid: int = NUMBER.unpack(self._read())[0]

    def _read(self) -> bytes:
        data = b""
        while len(data) < NUMBER.size:
            more = self._connection.recv(NUMBER.size - len(data))
            if not more:
                raise EOFError("the fork server is gone")
            data += more
        return data

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit status (negative: the signal), or None if it runs after `timeout` seconds."""
        if self._status is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    return None
            (self._status,) = NUMBER.unpack(self._read())
            self._connection.close()
        return self._status

    def kill(self) -> None:
        """End it at once, and wait for its end."""
        if self.wait(0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


def _request(**given: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"arguments": [], "path": [], "function": None}
    return base | {"cwd": str(Path.cwd()), "environment": dict(os.environ)} | given


def call(function: Callable[..., Any], *arguments: Any, descriptors: Sequence[int] = ()) -> Program:
    """Call a function of a module in a program; it is given `descriptors` after its arguments."""
    pickled = pickle.dumps((function, arguments))
    return Program(_request(function=pickled, path=sys.path), [0, 1, 2, *descriptors])


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` for `[sys.executable, ...]`, forked from the server."""

    _program: Program | None = None

    def _execute_child(self, args: Any, *rest: Any) -> None:
        (_, _, _, _, cwd, env, _, _, shell), ends = rest[:9], rest[9:15]
        words = [os.fsdecode(word) for word in args]
        assert words[0] == sys.executable, f"subprocess starts what is not Python: {words[0]}"
        assert not shell
        given: dict[str, Any] = {"arguments": words[1:]}
        if cwd is not None:
            given["cwd"] = os.fsdecode(cwd)
        if env is not None:
            given["environment"] = {
                os.fsdecode(key): os.fsdecode(value) for key, value in env.items()
            }
        p2cread, _, _, c2pwrite, _, errwrite = ends
        mine = [
            number if number != -1 else own
            for own, number in enumerate((p2cread, c2pwrite, errwrite))
        ]
        self._program = Program(_request(**given), mine)
        self.pid = self._program.pid
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None, **_more: Any) -> int | None:
        if self.returncode is None and self._program is not None:
            self.returncode = self._program.wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._program is not None:
            self.returncode = self._program.wait(timeout)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


def run(
    command: Sequence[Any],
    *,
    input: Any = None,  # noqa: A002 - as subprocess.run names it
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does, with a forked program."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    if capture_output:
        more["stdout"] = more["stderr"] = subprocess.PIPE
    with Popen(command, **more) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
