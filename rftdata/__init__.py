"""The experience database for reinforcement fine-tuning.

`open` a buffer, or `create` one; then use `Buffer.writer`, `Buffer.attempt` and `Buffer.sql`. This package does not import torch, ray, vllm
or transformers, so a notebook or a labeller's laptop needs nothing else.
"""

from rftdata.buffer import Buffer
from rftdata.connection import create, open
from rftdata.errors import RftError
from rftdata.experience import Group, Rollout, Sequence
from rftdata.run import Run
from rftdata.training.attempt import Attempt
from rftdata.training.batch import Batch
from rftdata.training.sampling import SamplingConfig
from rftdata.writing.writer import Writer

__all__ = [
    "Attempt", "Batch", "Buffer", "Group", "RftError", "Rollout", "Run", "SamplingConfig", "Sequence", "Writer", "create", "open",
]  # fmt: skip
