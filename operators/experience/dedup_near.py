"""Drop rows whose text is nearly the same as another's.

    - dedup_near: {threshold: 0.8}
    - dedup_near: {threshold: 0.7, n: 3, scope: batch}

The similarity of two texts is the Jaccard index of their sets of word n-grams: |A ∩ B| / |A ∪ B|. Candidates are found by MinHash and banding
(Broder 1997), which finds a pair at the threshold with a probability of 0.99, and a more similar pair almost surely. Candidates are
then compared exactly, so nothing below the threshold is dropped.

Rows are processed from the highest reward to the lowest, earlier ones first. A row is dropped if it is near one that stays, so no two
remaining rows are near each other. A stage sees one batch of groups and does not search the buffer. Texts of fewer than `n` words
are compared as wholes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome
from operators.experience.dedup_exact import best_first
from operators.groups import Groups
from operators.text.minhash import band_size, bands, signatures
from operators.text.ngrams import Unit, distinct, ngrams


class DedupNear(Operator, revision=1):
    """Drops each row that is near a better or earlier one; a row whose text is null or has no word is near no other."""

    class Config(StageConfig):
        """How similar rows must be, and where they are searched."""

        threshold: float = Field(0.8, gt=0, le=1, description="Smallest Jaccard similarity of a copy.")
        n: int = Field(5, ge=1, le=50, description="Words (or characters) in an n-gram.")
        unit: Unit = Field("word", description="Whether n-grams consist of words or of characters.")
        column: str = Field("response", description="The text column.")
        scope: Literal["group", "batch"] = Field("group", description="Where near copies are searched.")

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.reads = frozenset({"group_id", "experience_id", "reward", self.config.column})

    def apply(self, table: pa.Table) -> StageOutcome:
        texts, num_rows = table[self.config.column].combine_chunks(), table.num_rows
        sets = _sets(texts, self.config.n, self.config.unit)
        hashes, rows = (
            np.concatenate(sets) if sets else np.empty(0, np.uint64),
            np.repeat(np.arange(num_rows), [len(s) for s in sets]),
        )
        band = bands(signatures(hashes, rows, num_rows), band_size(self.config.threshold))
        if self.config.scope == "group":
            with np.errstate(over="ignore"):
                band += (Groups.of(table).group_N.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F))[:, None]
        ids = table["experience_id"].to_pylist()
        reasons: list[str | None] = [None] * num_rows
        for row, (near, similarity) in self._near(sets, band, best_first(table).tolist()).items():
            reasons[row] = f"{self.config.column} is {similarity:.2f} similar to that of experience {ids[near]}"
        return StageOutcome(pa.array(reasons, pa.string()))

    def _near(
        self, sets: list[npt.NDArray[np.uint64]], band: npt.NDArray[np.uint64], order: list[int]
    ) -> dict[int, tuple[int, float]]:
        """Return row to drop -> the row that stays in its place, and their similarity."""
        # A band with a single row has no candidates; most rows are alone in all their bands.
        values, counts = np.unique(band, return_counts=True)
        shared = np.isin(band, values[counts > 1])
        kept: dict[int, list[int]] = defaultdict(list)
        near_rows: dict[int, tuple[int, float]] = {}
        some = shared.any(axis=1) & np.array([len(one) > 0 for one in sets], np.bool_)
        for row in (row for row in order if some[row]):
            keys = band[row][shared[row]].tolist()
            candidates = {other: None for key in keys for other in kept.get(key, ())}
            near = self._nearest(sets, row, candidates)
            if near is not None:
                near_rows[row] = near
                continue
            for key in keys:
                kept[key].append(row)
        return near_rows

    def _nearest(
        self, sets: list[npt.NDArray[np.uint64]], row: int, candidates: dict[int, None]
    ) -> tuple[int, float] | None:
        for other in candidates:
            similarity = _jaccard(sets[row], sets[other])
            if similarity >= self.config.threshold:
                return other, similarity
        return None


def _sets(texts: pa.Array, n: int, unit: Unit) -> list[npt.NDArray[np.uint64]]:
    """Return the sorted n-grams of each text; a text of fewer than n words is a single one: its words in order."""
    hashes, rows = distinct(*ngrams(texts, n, unit))
    sets = np.split(hashes, np.searchsorted(rows, np.arange(1, len(texts)))) if len(texts) else []
    short = [row for row, one in enumerate(sets) if not len(one)]
    if short:
        wanted = texts.take(pa.array(short))
        for length in range(1, n):
            hashes_of_words, of = ngrams(wanted, length, unit)
            single = np.bincount(of, minlength=len(short)) == 1
            for value, position in zip(hashes_of_words.tolist(), of.tolist()):
                if single[position]:
                    sets[short[position]] = np.array([value >> 24], np.uint64)
    return sets


def _jaccard(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> float:
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)
