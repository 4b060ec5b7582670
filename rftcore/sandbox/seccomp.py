"""A filter of system calls: what a program in a sandbox has no use for, and what reaches other processes or large parts of the kernel."""

from __future__ import annotations

import ctypes
import errno
import platform
import signal
import socket
import struct

from rftcore.sandbox.kernel import PR_SET_PDEATHSIG, PR_SET_SECCOMP, prctl

_MODE_FILTER = 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# x86_64, aarch64
_DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "move_pages": (279, 239), "migrate_pages": (256, 238), "vhangup": (153, 58),
}  # fmt: skip
_DENIED_ON_X86 = {"iopl": 172, "ioperm": 173, "modify_ldt": 154, "uselib": 134}
# Queues that all processes of a host share, where there is no namespace for them.
_SHARED = {"semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)}
# Memory that belongs to no process, which only a control group counts.
_UNCOUNTED = {"shmget": (29, 194), "memfd_create": (319, 279), "memfd_secret": (447, 447)}
# What reaches files and processes of the same user without opening them. Landlock does not handle it.
_OUTSIDE = {
    "shmat": (30, 196), "shmctl": (31, 195), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_unlink": (241, 181),
    "chmod": (90, 53), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, 54), "fchown": (93, 55), "lchown": (94, 54), "fchownat": (260, 54),
    "utime": (132, 88), "utimes": (235, 88), "futimesat": (261, 88), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "inotify_add_watch": (254, 27), "fanotify_init": (300, 262), "bind": (49, 200), "connect": (42, 203),
    "sched_setaffinity": (203, 122), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "setpriority": (141, 140), "ioprio_set": (251, 30),
}  # fmt: skip
_SPECIAL = {
    "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "socketpair": (53, 199), "ioctl": (16, 29),
    "prctl": (157, 167), "prlimit64": (302, 261),
}  # fmt: skip


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _refusal(number: int = errno.EPERM) -> bytes:
    return _step(_RETURN, _ERRNO | number)


def _call(number: int, *steps: bytes) -> list[bytes]:
    """Return the steps for one system call; they end with a result, as they may replace the call's number."""
    return [_step(_EQUAL, number, 0, len(steps)), *steps]


def _filter(*, local_sockets: bool, counted: bool) -> bytes:
    """Return the program.

    Args:
        local_sockets: whether Unix sockets are allowed, in a network namespace of the sandbox's own.
        counted: whether a control group counts all memory.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"seccomp: no filter for processors of kind {machine}")
    column = list(_ARCHITECTURES).index(machine)
    denied = [numbers[column] for numbers in _DENIED.values()]
    if machine == "x86_64":
        denied += _DENIED_ON_X86.values()
    if not local_sockets:
        denied += [numbers[column] for numbers in (*_SHARED.values(), *_OUTSIDE.values())]
    if not counted:
        denied += [numbers[column] for numbers in _UNCOUNTED.values()]
    number = {name: numbers[column] for name, numbers in _SPECIAL.items()}
    allow, first = _step(_RETURN, _ALLOW), _step(_LOAD, _ARGUMENTS)
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        steps += [_step(_AT_LEAST, _X32, 0, 1), _refusal()]
    for each in denied:
        steps += _call(each, _refusal())
    # The C library falls back to clone, whose flags a filter can read.
    steps += _call(number["clone3"], _refusal(errno.ENOSYS))
    steps += _call(number["clone"], first, _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _refusal(), allow)
    # A program does not outlive what watches it.
    kill = [_step(_LOAD, _ARGUMENTS + 8), _step(_EQUAL, signal.SIGKILL, 1, 0)]
    steps += _call(number["prctl"], first, _step(_EQUAL, PR_SET_PDEATHSIG, 0, 3), *kill, _refusal(), allow)
    local_only = [first, _step(_EQUAL, socket.AF_UNIX, 1, 0), _refusal(errno.EACCES)]
    if local_sockets:
        steps += _call(number["socket"], *local_only, allow)
        steps += _call(number["socketpair"], *local_only, allow)
    else:
        steps += _call(number["socket"], _refusal(errno.EACCES))
        # A pair of datagrams can send to any path.
        streams = [_step(_LOAD, _ARGUMENTS + 8), _step(_AND, 0xF), _step(_EQUAL, socket.SOCK_STREAM, 1, 0)]
        steps += _call(number["socketpair"], *local_only, *streams, _refusal(errno.EACCES), allow)
        steps += _call(number["prlimit64"], first, _step(_EQUAL, 0, 1, 0), _refusal(), allow)
    inputs = [_step(_EQUAL, _TERMINAL_INPUT[0], 1, 0), _step(_EQUAL, _TERMINAL_INPUT[1], 0, 1)]
    steps += _call(number["ioctl"], _step(_LOAD, _ARGUMENTS + 8), *inputs, _refusal(), allow)
    steps += [allow]
    return b"".join(steps)


def restrict_system_calls(*, local_sockets: bool, counted: bool) -> None:
    """Load the filter into this process and all that it starts; it needs no_new_privs.

    Args:
        local_sockets, counted: see `_filter`.
    """
    program = _filter(local_sockets=local_sockets, counted=counted)
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(head))
