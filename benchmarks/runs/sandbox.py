"""What an execution in a sandbox costs: the same program of Python in a bare subprocess and at each tier that this machine offers, in turns.

The program prints a number and ends. `graded` runs a function by a test that is Python code, which takes two sandboxes, and `command` is a command of
a session that is open. `ratio` is the median of a tier over that of the bare subprocess. `at_once` is the number of executions a second with several
threads at a time.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.harness.arguments import argument_parser, integer
from benchmarks.harness.report import spread, write
from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.grading.forms import unit_tests
from rftcore.sandbox.grading.grade import grade
from rftcore.sandbox.host_process import HostProcess, request_of
from rftcore.sandbox.interpreter import Interpreter
from rftcore.sandbox.local import LocalSandbox
from rftcore.sandbox.program import Program
from rftcore.sandbox.session import SandboxSession
from rftcore.sandbox.tiers import refusal, tier_name

_CODE = "print(6 * 7)"
_PROGRAM = Program(["{python}", "-I", "-c", _CODE])
_CONFIG = SandboxConfig(wall_s=60)


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the result as JSON."""
    parser = argument_parser("sandbox", __doc__)
    parser.add_argument("--executions", type=integer(1), default=100, help="executions of each kind")
    parser.add_argument("--threads", type=integer(1), default=16, help="executions at a time for the rate")
    options = parser.parse_args(arguments)
    interpreter, host = Interpreter.of(None), HostProcess()
    held = [level for level in ("cgroup", "namespaces", "landlock") if refusal(level, interpreter) is None]
    kinds: dict[str, Callable[[], None]] = {"bare": lambda: _bare(interpreter)}
    kinds |= {level: lambda level=level: _confined(host, interpreter, level) for level in held}  # type: ignore[misc]
    sandbox = session = None
    if held:
        sandbox = LocalSandbox(_CONFIG)
        session = SandboxSession(sandbox, _CONFIG, session_s=3600)
        tests = unit_tests("assert f(6) == 42", None)
        code = "def f(x): return 7 * x"
        kinds["graded"] = lambda: _require(grade(sandbox, _CONFIG, code, tests)[0].passed)
        kinds["command"] = lambda: _require(session.shell("echo 42").output == "42\n")
    seconds = _in_turns(kinds, options.executions)
    bare = spread(seconds["bare"])["median"] or 1.0
    rows: dict[str, Any] = {}
    for kind, values in seconds.items():
        ms = spread([1e3 * value for value in values], 2)
        rows[kind] = {"ms": ms, "ratio": round((ms["median"] or 0.0) / (1e3 * bare), 2)}
    for kind in ("bare", *held):
        rows[kind]["at_once"] = round(_rate(kinds[kind], options.executions, options.threads), 1)
    if session is not None and sandbox is not None:
        session.close()
        sandbox.close()
    host.close()
    write(options, {"tiers": {level: tier_name(level) for level in held}, "executions": rows})
    return 0


def _in_turns(kinds: dict[str, Callable[[], None]], num: int) -> dict[str, list[float]]:
    """Return the seconds of each execution, after one that counts for none."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for place in range(num + 1):
        for kind, execute in kinds.items():
            started = time.perf_counter()
            execute()
            if place:
                seconds[kind].append(time.perf_counter() - started)
    return seconds


def _rate(execute: Callable[[], None], num: int, num_threads: int) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(execute) for _ in range(num)]:
            done.result()
    return num / (time.perf_counter() - started)


def _bare(interpreter: Interpreter) -> None:
    done = subprocess.run([interpreter.path, "-I", "-c", _CODE], capture_output=True, check=True)
    _require(done.stdout == b"42\n")


def _confined(host: HostProcess, interpreter: Interpreter, level: str) -> None:
    running = host.start(request_of(_PROGRAM, _CONFIG, interpreter, level), _PROGRAM)
    try:
        _require(running.wait().stdout == b"42\n")
    finally:
        running.close()


def _require(holds: bool) -> None:
    if not holds:
        raise RuntimeError("an execution gave another result")
