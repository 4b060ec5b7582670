"""The working folder of a program without a file system of its own: its size, and its removal. The program may have made it hard to read or to remove."""

from __future__ import annotations

import contextlib
import os

_ENTRY_BYTES = 4096


def disk_bytes(folder: str, most: int) -> int:
    """Return the size of all files below a folder, without following links.

    Each entry counts as 4 KiB or more. The count stops above `most`, which a folder that cannot be read exceeds.
    """
    total, waiting = 0, [folder]
    while waiting and total <= most:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        total += max(entry.stat(follow_symlinks=False).st_blocks * 512, _ENTRY_BYTES)
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                    if total > most:
                        break
        except FileNotFoundError:
            continue
        except OSError:
            return most + 1
    return total


def remove_folder(folder: str) -> None:
    """Remove a folder that no process uses, at any depth: folders within its folders are moved into it first. What the kernel refuses is left."""
    number, has_removed = 0, True
    while has_removed:
        has_removed = False
        for path in _paths(folder):
            for inner in _paths(path):
                number += 1
                with contextlib.suppress(OSError):
                    if _is_folder(inner):
                        os.chmod(inner, 0o700)  # its entry for its parent changes
                        os.rename(inner, os.path.join(folder, f".rft-removed-{number}"))
                    else:
                        os.unlink(inner)
            with contextlib.suppress(OSError):
                (os.rmdir if _is_folder(path) else os.unlink)(path)
                has_removed = True
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _paths(folder: str) -> list[str]:
    """Return the paths of a folder's entries; none if it is no folder."""
    if not _is_folder(folder):
        return []
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    return []


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
