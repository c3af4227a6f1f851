"""An accelerator that is not there: streams that do their copies late, and remember what was asked of them."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from dcp_rs import staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class FakeStream:
    """Runs what it is given in order, on a thread of its own, each after a delay."""

    def __init__(self, device: FakeAccelerator, name: str) -> None:
        self.name = name
        self._device = device
        self._work: list[Callable[[], None]] = []
        self._done = 0
        self._submitted = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name=f"fake-{name}").start()

    def submit(self, work: Callable[[], None]) -> int:
        with self._changed:
            self._work.append(work)
            self._submitted += 1
            self._changed.notify_all()
            return self._submitted

    def wait_stream(self, other: FakeStream) -> None:
        self._device.log.append(("wait", self.name, other.name))
        position = other.position()
        self.submit(lambda: other.join(position))

    def position(self) -> int:
        with self._changed:
            return self._submitted

    def reached(self, position: int) -> bool:
        with self._changed:
            return self._done >= position

    def join(self, position: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._done >= position, 30):
                raise AssertionError(f"the fake stream {self.name} hangs")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._work))
                work = self._work.pop(0)
            work()
            with self._changed:
                self._done += 1
                self._changed.notify_all()


class FakeEvent:
    def __init__(self) -> None:
        self._stream: FakeStream | None = None
        self._position = 0

    def record(self, stream: FakeStream) -> None:
        self._stream, self._position = stream, stream.position()

    def query(self) -> bool:
        return self._stream is None or self._stream.reached(self._position)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.join(self._position)


class FakeAccelerator:
    """In place of ``torch.cuda``: the caller's stream, and others, over host memory.

    Args:
        delay: seconds that a copy takes.
        fail_after: the copies after this many raise when they are asked for.
    """

    def __init__(self, delay: float = 0.0, fail_after: int | None = None) -> None:
        self.delay = delay
        self.fail_after = fail_after
        self.log: list[tuple[str, ...]] = []
        self.copies = 0
        self.scratch_bytes = 0
        self.lanes: list[FakeLane] = []
        self.caller = FakeStream(self, "caller")
        self._streams = 0
        self._entered: list[FakeStream] = [self.caller]

    # what torch.cuda has

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        self._streams += 1
        return FakeStream(self, f"side{self._streams}")

    def Event(self) -> FakeEvent:  # noqa: N802
        return FakeEvent()

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._entered[-1]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[Any]:
        self._entered.append(stream)
        try:
            yield
        finally:
            self._entered.pop()

    # what tests need

    def copy(self, work: Callable[[], None], what: str) -> None:
        self.copies += 1
        if self.fail_after is not None and self.copies > self.fail_after:
            raise RuntimeError("the fake device is out of order")
        stream = self._entered[-1]
        self.log.append((what, stream.name))

        def later() -> None:
            time.sleep(self.delay)
            work()

        stream.submit(later)

    def lane(self, device: torch.device) -> staging.Lane:
        lane = FakeLane(device, self)
        self.lanes.append(lane)
        return lane

    def synchronize(self) -> None:
        """As if the caller's next work ran: all that it waits for is over."""
        self.caller.join(self.caller.position())


class FakeLane(staging.StreamLane):
    """The lane of accelerators, with copies that the fake does."""

    def __init__(self, device: torch.device, fake: FakeAccelerator) -> None:
        self.fake = fake
        super().__init__(device, fake)

    def scratch(self, slab: torch.Tensor) -> torch.Tensor:
        before = sum(s.numel() for s in self._scratch if s is not None)
        scratch = super().scratch(slab)
        self.fake.scratch_bytes += sum(s.numel() for s in self._scratch if s is not None) - before
        return scratch

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.fake.copy(lambda: _no_grad_copy(destination, source), "copy")

    def _copy_group(self, destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        def work() -> None:
            for destination, source in zip(destinations, sources, strict=True):
                _no_grad_copy(destination, source)

        self.fake.copy(work, "group")


def _no_grad_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        destination.copy_(source)
