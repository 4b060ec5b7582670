"""A studio that restarts and a database that goes away under an open page: told there, nothing lost, nothing doubled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rftdata
from rftcore.studio.server import StudioServer
from rftcore.studio.settings import StudioSettings
from rftdata.config import BufferConfig
from rftdata.postgres.embedded import EmbeddedServer
from tests.support import studio_run
from tests.support.browsers import PATIENCE_MS
from tests.support.ports import closed_port
from tests.support.waiting import wait_until


@pytest.fixture
def own_buffer(tmp_path: Path) -> Iterator[rftdata.Buffer]:
    """A buffer with a server of its own, which the test stops."""
    with rftdata.open(BufferConfig(uri=str(tmp_path / "buffer"), min_free_bytes=0)) as buffer:
        studio_run.ask(buffer, studio_run.store(buffer))
        yield buffer


def answered(buffer: rftdata.Buffer) -> int:
    return int(buffer.sql("SELECT count(*) AS n FROM rft.review WHERE answer IS NOT NULL")["n"].to_pylist()[0])


def settled(page: Any) -> bool:
    return bool(
        page.evaluate(
            "Object.entries(sessionStorage).every(([key, text]) => !key.startsWith('rft-studio-writes') || text === '[]')"
        )
    )


@pytest.fixture
def port() -> Iterator[int]:
    with closed_port() as found:
        yield found


def test_answers_survive_a_restart_of_the_studio_and_of_the_database(
    browser: Any, own_buffer: rftdata.Buffer, port: int
) -> None:
    settings = StudioSettings(port=port, author="olga")
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    with StudioServer(own_buffer, settings).in_thread() as server:
        page.goto(server.address())
        page.wait_for_selector("article.item")
        page.keyboard.press("1")
        wait_until(lambda: settled(page))
    # The studio is gone. Items that were fetched ahead can still be answered.
    for _ in range(2):
        page.keyboard.press("1")
    page.locator("#state", has_text="not stored yet: 2").wait_for()
    assert answered(own_buffer) == 1
    server_of_buffer = EmbeddedServer(Path(own_buffer.config.uri))
    with StudioServer(own_buffer, settings).in_thread() as server:
        # A session ends with its studio: the page says so, and sends everything once its reader has signed in again in this tab.
        page.locator("#state", has_text="not signed in any more").wait_for()
        page.on("dialog", lambda dialog: dialog.accept())
        page.goto(server.address())
        page.wait_for_selector("article.item")
        wait_until(lambda: settled(page) and answered(own_buffer) == 3)
        server_of_buffer.stop()
        page.keyboard.press("0")
        page.locator("#state", has_text="database cannot be reached").wait_for()
        assert "page tries again" in page.request.get(f"http://127.0.0.1:{server.port}/experience/1").text()
        server_of_buffer.start()
        wait_until(lambda: settled(page) and answered(own_buffer) == 4)
    labels = own_buffer.sql("SELECT experience_id FROM rft.label ORDER BY 1")["experience_id"].to_pylist()
    assert len(labels) == len(set(labels))
    context.close()


def test_two_tabs_do_not_overwrite_each_other(browser: Any, own_buffer: rftdata.Buffer) -> None:
    with StudioServer(own_buffer, StudioSettings(author="olga")).in_thread() as server:
        context = browser.new_context()
        context.set_default_timeout(PATIENCE_MS)
        first = context.new_page()
        first.goto(server.address())
        first.wait_for_selector("article.item")
        second = context.new_page()
        second.goto(f"http://127.0.0.1:{server.port}/review")
        second.wait_for_selector("article.item")
        first.keyboard.press("1")
        wait_until(lambda: settled(first) and answered(own_buffer) == 1)
        second.keyboard.press("1")  # the same answer to the same question: it is stored already
        wait_until(lambda: settled(second))
        assert second.locator("#problems").inner_text() == ""
        first.keyboard.press("d")
        wait_until(lambda: settled(first) and answered(own_buffer) == 2)
        second.keyboard.press("0")
        second.locator("#problems", has_text="answered by olga meanwhile: drop").wait_for()
        assert answered(own_buffer) == 2
        context.close()
