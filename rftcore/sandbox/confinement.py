"""How a process confines itself, before it becomes a program in the sandbox.

With namespaces, the supervisor enters new ones for processes (and users, if it is not root), and its child is the first process in them. The child
makes the file system, gives up all rights, and starts the program, whose end it reports. When it ends, the kernel kills all that is left.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rftcore.sandbox import kernel
from rftcore.sandbox.file_system import DEVICES, SYSTEM_FOLDERS, replace_file_system, write_files
from rftcore.sandbox.landlock import restrict_paths
from rftcore.sandbox.request import WORK_FOLDER, Limits, Request
from rftcore.sandbox.seccomp import restrict_system_calls

_FIRST_USER, _NUM_USERS = 231_000, 4096
_OPEN_FILES = 256


def enter_process_namespace() -> None:
    """Let the children of this process be in a new process namespace, if necessary in one of users."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        kernel.unshare(kernel.CLONE_NEWPID)
        return
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def enter_other_namespaces(request: Request, user: int) -> None:
    """Give this process namespaces and a file system of its own."""
    others = (
        kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
    )
    kernel.unshare(others)
    replace_file_system(request.readable, WORK_FOLDER, request.limits.disk_bytes, user)
    socket.sethostname("sandbox")
    write_files(request.files, WORK_FOLDER, user)


def give_up_rights(request: Request, user: int | None, work: str) -> None:
    """Give up what the program must not have: user, groups, capabilities, system calls and, without namespaces, paths.

    Args:
        user: the user id to take; None: this process's.
    """
    kernel.forbid_new_capabilities()
    if user is not None and user != os.geteuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))  # a change of the user would clear it
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if request.level == "landlock":
        devices = [f"/dev/{name}" for name in DEVICES]
        restrict_paths([*SYSTEM_FOLDERS, *request.readable, *devices], [work, "/dev/null"])
    restrict_system_calls(local_sockets=request.level != "landlock", counted=request.level == "cgroup")


def set_limits(limits: Limits, level: str, num_others: int) -> None:
    """Set the limits of each process.

    Args:
        num_others: processes of the same user that are not the program's, but count with them.
    """
    values = {
        resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s + 1),
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NPROC: limits.processes + num_others,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 1,  # 0 would not keep a program of the host from getting it
        resource.RLIMIT_MEMLOCK: 65536,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if level != "cgroup":
        values[resource.RLIMIT_AS] = limits.memory_bytes
    if level == "none":
        del values[resource.RLIMIT_NPROC]  # it would count all that the user runs
    for kind, value in values.items():
        soft, hard = value if isinstance(value, tuple) else (value, value)
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def become_program(request: Request, work: str, files: list[int]) -> None:
    """Replace this process by the program; return only by an exception.

    Args:
        files: open files that become 0, 1, 2, ….
    """
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, 64) for file in files]
    for number, file in enumerate(moved):
        os.dup2(file, number, inheritable=True)
    for file in moved:
        os.close(file)
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_DFL)
    arguments = [each.replace("{work}", work) for each in request.arguments]
    environment = {name: value.replace("{work}", work) for name, value in request.environment.items()}
    os.execvpe(arguments[0], arguments, environment)


def count_processes(user: int) -> int:
    """Return the number of processes and threads of a user that this process sees."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return total


@contextmanager
def reserved_user() -> Iterator[int]:
    """Reserve a user id that no other sandbox of this machine has, as limits of processes count by user; needs root.

    An abstract socket of that name is the reservation, and ends with this process.
    """
    first = _first_user()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as reservation:
        start = os.getpid() * 7
        for number in range(_NUM_USERS):
            user = first + (start + number) % _NUM_USERS
            try:
                reservation.bind(f"\0rft-sandbox-user-{user}")
            except OSError:
                continue
            yield user
            return
    raise OSError(f"all {_NUM_USERS} user ids of sandboxes are in use")


def _first_user() -> int:
    """Return the first user id for sandboxes, among those that exist in this user namespace."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        most = max(int(line.split()[0]) + int(line.split()[2]) for line in file)
    return min(_FIRST_USER, most - _NUM_USERS - 1)


def end_without_cleanup(code: int) -> None:
    """End this process, a fork, at once."""
    sys.stdout = sys.stderr = None  # their buffers are the parent's
    os._exit(code)
