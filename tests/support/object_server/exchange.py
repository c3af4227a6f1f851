"""A request and its answer over HTTP, with what goes wrong between them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import struct
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from .state import Fault, Request

if TYPE_CHECKING:
    from .state import ObjectServer

XML = {"Content-Type": "application/xml"}


class Exchange(BaseHTTPRequestHandler):
    """Takes requests, and hands them to ``on_get``, ``on_put``, ...; ``self.server.store`` is the server's state."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    fault: Fault | None = None

    @property
    def store(self) -> ObjectServer:
        return self.server.store

    def log_message(self, *_):
        """Nothing is printed."""

    def setup(self):
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def handle_expect_100(self):
        """Says at once that the body may come: what is written here waits in a buffer, and some clients wait for it without end."""
        going_on = super().handle_expect_100()
        self.wfile.flush()
        return going_on

    def handle(self):
        with self.store.lock:
            self.store.connections += 1
        try:
            with contextlib.suppress(ConnectionError, TimeoutError, ValueError, OSError):
                super().handle()
        finally:
            with self.store.lock:
                self.store.connections -= 1

    def do_GET(self):
        with self.store.lock:
            self.store.at_once += 1
            self.store.most_at_once = max(self.store.most_at_once, self.store.at_once)
        try:
            self.serve()
        finally:
            with self.store.lock:
                self.store.at_once -= 1

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def condition(self) -> str | None:
        """The condition of this request, as its header reads."""
        for name in ("If-None-Match", "If-Match", "x-amz-copy-source-if-match"):
            if (value := self.headers.get(name)) is not None:
                return f"{name}: {value}"
        return None

    def serve(self):
        store = self.store
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        length = int(self.headers.get("Content-Length") or 0)
        asked = (
            self.headers.get("Range"),
            self.condition(),
            length,
            self.headers.get("x-amz-copy-source"),
        )
        request = Request(self.command, key, parts.query, *asked)
        self.fault = fault = store.fault_for(request)
        if fault is not None and (fault.reset or fault.broken is not None):
            self.rfile.read(min(fault.broken or 0, length))
            time.sleep(fault.delay)
            self.abandon()
            return
        body = self.body()
        time.sleep(store.latency)
        if fault is not None and fault.silent is None:
            time.sleep(fault.delay)
        if fault is not None and fault.status is not None and not fault.done:
            self.refuse(fault.status, fault.code)
        elif store.access_key is not None and store.access_key not in self.headers.get(
            "Authorization", ""
        ):
            self.refuse(403, "InvalidAccessKeyId")
        elif bucket != store.bucket:
            self.refuse(404, "NoSuchBucket")
        elif not self.is_what_was_sent(body):
            self.refuse(400, "BadDigest")
        else:
            query = {
                name: values[0]
                for name, values in parse_qs(parts.query, keep_blank_values=True).items()
            }
            getattr(self, f"on_{self.command.lower()}")(key, query, body)

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        length = int(self.headers.get("Content-Length") or 0)
        if self.fault is None or not self.fault.pause or not length:
            return self.read_exactly(length)
        pieces = []
        for start in range(0, length, length // 6 + 1):
            time.sleep(self.fault.pause)
            pieces.append(self.read_exactly(min(length // 6 + 1, length - start)))
        return b"".join(pieces)

    def read_exactly(self, length: int) -> bytes:
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("the client went away in the midst of its request")
        return body

    def is_what_was_sent(self, body: bytes) -> bool:
        """Whether the digests that the client sent are those of the body."""
        if self.store.trusts:
            return True
        sha = self.headers.get("x-amz-content-sha256", "")
        if len(sha) == 64 and body and hashlib.sha256(body).hexdigest() != sha:
            return False
        md5 = self.headers.get("Content-MD5")
        return (
            md5 is None
            or base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode() == md5
        )

    def abandon(self):
        """Resets the connection."""
        self.close_connection = True
        self.wfile = _Nowhere()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def refuse(self, status: int, code: str):
        """Answers with an error; its text has what S3 would have put there, a secret among it."""
        secret = "StringToSign: AWS4-HMAC-SHA256 test-secret-key-0123456789"
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{secret}</Message></Error>"
        if self.fault is not None and self.fault.lose:
            self.abandon()
        else:
            self.send(status, text.encode(), XML)

    def answer(self, status: int, body: bytes | memoryview = b"", headers=None):
        """Answers, as well as the fault lets it."""
        fault = self.fault
        if fault is None:
            self.send(status, body, headers)
        elif fault.lose:
            self.abandon()
        elif fault.status is not None:
            self.refuse(fault.status, fault.code)
        else:
            self.send(status, body if fault.short is None else body[: fault.short], headers, fault)

    def send(self, status: int, body: bytes | memoryview, headers=None, fault: Fault | None = None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
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


class _Nowhere:
    closed = False

    def write(self, data):
        return len(data)

    def flush(self):
        pass

    def close(self):
        pass
