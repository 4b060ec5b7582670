"""The result of a program: the reward that it reports, or its error."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rftcore.failures import FunctionFailedError, InfrastructureError
from rftcore.programs.process import Report
from rftdata.errors import RftError

_MAX_BYTES = 1 << 20
_SHAPE = '{"reward": number, "parts": {name: number}}'


@dataclass(frozen=True)
class ProgramResult:
    """What a program reports.

    Attributes:
        reward: None if it reports none.
    """

    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)


def read_result(file: Path, report: Report) -> ProgramResult:
    """Return the result in the program's file; without one, that in the last line of its output.

    Raises:
        FunctionFailedError: the file has an error, or the program failed.
        InfrastructureError: the system killed the program.
        RftError: the result is not valid.
    """
    found = _from_file(file)
    if isinstance(found, dict) and isinstance(found.get("error"), str):
        raise FunctionFailedError(found["error"], str(found.get("stack", "")))
    if report.code == -signal.SIGKILL:
        raise InfrastructureError("the program was killed, probably for a lack of memory")
    if report.code != 0:
        raise _failure(report)
    if found is None:
        found = _from_last_line(report.stdout)
    return ProgramResult() if found is None else _checked(found)


def _from_file(file: Path) -> Any:
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > _MAX_BYTES:
        raise RftError(f"the result file of a program has more than {_MAX_BYTES} bytes", allowed=_SHAPE)
    if not data.strip():
        return None
    try:
        return json.loads(data)
    except ValueError as error:
        raise RftError(f"the result file of a program is no JSON: {error}", value=data[:200], allowed=_SHAPE) from error


def _from_last_line(output: str) -> Any:
    """Return the result in the last line, or None if that is something else."""
    line = output.rstrip().rpartition("\n")[2].strip()
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if "reward" in found else None


def _checked(found: Any) -> ProgramResult:
    if not isinstance(found, dict) or set(found) - {"reward", "parts"}:
        raise RftError("the result of a program is not valid", value=found, allowed=_SHAPE)
    reward, parts = found.get("reward"), found.get("parts") or {}
    numbers = [] if reward is None else [reward]
    if not isinstance(parts, dict) or not all(map(_is_number, [*numbers, *parts.values()])):
        raise RftError("the result of a program has a value that is no finite number", value=found, allowed=_SHAPE)
    return ProgramResult(
        None if reward is None else float(reward), {str(name): float(value) for name, value in parts.items()}
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _failure(report: Report) -> FunctionFailedError:
    how = f"signal {signal.Signals(-report.code).name}" if report.code < 0 else f"exit code {report.code}"
    lines = (report.stderr or report.stdout).strip().splitlines()
    last = f": {lines[-1].strip()[:500]}" if lines else ""
    return FunctionFailedError(f"the program ended with {how}{last}", "\n".join(lines[-60:]))
