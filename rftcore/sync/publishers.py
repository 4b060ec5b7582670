"""Publishers that hand weights over as files: in shared memory on one host, or in a folder that all hosts see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rftcore.sync.base import Publication, Publisher
from rftcore.sync.weights_file import prune, write_atomically

SHARED_MEMORY = Path("/dev/shm")


class FolderPublisher(Publisher):
    """Keeps the newest `keep` files in `<run folder>/weights`.

    Two by default: an engine may still be opening the last one while the next appears.
    """

    def __init__(self, run_folder: Path, run_name: str, num_bytes: int, keep: int = 2) -> None:
        """
        Args:
            run_folder: the run's own folder.
            run_name: unique among the runs of this host.
            num_bytes: about how large one set of weights is.
            keep: how many sets stay.
        """
        self.keep = keep
        self.folder = self._choose_folder(run_folder, run_name, num_bytes)

    def _choose_folder(self, run_folder: Path, run_name: str, num_bytes: int) -> Path:
        del run_name, num_bytes
        return run_folder / "weights"

    def publish(self, name: str, export: Callable[[Path], object]) -> Publication:
        publication = write_atomically(self.folder / f"{name}.safetensors", export)
        prune(self.folder, self.keep)
        return publication

    def close(self) -> None:
        """Files in a run's folder outlive the run."""


class MemoryPublisher(FolderPublisher):
    """The same in shared memory (no disk is touched), as long as there is room; else in the run's folder."""

    def _choose_folder(self, run_folder: Path, run_name: str, num_bytes: int) -> Path:
        folder = shared_memory_folder(run_name, num_bytes * (self.keep + 1))
        return folder or super()._choose_folder(run_folder, run_name, num_bytes)

    def close(self) -> None:
        if self.folder.is_relative_to(SHARED_MEMORY):
            shutil.rmtree(self.folder, ignore_errors=True)


def shared_memory_folder(run_name: str, num_bytes: int, root: Path = SHARED_MEMORY) -> Path | None:
    """A folder of this user and run in shared memory, or None without `num_bytes` of room there.

    The folder of an earlier life of the same run is taken over, so a killed run leaves nothing for ever.
    """
    if not (root.is_dir() and os.access(root, os.W_OK)):
        return None
    parent = root / f"rftdata-{os.getuid()}"
    folder = parent / run_name.replace("/", "_")
    taken_over = sum(path.stat().st_size for path in folder.glob("*")) if folder.is_dir() else 0
    if shutil.disk_usage(root).free + taken_over < num_bytes:
        return None
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        return None
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
