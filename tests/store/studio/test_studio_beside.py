"""The studio beside a run: it tells its address, ends with the run, and its failure is a message."""

from __future__ import annotations

import httpx

import rftdata
from rftcore.launch.studio_beside import StudioBeside
from rftcore.launch.terminal.views import View
from rftdata.config import BufferConfig
from rftdata.reports.progress import Snapshot
from tests.support.waiting import wait_until


class Messages(View):
    """Keeps messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    def update(self, snapshot: Snapshot) -> None:
        raise AssertionError


def test_it_tells_its_address_and_ends_with_the_run(buffer: rftdata.Buffer) -> None:
    view = Messages()
    with StudioBeside(buffer.config, view):
        wait_until(lambda: view.lines)
        address = view.lines[0].removeprefix("the studio is at ")
        assert httpx.get(address, trust_env=False, timeout=60).status_code == 200
    wait_until(lambda: refuses(address))
    assert len(view.lines) == 1


def refuses(address: str) -> bool:
    try:
        httpx.get(address, trust_env=False, timeout=60)
    except httpx.TransportError:
        return True
    return False


def test_a_studio_that_does_not_start_is_a_message_and_no_error(buffer: rftdata.Buffer) -> None:
    view = Messages()
    missing = BufferConfig(uri=f"{buffer.config.uri}&dbname=nowhere", segments=buffer.config.segments)
    with StudioBeside(missing, view, tries=1):
        wait_until(lambda: view.lines)
    assert len(view.lines) == 1
    assert view.lines[0].startswith("warning: the studio has ended, the run continues: rft: ")
