"""Measure how much a text repeats itself.

    - repetition_score: {}
    - threshold: {column: repetition, max: 0.3}
    - repetition_score: {n: 10, unit: character, name: character_repetition}

    repetition = 1 − |distinct n-grams| / |n-grams|

which is seq-rep-n of Welleck et al. 2019 (arXiv 1908.04319, section 6.1): 0 if no n-gram occurs twice, near 1 for a loop. A text of
fewer than n words has no n-gram and scores 0.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from pydantic import Field

from operators.base import BATCH_SCHEMA, Operator, StageConfig, StageOutcome
from operators.text.ngrams import Unit, distinct, ngrams
from rftdata.errors import ConfigError


class RepetitionScore(Operator, revision=1):
    """Adds one number from 0 to 1; null where the text is null. Words are compared in lower case."""

    class Config(StageConfig):
        """The text, and the n-grams."""

        n: int = Field(4, ge=1, le=100, description="Words (or characters) in an n-gram.")
        unit: Unit = Field("word", description="Whether n-grams consist of words or of characters.")
        column: str = Field("response", description="The text column.")
        name: str = Field("repetition", pattern=r"^[A-Za-z_]\w*$", description="Name of the score column.")

    rowwise = True

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        if self.config.name in BATCH_SCHEMA.names:
            raise ConfigError(f"{self.config.name!r} is a column of every batch", todo="give `name` another value")
        self.reads = frozenset({self.config.column})
        self.scores = {self.config.name: pa.float64()}

    def apply(self, table: pa.Table) -> StageOutcome:
        texts = table[self.config.column].combine_chunks()
        hashes, rows = ngrams(texts, self.config.n, self.config.unit)
        total = np.bincount(rows, minlength=len(texts))
        different = np.bincount(distinct(hashes, rows)[1], minlength=len(texts))
        score = pa.array(1 - different / np.maximum(total, 1) - (total == 0), mask=texts.is_null().to_numpy(False))
        return StageOutcome.keep_all(table.num_rows, {self.config.name: score})
