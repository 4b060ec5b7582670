"""Drop copies of a row.

    - dedup_exact: {}
    - dedup_exact: {scope: batch, columns: [response], ignore: [case, whitespace]}

A copy is a row whose `columns` all equal those of another row. Of several copies the one with the highest reward stays, else the first.
A stage sees one batch of groups, so copies in other batches and in the buffer are not found.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome
from operators.groups import Groups, Ints, finite


class DedupExact(Operator, revision=1):
    """Drops each row that equals a better or earlier one; a row with a null among its `columns` equals no other.

    Within a group this changes what group-relative advantages compare: of eight samples, seven of them the same answer, two remain.
    """

    class Config(StageConfig):
        """What must be equal, and where copies are searched."""

        columns: tuple[str, ...] = Field(
            ("prompt", "response"), min_length=1, description="Text columns that must all be equal."
        )
        scope: Literal["group", "batch"] = Field("group", description="Where copies are searched.")
        ignore: tuple[Literal["case", "whitespace"], ...] = Field((), description="Differences that are ignored.")

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.reads = frozenset({"group_id", "experience_id", "reward", *self.config.columns})

    def apply(self, table: pa.Table) -> StageOutcome:
        code = Groups.of(table).group_N if self.config.scope == "group" else np.zeros(table.num_rows, np.int64)
        has_texts = np.ones(table.num_rows, np.bool_)
        for name in self.config.columns:
            texts = self._normalised(table[name].combine_chunks())
            has_texts &= texts.is_valid().to_numpy(False)
            coded = pc.fill_null(texts.dictionary_encode().indices, 0).to_numpy()
            _, code = np.unique(code * (int(coded.max(initial=0)) + 1) + coded, return_inverse=True)
        # Rows without equals each get their own set.
        code = np.where(has_texts, code, table.num_rows + np.arange(table.num_rows))
        return StageOutcome(self._reasons(table, code))

    def _normalised(self, texts: pa.Array) -> pa.Array:
        texts = pc.cast(texts, pa.string())
        if "case" in self.config.ignore:
            texts = pc.utf8_lower(texts)
        if "whitespace" in self.config.ignore:
            texts = pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, r"\s+", " "))
        return texts

    def _reasons(self, table: pa.Table, code: Ints) -> pa.Array:
        best = best_first(table)
        rank = np.empty(table.num_rows, np.int64)
        rank[best] = np.arange(table.num_rows)
        sets, code = np.unique(code, return_inverse=True)
        least = np.full(len(sets), table.num_rows)
        np.minimum.at(least, code, rank)
        kept = best[least[code]] if table.num_rows else best
        copy = pa.array(kept != np.arange(table.num_rows))
        ids = pc.cast(table["experience_id"].combine_chunks().take(pa.array(kept)), pa.string())
        text = pc.binary_join_element_wise(f"the same {' and '.join(self.config.columns)} as experience", ids, " ")
        return pc.if_else(copy, text, pa.scalar(None, pa.string()))


def best_first(table: pa.Table) -> Ints:
    """Return rows in the order in which one of several copies is kept: highest finite reward first, then by position."""
    reward = finite(table["reward"].combine_chunks())
    return np.argsort(-np.nan_to_num(reward, nan=-np.inf), kind="stable")
