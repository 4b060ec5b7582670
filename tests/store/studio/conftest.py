"""One studio, on one buffer, for all tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import rftdata
from rftdata.config import BufferConfig
from tests.support import studio_run
from tests.support.browsers import PATIENCE_MS, REPORT_VIOLATIONS, is_error, open_browser
from tests.support.studio_site import PASSWORD, Site, account, open_site


@pytest.fixture(scope="module")
def studio_buffer(
    databases: Callable[[str], AbstractContextManager[str]],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[rftdata.Buffer]:
    folder: Path = tmp_path_factory.mktemp("studio")
    with databases(f"studio_{request.module.__name__.rpartition('.')[2]}") as uri:
        config = BufferConfig(uri=uri, segments=str(folder / "segments"), min_free_bytes=0)
        with rftdata.open(config) as buffer:
            run = studio_run.store(buffer, with_attacks=True)
            studio_run.ask(buffer, run)
            yield buffer


@pytest.fixture(scope="module")
def site(studio_buffer: rftdata.Buffer) -> Iterator[Site]:
    with open_site(studio_buffer) as opened:
        yield opened


@pytest.fixture(scope="module")
def ada(studio_buffer: rftdata.Buffer) -> Iterator[str]:
    """An account that may label."""
    with account(studio_buffer, "studio_ada", "rft_labeler") as name:
        yield name


@pytest.fixture(scope="module")
def bob(studio_buffer: rftdata.Buffer) -> Iterator[str]:
    """Another account that may label."""
    with account(studio_buffer, "studio_bob", "rft_labeler") as name:
        yield name


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def signed_in(browser: Any, site: Site, ada: str) -> Iterator[Any]:
    """A browser in which ada has signed in through the form."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, locale="en")
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(REPORT_VIOLATIONS)
    page = context.new_page()
    page.goto(site.origin)
    page.get_by_label("Name").fill(ada)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{site.origin}/review")
    page.close()
    yield context
    context.close()


@pytest.fixture
def tab(signed_in: Any) -> Iterator[Any]:
    """A new tab. The test fails if a page in it reports an error, or a violation of the content security policy."""
    errors: list[str] = []
    page = signed_in.new_page()
    page.on("console", lambda message: errors.append(message.text) if is_error(message) else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []
