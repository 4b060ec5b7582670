"""How long a labeller waits for the next item, with many questions waiting.

The buffer has `--waiting` questions. `server`: milliseconds of the two requests behind a key, storing an answer and fetching the next items, over
HTTP from one client; `commit` is the smallest durable transaction of this machine and `page` an answer of the studio without any query, both
at the same time, for comparison. `browser`: milliseconds from a key to the next item on the screen in Chromium, while answers are sent
behind it; null without Chromium or Playwright. Deadlines are all `same`, the worst order for the queue, or `spread`.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, names, scratch_folder
from benchmarks.harness.report import say, write
from benchmarks.harness.statements import statements
from benchmarks.studio.client import signed_in
from rftcore.studio.server import StudioServer
from rftcore.studio.settings import StudioSettings
from rftdata.buffer import Buffer
from rftdata.config import BufferConfig

_WARM_UP = 10
_ITEM = re.compile(r'data-item-id="(\d+)" data-cursor="[^"]+" data-question="\d+" data-seen="(\d*)"')
_KEYS = ("1", "0", "Enter", "d")


def fill(buffer: Buffer, num: int, *, spread: bool) -> None:
    """Store `num` experiences with a question about each."""
    run = buffer.create_run(name="queue", config={}, seed=1, steps=1, pipeline_version="bench")
    texts = statements(__file__)
    values: dict[str, Any] = {"run_id": run.run_id, "num": num, "spread": spread}
    values["task_id"] = buffer.sql(texts["tasks"])["task_id"].to_pylist()[0]
    for name in ("groups", "prompts", "rollouts", "experiences", "reviews", "analyze"):
        buffer.sql(texts[name], values)


def percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and the greatest."""
    return {
        "p50": round(statistics.median(milliseconds), 2),
        "p95": round(statistics.quantiles(milliseconds, n=20)[-1], 2),
        "max": round(max(milliseconds), 2),
    }


def measure_server(server: StudioServer, buffer: Buffer, num: int) -> dict[str, dict[str, float]]:
    """Measure the requests of a labeller, one after another."""
    taken: dict[str, list[float]] = {"answer": [], "next": [], "page": [], "commit": []}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        taken[name].append(1000 * (time.perf_counter() - started))
        return result

    with signed_in(server) as client:
        for i in range(_WARM_UP + num):
            page = timed("next", partial(client.post, "/review/claim", data={"count": 1}))
            item, seen = _ITEM.findall(page.text)[0]
            fields = {"item": item, "choice": "pass", "reward": str(i % 2), "seen": seen}
            timed("answer", partial(client.post, "/review/answer", data=fields)).raise_for_status()
            timed("page", lambda: client.get("/sign-in"))
            timed("commit", lambda: buffer.sql("SELECT rft.begin_label_batches(1)"))
    return {name: percentiles(values[_WARM_UP:]) for name, values in taken.items()}


def measure_browser(server: StudioServer, num: int) -> dict[str, float] | None:
    """Measure from a key to the next item on the screen."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None or importlib.util.find_spec("playwright") is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.address())
        page.wait_for_url(f"http://{urlsplit(server.address()).netloc}/review")
        page.wait_for_selector("article.item")
        # Two frames after the change the item has been painted.
        page.evaluate(
            """() => {
              window.taken = [];
              addEventListener('keydown', () => { window.began = performance.now(); }, true);
              new MutationObserver(() => {
                if (!document.querySelector('#queue article') || window.began === null) return;
                const began = window.began;
                window.began = null;
                requestAnimationFrame(() => requestAnimationFrame(() => window.taken.push(performance.now() - began)));
              }).observe(document.getElementById('queue'), { childList: true });
            }"""
        )
        for i in range(_WARM_UP + num):
            page.keyboard.press(_KEYS[i % len(_KEYS)])
            while page.evaluate("window.taken.length") <= i:
                time.sleep(0.002)
        taken: list[float] = page.evaluate("window.taken")
        browser.close()
    return percentiles(taken[_WARM_UP:])


def main(arguments: Sequence[str]) -> int:
    """Measure; print JSON; return the exit code."""
    parser = argument_parser("studio", __doc__)
    parser.add_argument("--waiting", type=integer(8), default=100_000, help="questions that wait")
    parser.add_argument("--answers", type=integer(20), default=200, help="answers that are measured")
    parser.add_argument(
        "--deadlines", type=names("same", "spread"), default=["same", "spread"], help="same, spread or both"
    )
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    for deadlines in options.deadlines:
        with (
            scratch_folder(options) as folder,
            rftdata.open(BufferConfig(uri=str(folder / "buffer"), min_free_bytes=0)) as buffer,
        ):
            say(f"{deadlines}: storing {options.waiting:,} questions")
            fill(buffer, options.waiting, spread=deadlines == "spread")
            with StudioServer(buffer, StudioSettings(author="bench")).in_thread() as server:
                found = {"server_ms": measure_server(server, buffer, options.answers)}
                figures[deadlines] = {**found, "browser_ms": measure_browser(server, options.answers)}
            say(f"{deadlines}: {figures[deadlines]}")
    write(options, {"results": figures})
    return 0
