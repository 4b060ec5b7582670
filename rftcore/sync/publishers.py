"""Publishers that hand weights over as files: in shared memory on one host, or in a folder that all hosts see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
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
        self.num_bytes = num_bytes
        self.folders = self._choose_folders(run_folder, run_name)

    def _choose_folders(self, run_folder: Path, run_name: str) -> list[Path]:
        """Where sets may go, the preferred folder first."""
        del run_name
        return [run_folder / "weights"]

    def _folder_with_room(self) -> Path:
        return self.folders[0]

    def publish(self, name: str, export: Callable[[Path], object], in_use: Collection[str] = ()) -> Publication:
        publication = write_atomically(self._folder_with_room() / f"{name}.safetensors", export)
        prune(self.folders, self.keep, in_use)
        return publication

    def close(self) -> None:
        """Files in a run's folder outlive the run."""


class MemoryPublisher(FolderPublisher):
    """The same in shared memory (no disk is touched), as long as there is room; else in the run's folder."""

    def _choose_folders(self, run_folder: Path, run_name: str) -> list[Path]:
        memory = shared_memory_folder(run_name, self.num_bytes * (self.keep + 1))
        return [*([memory] if memory else []), *super()._choose_folders(run_folder, run_name)]

    def _folder_with_room(self) -> Path:
        # Sets that evaluations still need stay beside the newest ones: shared memory may fill while a run goes on.
        full = len(self.folders) > 1 and shutil.disk_usage(self.folders[0]).free < self.num_bytes
        return self.folders[-1] if full else self.folders[0]

    def close(self) -> None:
        if self.folders[0].is_relative_to(SHARED_MEMORY):
            shutil.rmtree(self.folders[0], ignore_errors=True)


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
