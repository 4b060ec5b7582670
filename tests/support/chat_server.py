"""A small HTTP server that speaks the protocol of chat completions and answers as a test demands: refusals, delays, nonsense."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Says:
    """One response: a status with a text, or a completion's text."""

    text: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bool = False


class ChatServer:
    """Serves on a free port until `close`.

    Args:
        answer: called with the number of the request (from 0) and its body, by a thread per request.

    Attributes:
        requests: bodies, in the order of their arrival.
        keys: their authorization headers.
    """

    def __init__(self, answer: Callable[[int, Body], Says | str]) -> None:
        self.requests: list[Body] = []
        self.keys: list[str | None] = []
        self.busiest = 0
        self._busy = 0
        self._lock = threading.Lock()
        self._answer = answer
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer._serve(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.keys.append(handler.headers.get("authorization"))
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
        try:
            said = self._answer(number, body)
            said = Says(said) if isinstance(said, str) else said
            payload = (said.text if said.raw or said.status != 200 else completion(said.text)).encode()
        finally:
            with self._lock:
                self._busy -= 1
        try:
            handler.send_response(said.status)
            for name, value in said.headers.items():
                handler.send_header(name, value)
            handler.send_header("content-length", str(len(payload)))
            handler.end_headers()
            handler.wfile.write(payload)
        except OSError:
            handler.close_connection = True  # the client gave up: a time-out is what some tests are about


def completion(text: str, prompt_tokens: int = 20, completion_tokens: int = 10) -> str:
    """The body of a chat completion."""
    return json.dumps(
        {
            "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
        }
    )
