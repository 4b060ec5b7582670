"""Trainer backends by name: what holds a model, computes with it and updates it.

`Network` is the built-in one, fsdp2, and its public methods and attributes are what another must have: `Learner` and `Models` call nothing else of
a model. `docs/how-to/train-on-several-gpus.md` lists them with what each has to promise.
"""

from __future__ import annotations

from rftcore.trainer.network import Network
from rftdata.plugins import Registry

BACKENDS = Registry[type[Network]]("trainer backend", {"fsdp2": "rftcore.trainer.network:Network"})
