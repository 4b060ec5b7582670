"""System calls that Python has no function for."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 442, 444, 445, 446
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def _system_call(number: int, name: str, *arguments: object) -> int:
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), name)


def unshare(flags: int) -> None:
    """Enter new namespaces; raise OSError if the kernel refuses."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    """Mount a file system or bind a path."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {kind or source} on {target}")


def make_read_only(target: str) -> None:
    """Make a mount and all below it read-only, without devices and set-user-id programs."""
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    _system_call(
        _MOUNT_SETATTR,
        f"mount_setattr {target}",
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )


def replace_root(new: str, old: str) -> None:
    """Make a mount the root, and put the former one at a folder in it."""
    _system_call(_PIVOT_ROOT[platform.machine()], "pivot_root", os.fsencode(new), os.fsencode(old))


def unmount(target: str) -> None:
    """Take a mount and all below it out of the tree."""
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(_MNT_DETACH)), f"umount {target}")


def prctl(option: int, value: object = 0, third: object = 0) -> None:
    """Change a property of this process."""
    arguments = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in (value, third, 0, 0)]
    _checked(_libc.prctl(ctypes.c_int(option), *arguments), f"prctl {option}")


def forbid_new_capabilities() -> None:
    """Empty the set of capabilities that programs may get; it needs CAP_SETPCAP."""
    for number in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError:  # unknown to this kernel, or not allowed
            return


def drop_capabilities() -> None:
    """Give up all capabilities that this process has."""
    header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    _checked(_libc.capset(header, none), "capset")


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 without Landlock."""
    result = int(_libc.syscall(ctypes.c_long(_LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(1)))
    return max(result, 0)


def landlock_ruleset(attributes: bytes) -> int:
    """Return the file of a new ruleset."""
    return _system_call(
        _LANDLOCK_CREATE_RULESET,
        "landlock_create_ruleset",
        attributes,
        ctypes.c_size_t(len(attributes)),
        ctypes.c_uint(0),
    )


def landlock_allow(ruleset: int, access: int, folder: int) -> None:
    """Allow accesses below an open folder, or to an open file."""
    rule = struct.pack("=Qi", access, folder)
    _system_call(
        _LANDLOCK_ADD_RULE, "landlock_add_rule", ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0)
    )


def landlock_restrict(ruleset: int) -> None:
    """Restrict this process and all that it starts."""
    _system_call(_LANDLOCK_RESTRICT_SELF, "landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint(0))
