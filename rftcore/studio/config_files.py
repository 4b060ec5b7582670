"""Configuration files in the folder that the owner named: listed, read and written there, and nowhere else.

- A path is followed from the folder one name at a time, without symbolic links, so neither `..` nor a link leads out of the folder.
- A file is written as a whole or not at all, and only if it still is what the writer has seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rftdata.errors import ConfigError, ConflictError, RftError

STATE_FOLDER = ".rft-studio"
_SUFFIXES = (".yaml", ".yml")
_MOST_BYTES = 2**19
_MOST_FILES = 500
_DEEPEST = 4
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FileRefusedError(RftError):
    """A name that is no configuration file of the folder."""


@dataclass(frozen=True)
class ConfigFile:
    """A file as it was read.

    Attributes:
        name: its path in the folder.
        text: with line feeds alone.
        digest: of its bytes; a writer names it.
        has_crlf: whether its lines end with two characters.
    """

    name: str
    text: str
    digest: str
    has_crlf: bool


class ConfigFolder:
    """The folder. Safe for threads and for several studios.

    Args:
        path: it must exist.

    Raises:
        ConfigError: it is no folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        if not self.path.is_dir():
            raise ConfigError("the folder of configurations does not exist", value=str(path), todo="name a folder")

    def names(self) -> list[str]:
        """Return the files, by their path in the folder; of a large tree the first ones."""
        return sorted(self._names(self.path, "", 0))[:_MOST_FILES]

    def read(self, name: str) -> ConfigFile:
        """Return a file.

        Raises:
            FileRefusedError: it is not a regular file of the folder, too large, or no text.
        """
        with self._parent(name) as (folder, last):
            return self._read(folder, last, name)

    def write(self, name: str, text: str, digest: str, *, source: str | None = None) -> ConfigFile:
        """Replace a file that is still what its writer has seen, and return it as it is now.

        Args:
            digest: of what the writer has seen; empty for a file that does not exist yet.
            source: the file whose text this was; a new file is as private as that one.

        Raises:
            FileRefusedError: see `read`.
            ConflictError: the file was changed, removed or created since.
        """
        with self.locked(), self._parent(name) as (folder, last):
            before = self._present(folder, last, name)
            if (before.digest if before else "") != digest:
                raise ConflictError(
                    f"{name} was changed on disk since you opened it" if digest else f"there is a file {name} already",
                    todo="nothing was saved; load the page again, and see the difference between the file and your text"
                    if digest
                    else "choose another name",
                )
            whole = text if text.endswith("\n") else f"{text}\n"
            data = whole.replace("\n", "\r\n").encode() if before and before.has_crlf else whole.encode()
            if len(data) > _MOST_BYTES:
                raise FileRefusedError("a configuration file is too large", allowed=f"at most {_MOST_BYTES} bytes")
            _replace(folder, last, data, self._mode(name if before else source))
            return self._read(folder, last, name)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Path]:
        """Yield the folder for the studio's own files, while no other studio writes into this folder or starts a run from it."""
        place = self.path / STATE_FOLDER
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)
            folder = os.open(place, _FOLDER)
        except OSError as error:
            raise _unusable(place, error) from error
        try:
            try:
                _ignore(folder)
            except OSError as error:
                raise _unusable(place, error) from error
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield place
        finally:
            os.close(folder)

    def _names(self, folder: Path, prefix: str, depth: int) -> Iterator[str]:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                if entry.name.startswith(".") or not _is_plain(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False) and depth < _DEEPEST:
                    yield from self._names(folder / entry.name, f"{prefix}{entry.name}/", depth + 1)
                elif entry.is_file(follow_symlinks=False) and entry.name.endswith(_SUFFIXES):
                    yield prefix + entry.name

    @contextlib.contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        """Yield the descriptor of the folder that holds a file, and the file's name in it."""
        *parts, last = name.split("/")
        if not last.endswith(_SUFFIXES) or not all(
            _is_plain(part) and not part.startswith(".") for part in (*parts, last)
        ):
            raise FileRefusedError(
                "this is no configuration file of the folder", value=name, allowed="FOLDER/NAME.yaml, without links"
            )
        folder = os.open(self.path, _FOLDER)
        try:
            for part in parts:
                inner = os.open(part, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder, last
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileRefusedError("there is no such configuration file in the folder", value=name) from error
        except OSError as error:
            raise FileRefusedError(f"the file cannot be used: {error.strerror}", value=name) from error
        finally:
            os.close(folder)

    def _mode(self, name: str | None) -> int | None:
        """Return the mode of a file; None if there is none."""
        if name is None:
            return None
        try:
            with self._parent(name) as (folder, last):
                return stat.S_IMODE(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode)
        except FileRefusedError:
            return None

    def _present(self, folder: int, last: str, name: str) -> ConfigFile | None:
        try:
            return self._read(folder, last, name)
        except FileNotFoundError:
            return None

    def _read(self, folder: int, last: str, name: str) -> ConfigFile:
        # Without waiting: a pipe of this name must not block the page.
        descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                raise FileRefusedError(
                    "this is no configuration file",
                    value=name,
                    allowed=f"a regular file of at most {_MOST_BYTES} bytes",
                )
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(_MOST_BYTES + 1)
        finally:
            os.close(descriptor)
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise FileRefusedError(f"the file is not UTF-8 text: {error}", value=name) from error
        return ConfigFile(name, text.replace("\r\n", "\n"), hashlib.sha256(data).hexdigest(), "\r\n" in text)


def _is_plain(name: str) -> bool:
    return bool(name) and name.isprintable() and name not in (".", "..") and "\\" not in name


def _unusable(place: Path, error: OSError) -> FileRefusedError:
    return FileRefusedError(
        f"the studio cannot use its folder: {error.strerror}",
        value=str(place),
        todo="let the user of the studio write there",
    )


def _ignore(folder: int) -> None:
    """Keep the records out of the repository of the configurations."""
    with contextlib.suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(".gitignore", flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(b"*\n")


def _replace(folder: int, last: str, data: bytes, mode: int | None) -> None:
    """Write a file so that a crash leaves the old one or the new one.

    Args:
        mode: None for that which the umask gives to new files.
    """
    draft = f".{last}.{secrets.token_hex(4)}.unfinished"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, 0o666 if mode is None else 0o600, dir_fd=folder), "wb") as file:
            file.write(data)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(draft, last, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
        raise
