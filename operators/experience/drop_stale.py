"""Drop responses that an old policy wrote.

    - drop_stale: {max: 4}

Staleness is how many trainer steps lie between the newest published policy and that of the response's oldest token, at the moment the
pipeline decides. What is drawn later has aged since: `sampling.max_staleness` is the bound that always holds, and this one saves
the work of later stages on what would age out anyway.
"""

from __future__ import annotations

import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome
from operators.thresholds import outside


class DropStale(Operator, revision=1):
    """Drops each row with staleness > `max`; a row that no policy of the run wrote (staleness is null) stays."""

    class Config(StageConfig):
        """How old is too old."""

        max: int = Field(ge=0, description="Greatest staleness that stays, in trainer steps.")

    reads = frozenset({"staleness"})
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        return outside(table["staleness"].combine_chunks(), "staleness", None, self.config.max, keep_unknown=True)
