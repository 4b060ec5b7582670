"""Publishers that transfer weights as files: in shared memory on one host, or in a folder visible to all hosts.

Every attempt of a run has its own folder, so a trainer that was replaced cannot change the weights of its successor, however
late it continues. A new attempt removes the folders of earlier ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from rftcore.sync.base import Publication, Publisher
from rftcore.sync.files.shared_memory import SHARED_MEMORY, HeldFolder, hold_folder
from rftcore.sync.files.weights_file import folder_of_attempt, prune, write_atomically
from rftdata.errors import FencedError


class FolderPublisher(Publisher):
    """Keeps the newest `keep` files in `<run folder>/weights/attempt-N`.

    Two by default, since an engine may still open the last file while the next appears.
    """

    def __init__(self, run_folder: Path, run_name: str, attempt_id: int, num_bytes: int, keep: int = 2) -> None:
        """
        Args:
            keep: number of sets to keep; for the others see `Publisher`.
        """
        self.keep = keep
        self.num_bytes = num_bytes
        self.folders = self._choose_folders(run_folder, run_name, attempt_id)

    def _choose_folders(self, run_folder: Path, run_name: str, attempt_id: int) -> list[Path]:
        """Return the folders for sets, the preferred one first."""
        del run_name
        return [folder_of_attempt(run_folder / "weights", attempt_id)]

    def _folder_with_room(self) -> Path:
        return self.folders[0]

    def publish(self, name: str, export: Callable[[Path], object], in_use: Collection[str] = ()) -> Publication:
        folder = self._folder_with_room()
        try:
            publication = write_atomically(folder / f"{name}.safetensors", export)
        except Exception as error:
            if folder.is_dir():
                raise
            # Only a later attempt removes it, when this trainer was stopped for so long that another took over the run.
            raise FencedError("another trainer has taken over the run and removed this one's weights") from error
        prune(self.folders, self.keep, in_use)
        return publication

    def close(self) -> None:
        """Keep the files: those in a run's folder outlive the attempt."""


class MemoryPublisher(FolderPublisher):
    """Keeps files in shared memory (without using the disk) while there is space; else in the run's folder."""

    _held: HeldFolder | None

    def _choose_folders(self, run_folder: Path, run_name: str, attempt_id: int) -> list[Path]:
        self._held = hold_folder(run_name, attempt_id, self.num_bytes * (self.keep + 1))
        in_memory = [self._held.path] if self._held else []
        return in_memory + super()._choose_folders(run_folder, run_name, attempt_id)

    def _folder_with_room(self) -> Path:
        # Sets that evaluations still need stay beside the newest ones, so shared memory may fill up during a run.
        full = self._held is not None and shutil.disk_usage(SHARED_MEMORY).free < self.num_bytes
        return self.folders[-1] if full else self.folders[0]

    def close(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None
