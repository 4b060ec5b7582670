"""`grade`: runs a model's code against unit tests."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.grading.forms import CallTest, CodeTests, ProgramTest, UnitTests
from rftcore.sandbox.inner.plain_values import decode, encode
from rftcore.sandbox.program import Program, ProgramEndedError, RunningProgram, Sandbox, run
from rftdata.errors import RftError

_INNER = Path(__file__).parents[1] / "inner"
_VALUES, _FUNCTIONS, _RUNNER = (
    (_INNER / f"{name}.py").read_bytes() for name in ("plain_values", "functions", "tests_runner")
)
_VALUES_PATH = "rftcore/sandbox/inner/plain_values.py"
_TOLERANCE = 1e-6
_MARGIN_S = 1.0
# What reading a message raises that the code wrote itself.
_NOT_VALID = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test.

    Attributes:
        failure: why it failed, for people; None if it passed.
    """

    name: str
    failure: str | None

    @property
    def passed(self) -> bool:
        """Whether it passed."""
        return self.failure is None


def grade(
    sandbox: Sandbox,
    config: SandboxConfig,
    code: str,
    tests: UnitTests,
    *,
    all_needed: bool = False,
    total_s: float = math.inf,
) -> list[Outcome]:
    """Return the outcomes of tests, at least one.

    Args:
        code: the model's, of Python.
        all_needed: whether to stop at the first failure.
        total_s: seconds for all programs together; the tests that are left then have failed.

    Raises:
        SandboxFailedError: a sandbox could not be made.
    """
    if isinstance(tests, CodeTests):
        return _grade_by_code(sandbox, config, code, tests, total_s)
    outcomes = []
    graded = (
        _grade_programs(sandbox, config, code, tests, total_s)
        if isinstance(tests[0], ProgramTest)
        else _grade_calls(sandbox, config, code, tests, total_s)
    )
    for outcome in graded:
        outcomes.append(outcome)
        if all_needed and not outcome.passed:
            break
    return outcomes


def _grade_programs(
    sandbox: Sandbox, config: SandboxConfig, code: str, tests: Any, total_s: float
) -> Iterator[Outcome]:
    files = {"solution.py": code.encode(errors="replace")}
    until = time.monotonic() + total_s
    for place, test in enumerate(tests, 1):
        left = min(config.wall_s, until - time.monotonic())
        if left <= 0:
            yield Outcome(f"test {place}", "the time for all tests was used up")
            continue
        limits = replace(config.limits, wall_s=left)
        program = Program(["{python}", "-I", "{work}/solution.py"], files, test.stdin.encode(), limits=limits)
        report = run(sandbox, program)
        failure = None
        if report.killed is not None:
            failure = f"exceeded its limit: {report.killed}"
        elif report.code != 0:
            failure = f"ended with {report.code}: {report.stderr.decode(errors='replace')[-300:]}"
        elif _lines(report.stdout.decode(errors="replace")) != _lines(test.expected):
            failure = "printed something else"
        yield Outcome(f"test {place}", failure)


def _lines(text: str) -> list[str]:
    """Return lines without white space at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _grade_calls(sandbox: Sandbox, config: SandboxConfig, code: str, tests: Any, total_s: float) -> Iterator[Outcome]:
    with _functions(sandbox, code) as functions:
        until = time.monotonic() + min(config.wall_s, total_s)
        failure = _load(functions, until)[1]
        for place, test in enumerate(tests, 1):
            if failure is None:
                failure_of_test, failure = _call(functions, test, until)
                yield Outcome(f"test {place}", failure_of_test)
            else:
                yield Outcome(f"test {place}", failure)


def _call(functions: RunningProgram, test: CallTest, until: float) -> tuple[str | None, str | None]:
    """Return why a test failed, and why all that follow will."""
    module = {"type": "object", "number": -1}
    try:
        found = _asked(functions, {"do": "attribute", "given": [module, test.function]}, until)
        if "error" not in found:
            given = [found["value"], encode(list(test.args), _no_object), encode(dict(test.kwargs), _no_object)]
            found = _asked(functions, {"do": "call", "given": given}, until)
        if "error" in found:
            return f"raised {found['raises'][0]}: {found['error'][:300]}", None
        returned = decode(found["value"], _Unequal, hashes=False)
    except ProgramEndedError as error:
        return str(error), str(error)
    except _NOT_VALID as error:
        return f"its answer is not valid: {error}", None
    return (None if _equal(returned, test.expected) else "returned something else"), None


class _Unequal:
    """What is equal to no expected value: an object of the model's code, a set."""

    def __init__(self, value: dict[str, Any]) -> None:
        pass


def _no_object(value: Any) -> Any:
    raise RftError("an argument of a unit test is no plain value", value=type(value).__name__, todo="correct the task")


def _equal(found: Any, expected: Any) -> bool:
    """Return whether plain values are equal: numbers within a millionth, tuples as lists, which JSON has no other form for."""
    if isinstance(found, float) or isinstance(expected, float):
        numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (found, expected))
        try:
            return numbers and (
                found == expected or math.isclose(found, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
            )
        except OverflowError:  # an integer larger than any float
            return False
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_equal(found[key], expected[key]) for key in expected)
    return isinstance(found, bool) == isinstance(expected, bool) and bool(found == expected)


def _grade_by_code(
    sandbox: Sandbox, config: SandboxConfig, code: str, tests: CodeTests, total_s: float
) -> list[Outcome]:
    with _functions(sandbox, code) as functions, _runner(sandbox, config) as runner:
        until = time.monotonic() + min(config.wall_s, total_s)
        loaded, failure = _load(functions, until)
        if failure is not None:
            return [Outcome("load", failure)]
        if tests.entry_point is not None and tests.entry_point not in loaded["names"]:
            return [Outcome("load", f"it does not define {tests.entry_point}")]
        return _CodeGrading(functions, runner, until).outcomes(tests, loaded)


class _CodeGrading:
    """Passes messages between tests and the code.

    When the code has ended, the tests go on without it and fail. So the number of tests does not depend on the code.

    Args:
        until: time at which the code has taken too long.
    """

    def __init__(self, functions: RunningProgram, runner: RunningProgram, until: float) -> None:
        self._functions, self._runner, self._until = functions, runner, until
        self._nonce = secrets.token_hex(16)
        self._failure: str | None = None
        self._names: list[list[str]] = []
        self._outcomes: list[Outcome] = []

    def outcomes(self, tests: CodeTests, loaded: dict[str, Any]) -> list[Outcome]:
        """Return the outcomes of all tests."""
        given = {"nonce": self._nonce, "tests": tests.codes, "entry_point": tests.entry_point, "loaded": loaded}
        until = self._until + _MARGIN_S
        try:
            self._runner.channel.send(given, until)
            while (message := self._runner.channel.receive(until)) and not message.get("done"):
                if "ask" in message:
                    self._runner.channel.send(self._answer(message["ask"]), until)
                elif message.get("nonce") == self._nonce:
                    self._take(message)
        except ProgramEndedError as error:
            self._failure = self._failure or str(error)
        names = [name for of_code in self._names for name in of_code]
        names += [f"tests {place + 1}" for place in range(len(self._names), len(tests.codes))]
        why = self._failure or "it did not run"
        return self._outcomes + [Outcome(name, why) for name in names[len(self._outcomes) :]]

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self._failure is None:
            try:
                return _asked(self._functions, asked, self._until)
            except ProgramEndedError as error:
                self._failure = str(error)
        return {"error": self._failure, "raises": ["RuntimeError"]}

    def _take(self, message: dict[str, Any]) -> None:
        """Take the names of the tests of a code, before they run, or the outcome of the next test."""
        if "names" in message:
            self._names.append(message["names"])
        else:
            self._outcomes.append(Outcome(message["test"], self._failure or message["failure"]))


@contextmanager
def _functions(sandbox: Sandbox, code: str) -> Iterator[RunningProgram]:
    """Start the model's code in a sandbox that serves its functions."""
    files = {"solution.py": code.encode(errors="replace"), "functions.py": _FUNCTIONS, _VALUES_PATH: _VALUES}
    running = sandbox.start(Program(["{python}", "-I", "{work}/functions.py"], files, has_channel=True))
    try:
        yield running
    finally:
        running.close()


@contextmanager
def _runner(sandbox: Sandbox, config: SandboxConfig) -> Iterator[RunningProgram]:
    """Start the tests' sandbox."""
    limits = replace(config.limits, wall_s=config.wall_s + _MARGIN_S)
    files = {"tests_runner.py": _RUNNER, _VALUES_PATH: _VALUES}
    running = sandbox.start(
        Program(["{python}", "-I", "{work}/tests_runner.py"], files, has_channel=True, limits=limits)
    )
    try:
        yield running
    finally:
        running.close()


def _load(functions: RunningProgram, until: float) -> tuple[dict[str, Any], str | None]:
    """Return the names that the code defines, or why it does not load."""
    try:
        answer = _asked(functions, {"do": "load"}, until)
        if "error" in answer:
            return {}, f"the code raised {answer['raises'][0]}: {answer['error'][:300]}"
        found = decode(answer["value"], _Unequal, hashes=False)
        names, modules = found["names"], found["modules"]
        valid = all(isinstance(name, str) for name in (*names, *modules, *modules.values()))
    except ProgramEndedError as error:
        return {}, f"the code did not load: {error}"
    except _NOT_VALID:
        valid = False
    return ({"names": list(names), "modules": dict(modules)}, None) if valid else ({}, "the code sent no valid answer")


def _asked(functions: RunningProgram, message: Any, until: float) -> dict[str, Any]:
    functions.channel.send(message, until)
    answer = functions.channel.receive(until)
    if not isinstance(answer, dict) or not ("value" in answer or {"error", "raises"} <= answer.keys()):
        raise ProgramEndedError("it sent no valid answer")
    return answer
