"""The browser of tests: the system's Chromium, driven by Playwright. Without it, tests are skipped with the reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AXE = Path(__file__).parent / "axe" / "axe.min.js"
PATIENCE_MS = 240_000
# A page reports what its content security policy refuses. Playwright's wait_for_function would be refused, too: it evaluates texts in the page.
REPORT_VIOLATIONS = "addEventListener('securitypolicyviolation', (e) => console.error('CSP ' + e.violatedDirective + ' ' + e.blockedURI))"


def chromium() -> str:
    """Return the program, or skip the test."""
    found = os.environ.get("RFT_TEST_CHROMIUM") or next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None and os.environ.get("RFT_REQUIRE_CHROMIUM"):
        pytest.fail(
            "no Chromium on this machine, and RFT_REQUIRE_CHROMIUM is set: scripts/set_up.py installs it for root on Debian"
        )
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium, or name one in RFT_TEST_CHROMIUM")
    return found


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yield a browser without a window."""
    program = chromium()
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    # Its sandbox needs rights that containers and root do not have; the pages are our own.
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


def is_error(message: Any) -> bool:
    """Whether a message of the console is an error, other than the status of an answer, which tests look at themselves."""
    return message.type == "error" and not message.text.startswith(("Failed to load resource", "Response Status Error"))


def violations(page: Any) -> list[str]:
    """Return what axe-core finds on a page. Its script runs in the debugger's world, which the page's policy does not bind."""
    if not page.evaluate("typeof window.axe === 'object'"):
        page.evaluate(AXE.read_text(encoding="utf-8") + "; null")
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found["violations"]]
