"""Engines that take every weight they are sent, and sample from others."""

from __future__ import annotations

import torch

from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.sync.transfer.plan import TransferPlan


class ChangesAMatrix(TransformersEngine):
    """After a transfer one of its matrices is not the one that arrived; what it writes gets no reward any more."""

    factor = -3.0

    def _receive_weights(self, plan: TransferPlan) -> str:
        checksum = super()._receive_weights(plan)
        with torch.no_grad():
            self._model.get_submodule("model.layers.0.mlp.down_proj").get_parameter("weight").mul_(self.factor)
        return checksum


class ChangesItALittle(ChangesAMatrix):
    """What it writes is still rewarded."""

    factor = 0.6
