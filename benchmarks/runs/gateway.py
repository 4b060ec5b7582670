"""What the endpoint for programs costs: many sessions at once over an engine that answers at once, beside the same calls of `model.chat` without HTTP.

Each session is a chat of several turns, which continues its own answers. The clients share a process, write HTTP by hand and wait for each answer, so that the
times are those of the endpoint as far as possible. `p50_ms` and `p99_ms` are what a client waits for an answer while all others ask, too; `alone_ms` is the
median of one session at a time.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness.arguments import argument_parser, integer
from benchmarks.harness.report import write
from rftcore.engines.base import Decoding
from rftcore.explorer.rehearsal import StandIn
from rftcore.gateway import Gateway, GatewaySession, SessionSettings
from rftcore.workflows.task import Model
from tests.support.models import make_character_tokenizer

_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
_QUESTION = "What is the sum of seventeen and twenty five, and of that and one more? " * 3
_ANSWER = "The sum is forty two, and with one more it is forty three."


def _engine() -> StandIn:
    tokenizer: Any = make_character_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    return StandIn(tokenizer, _ANSWER)


async def through_the_endpoint(num_sessions: int, num_turns: int) -> tuple[float, list[float]]:
    """Return the seconds of all requests of so many sessions at once, and those of each."""
    engine, gateway = _engine(), Gateway()
    sessions = [GatewaySession(Model(engine, Decoding()), SessionSettings()) for _ in range(num_sessions)]
    urls = [gateway.open(session) for session in sessions]
    ours, theirs = multiprocessing.Pipe()
    clients = multiprocessing.get_context("spawn").Process(target=_clients, args=(urls, num_turns, theirs))
    clients.start()
    try:
        seconds, each = await asyncio.to_thread(ours.recv)
    finally:
        await asyncio.to_thread(clients.join)
        await gateway.close()
    return seconds, each


async def in_process(num_sessions: int, num_turns: int) -> float:
    """Return the seconds of the same chats without HTTP."""
    engine = _engine()

    async def one() -> None:
        model, chat = Model(engine, Decoding()), [{"role": "user", "content": _QUESTION}]
        for _ in range(num_turns):
            turn = await model.chat(chat)
            chat = [*chat, turn.message, {"role": "user", "content": _QUESTION}]

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(num_sessions)))
    return time.perf_counter() - started


def _clients(urls: Sequence[str], num_turns: int, result: Connection) -> None:
    result.send(asyncio.run(_asked(urls, num_turns)))


async def _asked(urls: Sequence[str], num_turns: int) -> tuple[float, list[float]]:
    seconds: list[float] = []
    opened = await asyncio.gather(
        *(asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port) for url in urls)
    )

    async def session(url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chat: list[dict[str, Any]] = [{"role": "user", "content": _QUESTION}]
        for _ in range(num_turns):
            begun = time.perf_counter()
            message = await _post(url, {"model": "policy", "messages": chat}, reader, writer)
            seconds.append(time.perf_counter() - begun)
            chat += [message, {"role": "user", "content": _QUESTION}]
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(session(url, *streams) for url, streams in zip(urls, opened, strict=True)))
    return time.perf_counter() - started, seconds


async def _post(
    url: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> dict[str, Any]:
    data = json.dumps(body).encode()
    path = urlsplit(url).path
    head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    headers = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(headers.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    answer = json.loads(await reader.readexactly(length))
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the result as JSON."""
    parser = argument_parser("gateway", __doc__)
    parser.add_argument("--sessions", type=integer(1), default=1000, help="number of sessions at a time")
    parser.add_argument("--turns", type=integer(1), default=8, help="number of turns of a session")
    options = parser.parse_args(arguments)
    _, alone = asyncio.run(through_the_endpoint(1, options.turns))
    seconds, each = asyncio.run(through_the_endpoint(options.sessions, options.turns))
    bare_s = asyncio.run(in_process(options.sessions, options.turns))
    num = len(each)
    write(
        options,
        {
            "requests": num,
            "requests_per_s": round(num / seconds),
            "chat_per_s": round(num / bare_s),
            "ratio": round(bare_s / seconds, 3),
            "p50_ms": round(1e3 * statistics.median(each), 1),
            "p99_ms": round(1e3 * sorted(each)[int(0.99 * (num - 1))], 1),
            "alone_ms": round(1e3 * statistics.median(alone), 2),
        },
    )
    return 0
