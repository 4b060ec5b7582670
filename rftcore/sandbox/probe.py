"""A probe of a level: programs that try to reach the host and to exceed their limits. The level holds only if all of them fail."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.host_process import HostProcess, request_of
from rftcore.sandbox.interpreter import Interpreter
from rftcore.sandbox.program import Program, ProgramEndedError, SandboxFailedError
from rftcore.sandbox.request import Limits

_ATTACKS = (Path(__file__).parent / "inner" / "attacks.py").read_bytes()
_MIB = 1 << 20
_LIMITS = Limits(
    wall_s=20.0,
    cpu_s=10,
    memory_bytes=128 * _MIB,
    processes=8,
    file_bytes=_MIB,
    disk_bytes=8 * _MIB,
    output_bytes=65536,
)


def probe(level: str, interpreter: Interpreter) -> str | None:
    """Return why a level does not hold; None if it does."""
    assert level != "none", "nothing would stop the programs of the probe"
    host = HostProcess()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            socket.create_server(("127.0.0.1", 0)) as tcp,
            _abstract() as local,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server,
        ):
            secret = Path(folder) / "secret"
            secret.write_text("secret", encoding="utf-8")
            os.chmod(folder, 0o777)  # only the sandbox may refuse
            os.chmod(secret, 0o666)
            path = str(Path(folder) / "socket")
            server.bind(path)
            os.chmod(path, 0o666)
            name = local.getsockname()[1:].decode()
            targets = [str(secret), str(os.getpid()), str(tcp.getsockname()[1]), name, path]
            return _reached(host, level, interpreter, targets) or _not_limited(host, level, interpreter)
    except (SandboxFailedError, OSError) as error:
        return str(error).removeprefix("the sandbox could not be made: ")
    finally:
        host.close()


def _abstract() -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0rft-probe-{os.getpid()}-{os.urandom(4).hex()}")
    server.listen()
    return server


def _reached(host: HostProcess, level: str, interpreter: Interpreter, targets: list[str]) -> str | None:
    """Return what a program has reached that it must not."""
    program = Program(
        ["{python}", "-I", "{work}/attacks.py", *targets], {"attacks.py": _ATTACKS}, has_channel=True, limits=_LIMITS
    )
    running = host.start(request_of(program, SandboxConfig(), interpreter, level), program)
    try:
        reached = running.channel.receive(time.monotonic() + _LIMITS.wall_s)
    except ProgramEndedError as error:
        report = running.wait()
        output = report.stderr.decode(errors="replace").strip().splitlines()
        return f"{interpreter.path} does not run there: {output[-1] if output else error}"
    finally:
        running.close()
    return f"a program in it can {', '.join(reached)}" if reached else None


def _not_limited(host: HostProcess, level: str, interpreter: Interpreter) -> str | None:
    """Return a limit of memory that does not hold."""
    code = "import os, time; os.fork(); data = b'x' * (100 << 20); time.sleep(1)"
    program = Program(["{python}", "-I", "-c", code], limits=_LIMITS)
    running = host.start(request_of(program, SandboxConfig(), interpreter, level), program)
    try:
        report = running.wait()
    finally:
        running.close()
    return None if report.killed == "memory" or report.code else "its limit of memory does not hold"
