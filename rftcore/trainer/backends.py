"""Trainer backends by name: what holds a model, computes with it and updates it. Importing this does not import torch.

`rftcore.trainer.network.Network` is the built-in one, fsdp2, and its public methods and attributes are what another must have: `Learner` and
`Models` call nothing else of a model. `docs/how-to/train-on-several-gpus.md` lists them with what each has to promise.
"""

from __future__ import annotations

from typing import Any

from rftdata.plugins import Registry

# Any: a type here would be an import of torch, for every reader of a configuration.
BACKENDS = Registry[Any]("trainer backend", {"fsdp2": "rftcore.trainer.network:Network"})
