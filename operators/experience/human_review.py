"""Ask a person about some rows before they are trained on.

    - human_review: {where: "reward BETWEEN 0.3 AND 0.7", sample: 0.05, otherwise: pass}
    - human_review: {name: tone, question: "Is it polite?", timeout: 2 h, otherwise: drop}
    - human_review: {kind: polite, wanted: 3, decide: majority}

Such a row waits together with its whole group. `rft label queue` and the view `rft.v_review_queue` list the waiting rows. Two things are
answers: a new reward (`rft label set`, `rft label import`, `UPDATE rft.experience SET reward`), with which the row passes; or
`UPDATE rft.review SET answer = 'pass'` or `'drop'`. Without an answer, `otherwise` applies from the deadline on, by the database's
clock, whether or not a process runs at that moment. Rows that a person has already labelled are not asked about.

With `kind`, annotations of that kind are the answers: `wanted` accounts must annotate the row, then the rule `decide` applies. An annotation
passes if it is true, a number of at least `least`, or a choice among `passing`. majority: more than half pass (half: `otherwise`); mean: the mean
is at least `least`; all: every one passes; adjudicated: they agree, or an adjudication decides. An adjudication always decides alone.

A hash of the question's name and the experience's id decides which rows belong to the sample, the same in every run and version.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import Field, field_validator, model_validator

from operators.base import Operator, Panel, Review, StageConfig, StageOutcome
from operators.sql.expression import Expression

_TEN_YEARS_S = 10 * 365.25 * 86400.0
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class HumanReview(Operator, revision=1):
    """Makes rows wait for a person; drops those that are answered with `drop`."""

    class Config(StageConfig):
        """`where`, `sample`: which rows; `timeout`, `otherwise`: what applies without an answer; `name`, `question`: the question."""

        where: str | None = Field(default=None, description="Condition over the columns; all rows by default.")
        sample: float = Field(default=1.0, gt=0, le=1, description="Share of these rows that is asked about.")
        timeout: float = Field(
            default=86400.0,
            gt=0,
            le=_TEN_YEARS_S,
            description="Time to answer: seconds, or a number with s, min, h or d.",
        )
        otherwise: Literal["pass", "drop"] = Field(
            default="pass", description="The answer that applies if none is given in time."
        )
        name: str = Field(
            default="review",
            min_length=1,
            description="Name of the question; an experience is asked each question once.",
        )
        question: str = Field(
            default="Is this reward right?", min_length=1, description="The text shown to the person."
        )
        kind: str | None = Field(
            default=None,
            pattern=r"^[a-z][a-z0-9_]{0,62}$",
            description="Kind of label (bool, number or choice) whose annotations answer; without it, a reward or an answer does.",
        )
        wanted: int = Field(default=1, ge=1, le=100, description="Number of accounts that must annotate a row.")
        decide: Literal["majority", "mean", "all", "adjudicated"] = Field(
            default="majority", description="Rule that decides from their annotations."
        )
        least: float = Field(
            default=0.5,
            allow_inf_nan=False,
            description="A number passes if it is at least this; true is 1, false is 0.",
        )
        passing: list[str] | None = Field(default=None, min_length=1, description="Choices that pass.")

        @model_validator(mode="after")
        def _kind_of_panel(self) -> HumanReview.Config:
            given = {"wanted", "decide", "least", "passing"} & self.model_fields_set
            if self.kind is None and given:
                raise ValueError(f"{', '.join(sorted(given))}: needs kind, the kind of label that people annotate with")
            return self

        @field_validator("timeout", mode="before")
        @classmethod
        def _seconds(cls, value: Any) -> Any:
            if not isinstance(value, str):
                return value
            match = re.fullmatch(r"\s*([0-9.]+)\s*(s|min|h|d)?\s*", value)
            if not match:
                raise ValueError("write a number of seconds, or a number with s, min, h or d, such as 2 h")
            return float(match[1]) * _UNITS[match[2] or "s"]

    rowwise = True

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.asks = frozenset({self.config.name})
        self._where = Expression(self.config.where, pa.bool_()) if self.config.where else None
        if self._where is not None:
            self.rowwise = self._where.rowwise
        self.reads = frozenset({"reviews", "labelled"}) | (self._where.columns if self._where else frozenset())

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        if self._where is not None:
            self._where.bind(schema)
        return super().validate_schema(schema)

    def apply(self, table: pa.Table) -> StageOutcome:
        wanted = [True] * table.num_rows
        if self._where is not None:
            wanted = pc.fill_null(self._where.evaluate(table), False).to_pylist()
        config = self.config
        panel = None
        if config.kind is not None:
            passing = None if config.passing is None else tuple(config.passing)
            panel = Panel(config.kind, config.wanted, config.decide, config.least, passing)
        review = Review(config.name, config.question, config.timeout, config.otherwise, panel)
        waiting: dict[int, Review] = {}
        reasons: list[str | None] = [None] * table.num_rows
        rows = zip(table["experience_id"].to_pylist(), table["reviews"].to_pylist(), table["labelled"].to_pylist())
        for row, (experience_id, reviews, labelled) in enumerate(rows):
            state = json.loads(reviews).get(self.config.name) if reviews else None
            if state == "drop":
                reasons[row] = f"review {self.config.name!r}: drop"
            elif state == "waiting" or (
                state is None and (panel or not labelled) and wanted[row] and self._sampled(experience_id)
            ):
                waiting[row] = review
        return StageOutcome(pa.array(reasons, pa.string()), waiting=waiting)

    def close(self) -> None:
        if self._where is not None:
            self._where.close()

    def _sampled(self, experience_id: int) -> bool:
        place = xxhash.xxh3_64_intdigest(f"{self.config.name}/{experience_id}".encode())
        return place < float(self.config.sample) * 2**64
