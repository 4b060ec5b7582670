"""Tries to leave the sandbox, and sends the names of what it could do.

Each attempt is harmless where it succeeds, since the sandbox may not hold: what changes the system is aimed at paths that do not exist.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import sys
import tempfile

libc = ctypes.CDLL(None, use_errno=True)
secret, caller, port, name, server = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]


def read_secret() -> None:
    open(secret).close()


def write_outside() -> None:
    open(os.path.join(os.path.dirname(secret), "written"), "w").close()


def read_environment() -> None:
    with open(f"/proc/{caller}/environ", "rb") as file:
        assert file.read(1)


def signal_caller() -> None:
    os.kill(caller, 0)


def connect_tcp() -> None:
    socket.create_connection(("127.0.0.1", port), 2).close()


def connect_abstract() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + name)


def change_mode() -> None:
    os.chmod(secret, 0o666)  # as it is


def send_to_path() -> None:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with first, second:
        first.sendto(b"x", server)


def change_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, caller, os.getpriority(os.PRIO_PROCESS, caller))


def read_limits() -> None:
    resource.prlimit(caller, resource.RLIMIT_CPU)


def refuse_denied(result: int) -> None:
    """Raise if the filter has denied a system call; its other errors show that the kernel has begun it."""
    if result != 0 and ctypes.get_errno() == errno.EPERM:
        raise PermissionError


def trace() -> None:
    refuse_denied(libc.ptrace(0, 0, 0, 0))


# Into the current folder: where no sandbox holds it, it must not hide what others use.
def mount_something() -> None:
    refuse_denied(libc.mount(b"none", b"/does-not-exist/rft-sandbox", b"tmpfs", 0, None))


def make_a_namespace() -> None:
    refuse_denied(libc.unshare(0x10000000))


def be_root() -> None:
    if os.getuid() != 0:
        os.setuid(0)


def fork_without_limit() -> None:
    children = []
    try:
        for _ in range(40):
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def write_a_large_file() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4 << 20))


def raise_limits() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))


ATTACKS = {
    "read the host's files": read_secret,
    "write the host's files": write_outside,
    "read another process's environment": read_environment,
    "signal a process outside": signal_caller,
    "connect to a TCP port": connect_tcp,
    "connect to an abstract socket": connect_abstract,
    "change the host's files": change_mode,
    "send to a socket of the host": send_to_path,
    "change a process outside": change_priority,
    "reach limits of a process outside": read_limits,
    "trace processes": trace,
    "mount file systems": mount_something,
    "make a namespace": make_a_namespace,
    "be root": be_root,
    "start any number of processes": fork_without_limit,
    "write a file of any size": write_a_large_file,
    "raise its limits": raise_limits,
}

reached = []
for what, attack in ATTACKS.items():
    try:
        attack()
    except (OSError, ValueError):  # refused; ValueError is that of limits
        continue
    reached.append(what)
data = json.dumps(reached).encode()
os.write(4, len(data).to_bytes(4, "big") + data)
