"""A simulated accelerator (``sim:0``, ``sim:1``): streams that are late, memory that is poisoned when it is freed. See ``device.cpp``.

The process that has it keeps it: torch takes one such backend, for good. Tests get it by the
fixture ``sim`` and run after all others.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Simulated", "UnavailableError", "host", "install", "on"]

_SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")
#: It is written against the headers of these; others may or may not have what it takes.
_WRITTEN_FOR = "2.15"


class UnavailableError(Exception):
    """Why there is no simulated device here."""


class Simulated:
    """What tests set and read of the device.

    The attributes are counters and settings: ``delay`` (microseconds before a task on a stream
    touches memory), ``pinned`` and ``streams`` (whether it has them), ``fail_after`` (copies that
    are taken before one is refused; -1: none is), ``fail_late`` (copies raise when their turn
    comes), ``copies``, ``grouped`` (those by ``_foreach_copy_``), ``waits`` (of one stream for
    another), ``allocated`` (tensors), ``contexts`` (a bit for each device that got a context: on
    CUDA by being made current, unless a guard ends, or by a call that needs one).
    """

    _KNOBS = (
        "delay",
        "pinned",
        "streams",
        "fail_after",
        "fail_late",
        "copies",
        "grouped",
        "waits",
        "allocated",
        "contexts",
    )
    _DEFAULTS: ClassVar[dict[str, int]] = {"pinned": 1, "streams": 1, "fail_after": -1}

    def __init__(self, library: ctypes.CDLL) -> None:
        library.simulated_knob.restype = ctypes.POINTER(ctypes.c_int64)
        library.simulated_gate.restype = ctypes.c_void_p
        library.simulated_gate.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.simulated_open.argtypes = [ctypes.c_void_p]
        library.simulated_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.simulated_unregister.argtypes = [ctypes.c_void_p]
        library.simulated_is_pinned.argtypes = [ctypes.c_void_p]
        library.simulated_pinned_bytes.restype = ctypes.c_size_t
        self.__dict__["_library"] = library
        self.__dict__["_knobs"] = {
            name: library.simulated_knob(name.encode()) for name in self._KNOBS
        }

    def __getattr__(self, name: str) -> int:
        try:
            return int(self._knobs[name][0])
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: int) -> None:
        self._knobs[name][0] = int(value)

    def reset(self) -> None:
        """All settings as they were, all counters at nothing, and everything done that was asked for."""
        for name in self._KNOBS:
            setattr(self, name, self._DEFAULTS.get(name, 0))
        with contextlib.suppress(RuntimeError):  # what an earlier test let fail
            self.synchronize()
        self.synchronize()
        for name in self._KNOBS:
            setattr(self, name, self._DEFAULTS.get(name, 0))

    @contextlib.contextmanager
    def held_up(self, stream: torch.Stream, seconds: float | None = None) -> Iterator[None]:
        """Keeps a stream from going on: for the time of the block, or for some seconds."""
        gate, timer = self.gate(stream), None
        if seconds is not None:
            timer = threading.Timer(seconds, self.open, [gate])
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.join()
            self.open(gate)

    def gate(self, stream: torch.Stream) -> int:
        """Something that the stream waits at until it is opened."""
        return int(self._library.simulated_gate(stream.device_index, stream.stream_id))

    def open(self, gate: int) -> None:
        """Lets the stream go on."""
        self._library.simulated_open(gate)

    def synchronize(self) -> None:
        """Waits for all streams of all devices."""
        for index in range(self._library.simulated_devices()):
            torch.accelerator.synchronize(torch.device("sim", index))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether copies read and write the memory late. ``Tensor.is_pinned`` says no until torch itself has pinned something."""
        return bool(self._library.simulated_is_pinned(tensor.data_ptr()))

    @property
    def pinned_bytes(self) -> int:
        """Host memory that is pinned now, in use or kept by torch."""
        return int(self._library.simulated_pinned_bytes())

    def __reduce__(self) -> str | tuple[Any, ...]:
        return install, ()


def on(device: torch.device, values: dict[str, Any]) -> dict[str, Any]:
    """Destinations on the device like the tensors among ``values``, with whatever is in their memory."""
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device=device)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in values.items()
    }


def host(values: dict[str, Any]) -> dict[str, Any]:
    """The tensors in host memory, as the current streams see them."""
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


@functools.cache
def install() -> Simulated:
    """The device of this process, built if it was not.

    Raises:
        UnavailableError: there is no compiler, or this torch is not one that the source is written
            for.
    """
    library = ctypes.CDLL(str(_built()))
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module(library))  # type: ignore[no-untyped-call]
    return Simulated(library)


def _built() -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        msg = "no C++ compiler (g++, clang++ or CXX) to build the simulated device with"
        raise UnavailableError(msg)
    from torch.utils.cpp_extension import include_paths, library_paths

    arguments = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    arguments += [part for folder in include_paths() for part in ("-isystem", folder)]
    arguments += [
        str(_SOURCE),
        *(f"-L{folder}" for folder in library_paths()),
        "-lc10",
        "-ltorch_cpu",
    ]
    key = hashlib.sha256(
        "\0".join([compiler, torch.__version__, *arguments]).encode() + _SOURCE.read_bytes()
    )
    folder = Path(sys.prefix) / "simulated-device"
    built = folder / f"{key.hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    why_not = built.with_suffix(".why")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of a test, or two runs
        if why_not.exists():
            raise UnavailableError(why_not.read_text())
        if not built.exists():
            unfinished = built.with_suffix(".tmp")
            done = subprocess.run(
                [compiler, *arguments, "-o", str(unfinished)],
                check=False,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                msg = f"the simulated device does not compile against torch {torch.__version__}:\n{done.stderr[-4000:]}"
                if torch.__version__.startswith(_WRITTEN_FOR):
                    raise RuntimeError(msg)
                why_not.write_text(msg)  # every test asks
                raise UnavailableError(msg)
            for old in folder.glob("*.so"):
                old.unlink()
            unfinished.rename(built)
    return built


def _module(library: ctypes.CDLL) -> types.ModuleType:
    """``torch.sim``: no more than torch itself asks of a device's module, and what of ``torch.cuda`` the package uses."""
    module: Any = types.ModuleType("torch.sim")
    module.device_count = library.simulated_devices
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.stream = lambda stream: stream or contextlib.nullcontext()  # for stock DCP's writer
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, device=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.cudart = lambda: types.SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: library.simulated_register(address, nbytes),
        cudaHostUnregister=library.simulated_unregister,
    )
    sys.modules["torch.sim"] = module
    return module  # type: ignore[no-any-return]
