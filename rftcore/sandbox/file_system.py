"""The file system of a sandbox: an empty one in memory, with the host's programs and libraries read-only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from rftcore.sandbox import kernel

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""What programs and libraries need of the host."""

DEVICES = ("null", "zero", "full", "random", "urandom")
_OLD, _BASE = "/old-root", "/tmp"
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV


def replace_file_system(readable: Sequence[str], work: str, disk_bytes: int, user: int) -> None:
    """Give this process, in a mount namespace of its own, a file system of its own; the current folder is then `work`.

    Args:
        readable: paths of the host that it shows.
        work: folder that belongs to the user.
        disk_bytes: size of all files.
        user: user id of the programs.
    """
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _BASE, "tmpfs", _FLAGS, f"size={disk_bytes},nr_inodes=65536,mode=755")
    os.mkdir(_BASE + _OLD)
    kernel.replace_root(_BASE, _BASE + _OLD)
    os.chdir("/")
    for path in (*SYSTEM_FOLDERS, *readable):
        _show(path)
    _make_devices()
    os.mkdir("/proc")
    with contextlib.suppress(OSError):  # the kernel allows none where the container's own hides parts
        kernel.mount("proc", "/proc", "proc", _FLAGS | kernel.MS_NOEXEC | kernel.MS_RDONLY)
    for folder, mode in (("/tmp", 0o1777), ("/dev/shm", 0o1777), (work, 0o755)):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, mode)
    os.chown(work, user, user)
    os.makedirs("/etc", exist_ok=True)
    _write("/etc/passwd", f"sandbox:x:{user}:{user}::{work}:/bin/sh\n".encode())
    _write("/etc/group", f"sandbox:x:{user}:\n".encode())
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    os.chdir(work)


def write_files(files: Mapping[str, bytes], work: str, user: int | None) -> None:
    """Write files into a folder that no program has used yet.

    Args:
        files: contents by relative path, which `checked_path` has checked.
        user: who owns them; None: this process's user.
    """
    for name, data in files.items():
        path = os.path.join(work, name)
        folder = os.path.dirname(name)
        made = ""
        for part in folder.split("/") if folder else []:
            made = os.path.join(made, part)
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(work, made))
                if user is not None:
                    os.chown(os.path.join(work, made), user, user)
        _write(path, data)
        if user is not None:
            os.chown(path, user, user)


def _show(path: str) -> None:
    source = _OLD + path
    if os.path.islink(source):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(os.readlink(source), path)
    elif os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
        _bind(source, path)
    elif os.path.exists(source):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _write(path, b"")
        _bind(source, path)


def _bind(source: str, path: str) -> None:
    kernel.mount(source, path, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(path)


def _make_devices() -> None:
    os.mkdir("/dev")
    for name in DEVICES:
        _write(f"/dev/{name}", b"")
        kernel.mount(f"{_OLD}/dev/{name}", f"/dev/{name}", flags=kernel.MS_BIND)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
