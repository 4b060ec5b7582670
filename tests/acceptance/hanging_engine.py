"""An engine that hangs once, in a step after the first change of its weights; the next process finds that it has."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rftcore.engines.base import Generation
from rftcore.engines.transformers_engine import TransformersEngine


class HangsOnce(TransformersEngine):
    def _step(self) -> list[tuple[str, Generation]]:
        if self.policy_version_id > 1:
            try:
                Path(os.environ["HUNG"]).touch(exist_ok=False)
            except FileExistsError:
                return super()._step()
            time.sleep(3600)
        return super()._step()
