"""Which errors end a rollout alone, which end the run, and how the former are recorded."""

from __future__ import annotations

from rftcore.explorer.workflow_loop import BlockedError
from rftcore.failures import FunctionFailedError, comes_from_outside, describe, holds, waited_at
from rftdata.errors import ConfigError, EngineStoppedError, ModelError

OF_THE_RUN = (ConfigError, ModelError, EngineStoppedError)


def ends_rollout_alone(raised: BaseException) -> bool:
    """Return whether an error of a user's code is an outcome of its rollout: sys.exit() and the panic of an extension are, too."""
    return not comes_from_outside(raised) and not holds(raised, *OF_THE_RUN)


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
