"""Fixtures that run `rft` like a user, with the warmed-up model and the built wheel, which all processes of a session share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.support.command_line import CHECKOUT, Rft, call_rft
from tests.support.warm_up import Warm, warm_up


@pytest.fixture(scope="session")
def rft() -> Rft:
    """Runs `rft …` to its end and returns what it printed."""
    return call_rft


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's folder, in which each of its processes has one of its own."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def warm(shared: Path) -> Warm:
    """The example's warm-up, made by the first process of the session that needs it."""
    with FileLock(str(shared / "warm.lock")):
        (shared / "warm").mkdir(exist_ok=True)
        return warm_up(shared / "warm")


@pytest.fixture(scope="session")
def wheel(shared: Path) -> Path:
    """The wheel, built by the first process of the session that needs it."""
    folder = shared / "dist"
    with FileLock(str(shared / "wheel.lock")):
        if not list(folder.glob("*.whl")):
            folder.mkdir(exist_ok=True)
            # The default of `build`: a source distribution first, and the wheel from that, so both are known to be complete.
            command = [sys.executable, "-m", "build", "--outdir", folder, CHECKOUT]
            subprocess.run(command, cwd=folder, check=True, timeout=500)
        [built] = folder.glob("*.whl")
        return built
