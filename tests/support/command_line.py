"""`rft` as a user calls it, in a process of its own (`Preloaded`), and what it left in an embedded buffer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rftdata
from tests.support.preloaded import Preloaded

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLE = CHECKOUT / "examples" / "sort_from_scratch"

Rft = Callable[..., "subprocess.CompletedProcess[str]"]


def call_rft(
    *arguments: object, timeout: float = 420, cwd: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `rft …` to its end.

    Args:
        check: fail the test where the exit code is not 0.
    """
    process = Preloaded(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd or CHECKOUT, env=rft_environment()
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        doing = _what_they_do(arguments)
        process.kill()
        stdout, stderr = process.communicate()
        pytest.fail(
            f"rft {arguments} took over {timeout} s:\n{stdout[-4000:]}\n{stderr[-4000:]}\n{doing}", pytrace=False
        )
    result = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    assert not check or result.returncode == 0, (
        f"rft {arguments} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    )
    return result


def _what_they_do(arguments: tuple[object, ...]) -> str:
    """Return what the processes of a buffer reported about their work, for the message of a call that does not return."""
    named = [Path(str(arguments[i + 1])) for i, argument in enumerate(arguments[:-1]) if argument == "--buffer"]
    queries = (
        "select * from rft.worker",
        "select * from rft.worklist",
        "select * from rft.evaluation",
        "select * from rft.rollout_group",
    )
    found = [f"{query}: {rows(buffer, query)[-30:]}" for buffer in named for query in queries]
    stacks = [
        subprocess.run(
            rft_command("status", "--stacks", "--buffer", buffer), capture_output=True, text=True, check=False
        ).stdout
        for buffer in named
    ]
    return "\n".join(found + stacks)


def impatient_rft(*arguments: str) -> None:
    """Be an `rft` that gives up what is not Python code after half a second, instead of some seconds."""
    from rftcore.cli import main
    from rftdata.user_code import held_lock_timer, time_limits

    time_limits.GRACE_S = held_lock_timer.SLACK_S = 0.5
    sys.argv[:] = ["rft", *arguments]
    main()


def rft_command(*arguments: object) -> list[str]:
    """The command by which a process of its own runs `rft`; `Preloaded` starts faster."""
    return [sys.executable, "-m", "rftcore", *map(str, arguments)]


def rft_environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "NO_COLOR": "1"}


def rows(buffer: Path, query: str) -> list[dict[str, Any]]:
    """Rows of a query on an embedded buffer."""
    with rftdata.open(str(buffer)) as opened:
        return opened.sql(query).to_pylist()


def report(rft: Rft, buffer: Path, run: str) -> dict[str, Any]:
    """`rft report RUN --json`."""
    result = rft("report", run, "--json", "--buffer", buffer)
    assert "Warning" not in result.stderr, result.stderr
    return json.loads(result.stdout)
