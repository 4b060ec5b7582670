"""Soft overlong punishment: the reward falls as a response approaches the length limit.

DAPO, arXiv 2503.14476, eq. 13, with L = `num_trained_tokens`:

    R_length = 0                                          if L ≤ max_tokens − cache_tokens
               ((max_tokens − cache_tokens) − L) / cache_tokens   up to L ≤ max_tokens
               −1                                         beyond

and reward := reward + weight · R_length.

    - length_penalty: {max_tokens: 1024, cache_tokens: 256}
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from operators.base import Operator, StageConfig, StageOutcome


class LengthPenalty(Operator, revision=1):
    """Adds weight · R_length to `reward`; a null reward stays null."""

    class Config(StageConfig):
        """Where the penalty begins, and its size."""

        max_tokens: int = Field(gt=0, description="L_max: the length from which the full penalty applies.")
        cache_tokens: int = Field(
            gt=0, description="L_cache: the number of tokens before L_max over which the penalty grows."
        )
        weight: float = Field(1.0, gt=0, description="Size of the full penalty.")

        @model_validator(mode="after")
        def _cache_within_limit(self) -> LengthPenalty.Config:
            if self.cache_tokens > self.max_tokens:
                raise ValueError(f"cache_tokens {self.cache_tokens} is more than max_tokens {self.max_tokens}")
            return self

    reads = frozenset({"num_trained_tokens", "reward"})
    writes = frozenset({"reward"})
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        length = pc.cast(table["num_trained_tokens"].combine_chunks(), pa.float64())
        free = float(self.config.max_tokens - self.config.cache_tokens)
        ramp = pc.divide(pc.subtract(free, length), float(self.config.cache_tokens))
        penalty = pc.max_element_wise(pc.min_element_wise(ramp, 0.0, skip_nulls=False), -1.0, skip_nulls=False)
        reward = pc.add(table["reward"].combine_chunks(), pc.multiply(penalty, self.config.weight))
        return StageOutcome.keep_all(table.num_rows, {"reward": reward})
