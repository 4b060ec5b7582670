"""`rft` as a user calls it, and the warmed-up model, which the processes of a test session share."""

from __future__ import annotations

import os

import pytest
from filelock import FileLock

from tests.support.command_line import Rft, call_rft
from tests.support.warm_up import Warm, warm_up


@pytest.fixture(scope="session")
def rft() -> Rft:
    """Runs `rft …` to its end and returns what it printed."""
    return call_rft


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    """The example's warm-up, made by the first process of the session that needs it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the folder of a process lies in that of the session
    with FileLock(str(folder / "warm.lock")):
        (folder / "warm").mkdir(exist_ok=True)
        return warm_up(folder / "warm")
