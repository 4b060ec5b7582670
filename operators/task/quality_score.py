"""How well a task is written, by cheap statistics of its prompt: the column and feature `quality`, in [0, 1].

    quality = mean of the measures that apply, each in [0, 1] and 1 where it is good

    alnum            share of letters and digits among the characters that are not white space
    special          1 − share of characters that are neither letter, digit, white space nor common punctuation
    char_repetition  1 − share of the prompt's character n-grams (n = char_ngram) that occur more than once
    word_repetition  1 − the same for word n-grams (n = word_ngram)
    length           min(1, words / min_words, max_words / words)
    any of `columns` its place in the given range: 0 at the first bound, 1 at the second

A measure does not apply to a prompt too short for its n-grams. The default limits suit questions; texts full of formulas are better
scored with `measures: [char_repetition, length]`. The statistics only see form; add a model's grade with `columns`.

    - quality_score: {}
    - quality_score: {measures: [length, word_repetition], min_words: 5, columns: {judge: [1, 10]}}
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from operators.base import Operator, StageConfig, StageOutcome
from operators.task.numbers import as_array, columns_for, keys_for, numbers, place_in_range

Measure = Literal["alnum", "special", "char_repetition", "word_repetition", "length"]
_COMMON = frozenset(string.whitespace + ".,;:!?'\"()-+*/=%$")


class QualityScore(Operator, revision=1):
    """Adds `quality`, by the formula above."""

    class Config(StageConfig):
        """The measures and their limits."""

        measures: tuple[Measure, ...] = Field(
            ("alnum", "special", "char_repetition", "word_repetition", "length"),
            description="Which statistics of the prompt count.",
        )
        columns: dict[str, tuple[float, float]] = Field(
            default_factory=dict,
            description="Name of a number -> [worst, best]: its place in this range counts like a measure.",
        )
        char_ngram: int = Field(10, ge=1, description="Length of character n-grams.")
        word_ngram: int = Field(3, ge=1, description="Length of word n-grams.")
        min_words: int = Field(3, ge=1, description="Fewer words lower the quality.")
        max_words: int = Field(400, ge=1, description="More words lower the quality.")

        @model_validator(mode="after")
        def _measures_something(self) -> QualityScore.Config:
            if not self.measures and not self.columns:
                raise ValueError("name a measure or a column")
            if self.min_words > self.max_words:
                raise ValueError(f"min_words {self.min_words} is above max_words {self.max_words}")
            for name, (worst, best) in self.columns.items():
                if worst == best:
                    raise ValueError(f"the range of {name} is empty: [{worst:g}, {best:g}]")
            return self

    reads = frozenset({"prompt"})
    scores: Mapping[str, pa.DataType] = {"quality": pa.float64()}
    rowwise = True

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        self.reads = frozenset({"prompt"}) | columns_for(self.config.columns, schema)
        self.keys = keys_for(self.config.columns, schema)
        return super().validate_schema(schema)

    def apply(self, table: pa.Table) -> StageOutcome:
        measures = [self._measure(name) for name in self.config.measures]
        rows = [[measure(text or "") for measure in measures] for text in table["prompt"].to_pylist()]
        columns = [np.array(values, np.float64) for values in zip(*rows)]
        for name, (worst, best) in self.config.columns.items():
            columns.append(place_in_range(numbers(table, name), worst, best))
        stacked = np.stack(columns) if columns and table.num_rows else np.zeros((1, table.num_rows))
        has_value = ~np.isnan(stacked)
        quality = np.where(has_value, stacked, 0.0).sum(axis=0) / np.maximum(has_value.sum(axis=0), 1)
        quality[~has_value.any(axis=0)] = np.nan
        return StageOutcome.keep_all(table.num_rows, {"quality": as_array(quality)})

    def _measure(self, name: str) -> Callable[[str], float]:
        config: Any = self.config
        return {
            "alnum": _alnum,
            "special": _special,
            "char_repetition": lambda text: 1.0 - _repetition(text, config.char_ngram),
            "word_repetition": lambda text: 1.0 - _repetition(text.casefold().split(), config.word_ngram),
            "length": lambda text: _length(len(text.split()), config.min_words, config.max_words),
        }[name]


def _alnum(text: str) -> float:
    characters = [character for character in text if not character.isspace()]
    return sum(map(str.isalnum, characters)) / len(characters) if characters else 0.0


def _special(text: str) -> float:
    if not text:
        return 0.0
    return 1.0 - sum(
        not (character.isalnum() or character in _COMMON or character.isspace()) for character in text
    ) / len(text)


def _repetition(items: Sequence[str], n: int) -> float:
    """Return the share of n-grams that occur more than once; NaN if there is none."""
    count = len(items) - n + 1
    if count < 1:
        return float("nan")
    grams = Counter(tuple(items[i : i + n]) if not isinstance(items, str) else items[i : i + n] for i in range(count))
    return sum(times for times in grams.values() if times > 1) / count


def _length(words: int, least: int, most: int) -> float:
    return min(1.0, words / least, most / words) if words else 0.0
