"""Many labels in a row without a mouse: none is lost, none is doubled."""

from __future__ import annotations

from typing import Any

import pytest

import rftdata
from tests.support import studio_run
from tests.support.browsers import PATIENCE_MS
from tests.support.studio_site import open_site
from tests.support.waiting import wait_until


@pytest.mark.parametrize("num", [30, pytest.param(1000, marks=pytest.mark.long)])
def test_labels_in_a_row_are_all_stored_once(browser: Any, buffer: rftdata.Buffer, num: int) -> None:
    studio_run.ask(buffer, studio_run.store(buffer, num_sums=num // 3 + 1))
    with open_site(buffer) as site:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(site.server.address())
        page.wait_for_selector("article.item")
        for i in range(num):
            item = page.locator("#queue article").get_attribute("data-item-id")
            page.keyboard.press("1" if i % 2 else "0")
            page.locator(f"#queue article:not([data-item-id='{item}'])").wait_for()
        wait_until(
            lambda: page.evaluate(
                "Object.entries(sessionStorage).every(([key, text]) => !key.startsWith('rft-studio-writes') || text === '[]')"
            )
        )
        page.close()
    answered = buffer.sql("SELECT count(*) AS n FROM rft.review WHERE answer IS NOT NULL AND author = 'olga'")
    twice = buffer.sql("SELECT experience_id FROM rft.label GROUP BY experience_id HAVING count(*) > 1")
    assert answered["n"].to_pylist() == [num] and twice.num_rows == 0
