"""A process that has imported torch and forks Python programs on request.

Importing torch takes seconds, and most child processes of the tests spend most of their time there.
`python fork_server.py SOCKET` imports it once. Each connection to its socket asks for one program:
a pickled dict (`programs.request`), with the descriptors that the program takes over. The
server answers with the program's number, and at the program's end with its exit status.

The fork happens before the server has a thread, a process group or this package: the program begins
as a fresh interpreter does, except that torch is there. What is about a fresh interpreter itself
(import time, `-X` and `-B`, `LD_PRELOAD`, `PYTHON...` variables) or about its end (module teardown)
needs `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import pickle
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import types
import warnings
from typing import Any, NoReturn

NUMBER = struct.Struct("!q")
LENGTH = struct.Struct("!Q")
#: The modules that a program finds imported.
PRELOADED = (
    "numpy",
    "numpy.fft",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "safetensors.torch",
    "multiprocessing.spawn",
)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read a request and its descriptors."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 16)
    (length,) = LENGTH.unpack(head)
    data = bytearray()
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise EOFError
        data += more
    return pickle.loads(data), list(descriptors)


def serve(address: str) -> tuple[dict[str, Any], list[int]]:
    """Fork a program for each connection. Return in the child, with what it was asked for."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    wake_in, wake_out = os.pipe()
    for end in (wake_in, wake_out):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they end the server
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(wake_in, selectors.EVENT_READ)
    # The server ends when the process that started it does: then its stdin is closed.
    selector.register(0, selectors.EVENT_READ)
    programs: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                os._exit(0)
            if key.fileobj == wake_in:
                os.read(wake_in, 4096)
                _report_ended(programs)
                continue
            connection, _ = listener.accept()
            try:
                request, descriptors = _receive(connection)
            except (EOFError, OSError, struct.error):
                connection.close()
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                selector.close()
                for number in (wake_in, wake_out):
                    os.close(number)
                for other in (listener, connection, *programs.values()):
                    other.close()
                return request, descriptors
            for number in descriptors:
                os.close(number)
            programs[pid] = connection
            _tell(connection, pid)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the test that asked is gone
        connection.sendall(NUMBER.pack(number))


def _report_ended(programs: dict[int, socket.socket]) -> None:
    """Tell each client whose program has ended how it did."""
    while programs:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        connection = programs.pop(pid, None)
        if connection is not None:
            _tell(connection, os.waitstatus_to_exitcode(status))
            connection.close()


# --- in the child


def _open_standard_streams() -> None:
    """Make Python's own streams over descriptors 0, 1 and 2, as a fresh interpreter does."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        raw = io.FileIO(number, mode, closefd=False)
        buffered: Any = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            buffered,
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            line_buffering=number == 2 or raw.isatty(),
        )
        stream.mode = mode  # type: ignore[misc]  # as the interpreter's own have
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _become(request: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Take over what the request gives, and return the arguments after the options."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number, inheritable=True)
    for descriptor in descriptors[:3]:
        if descriptor > 2:
            os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _open_standard_streams()
    random.seed()
    sys.modules["numpy"].random.seed()
    arguments = list(request["arguments"])
    warnings.resetwarnings()
    warnings.simplefilter("default")
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", ResourceWarning)
    while arguments and arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]  # "ignore", "error", ...
        del arguments[:2]
    return arguments


def run(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run the program: what it raises ends this process as it would end a fresh interpreter."""
    arguments = _become(request, descriptors)
    extra = [
        entry for entry in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if entry
    ]
    rest = list(dict.fromkeys([*extra, *request["path"], *sys.path]))
    if request["function"] is not None:
        sys.path[:] = rest
        function, values = pickle.loads(request["function"])
        function(*values, *descriptors[3:])
    elif arguments[0] == "-c":
        sys.path[:] = ["", *rest]
        sys.argv = ["-c", *arguments[2:]]
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif arguments[0] == "-m":
        sys.path[:] = [request["cwd"], *rest]
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:] = [os.path.dirname(os.path.abspath(arguments[0])), *rest]  # noqa: PTH100, PTH120
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def main(address: str) -> None:
    """Import what programs find imported, and serve."""
    import importlib

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector of a program leaves alone what is imported here
    request, descriptors = serve(address)
    try:
        run(request, descriptors)
        code: object = None
    except SystemExit as end:
        code = end.code
    except Exception as error:  # noqa: BLE001 - whatever a program raises
        # The traceback of the program alone, without the frames of this file.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    _end(code)


def _end(code: object) -> NoReturn:
    """End the process as an interpreter does, up to the point where it takes its modules apart.

    That would copy each page of torch that the server shares: five times what the fork costs.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # the reader is gone, or the program closed it
        code = 120
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    main(sys.argv[1])
