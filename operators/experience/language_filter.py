"""Keep rows in some languages; a `language_score` stage before it detects the language.

    - language_score: {column: response}
    - language_filter: {keep: [en]}
    - language_filter: {keep: [en, de], min_probability: 0.7, "null": keep}

Short texts and lists of numbers get a language of low probability. Look at some with `rft pipeline preview` before you choose a bound.
"""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome
from rftdata.errors import ConfigError


class LanguageFilter(Operator, revision=1):
    """Drops each row whose `language` is not listed, or is less probable than `min_probability`."""

    class Config(StageConfig):
        """Which languages stay."""

        keep: tuple[str, ...] = Field(min_length=1, description="ISO 639 codes of the languages that stay.")
        min_probability: float = Field(0.0, ge=0, le=1, description="Smallest `language_probability` that stays.")
        null: Literal["drop", "keep"] = Field(
            "drop", description="Whether rows without a language (null or blank text) stay."
        )

    reads = frozenset({"language", "language_probability"})
    rowwise = True

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        if "language" not in schema.names:
            raise ConfigError(
                "no stage before it detects the language of a text", todo="put `- language_score: {}` before it"
            )
        return super().validate_schema(schema)

    def apply(self, table: pa.Table) -> StageOutcome:
        language, probability = (table[name].combine_chunks() for name in ("language", "language_probability"))
        unknown = language.is_null()
        language_name = pc.fill_null(language, "")
        other = pc.invert(pc.is_in(language_name, value_set=pa.array(self.config.keep)))
        unsure = pc.less(pc.fill_null(probability, 0.0), self.config.min_probability)
        percent = pc.cast(pc.round(pc.fill_null(probability, 0.0), 2), pa.string())
        reasons = pc.if_else(
            unsure, pc.binary_join_element_wise("language is", language_name, "with probability", percent, " "), None
        )
        reasons = pc.if_else(other, pc.binary_join_element_wise("language is", language_name, " "), reasons)
        without = None if self.config.null == "keep" else "the text has no language"
        return StageOutcome(pc.cast(pc.if_else(unknown, pa.scalar(without, pa.string()), reasons), pa.string()))
