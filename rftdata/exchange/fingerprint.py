"""Identification of the content of a file or a folder of files, to detect changes.

The digest is of all bytes, and is stored with an import. The stamps come from the filesystem and cost nothing: equal stamps mean that no
process wrote to the file between two passes over it.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

_AT_ONCE = 4 * 2**20

Stamps = tuple[tuple[str, int, int, int], ...]


def stamps(path: Path) -> Stamps:
    """Return name, size, time of the last change and inode of the file, or of every file in the folder.

    Raises:
        OSError: the path cannot be read.
    """
    stats = [(file, file.stat()) for file in _files(path)]
    return tuple((str(file.relative_to(path)), s.st_size, s.st_mtime_ns, s.st_ino) for file, s in stats)


def digest(path: Path) -> str:
    """Return the xxh3-128 of the file, or of every file in the folder with its name and size, hexadecimal.

    Raises:
        OSError: the path cannot be read.
    """
    whole = xxhash.xxh3_128()
    block = bytearray(_AT_ONCE)
    for file in _files(path):
        if file != path:
            whole.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        with open(file, "rb", buffering=0) as stream:
            while num_bytes := stream.readinto(block):
                whole.update(memoryview(block)[:num_bytes])
    return whole.hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
