"""Two custom stages: a class that works on columns, and a function of one row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import Drop, Operator, StageConfig, StageOutcome, drop


class DigitsKept(Operator):
    """Scores the share of the answer's digits that the response contains, in any order; 1 if none is missing or added."""

    class Config(StageConfig):
        """The score's column."""

        name: str = Field("digits_kept", description="Name of the score column.")

    reads = frozenset({"response", "answer"})
    rowwise = True  # each row independently, so a batch may be cut and its parts run concurrently

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        # A score is stored per experience and reused while these columns, the arguments and this file are unchanged.
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
    """Keep answers that consist of digits."""
    strange = {sign for sign in row["response"] if not sign.isdigit() and sign not in allowed}
    return drop(f"has {''.join(sorted(strange))!r}") if strange else True


no_letters.reads = {"response"}  # type: ignore[attr-defined]
