"""The experience database for reinforcement fine-tuning.

`open` a buffer, or `create` one; then `Buffer.writer`, `Buffer.attempt`, `Buffer.sql`. This package imports neither torch, ray, vllm nor
transformers: a notebook or a labeller's laptop needs only it.
"""

from rftdata.buffer import Buffer
from rftdata.connection import create, open
from rftdata.errors import RftError
from rftdata.experience import Group, Rollout, Sequence

__all__ = ["Buffer", "Group", "RftError", "Rollout", "Sequence", "create", "open"]
