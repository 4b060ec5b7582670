"""Two stages of one's own: a class that works on columns, and a function of one row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import Drop, Operator, StageConfig, StageOutcome, drop


class DigitsKept(Operator):
    """Scores the share of the question's digits that the answer has, whatever their order; 1 where none is lost or invented."""

    class Config(StageConfig):
        """What is looked at."""

        name: str = Field("digits_kept", description="The column it scores.")

    reads = frozenset({"response", "answer"})
    rowwise = True  # each row by itself, so a batch may be cut and its parts run at the same time

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        # A score is stored for every experience and not computed again while these columns, the arguments and this file stay the same.
        self.scores = {self.config.name: pa.float64()}

    def apply(self, table: pa.Table) -> StageOutcome:
        kept = pa.array([0.0] * table.num_rows)
        wanted = pc.max_element_wise(pc.utf8_length(table["answer"]), pc.utf8_length(table["response"]))
        for digit in "0123456789":
            given, asked = (pc.count_substring(table[name], digit) for name in ("response", "answer"))
            kept = pc.add(kept, pc.cast(pc.min_element_wise(given, asked), pa.float64()))
        share = pc.divide(kept, pc.cast(pc.max_element_wise(wanted, 1), pa.float64()))
        return StageOutcome.keep_all(table.num_rows, {self.config.name: share.combine_chunks()})


def no_letters(row: dict[str, Any], allowed: str = "") -> bool | Drop:
    """Keep answers that are made of digits."""
    strange = {sign for sign in row["response"] if not sign.isdigit() and sign not in allowed}
    return drop(f"has {''.join(sorted(strange))!r}") if strange else True


no_letters.reads = {"response"}  # type: ignore[attr-defined]
