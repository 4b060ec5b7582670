"""The run that explorers of these tests work for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rftdata
from rftdata.attempts.attempt import Attempt
from tests.support.explored_run import Run


@pytest.fixture
def run(buffer: rftdata.Buffer, tmp_path: Path) -> Run:
    return Run(buffer, tmp_path)


@pytest.fixture
def attempt(run: Run) -> Iterator[Attempt]:
    with run.buffer.attempt(run.run) as attempt:
        yield attempt
