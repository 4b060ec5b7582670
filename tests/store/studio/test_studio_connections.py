"""Slow and many connections: none holds the studio, and people at work notice nothing."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import rftdata
from rftcore.studio import connections, guards
from tests.support.studio_site import Site, open_site
from tests.support.waiting import wait_until

HEAD = b"GET /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 1.0)
    monkeypatch.setattr(connections, "READING_S", 1.0)
    monkeypatch.setattr(guards, "BODY_S", 1.0)


def line_to(site: Site) -> socket.socket:
    return socket.create_connection(("127.0.0.1", site.server.port), timeout=60)


def num_open(site: Site) -> int:
    return len(site.server._server.server_state.connections)


@contextlib.contextmanager
def dripping(line: socket.socket, pieces: Iterator[bytes]) -> Iterator[threading.Event]:
    """Send a piece every 50 ms while the block runs; yield what is set once the studio has closed the connection."""
    closed, stop = threading.Event(), threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                line.sendall(next(pieces))
            return
        closed.set()

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield closed
    finally:
        stop.set()
        thread.join()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"", b"G"),
        (HEAD + b"X: ", b"x"),
        (HEAD, b"X: y\r\n"),
        # A body that nothing reads, because the request was answered before; and one that a route waits for.
        (HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
        (b"POST /label HTTP/1.1\r\nHost: evil\r\nContent-Length: 100000\r\n\r\n", b"x"),
        (
            HEAD.replace(b"GET", b"POST")
            + b"Sec-Fetch-Site: same-origin\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 9999\r\n\r\n",
            b"x",
        ),
        (HEAD + b"\r\n" + HEAD, b"X: y\r\n"),  # the second request of a connection
    ],
    ids=[
        "request line",
        "header",
        "many headers",
        "unread body",
        "body of a refused request",
        "body",
        "second request",
    ],
)
def test_a_client_that_sends_a_byte_now_and_then_loses_its_connection(site: Site, begin: bytes, piece: bytes) -> None:
    with line_to(site) as line:
        line.sendall(begin)
        with dripping(line, itertools.repeat(piece)) as closed:
            assert closed.wait(60)


@pytest.mark.usefixtures("hurried")
def test_a_client_that_sends_nothing_or_reads_nothing_loses_its_connection(site: Site) -> None:
    before = num_open(site)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(line_to(site))
        # Far more answers than the buffers of the system hold.
        greedy = stack.enter_context(line_to(site))
        request = b"GET /static/vendor/htmx.min.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        with dripping(greedy, itertools.repeat(request * 20)) as closed:
            assert closed.wait(60)
        wait_until(lambda: num_open(site) <= before)


@pytest.mark.usefixtures("hurried")
def test_an_event_stream_lasts_and_a_connection_serves_several_requests(site: Site) -> None:
    with site.owner() as client, client.stream("GET", "/events") as events:
        pieces = events.iter_raw()
        assert b"retry" in next(pieces)
        with line_to(site) as slow, dripping(slow, itertools.repeat(b"G")) as closed:
            assert client.get("/review").status_code == client.get("/runs").status_code == 200
            assert closed.wait(60)  # which took longer than headers may take
        site.server.studio.live.hint()
        assert b"event: live" in next(pieces)


def answer_on(line: socket.socket) -> bytes:
    """Return the beginning of the answer to a request; nothing if the connection is refused."""
    with contextlib.suppress(ConnectionError):
        line.sendall(HEAD + b"\r\n")
        return line.recv(9)
    return b""


def test_an_address_has_so_many_connections_and_a_proxy_more(
    studio_buffer: rftdata.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_OF_ADDRESS", 5)
    for settings, most in (({}, 5), ({"behind_proxy": True, "hosts": ("studio.example.org",)}, 8)):
        monkeypatch.setattr(connections, "MOST", 8)
        with open_site(studio_buffer, **settings) as site, ExitStack() as stack:
            lines = [stack.enter_context(line_to(site)) for _ in range(most)]
            wait_until(lambda site=site, most=most: num_open(site) == most)
            with line_to(site) as refused:
                assert answer_on(refused) == b""
            lines[0].close()
            wait_until(lambda site=site, most=most: num_open(site) < most)
            with line_to(site) as line:
                assert answer_on(line) == b"HTTP/1.1 "


def test_headers_have_a_size(site: Site) -> None:
    with line_to(site) as line, contextlib.suppress(ConnectionError):
        line.sendall(HEAD + b"X: " + b"x" * 10**6)
        answer = line.recv(100)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
