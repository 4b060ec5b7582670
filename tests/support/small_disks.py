"""File systems of a few MiB that can be full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Mount = Callable[[Path, int], "SmallDisk"]


class SmallDisk:
    """A file system of its own, in memory, whose size can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def resize(self, num_bytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={num_bytes}", self.folder], check=True, capture_output=True)

    def fill(self) -> None:
        """Take what is left, at once: a file that grows to the end would give a short run the time to finish."""
        while (disk := os.statvfs(self.folder)).f_bavail:
            with contextlib.suppress(subprocess.CalledProcessError):  # more is used by now
                self.resize((disk.f_blocks - disk.f_bavail) * disk.f_frsize)


@contextlib.contextmanager
def small_disks() -> Iterator[Mount]:
    """Mounts disks of a size at paths; skips where that is forbidden."""
    mounted: list[Path] = []

    def mount(folder: Path, num_bytes: int) -> SmallDisk:
        folder.mkdir(parents=True)
        result = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            pytest.skip(f"a small disk cannot be mounted: {result.stderr.strip()}")
        mounted.append(folder)
        return SmallDisk(folder)

    try:
        yield mount
    finally:
        for folder in mounted:
            subprocess.run(["umount", "--lazy", folder], check=False, capture_output=True)
