"""Detect the language of a text.

    - language_score: {}
    - language_filter: {keep: [en, de]}

Codes as in ISO 639. py3langid is a naive Bayes classifier over byte n-grams for more than a hundred languages that includes its model (langid.py:
Lui and Baldwin 2012). It works offline and is deterministic. A text without any language, such as a formula, is `zxx`. The probability grows with
the length of the text. It costs about 0.1 ms per kilobyte, and the score is stored, so a text is classified once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig, StageContext, StageOutcome
from rftdata.errors import ConfigError, PluginError


class LanguageScore(Operator, revision=1):
    """Scores `language` and `language_probability` (0 to 1); both null where the text is null or blank."""

    class Config(StageConfig):
        """The text column, and the possible languages."""

        column: str = Field("response", description="The text column.")
        among: tuple[str, ...] | None = Field(
            None, min_length=2, description="Codes of the possible languages; all by default."
        )
        max_characters: int = Field(1000, ge=20, description="Only this many characters of the text are read.")

    rowwise = True
    prepare_timeout_s = None  # loads a model

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.reads = frozenset({self.config.column})
        self.scores = {"language": pa.string(), "language_probability": pa.float64()}
        self._identifier: Any = None

    def prepare(self, context: StageContext) -> None:
        try:
            langid = importlib.import_module("py3langid.langid")
        except ImportError as error:
            raise PluginError("it needs the package py3langid", todo="pip install 'rftdata[language]'") from error
        identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        if self.config.among is not None:
            unknown = sorted(set(self.config.among) - set(identifier.labels))
            if unknown:
                raise ConfigError(f"unknown language {unknown[0]!r}", allowed=", ".join(sorted(identifier.labels)))
            identifier.set_languages(list(self.config.among))
        self._identifier = identifier

    def spec(self) -> dict[str, Any]:
        try:
            version = importlib.metadata.version("py3langid")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        return {**super().spec(), "py3langid": version}

    def apply(self, table: pa.Table) -> StageOutcome:
        if self._identifier is None:
            self.prepare(StageContext())
        languages = [self._classify(text) for text in table[self.config.column].to_pylist()]
        return StageOutcome.keep_all(
            table.num_rows,
            {
                "language": pa.array([language for language, _ in languages], pa.string()),
                "language_probability": pa.array([probability for _, probability in languages], pa.float64()),
            },
        )

    def _classify(self, text: str | None) -> tuple[str | None, float | None]:
        if text is None or not text.strip():
            return None, None
        language, probability = self._identifier.classify(text[: self.config.max_characters])
        return str(language), float(probability)
