"""Drop truncated responses.

A response that was cut at the token limit is unfinished, so its reward depends more on the limit than on the answer
(DAPO's overlong filtering, arXiv 2503.14476, section 3.4).

    - drop_truncated: {}
    - drop_truncated: {finish_reasons: [length, abort]}
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome


class DropTruncated(Operator, revision=1):
    """Drops each row whose `finish_reason` is listed; a row without a finish reason stays."""

    class Config(StageConfig):
        """Which finish reasons count as truncated."""

        finish_reasons: tuple[str, ...] = Field(
            ("length", "abort"), min_length=1, description="`length`: token limit; `abort`: stopped by the engine."
        )

    reads = frozenset({"finish_reason"})
    rowwise = True
    remedy = "raise explorer.max_tokens"

    def apply(self, table: pa.Table) -> StageOutcome:
        finish_reason = table["finish_reason"].combine_chunks()
        cut_off = pc.is_in(finish_reason, value_set=pa.array(self.config.finish_reasons, finish_reason.type))
        reason = pc.binary_join_element_wise("finish_reason is", pc.fill_null(finish_reason, ""), " ")
        return StageOutcome.keep_where(pc.invert(cut_off), reason)
