"""Crash tests write to a disk, where a kill meets a process that waits until its files are durable."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.session_processes import folder_prefix


@pytest.fixture
def server_folders() -> Iterator[Path]:
    """Folder of the embedded servers, outside pytest's own folder; see tests/conftest.py."""
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        yield Path(folder)
