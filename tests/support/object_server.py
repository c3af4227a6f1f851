"""A small S3-like server on loopback, in threads of this process, that can be told to misbehave.

It knows GET with ranges and conditions, HEAD, PUT with conditions, multipart uploads, LIST, DELETE; no signatures. Objects live in memory, and are sent from there
without a copy. What it is asked is noted.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["Fault", "ObjectServer", "Request", "object_server"]


@dataclass(frozen=True)
class Request:
    """What was asked: method, key (without the bucket), query and range."""

    method: str
    key: str
    query: str
    range: str | None


@dataclass
class Fault:
    """What goes wrong with some requests.

    Attributes:
        status: answered instead of doing it; with ``code`` in its body.
        cut: the connection is lost after that many bytes of the body.
        lose: it is done, and the connection lost before the answer.
        reset: the connection is reset before anything is done.
        delay: seconds before anything is done.
        short: the body has that many bytes, and the answer says so.
        pause: seconds before each sixth of the body.
        silent: after that many bytes of the body nothing more is sent, and the connection stays open for ``delay``.
        matches: which requests; all of them by default.
        times: so often, then no more; None for always.
        chance: of each request that matches.
    """

    status: int | None = None
    code: str = "SlowDown"
    cut: int | None = None
    lose: bool = False
    reset: bool = False
    delay: float = 0.0
    silent: int | None = None
    short: int | None = None
    pause: float = 0.0
    matches: Callable[[Request], bool] = lambda request: True
    times: int | None = 1
    chance: float = 1.0


@dataclass
class Stored:
    """An object."""

    data: bytes
    tag: str


@dataclass
class ObjectServer:
    """What the server has, what it is to do wrong, and what it was asked."""

    bucket: str = "bucket"
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    latency: float = 0.0
    ignores_conditions: bool = False
    #: Of requests without this in their Authorization header are refused.
    access_key: str | None = None
    endpoint: str = ""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    lock: threading.Lock = field(default_factory=threading.Lock)

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

    def put(self, key: str, data: bytes) -> None:
        """Stores an object."""
        self.objects[key] = Stored(data, f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"')

    def put_folder(self, folder, prefix: str) -> None:
        """Stores the files of a folder, under a prefix."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def url(self, key: str) -> str:
        """The ``s3://`` URL of a key or prefix."""
        return f"s3://{self.bucket}/{key}"

    def http_url(self, key: str) -> str:
        """The same object, as a server of plain files has it."""
        return f"{self.endpoint}/{self.bucket}/{key}"

    def asked(self, method: str | None = None) -> list[Request]:
        """What was asked so far."""
        return [request for request in list(self.requests) if method in (None, request.method)]

    def fault_for(self, request: Request) -> Fault | None:
        """What is to go wrong with this request, if anything."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times == 0 or not fault.matches(request) or self.rng.random() >= fault.chance:
                    continue
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    wbufsize = 1 << 16

    def log_message(self, *_):
        """Nothing is printed."""

    def setup(self):
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def handle(self):
        with contextlib.suppress(ConnectionError, TimeoutError, ValueError, OSError):
            super().handle()

    def do_GET(self):
        self.serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def serve(self):
        store = self.server.store
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        body = self.body()
        request = Request(self.command, key, parts.query, self.headers.get("Range"))
        self.fault = store.fault_for(request)
        if store.latency:
            time.sleep(store.latency)
        if self.fault is not None and self.fault.delay and self.fault.silent is None:
            time.sleep(self.fault.delay)
        if self.fault is not None and self.fault.reset:
            self.abandon()
            return
        if self.fault is not None and self.fault.status is not None:
            self.refuse(self.fault.status, self.fault.code)
            return
        if store.access_key is not None and store.access_key not in self.headers.get("Authorization", ""):
            self.refuse(403, "InvalidAccessKeyId")
        elif bucket != store.bucket:
            self.refuse(404, "NoSuchBucket")
        else:
            query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
            getattr(self, f"on_{self.command.lower()}")(key, query, body)

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def abandon(self):
        """Resets the connection."""
        self.close_connection = True
        self.wfile = _Nowhere()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def refuse(self, status: int, code: str):
        secret = "StringToSign: AWS4-HMAC-SHA256 test-secret-key-0123456789"
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{secret}</Message></Error>"
        self.answer(status, text.encode(), {"Content-Type": "application/xml"}, faulty=False)

    def answer(self, status: int, body: bytes | memoryview = b"", headers=None, *, length=None, faulty=True):
        fault = self.fault if faulty else None
        if fault is not None and fault.lose:
            self.abandon()
            return
        if fault is not None and fault.short is not None:
            body, length = body[: fault.short], None
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.silent is not None:
            self.wfile.write(body[: fault.silent])
            self.wfile.flush()
            time.sleep(fault.delay)
            self.abandon()
            return
        if fault is not None and fault.cut is not None:
            self.wfile.write(body[: fault.cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.flush()
        if fault is not None and fault.pause:
            step = len(body) // 6 + 1
            for start in range(0, len(body), step):
                time.sleep(fault.pause)
                self.connection.sendall(body[start : start + step])
            return
        self.connection.sendall(body)

    def on_get(self, key, query, _body):
        if not key or "list-type" in query:
            self.list(query)
            return
        stored = self.server.store.objects.get(key)
        if stored is None:
            self.refuse(404, "NoSuchKey")
            return
        conditional = not self.server.store.ignores_conditions
        wanted = self.headers.get("If-Match")
        if conditional and wanted not in (None, "*", stored.tag):
            self.refuse(412, "PreconditionFailed")
            return
        whole = memoryview(stored.data)
        headers = {"ETag": stored.tag, "Accept-Ranges": "bytes", "Last-Modified": "Sun, 22 Nov 2026 12:00:00 GMT"}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if found is None:
            self.answer(200, whole, headers)
            return
        start = int(found[1])
        end = min(int(found[2]) + 1 if found[2] else len(whole), len(whole))
        if start >= len(whole):
            self.refuse(416, "InvalidRange")
            return
        self.answer(206, whole[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(whole)}"})

    on_head = on_get

    def list(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        found, folders = [], set()
        for key, stored in sorted(self.server.store.objects.items()):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                found.append((key, stored))
        # Two a page, so that pages are followed.
        after = query.get("continuation-token") or query.get("start-after") or ""
        rest = [(key, stored) for key, stored in found if key > after]
        page, more = rest[:2], len(rest) > 2
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-22T12:00:00.000Z</LastModified>"
            f"<ETag>{escape(stored.tag)}</ETag><Size>{len(stored.data)}</Size></Contents>"
            for key, stored in page
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)
        )
        token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}{common}</ListBucketResult>"
        self.answer(200, text.encode(), {"Content-Type": "application/xml"})

    def on_put(self, key, query, body):
        store = self.server.store
        if "uploadId" in query:
            upload = store.uploads.get(query["uploadId"])
            if upload is None:
                self.refuse(404, "NoSuchUpload")
                return
            upload[1][int(query["partNumber"])] = body
            self.answer(200, b"", {"ETag": f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'})
            return
        with store.lock:
            there = store.objects.get(key)
            if not store.ignores_conditions:
                none, match = self.headers.get("If-None-Match"), self.headers.get("If-Match")
                if (none == "*" and there is not None) or (match is not None and (there is None or there.tag != match)):
                    refused = True
                else:
                    refused = False
                    store.put(key, body)
            else:
                refused = False
                store.put(key, body)
        if refused:
            self.refuse(412, "PreconditionFailed")
        else:
            self.answer(200, b"", {"ETag": store.objects[key].tag})

    def on_post(self, key, query, body):
        store = self.server.store
        if "uploads" in query:
            number = f"upload-{len(store.requests)}-{store.rng.random()}"
            store.uploads[number] = (key, {})
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            self.answer(200, text.encode(), {"Content-Type": "application/xml"})
        elif "uploadId" in query:
            upload = store.uploads.pop(query["uploadId"], None)
            if upload is None:
                self.refuse(404, "NoSuchUpload")
                return
            store.put(key, b"".join(part for _, part in sorted(upload[1].items())))
            tag = escape(store.objects[key].tag)
            text = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
            self.answer(200, text.encode(), {"Content-Type": "application/xml"})
        elif "delete" in query:
            for name in re.findall(rb"<Key>(.*?)</Key>", body):
                store.objects.pop(name.decode(), None)
            self.answer(200, b"<DeleteResult></DeleteResult>", {"Content-Type": "application/xml"})
        else:
            self.refuse(400, "InvalidRequest")

    def on_delete(self, key, query, _body):
        store = self.server.store
        if "uploadId" in query:
            store.uploads.pop(query["uploadId"], None)
        else:
            store.objects.pop(key, None)
        self.answer(204)


class _Nowhere:
    closed = False

    def write(self, data):
        return len(data)

    def flush(self):
        pass

    def close(self):
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, store: ObjectServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store

    def handle_error(self, *_):
        """A client that goes away in the midst of an answer is what tests do."""


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    """A server on a free port, for as long as the block runs."""
    store = ObjectServer()
    server = _Server(store)
    store.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
