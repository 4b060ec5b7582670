"""Keep rows in some languages; `language_score` before it says which language each is in.

    - language_score: {column: response}
    - language_filter: {keep: [en]}
    - language_filter: {keep: [en, de], min_probability: 0.7, "null": keep}

Short texts and lists of numbers have languages of low probability: look at some with `rft pipeline preview` before choosing a bound.
"""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome
from rftdata.errors import ConfigError


class LanguageFilter(Operator, revision=1):
    """Drops each row whose `language` is not listed or less probable than `min_probability`."""

    class Config(StageConfig):
        """Which languages stay."""

        keep: tuple[str, ...] = Field(min_length=1, description="ISO 639 codes of the languages that stay.")
        min_probability: float = Field(0.0, ge=0, le=1, description="Least `language_probability` that stays.")
        null: Literal["drop", "keep"] = Field(
            "drop", description="What becomes of rows without a language: the text is null or blank."
        )

    reads = frozenset({"language", "language_probability"})
    rowwise = True

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        if "language" not in schema.names:
            raise ConfigError(
                "no stage before it says which language a text is in", todo="put `- language_score: {}` before it"
            )
        return super().validate_schema(schema)

    def apply(self, table: pa.Table) -> StageOutcome:
        language, probability = (table[name].combine_chunks() for name in ("language", "language_probability"))
        unknown = language.is_null()
        shown = pc.fill_null(language, "")
        other = pc.invert(pc.is_in(shown, value_set=pa.array(self.config.keep)))
        unsure = pc.less(pc.fill_null(probability, 0.0), self.config.min_probability)
        percent = pc.cast(pc.round(pc.fill_null(probability, 0.0), 2), pa.string())
        reasons = pc.if_else(
            unsure, pc.binary_join_element_wise("language is", shown, "with probability", percent, " "), None
        )
        reasons = pc.if_else(other, pc.binary_join_element_wise("language is", shown, " "), reasons)
        without = None if self.config.null == "keep" else "the text has no language"
        return StageOutcome(pc.cast(pc.if_else(unknown, pa.scalar(without, pa.string()), reasons), pa.string()))
