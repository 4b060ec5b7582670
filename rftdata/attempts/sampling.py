"""How a trainer samples from the buffer: the configuration and its representation in the database.

A policy has one or more lanes. A lane determines which groups it contains (all, those of a source or a taskset, or those drawn
before), in which order they are drawn, how often each may be drawn, and its share of a batch. The terms are those of Reverb (Cassirer et
al. 2021, arXiv 2102.04736). The functions `rft.draw_groups` and `rft.place_items` implement it in the transaction of the draw, so
all readers see the same. See docs/decisions/0014.

This module keeps no state: the policy is stored in `rft.sampler` and `rft.sampler_lane`, the draws in `rft.draw`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import psycopg
from pydantic import Field, model_validator

from rftdata.config import Section
from rftdata.errors import ConfigError
from rftdata.postgres.database import Database, fetch, limit_statements

Order = Literal["fifo", "newest", "uniform", "prioritized", "rank"]
Source = Literal["explorer", "human", "import", "synthesis", "replay"]


class LaneConfig(Section):
    """One source of a mixture; settings that it omits are those of the section `sampling`."""

    source: Source | None = Field(
        None,
        description="Take groups of this source; replay: groups that were drawn as often as their own source allows.",
    )
    taskset: str | None = Field(None, min_length=1, description="Take groups of this taskset.")
    ratio: float = Field(gt=0, description="Share of a batch, relative to the other sources.")
    order: Order | None = Field(None, description="As `order` of the section, for this source.")
    max_times_sampled: int | None = Field(None, ge=0, description="As in the section, for this source; 0: no limit.")
    cooldown_steps: int | None = Field(None, ge=1, description="As in the section, for this source.")

    @model_validator(mode="after")
    def _takes_something(self) -> LaneConfig:
        if (self.source is None) == (self.taskset is None):
            raise ValueError("a source of a mixture must have either a source or a taskset")
        return self

    @property
    def name(self) -> str:
        return self.source or f"taskset {self.taskset}"


class PriorityConfig(Section):
    """Prioritised sampling: Schaul et al. 2016, "Prioritized Experience Replay", arXiv 1511.05952."""

    formula: str | None = Field(
        None,
        min_length=1,
        description="Priority as an SQL expression over the columns of rft.formula_columns, evaluated when a group is written, "
        "labelled and drawn; the pipeline's or trainer's priority by default.",
    )
    exponent: float = Field(
        0.6,
        ge=0,
        le=10,
        description="Weight = priority, or 1 / rank, to this power (α): 0 is uniform, 1 proportional.",
    )
    importance_exponent: float = Field(
        0.4,
        ge=0,
        le=1,
        description="Loss weight = (1 / probability) to this power (β), over the greatest of the batch.",
    )


class RateLimitConfig(Section):
    """Reverb's rate limiter: a draw beyond `ratio` samples per insert waits. Samples and inserts are groups."""

    ratio: float = Field(
        gt=0, description="Groups drawn per group that became ready; explorers plan accordingly fewer."
    )
    min_size_to_sample: int = Field(1, ge=1, description="Groups that must have become ready before the first draw.")
    error_buffer: float | None = Field(
        None, gt=0, description="Samples by which the ratio may be exceeded; ratio · min_size_to_sample by default."
    )

    @model_validator(mode="after")
    def _can_ever_sample(self) -> RateLimitConfig:
        if self.error_buffer is not None and self.error_buffer < max(1.0, self.ratio):
            raise ValueError(
                f"an error_buffer ({self.error_buffer:g}) below max(1, ratio) = {max(1.0, self.ratio):g} stops every draw between "
                "two inserts"
            )
        return self

    @property
    def tolerance(self) -> float:
        return self.error_buffer or max(1.0, self.ratio * self.min_size_to_sample)


class SourceConfig(Section):
    """The stored selection that a run trains on instead of its own groups."""

    sql: str = Field(
        pattern=r"\S",
        description="One SELECT of experience_id, pair_id or group_id (and priority); the run trains on the result of the query when the "
        "run is created.",
    )
    pin_labels: bool = Field(
        True,
        description="Use rewards as they were when the run was created; false: as they are at the draw, so batches may change.",
    )
    include_dropped: bool = Field(
        False,
        description="Also train on what the chain of an experience's run dropped. By default such experiences, pairs with one, and such experiences of "
        "groups are left out.",
    )


class SamplingConfig(Section):
    order: Order = Field(
        "fifo",
        description="Which ready groups are drawn first: the oldest, the newest, a random one, by priority, or by rank of priority.",
    )
    max_staleness: int = Field(
        4,
        ge=0,
        description="Age, in trainer steps, of the oldest policy from which a drawn group may come; older groups age out.",
    )
    over_sampling: float = Field(
        0.0,
        ge=0,
        le=64,
        description="Share of a batch that explorers sample in addition: the trainer takes the groups that are ready first, and the others serve"
        " the next steps, so that it does not wait for the slowest. 1 with sync.offset 0 is a window of two batches.",
    )
    max_times_sampled: int = Field(1, ge=0, description="How often one group may be drawn in one history; 0: no limit.")
    cooldown_steps: int = Field(1, ge=1, description="Minimum number of trainer steps between two draws of a group.")
    priority: PriorityConfig = PriorityConfig()
    samples_per_insert: RateLimitConfig | None = None
    mixture: list[LaneConfig] = Field(
        default_factory=list,
        description="Sources and their shares of a batch, exact over time. Groups that no source takes are not drawn.",
    )
    stratify: Literal["taskset"] | None = Field(
        None, description="taskset: every taskset has the same share of a batch."
    )
    source: SourceConfig | None = Field(
        None, description="Train on a stored selection, {sql: SELECT …}, instead of on groups sampled by this run."
    )
    epochs: int = Field(1, ge=1, le=32767, description="How often each row of the stored selection is trained on.")

    @model_validator(mode="after")
    def _epochs_are_of_a_selection(self) -> SamplingConfig:
        if self.epochs > 1 and self.source is None:
            raise ValueError(
                "epochs is the number of passes over a stored selection; set sampling.source, or remove epochs"
            )
        return self

    @model_validator(mode="after")
    def _surplus_stays_fresh(self) -> SamplingConfig:
        if self.window < 0:
            raise ValueError(
                f"with over_sampling ({self.over_sampling:g}) groups are trained on up to {math.ceil(self.over_sampling)} steps later, and "
                f"max_staleness ({self.max_staleness}) allows less; raise max_staleness, or lower over_sampling"
            )
        return self

    @model_validator(mode="after")
    def _selections_have_an_order_of_their_own(self) -> SamplingConfig:
        if self.source is None:
            return self
        # `fifo` is the default, and cannot be told from a value that was set to it.
        if self.order not in ("fifo", "uniform", "prioritized"):
            raise ValueError(
                f"order: {self.order} is for groups that explorers supply; with sampling.source it is uniform (each row once in an epoch) or "
                "prioritized"
            )
        if self.priority.formula is not None:
            raise ValueError(
                "priority.formula is for groups that explorers supply; with sampling.source, select a second column priority in the query"
            )
        useless = {
            "mixture": self.mixture,
            "stratify": self.stratify,
            "samples_per_insert": self.samples_per_insert,
            "over_sampling": self.over_sampling,
            "max_times_sampled": self.max_times_sampled != 1,
            "cooldown_steps": self.cooldown_steps != 1,
        }
        for key in (key for key, value in useless.items() if value):
            raise ValueError(
                f"{key} has no effect with sampling.source: the query chooses the rows, and epochs says how often each is trained on"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> SamplingConfig:
        if self.mixture and self.stratify:
            raise ValueError("mixture and stratify both divide a batch: name the tasksets in the mixture instead")
        names = [lane.name for lane in self.mixture]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"the mixture names {', '.join(doubled)} more than once")
        if names == ["replay"]:
            raise ValueError("a mixture of replay alone draws nothing, because only groups drawn before are replayed")
        orders = {self.order, *(lane.order for lane in self.mixture)}
        if self.priority != PriorityConfig() and not orders & {"prioritized", "rank"}:
            raise ValueError("priority has no effect without order: prioritized or rank")
        return self

    def fresh_share(self) -> float:
        """Return the number of new groups that explorers supply per group drawn."""
        supplied = [lane.ratio for lane in self.mixture if lane.source in (None, "explorer")]
        share = sum(supplied) / sum(lane.ratio for lane in self.mixture) if self.mixture else 1.0
        return share / (self.samples_per_insert.ratio if self.samples_per_insert else 1.0)

    @property
    def window(self) -> int:
        """The most trainer steps between the policy of a new group and the step for which it is planned; see `Pacing`."""
        return self.max_staleness - math.ceil(self.over_sampling)

    @property
    def is_fifo(self) -> bool:
        """Whether groups are drawn in the order of their planning, wherever they are drawn from: later ones change no earlier draw."""
        orders = [lane.order or self.order for lane in self.mixture] or [self.order]
        return set(orders) == {"fifo"}

    def policy(self, tasksets: Sequence[str] = (), formula: str | None = None) -> dict[str, Any]:
        """Return the rows of `rft.sampler` and `rft.sampler_lane`.

        Args:
            tasksets: the tasksets of the run, for `stratify`.
            formula: as `checked_formula` returned it.
        """
        limit = self.samples_per_insert
        lanes = [self._lane(lane.name, lane) for lane in self.mixture]
        if self.stratify:
            lanes = [self._lane(f"taskset {name}", LaneConfig(taskset=name, ratio=1)) for name in tasksets]
        return {
            "max_staleness": self.max_staleness,
            "formula": formula,
            "samples_per_insert": limit.ratio if limit else None,
            "min_size_to_sample": limit.min_size_to_sample if limit else 0,
            "error_buffer": limit.tolerance if limit else 0.0,
            "fresh_share": self.fresh_share(),
            "over_sampling": self.over_sampling,
            "lanes": lanes or [self._lane("all", None)],
        }

    def _lane(self, name: str, lane: LaneConfig | None) -> dict[str, Any]:
        def own(key: str) -> Any:
            value = getattr(lane, key, None)
            return getattr(self, key) if value is None else value

        return {
            "lane": name,
            "source": lane.source if lane and lane.source != "replay" else None,
            "taskset": lane.taskset if lane else None,
            "replay": bool(lane and lane.source == "replay"),
            "ratio": lane.ratio if lane else 1.0,
            "sample_order": own("order"),
            "max_times_sampled": own("max_times_sampled") or None,
            "cooldown_steps": own("cooldown_steps"),
            "priority_exponent": self.priority.exponent,
            "importance_exponent": self.priority.importance_exponent,
        }


def checked_formula(database: Database, formula: str | None, *, limit_s: float = 10.0) -> str | None:
    """Return a priority formula as `rft.checked_formula` prints it after parsing; nothing of it is executed or kept.

    The printed parse tree is stored and run later, never the text itself. The database checks it again when it is stored.

    Args:
        limit_s: seconds for constant parts, which PostgreSQL computes while it parses.

    Raises:
        ConfigError: the formula is not one expression over the columns of `rft.formula_columns` that uses only what is part of
            PostgreSQL; the message quotes the server.
    """
    if formula is None:
        return None
    with database.connection() as connection, connection.transaction(force_rollback=True):
        limit_statements(connection, limit_s)
        names = [row["name"] for row in fetch(connection, "formula_names")]
        try:
            return str(fetch(connection, "check_formula", formula=formula)[0]["formula"])
        except psycopg.Error as error:
            raise _formula_error(formula, names, error.diag.message_primary or str(error)) from error


def _formula_error(formula: str, columns: list[str], reason: str) -> ConfigError:
    return ConfigError(
        f"sampling.priority.formula is not an expression that can be computed for a group: {reason}",
        value=formula,
        allowed=f"arithmetic, functions and CASE over {', '.join(columns)}",
        todo="correct it",
    )
