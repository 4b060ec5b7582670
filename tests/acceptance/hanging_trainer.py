"""A model that hangs once, in the update of the third step; the next process finds that it has."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rftcore.trainer.network.network import Network

_HANGS_AT = 3


class HangsOnce(Network):
    num_updates = 0

    def update(self, share: float) -> float:
        self.num_updates += 1
        if self.num_updates == _HANGS_AT:
            try:
                Path(os.environ["HUNG"]).touch(exist_ok=False)
            except FileExistsError:
                return super().update(share)
            time.sleep(3600)
        return super().update(share)
