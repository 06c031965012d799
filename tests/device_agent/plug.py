"""A smart plug on loopback: answers over HTTP as a Shelly does, with watts that somebody else decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def plugged(watts: Callable[[], float]) -> Iterator[str]:
    """Answer while the block lasts; yields the address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/rpc/Switch.GetStatus?id=0":
                self.send_error(404)
                return
            body = json.dumps({"id": 0, "output": True, "apower": watts()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
