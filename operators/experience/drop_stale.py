"""Drop responses that were sampled from an old policy.

    - drop_stale: {max: 4}

Staleness is the number of trainer steps between the newest published policy and the policy of the response's oldest token, at the moment
the pipeline decides. Responses grow older until they are drawn: `sampling.max_staleness` is the bound that always holds. This stage
saves later stages the work on responses that would soon be too old.
"""

from __future__ import annotations

import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome
from operators.thresholds import outside


class DropStale(Operator, revision=1):
    """Drops each row with staleness > `max`; a row that no policy of the run sampled (staleness is null) stays."""

    class Config(StageConfig):
        """The largest staleness."""

        max: int = Field(ge=0, description="Largest staleness that stays, in trainer steps.")

    reads = frozenset({"staleness"})
    rowwise = True
    remedy = "lower sync.offset, or raise its max"

    def apply(self, table: pa.Table) -> StageOutcome:
        return outside(table["staleness"].combine_chunks(), "staleness", None, self.config.max, keep_unknown=True)
