"""The experience database for reinforcement fine-tuning.

`open` a buffer, or `create` one; then use `Buffer.writer`, `Buffer.attempt` and `Buffer.sql`. This package does not import torch, ray, vllm
or transformers, so a notebook or a labeller's laptop needs nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rftdata.attempts.attempt import Attempt
    from rftdata.attempts.batch import Batch
    from rftdata.attempts.sampling import SamplingConfig
    from rftdata.buffer import Buffer
    from rftdata.connection import create, open
    from rftdata.errors import RftError
    from rftdata.experience import Group, Rollout, Sequence
    from rftdata.run import Run
    from rftdata.writing.writer import Writer

# Imported on first use: a process that needs one module of this package, such as that of reward functions, starts without the database.
_HOMES = {
    "Attempt": "attempts.attempt",
    "Batch": "attempts.batch",
    "Buffer": "buffer",
    "Group": "experience",
    "RftError": "errors",
    "Rollout": "experience",
    "Run": "run",
    "SamplingConfig": "attempts.sampling",
    "Sequence": "experience",
    "Writer": "writing.writer",
    "create": "connection",
    "open": "connection",
}

__all__ = [
    "Attempt",
    "Batch",
    "Buffer",
    "Group",
    "RftError",
    "Rollout",
    "Run",
    "SamplingConfig",
    "Sequence",
    "Writer",
    "create",
    "open",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
