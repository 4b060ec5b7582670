"""Base of stages in which a model judges responses: a template, and per row a score, an explanation and an error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import pyarrow as pa
from pydantic import Field

from operators.base import StageOutcome
from operators.llm.client import AskingConfig, AskingOperator, chat
from operators.llm.templates import Template, columns_of

ColumnWord = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""First word of the columns' names."""
Judged = tuple[float | None, str | None, str | None]
"""For a row: its score, the explanation, and why there is no score."""


class Suggestion(NamedTuple):
    """What a judge suggests as a label of a row: the value, why, and how sure it is, from 0 to 1 (None: unknown)."""

    value: Any
    reason: str | None
    confidence: float | None = None


class JudgeConfig(AskingConfig):
    """Arguments of every judge. `template`, `system`: texts of the chat; `column`: first word of the columns' names; `suggests`: kind of label of
    experiences as which new scores are suggested to people."""

    template: str
    system: str | None = None
    column: ColumnWord
    suggests: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]{0,62}$")


class Judge(AskingOperator):
    """A judge with a `JudgeConfig`, whose scores are `<column>_score`, `<column>_<behind>` and `<column>_error`.

    Attributes:
        behind: name of its second column.
        suggested_types: types of labels that it can suggest: number, the score; text, the explanation; rubric, the grades.
    """

    behind: ClassVar[str]
    suggested_types: ClassVar[frozenset[str]] = frozenset({"number", "text"})

    def __init__(self, config: Any, template: Template, reads: Iterable[str] = ()) -> None:
        """`reads`: columns in addition to those of the template's placeholders."""
        super().__init__(config)
        self._template = template
        self.reads = columns_of(template.names) | frozenset(reads)
        word = config.column
        self.error_column = f"{word}_error"
        self.scores = {
            f"{word}_score": pa.float64(),
            f"{word}_{self.behind}": pa.string(),
            self.error_column: pa.string(),
        }
        self.counted_as = word
        nothing = template.fill(dict.fromkeys(template.names, ""))
        config.budget.check_allows(chat(config.system, nothing), config.max_tokens)

    def judged(self, rows: Sequence[Judged]) -> StageOutcome:
        """Keep all rows, with these columns."""
        columns = zip(*rows, strict=True) if rows else ([], [], [])
        named = zip(self.scores.items(), columns, strict=True)
        return StageOutcome.keep_all(len(rows), {name: pa.array(values, kind) for (name, kind), values in named})

    def suggestion(self, scores: Mapping[str, Any], type: str) -> Suggestion | None:
        """Return the label of a type that the scores of a row suggest; None if they suggest none."""
        word = self.config.column
        score, behind = scores.get(f"{word}_score"), scores.get(f"{word}_{self.behind}")
        if score is None:
            return None
        if type == "number":
            return Suggestion(score, behind, self.confidence(behind))
        if not behind:
            return None
        return Suggestion(json.loads(behind) if type == "rubric" else behind, None, self.confidence(behind))

    def confidence(self, behind: str | None) -> float | None:
        """Return how sure the judge is of a row, by its second column; None if it does not know."""
        return None

    def spec(self) -> dict[str, Any]:
        """Return the arguments; without `suggests` if there is none, so that the version of a chain stays."""
        return {key: value for key, value in super().spec().items() if key != "suggests" or value is not None}

    def score_spec(self) -> dict[str, Any]:
        return {key: value for key, value in self.spec().items() if key != "suggests"}
