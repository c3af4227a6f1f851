"""A small S3-like server on loopback, in threads of this process, that can be told to misbehave.

It knows GET with ranges and conditions, HEAD, PUT with conditions, copies, multipart uploads, LIST,
DELETE; no signatures. Objects live in memory, and are sent from there without a copy. What it is
asked is noted.
"""

from __future__ import annotations

import contextlib
import socketserver
import ssl
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

from .reading import Reading
from .state import Fault, ObjectServer, Request, Stored, Upload
from .writing import Writing

__all__ = ["Fault", "ObjectServer", "Request", "Stored", "Upload", "object_server"]


class _Handler(Reading, Writing):
    """Everything that the server answers."""


#: Ports that had a server: what a process learned of a store, it takes for true of whatever answers
#: there.
_had: set[int] = set()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, store: ObjectServer, context: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store
        self.context = context

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks for the name of the address: where nobody knows it, that
        # takes seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address

    def finish_request(self, request, client_address):
        # In the thread of the connection: a handshake waits for the client.
        if self.context is not None:
            request = self.context.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)

    def handle_error(self, *_):
        """A client that goes away in the midst of an answer is what tests do."""


def _new_server(store: ObjectServer, context: ssl.SSLContext | None) -> _Server:
    refused = []
    while (server := _Server(store, context)).server_port in _had:
        refused.append(server)  # closed later, so that its port is not given again
    for other in refused:
        other.server_close()
    _had.add(server.server_port)
    return server


@contextlib.contextmanager
def object_server(context: ssl.SSLContext | None = None) -> Iterator[ObjectServer]:
    """A server on a free port, for as long as the block runs; over TLS with a context."""
    store = ObjectServer()
    server = _new_server(store, context)
    store.endpoint = f"{'https' if context else 'http'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
