"""What hostile code tries: each attempt meets a limit or a border, at every tier that this machine offers.

No attempt would do lasting harm if it succeeded: bombs end by themselves, and targets are files and sockets of the test.
"""

from __future__ import annotations

import os
import socket
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.host_process import HostProcess, request_of
from rftcore.sandbox.interpreter import Interpreter
from rftcore.sandbox.program import Program
from rftcore.sandbox.request import Report
from rftcore.sandbox.tiers import refusal
from tests.support.waiting import PATIENCE_S, wait_until

MIB = 1 << 20
CONFIG = SandboxConfig(
    wall_s=PATIENCE_S, cpu_s=60, memory_bytes=128 * MIB, processes=16, file_bytes=4 * MIB, disk_bytes=16 * MIB, output_bytes=MIB
)  # fmt: skip


class Confined:
    """Runs code at one level."""

    def __init__(self, level: str, interpreter: Interpreter) -> None:
        self.level = level
        self.host = HostProcess()
        self._interpreter = interpreter

    def run(self, code: str, *arguments: str, **changes: object) -> Report:
        config = CONFIG.model_copy(update=changes)
        program = Program(
            ["{python}", "-I", "{work}/attack.py", *arguments], {"attack.py": textwrap.dedent(code).encode()}
        )
        running = self.host.start(request_of(program, config, self._interpreter, self.level), program)
        try:
            return running.wait()
        finally:
            running.close()


@pytest.fixture(scope="module", params=["cgroup", "namespaces", "landlock"])
def confined(request: pytest.FixtureRequest) -> Iterator[Confined]:
    # Without a file system of its own, a sandbox of root cannot read an interpreter in root's folder.
    for interpreter in (Interpreter.of(None), Interpreter("/usr/bin/python3", ())):
        refused = refusal(request.param, interpreter)
        if refused is None:
            confined = Confined(request.param, interpreter)
            yield confined
            confined.host.close()
            return
    pytest.skip(f"this machine has no tier {request.param}: {refused}")


def fails(report: Report, error: str) -> bool:
    return report.code == 1 and error in report.stderr.decode()


def test_a_fork_bomb_is_stopped_and_nothing_of_it_is_left(confined: Confined) -> None:
    code = """
        import os, time
        until = time.monotonic() + 3
        for _ in range(2000):
            try: os.fork()
            except OSError: break
        while time.monotonic() < until: time.sleep(0.1)
        """
    before = len(psutil.pids())
    confined.run(code, wall_s=5)
    wait_until(lambda: len(psutil.pids()) < before + 16, "processes of the bomb are left")


@pytest.mark.parametrize(
    "code",
    [
        "data = []\nfor _ in range(40): data.append(b'x' * (10 << 20))",
        "import mmap\nm = mmap.mmap(-1, 400 << 20)\nfor place in range(0, 400 << 20, 4096): m[place] = 1",
        # Together, while each has less than allowed, and has lost its parent.
        ("import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        if os.fork(): os._exit(0)\n        break\n"
        "data = b'x' * (40 << 20)\ntime.sleep(3)"),
        # In files that belong to no process.
        "import os, resource\nfor place in range(100):\n    f = os.memfd_create('x')\n    os.write(f, b'x' * (4 << 20))\n    keep = os.dup(f)",
    ],
)  # fmt: skip
def test_a_memory_bomb_is_stopped(code: str, confined: Confined) -> None:
    report = confined.run(code)
    assert report.killed == "memory" or report.code != 0


def test_files_and_all_files_together_have_limits(confined: Confined) -> None:
    one = "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nwith open('big', 'wb') as file: file.truncate(10 << 30)"
    assert fails(confined.run(one), "File too large")
    many = """
        import os, time
        files = []
        for place in range(16):
            files.append(open(f'file{place}', 'wb', buffering=0))
            if place % 2: os.unlink(f'file{place}')
            files[-1].write(bytes(3 << 20))
            if os.fstat(files[-1].fileno()).st_size < 3 << 20: raise OSError(28, "No space left")
            time.sleep(0.1)
        """
    report = confined.run(many)
    assert fails(report, "No space left") or report.killed in ("disk", "memory")


def test_endless_output_and_endless_time_end(confined: Confined) -> None:
    report = confined.run("while True: print('x' * 1000)")
    assert (report.killed, len(report.stdout)) == ("output", CONFIG.output_bytes)
    assert confined.run("import time\ntime.sleep(60)", wall_s=0.5).killed == "wall"
    assert confined.run("while True: pass", cpu_s=1).killed == "cpu"


def test_a_daemon_ends_with_its_program(confined: Confined) -> None:
    code = """
        import os, sys, time
        for _ in range(2):
            if os.fork(): os._exit(0) if _ else None
            os.setsid()
        time.sleep(50)
        """
    started = time.monotonic()
    name = f"rft-daemon-{os.getpid()}-{confined.level}"
    confined.run(code, name, wall_s=2)
    assert time.monotonic() - started < 20
    wait_until(
        lambda: not any(name in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])),
        "a daemon is left",
    )


def test_files_of_the_host_are_out_of_reach_and_links_lead_nowhere(confined: Confined, tmp_path: Path) -> None:
    secret = Path(os.path.realpath(tmp_path)) / "secret"
    secret.write_text("secret")
    for folder in (secret, *secret.parents[:-1]):
        os.chmod(folder, os.stat(folder).st_mode | 0o005)
    code = """
        import os, sys
        secret = sys.argv[1]
        os.symlink(secret, "link")
        os.symlink("/", "root")
        found = []
        for path in (secret, "link", "root" + secret, "/proc/1/root" + secret, "/proc/1/cwd" + secret, "/proc/self/root" + secret,
                     "../../.." + secret, "/etc/shadow", "/proc/1/environ", "/proc/1/mem", "/proc/kcore", "/dev/sda", "/dev/vda", "/dev/mem"):
            try: found.append((path, open(path, "rb").read(9)))
            except OSError: pass
        print(found)
        try: os.link(secret, "hard")
        except OSError: print("no link")
        """
    assert confined.run(code, str(secret)).stdout.decode() == "[]\nno link\n"


def test_other_processes_are_out_of_reach(confined: Confined) -> None:
    code = """
        import os, sys
        caller, supervised = int(sys.argv[1]), os.getppid()
        for place in (caller, supervised):
            for name in ("environ", "mem", "maps", "exe", "fd/0", "root/etc/hostname"):
                try: open(f"/proc/{place}/{name}", "rb").read(1)
                except OSError: continue
                print("read", place, name)
        try: os.kill(caller, 0)  # a signal that does nothing
        except OSError: sys.exit()
        print("signalled")
        """
    assert confined.run(code, str(os.getpid())).stdout == b""


def test_there_is_no_network(confined: Confined) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as local:
        name = f"rft-attack-{os.getpid()}-{confined.level}"
        local.bind("\0" + name)
        local.listen()
        code = """
            import socket, sys
            def tcp():
                socket.create_connection(("127.0.0.1", int(sys.argv[1])), 2)
            def udp():
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", int(sys.argv[1])))
            def six():
                socket.socket(socket.AF_INET6).connect(("::1", int(sys.argv[1])))
            def name(): socket.getaddrinfo("example.org", 80)
            def abstract(): socket.socket(socket.AF_UNIX).connect(chr(0) + sys.argv[2])
            def netlink(): socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
            def packets(): socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            def vsock(): socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
            for attempt in (tcp, udp, six, name, abstract, netlink, packets, vsock):
                try: attempt()
                except OSError: continue
                print("reached", attempt.__name__)
            """
        assert confined.run(code, str(tcp.getsockname()[1]), name).stdout == b""


def test_rights_system_calls_and_limits_cannot_be_regained(confined: Confined) -> None:
    code = """
        import ctypes, os, platform, resource, socket, sys
        libc = ctypes.CDLL(None, use_errno=True)
        def denied(result): return result != 0 and ctypes.get_errno() == 1
        machine = platform.machine()
        print(all([os.getuid() != 0, os.getgroups() in ([], [os.getgid()]),
            denied(libc.ptrace(16, os.getppid(), 0, 0)), denied(libc.unshare(0x10000000)), denied(libc.mount(b"none", b"/nowhere", b"tmpfs", 0, None)),
            denied(libc.process_vm_readv(os.getppid(), None, 0, None, 0, 0)), denied(libc.chroot(b"/nowhere")), denied(libc.setns(0, 0)),
            denied(libc.syscall({"x86_64": 321, "aarch64": 280}[machine], 0, None, 0)), denied(libc.syscall(425, 1, None)),
            denied(libc.syscall({"x86_64": 56, "aarch64": 220}[machine], 0x10000000, 0, 0, 0, 0))]))
        for attempt in (lambda: os.setuid(0), lambda: resource.setrlimit(resource.RLIMIT_NPROC, (99, 999)), lambda: os.nice(-1)):
            try: attempt()
            except (OSError, ValueError): continue
            print("regained")
        def refused(attempt):
            try: attempt()
            except PermissionError: return True
        pair = socket.socketpair()
        print("without namespaces", sys.argv[1] != "landlock" or all(map(refused, [
            lambda: os.chmod("attack.py", 0o777), lambda: os.utime("attack.py"), lambda: os.setxattr("attack.py", "user.a", b"1"),
            lambda: os.setpriority(os.PRIO_PROCESS, os.getpid(), 19), lambda: os.sched_setaffinity(0, [0]),
            lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU), lambda: socket.socketpair(type=socket.SOCK_DGRAM),
            lambda: pair[0].bind(chr(0) + "rft-name")])))
        print("signal at the parent's end", denied(libc.prctl(1, 0)))
        sys.stdout.flush()
        if os.fork() == 0: os.execv("/usr/bin/env", ["env"])
        os.wait()
        """
    os.environ["RFT_SECRET"] = "secret"
    try:
        report = confined.run(code, confined.level)
    finally:
        del os.environ["RFT_SECRET"]
    lines = report.stdout.decode().splitlines()
    assert lines[:3] == ["True", "without namespaces True", "signal at the parent's end True"], report.stderr.decode()
    assert b"regained" not in report.stdout
    assert b"secret" not in report.stdout


def test_an_interpreter_of_32_bits_is_no_way_around_the_filter(confined: Confined) -> None:
    code = """
        import ctypes, mmap, platform
        if platform.machine() == "x86_64":
            page = mmap.mmap(-1, 4096, prot=7)
            page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # getpid by int 0x80
            ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
            print("called")
        """
    assert b"called" not in confined.run(code).stdout


def test_64_at_a_time_have_limits_of_their_own(confined: Confined) -> None:
    """Each has more than half of its processes, files and memory, as would not be possible together."""
    code = """
        import os, time
        children = [os.fork() for _ in range(1)]
        data = b"x" * (4 << 20)
        with open("file", "wb") as file: file.write(data[: 1 << 20])
        if children[0] == 0: os._exit(0)
        os.wait()
        print(len(data), os.listdir("."))
        """
    started = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        reports = list(pool.map(lambda _: confined.run(code), range(64)))
    assert {(report.code, report.killed) for report in reports} == {(0, None)}, reports[0].stderr.decode()
    assert {report.stdout for report in reports} <= {
        b"4194304 ['attack.py', 'file']\n",
        b"4194304 ['file', 'attack.py']\n",
    }
    assert time.monotonic() - started < PATIENCE_S


def test_programs_end_with_their_caller_and_with_their_host(confined: Confined) -> None:
    mark = f"rft-left-{os.getpid()}-{confined.level}"

    def lives() -> bool:
        return any(mark in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))

    for end in ("caller", "host", "supervisor"):
        host = HostProcess()
        program = Program(["{python}", "-I", "-c", "import os, time; os.fork(); time.sleep(60)", mark])
        running = host.start(request_of(program, CONFIG, confined._interpreter, confined.level), program)
        wait_until(lives, "it starts")
        if end == "caller":
            with running._supervisor.dup():  # as a fork of the caller has it
                running.close()
        elif end == "host":
            host.close()
            running.close()
        else:
            assert host._process is not None
            psutil.Process(host._process.pid).children()[0].kill()
        wait_until(lambda: not lives(), f"it is left after the end of its {end}")
        running.close()
        host.close()
