"""Memory and I/O of a process, as the kernel counts them."""

import threading
from pathlib import Path

from harness.driven import Driven

_INTERVAL = 0.001


def anonymous_bytes(pid: int) -> int:
    """Resident memory that no file backs, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    msg = "the kernel does not tell RssAnon"
    raise RuntimeError(msg)


def extra_anonymous_bytes(process: Driven, word: str) -> int:
    """The most that the anonymous memory of a process grew while it answered `word`, sampled every millisecond."""
    pid = process.pid
    before = peak = anonymous_bytes(pid)
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(_INTERVAL):
            peak = max(peak, anonymous_bytes(pid))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        process.ask(word)
    finally:
        done.set()
        thread.join()
    return max(peak, anonymous_bytes(pid)) - before


def storage_bytes_read() -> int:
    """What this process has made the storage deliver so far, in bytes."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    msg = "the kernel does not tell read_bytes"
    raise RuntimeError(msg)
