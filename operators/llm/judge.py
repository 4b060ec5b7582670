"""Base of stages in which a model judges responses: a template, and per row a score, an explanation and an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import pyarrow as pa
from pydantic import Field

from operators.base import StageOutcome
from operators.llm.client import AskingConfig, AskingOperator, chat
from operators.llm.templates import Template, columns_of

ColumnWord = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""First word of the columns' names."""
Judged = tuple[float | None, str | None, str | None]
"""For a row: its score, the explanation, and why there is no score."""


class JudgeConfig(AskingConfig):
    """Arguments of every judge. `template`, `system`: texts of the chat; `column`: first word of the columns' names."""

    template: str
    system: str | None = None
    column: ColumnWord


class Judge(AskingOperator):
    """A judge with a `JudgeConfig`, whose scores are `<column>_score`, `<column>_<behind>` and `<column>_error`.

    Attributes:
        behind: name of its second column.
    """

    behind: ClassVar[str]

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
