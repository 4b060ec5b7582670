"""Publishers that hand weights over as files: in shared memory on one host, or in a folder that all hosts see.

Every attempt of a run has a folder of its own, so a trainer that was replaced cannot touch the weights of the one that
replaced it, however late it wakes. A new attempt removes the folders of earlier ones: what a killed trainer left in shared
memory would stay there for ever.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from rftcore.sync.base import Publication, Publisher
from rftcore.sync.weights_file import prune, write_atomically
from rftdata.errors import FencedError

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "attempt-"


class FolderPublisher(Publisher):
    """Keeps the newest `keep` files in `<run folder>/weights/attempt-N`.

    Two by default: an engine may still be opening the last one while the next appears.
    """

    def __init__(self, run_folder: Path, run_name: str, attempt_id: int, num_bytes: int, keep: int = 2) -> None:
        """
        Args:
            run_folder: the run's own folder.
            run_name: unique among the runs of this host.
            attempt_id: of the attempt that publishes; it holds the run.
            num_bytes: about how large one set of weights is.
            keep: how many sets stay.
        """
        self.keep = keep
        self.num_bytes = num_bytes
        self.folders = self._choose_folders(run_folder, run_name, attempt_id)

    def _choose_folders(self, run_folder: Path, run_name: str, attempt_id: int) -> list[Path]:
        """Where sets may go, the preferred folder first."""
        del run_name
        return [_folder_of_attempt(run_folder / "weights", attempt_id)]

    def _folder_with_room(self) -> Path:
        return self.folders[0]

    def publish(self, name: str, export: Callable[[Path], object], in_use: Collection[str] = ()) -> Publication:
        folder = self._folder_with_room()
        try:
            publication = write_atomically(folder / f"{name}.safetensors", export)
        except Exception as error:
            if folder.is_dir():
                raise
            # Only a later attempt removes it: this trainer was stopped for so long that another took its place.
            raise FencedError("another trainer has taken the run over, and removed this one's weights") from error
        prune(self.folders, self.keep, in_use)
        return publication

    def close(self) -> None:
        """Files in a run's folder outlive the attempt."""


class MemoryPublisher(FolderPublisher):
    """The same in shared memory (no disk is touched), as long as there is room; else in the run's folder."""

    def _choose_folders(self, run_folder: Path, run_name: str, attempt_id: int) -> list[Path]:
        memory = shared_memory_folder(run_name, attempt_id, self.num_bytes * (self.keep + 1))
        return [*([memory] if memory else []), *super()._choose_folders(run_folder, run_name, attempt_id)]

    def _folder_with_room(self) -> Path:
        # Sets that evaluations still need stay beside the newest ones: shared memory may fill while a run goes on.
        full = len(self.folders) > 1 and shutil.disk_usage(SHARED_MEMORY).free < self.num_bytes
        return self.folders[-1] if full else self.folders[0]

    def close(self) -> None:
        if self.folders[0].is_relative_to(SHARED_MEMORY):
            shutil.rmtree(self.folders[0], ignore_errors=True)
            with contextlib.suppress(OSError):  # a later attempt is in there already
                self.folders[0].parent.rmdir()


def shared_memory_folder(run_name: str, attempt_id: int, num_bytes: int, root: Path = SHARED_MEMORY) -> Path | None:
    """A folder of this user and attempt in shared memory, or None without `num_bytes` of room there.

    What earlier attempts of the run left there is removed.
    """
    if not (root.is_dir() and os.access(root, os.W_OK)):
        return None
    parent = root / f"rftdata-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        return None
    folder = _folder_of_attempt(parent / run_name.replace("/", "_"), attempt_id)
    if shutil.disk_usage(root).free < num_bytes:
        return None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _folder_of_attempt(parent: Path, attempt_id: int) -> Path:
    """The attempt's own folder in `parent`; those of earlier attempts go. Later ones may have replaced this one: they stay."""
    for path in parent.glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX)
        if number.isdecimal() and int(number) < attempt_id:
            shutil.rmtree(path, ignore_errors=True)
    return parent / f"{_PREFIX}{attempt_id}"
