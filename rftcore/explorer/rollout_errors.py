"""Which errors end a rollout alone, which end the run, and how the former are recorded."""

from __future__ import annotations

from rftcore.explorer.workflow_loop import BlockedError
from rftcore.failures import FunctionFailedError, describe, waited_at
from rftdata.errors import ConfigError, EngineStoppedError, ModelError

# sys.exit() in a user's code ends the rollout instead of the explorer.
OF_A_USER = (Exception, BaseExceptionGroup, BlockedError, SystemExit, KeyboardInterrupt)
OF_THE_RUN = (ConfigError, ModelError, EngineStoppedError)


def holds(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Return whether an error, or one of a group of errors from concurrent requests, is of one of these kinds."""
    return isinstance(error, kinds) or (isinstance(error, BaseExceptionGroup) and error.subgroup(kinds) is not None)


def outcome_of(raised: BaseException, limit: str | None = None) -> tuple[str, str]:
    """Return the outcome of a rollout that failed, and its error.

    Args:
        limit: the limit on its time, if that ended it.
    """
    if holds(raised, BlockedError):
        return "timeout", f"blocked the event loop of the workflows for too long{waited_at(raised)}"
    if limit is not None:
        return "timeout", f"{limit}{waited_at(raised)}"
    if isinstance(raised, FunctionFailedError) and raised.timed_out:
        return "timeout", raised.text
    text = describe(raised)
    return "failed", f"{text}; an await is missing" if "'coroutine' object" in text else text
