"""What the server has, what it is to do wrong, and what it was asked."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """What was asked: method, key (without the bucket), query, range, the condition of a write, the length of its body, what is to be copied."""

    method: str
    key: str
    query: str
    range: str | None
    condition: str | None = None
    length: int = 0
    source: str | None = None

    @property
    def kind(self) -> str:
        """``get``, ``head``, ``list``, ``put``, ``copy``, ``delete``, ``bulk delete``; of multipart uploads ``create``, ``part``, ``complete``, ``abort``."""
        asked = {piece.partition("=")[0] for piece in self.query.split("&")}
        if self.method == "GET" and (not self.key or "list-type" in asked):
            return "list"
        if "uploadId" in asked:
            return {"PUT": "part", "POST": "complete", "DELETE": "abort"}.get(
                self.method, self.method.lower()
            )
        if self.source is not None:
            return "copy"
        if self.method == "POST":
            return (
                "create" if "uploads" in asked else "bulk delete" if "delete" in asked else "post"
            )
        return self.method.lower()


@dataclass
class Fault:
    """What goes wrong with some requests.

    Attributes:
        status: answered instead of doing it; with ``code`` in its body. 200 is how S3 says that
            completing an upload failed.
        done: with ``status``: it is done all the same.
        cut: the connection is lost after that many bytes of the body.
        lose: it is done, and the connection lost before the answer.
        reset: the connection is reset before anything is done.
        broken: the connection is reset after that many bytes of the request's body.
        delay: seconds before anything is done.
        short: the body has that many bytes, and the answer says so.
        pause: seconds before each sixth of the body, be it the request's or the answer's.
        silent: after that many bytes of the body nothing more is sent, and the connection stays
            open for ``delay``.
        matches: which requests; all of them by default.
        times: so often, then no more; None for always.
        chance: of each request that matches.
    """

    status: int | None = None
    code: str = "SlowDown"
    done: bool = False
    cut: int | None = None
    lose: bool = False
    reset: bool = False
    broken: int | None = None
    delay: float = 0.0
    silent: int | None = None
    short: int | None = None
    pause: float = 0.0
    matches: Callable[[Request], bool] = lambda request: True
    times: int | None = 1
    chance: float = 1.0


@dataclass
class Stored:
    """An object; ``modified`` in seconds since the epoch. An empty tag is not told."""

    pieces: list[bytes]
    tag: str
    modified: float

    @property
    def data(self) -> bytes:
        """All of it. What was stored in parts is put together when it is first asked for."""
        if len(self.pieces) > 1:
            self.pieces = [b"".join(self.pieces)]
        return self.pieces[0]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, self.pieces))


@dataclass
class Upload:
    """A multipart upload that is neither completed nor aborted: its parts and their tags, by number."""

    key: str
    parts: dict[int, tuple[bytes, str]] = field(default_factory=dict)


@dataclass
class ObjectServer:
    """What the server has, what it is to do wrong, and what it was asked."""

    bucket: str = "bucket"
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    latency: float = 0.0
    #: Conditions are taken for not there.
    ignores_conditions: bool = False
    #: ``If-None-Match`` is taken for not there, ``If-Match`` is not.
    ignores_new: bool = False
    #: A conditional PUT or DELETE, or completion of an upload, is answered 501.
    refuses_conditions: bool = False
    #: A second completion of an upload is answered as the first was; else 404.
    remembers_uploads: bool = False
    #: Parts but the last that are shorter are refused, as S3 does.
    least_part: int = 5 << 20
    #: Objects, or prefixes, a page of a listing.
    page: int = 2
    #: Bodies are taken for what was sent, and tags are numbers: of what a server does with a body,
    #: digests take the longest.
    trusts: bool = False
    #: Of requests without this in their Authorization header are refused.
    access_key: str | None = None
    #: Keys that may not be deleted.
    undeletable: set[str] = field(default_factory=set)
    endpoint: str = ""
    #: Connections that are open.
    connections: int = 0
    #: Requests that are being answered, and the most there were at once.
    at_once: int = 0
    most_at_once: int = 0
    completed: dict[str, str] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def options(self, **more: object) -> dict[str, object]:
        """``storage_options`` that lead here."""
        return {
            "aws_endpoint": self.endpoint,
            "aws_region": "us-east-1",
            "aws_access_key_id": "test-access-key",
            "aws_secret_access_key": "test-secret-key-0123456789",
            "aws_allow_http": True,
            "retry_timeout": 20,
            **more,
        }

    def tag_of(self, data: bytes) -> str:
        """The tag of an object, or part, that is put in one piece."""
        if self.trusts:
            with self.lock:
                return f'"{self.rng.getrandbits(128):032x}"'
        return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'

    def put(self, key: str, data: bytes, tag: str | None = None) -> None:
        """Stores an object."""
        self.put_pieces(key, [data], tag or self.tag_of(data))

    def put_pieces(self, key: str, pieces: list[bytes], tag: str) -> None:
        """Stores an object that came in parts."""
        stored = Stored(pieces, tag, time.time())
        with self.lock:
            self.objects[key] = stored

    def put_folder(self, folder, prefix: str) -> None:
        """Stores the files of a folder, under a prefix."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def get_folder(self, prefix: str, folder) -> None:
        """Writes what is under a prefix to a folder: what others can read of a save."""
        for key, stored in list(self.objects.items()):
            if key.startswith(f"{prefix}/"):
                path = folder / key.removeprefix(f"{prefix}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(stored.data)

    def keys(self, prefix: str = "") -> list[str]:
        """The keys under a prefix, sorted."""
        return sorted(key for key in list(self.objects) if key.startswith(prefix))

    def open_uploads(self) -> list[str]:
        """The keys of the multipart uploads that are neither completed nor aborted."""
        with self.lock:
            return sorted(upload.key for upload in self.uploads.values())

    def url(self, key: str) -> str:
        """The ``s3://`` URL of a key or prefix."""
        return f"s3://{self.bucket}/{key}"

    def http_url(self, key: str) -> str:
        """The same object, as a server of plain files has it."""
        return f"{self.endpoint}/{self.bucket}/{key}"

    def asked(self, method: str | None = None) -> list[Request]:
        """What was asked so far."""
        return [request for request in list(self.requests) if method in (None, request.method)]

    def counts(self) -> Counter[str]:
        """How many requests there were, by kind."""
        return Counter(request.kind for request in list(self.requests))

    def fault_for(self, request: Request) -> Fault | None:
        """What is to go wrong with this request, if anything."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if (
                    fault.times == 0
                    or not fault.matches(request)
                    or self.rng.random() >= fault.chance
                ):
                    continue
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None
