"""A prefix of a store that saves are killed over. The store is a process of its own, that goes on with what it was asked when the saver is gone."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import dcp_rs
from dcp_rs import _core
from support.commands import in_a_process
from support.object_server import Fault, ObjectServer, Request, object_server

if TYPE_CHECKING:
    import random

    from crash.kills import Savers

KEY = "ckpt"
INDEX = f"{KEY}/index.dcprs"


def _of(*kinds: str) -> Callable[[Request], bool]:
    return lambda request: request.kind in kinds and request.key.startswith(f"{KEY}/g")


def _index(request: Request) -> bool:
    return request.kind == "put" and request.key == INDEX


#: The requests of a save over another one, in their order.
REQUESTS: dict[str, Callable[[Request], bool]] = {
    "create": _of("create"),
    "part": _of("part"),
    "complete": _of("complete"),
    "look": _of("head", "get"),
    "index": _index,
    "remove": _of("delete"),
}
#: When a saver is ended: at any moment, or when the store was just asked for one of these.
MOMENTS = ("any", *REQUESTS)

#: Seconds that each request takes, and that one which is waited for takes longer.
LATENCY = 0.002
HELD = 0.05
#: Of the requests that are waited for, so many pass before, at most.
PASSED = 3
#: No saver needs longer to come to a request.
PATIENCE = 60.0


def _misbehaviour(way: str) -> list[Fault]:
    """What the store does wrong while savers are ended in this way."""
    return {
        "busy": [Fault(status=503, times=None, chance=0.1)],
        "lost commit": [Fault(lose=True, matches=_index, times=None, chance=0.7)],
        "lost answers": [
            Fault(lose=True, times=None, chance=0.05),
            Fault(status=503, done=True, times=None, chance=0.05),
        ],
    }.get(way, [])


class _Told:
    """What the process of the store does when it is told to."""

    def __init__(self, server: ObjectServer) -> None:
        self._server = server
        self._came = threading.Event()

    def begin(self, way: str, moment: str, passed: int) -> None:
        """Misbehaves from now on, and holds a request of this kind, after some that pass."""
        self._came.clear()
        faults = _misbehaviour(way)
        if moment in REQUESTS:
            faults.insert(0, Fault(delay=HELD, matches=self._is_the_one(REQUESTS[moment], passed)))
        self._server.faults[:] = faults

    def _is_the_one(
        self, matches: Callable[[Request], bool], passed: int
    ) -> Callable[[Request], bool]:
        left = [passed]

        def is_it(request: Request) -> bool:
            if matches(request):
                left[0] -= 1
                if left[0] < 0:
                    self._came.set()
                    return True
            return False

        return is_it

    def came(self) -> bool:
        """Waits for that request."""
        return self._came.wait(PATIENCE)

    def settle(self) -> list[str]:
        """Waits until nothing that it was asked is still done, and does nothing wrong any more. Returns the keys of open uploads."""
        quiet = 0
        end = time.monotonic() + PATIENCE
        while quiet < 3:
            assert time.monotonic() < end, (
                f"{self._server.connections} connections of savers that are gone"
            )
            quiet = 0 if self._server.connections else quiet + 1
            time.sleep(0.005)
        self._server.faults.clear()
        self._server.requests.clear()
        return self._server.open_uploads()

    def apply_rule(self) -> None:
        """What a rule of the bucket does in time: removes the uploads that were not completed."""
        with self._server.lock:
            self._server.uploads.clear()

    def keys(self) -> list[str]:
        return self._server.keys()


def _serve(told: Connection) -> None:
    with object_server() as server:
        server.latency = LATENCY
        server.page = 1000
        told.send((server.url(KEY), server.options()))
        does = _Told(server)
        while True:
            try:
                word, *arguments = told.recv()
            except EOFError:
                return
            told.send(getattr(does, word)(*arguments))


class Store:
    """A prefix of a store, in a process that ends with this one."""

    #: As for folders; and at once, while requests fail now and then, while the answer to the commit
    #: is lost, or any.
    ways = ("kill", "term", "handled term", "busy", "lost commit", "lost answers")
    #: Elements: three parts of an upload.
    large = 4_300_000

    def __init__(self) -> None:
        self._told, theirs = multiprocessing.Pipe()
        # Before anything of a store was asked here: a fork has no threads of its parent.
        process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(theirs,), daemon=True
        )
        process.start()
        self.path, options = self._told.recv()
        self.access = {"storage_options": options}
        self._way = self._moment = "any"

    def _tell(self, word: str, *arguments: object) -> Any:
        self._told.send((word, *arguments))
        assert self._told.poll(2 * PATIENCE), f"the store does not answer to {word}"
        return self._told.recv()

    def begin(self, way: str, number: int) -> str:
        self._way = way
        self._moment = MOMENTS[number % len(MOMENTS)]
        self._tell("begin", way, self._moment, number // len(MOMENTS) % PASSED)
        return self._moment

    def wait(self, savers: Savers, rng: random.Random, usual: float) -> None:
        if self._moment == "any":
            time.sleep(rng.uniform(0, 2 * usual))
            return
        assert self._tell("came"), f"no saver asked for {self._moment}"
        time.sleep(rng.uniform(0, 2 * HELD))

    def _named(self) -> set[str]:
        """The keys that the index names, and its own."""
        (data,) = _core.Store(self.path, self._plain()).read([f"{self.path}/index.dcprs"])
        assert data is not None
        index = _core.Index.from_bytes(data, f"{self.path}/index.dcprs", False)
        return {INDEX, *(f"{KEY}/{file.name}" for file in index.files())}

    def _plain(self) -> dict[str, str]:
        return {
            name: str(value).lower() if value is True else str(value)
            for name, value in self._options().items()
        }

    def _options(self) -> dict[str, object]:
        return self.access["storage_options"]

    def settle(self) -> int:
        left = self._tell("settle")
        assert all(key.startswith(f"{KEY}/g") for key in left), left
        # An upload is begun anew where the answer was lost: of the first nobody knows.
        assert self._way == "lost answers" or not set(left) & self._named()
        self._tell("apply_rule")
        return len(left)

    def strays(self) -> list[str]:
        return sorted(set(self._tell("keys")) - self._named())

    def clean(self) -> None:
        """By the command line, as somebody would who looks after it. What else there is, is for a rule of the bucket: it says so."""
        strays = self.strays()
        options = [f"--storage-option={name}={value}" for name, value in self._plain().items()]
        done = in_a_process("clean", self.path, "--yes", "--older-than", "0", "--json", *options)
        assert done.returncode == 0, done.stderr
        removed = [found["path"] for found in json.loads(done.stdout)["removed"]]
        assert sorted(path.removeprefix(self.path) for path in removed) == [
            key.removeprefix(KEY) for key in strays
        ]
        assert self.strays() == []
        assert dcp_rs.clean(self.path, older_than=0, **self.access).found == []
