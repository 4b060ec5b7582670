"""The experience database for reinforcement fine-tuning.

`open` a buffer, or `create` one; then `Buffer.writer`, `Buffer.attempt`, `Buffer.sql`. This package imports neither torch, ray, vllm nor
transformers: a notebook or a labeller's laptop needs only it.
"""

from rftdata.buffer import Buffer
from rftdata.errors import RftError
from rftdata.groups import Group, Rollout, Sequence
from rftdata.opening import create, open

__all__ = ["Buffer", "Group", "RftError", "Rollout", "Sequence", "create", "open"]
