"""A call of a function as it is made where the function runs: its outcome is data, whatever the function does."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rftcore.failures import InfrastructureError, describe, holds, user_stack
from rftcore.tools.calls import ErrorKind
from rftcore.tools.observations import cut_in_the_middle, error_text, raised_text, result_text
from rftcore.tools.signature import InvalidArgumentsError
from rftcore.tools.tool import Tool, ToolContext
from rftdata.plugins import Registry

TOOLS = Registry[Callable[..., Any]]("tool", {})

_MAX_PRINTED = 4096


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call.

    Attributes:
        text: what the model reads.
        error: None for a result.
        stack: the user's frames of an exception.
        state: the rollout's state after a call in another process, pickled.
        infrastructure: what failed outside the rollout; the rollout fails with it.
    """

    text: str
    error: ErrorKind | None = None
    stack: str = ""
    state: bytes | None = None
    infrastructure: str | None = None


def failed(error: ErrorKind, what: str, stack: str = "") -> Outcome:
    """Return the outcome of a call that gives an error.

    Args:
        what: for the model.
    """
    return Outcome(error_text(what), error, stack)


def outcome_of_error(raised: BaseException) -> Outcome:
    """Return the outcome of a call that raised."""
    if isinstance(raised, InvalidArgumentsError):
        return failed("invalid_arguments", str(raised))
    if holds(raised, InfrastructureError, ConnectionError):
        return Outcome("", "exception", user_stack(raised), infrastructure=describe(raised))
    return failed("exception", raised_text(raised), user_stack(raised))


def outcome_of_value(value: object, max_chars: int) -> Outcome:
    """Return the outcome of a call that returned."""
    try:
        return Outcome(cut_in_the_middle(result_text(value), max_chars))
    except TypeError as error:
        return failed("exception", str(error))


def load_tool(source: str, base_dir: Path, name: str | None = None) -> Tool:
    """Return the tool of a function.

    Args:
        source: as in a configuration.
        base_dir: folder of the configuration file.

    Raises:
        PluginError: it does not load.
        ConfigError: it cannot be a tool.
    """
    return Tool.of(TOOLS.load(source, base_dir), name)


def load_calls(sources: list[str], base_dir: Path) -> dict[str, Callable[..., Outcome]]:
    """Return functions as they are called in another process.

    Raises:
        PluginError, ConfigError: see `load_tool`.
    """
    return {source: partial(_called, load_tool(source, base_dir)) for source in sources}


def _called(tool: Tool, arguments: dict[str, Any], context: ToolContext | None, max_chars: int) -> Outcome:
    context = context or ToolContext(None, 0)
    try:
        with _bounded_output():
            value = tool.call(arguments, context)
        state = pickle.dumps(context.state) if tool.takes_context else None
    except BaseException as error:  # noqa: BLE001 - the boundary: errors of a tool are data
        return outcome_of_error(error)
    found = outcome_of_value(value, max_chars)
    return Outcome(found.text, found.error, state=state)


@contextlib.contextmanager
def _bounded_output() -> Iterator[None]:
    """Let a function print so many characters at most, to the log of the explorer."""
    with contextlib.redirect_stdout(_Bounded(sys.stdout)), contextlib.redirect_stderr(_Bounded(sys.stderr)):
        yield


class _Bounded(io.TextIOBase):
    def __init__(self, stream: Any) -> None:
        self._stream, self._left = stream, _MAX_PRINTED

    def write(self, text: str) -> int:
        if self._left > 0:
            self._stream.write(text[: self._left])
            if len(text) >= self._left:
                self._stream.write("\n[the tool printed more, which is left out]\n")
            self._left -= len(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())
