"""How an environment fails."""

from __future__ import annotations

from rftcore.failures import FunctionFailedError, InfrastructureError

__all__ = ["EnvironmentFailedError", "InfrastructureError"]


class EnvironmentFailedError(FunctionFailedError):
    """An environment raised, returned something invalid, exceeded a limit or ended its process: the rollout's recorded outcome."""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.text, self.stack, self.timed_out)


def _rebuild(text: str, stack: str, timed_out: bool) -> EnvironmentFailedError:
    return EnvironmentFailedError(text, stack, timed_out=timed_out)
