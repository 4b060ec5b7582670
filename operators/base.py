"""The interface of a pipeline stage: a pure function from a batch of whole groups to one decision per row.

A stage gets an Arrow table with one row per experience. For every row it returns whether the row stays, the reason if not,
and the columns that change. It never filters, reorders or mutates the table: `operators.chain.chain` does that in one place,
so that counts, reasons and group rules are the same for every stage. The same table always gives the same outcome.

Scoring and deciding are separate stages. A scoring stage lists its columns in `scores`. Its results are stored per
experience and reused, so that a later threshold can change without computing them again. A stage that asks a person lists
the rows in `waiting`; a stage that creates tasks or experiences lists these in `created`.

Not here: storing verdicts and scores (the caller does), and finding the row on which a stage fails.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError, OperatorError
from rftdata.pipeline import records
from rftdata.pipeline.budget import MemoryUsage, UsageLedger
from rftdata.pipeline.records import CreatedAnswer as CreatedAnswer
from rftdata.pipeline.records import CreatedGroup as CreatedGroup
from rftdata.pipeline.records import CreatedTask as CreatedTask
from rftdata.pipeline.records import Panel as Panel
from rftdata.pipeline.records import Review as Review
from rftdata.user_code.time_limits import DEFAULT_S, LOADING_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BATCH_SCHEMA = records.BATCH_SCHEMA.append(pa.field("priority", pa.float64()))
"""The columns of a batch. `metrics` is JSON text; `priority` is added by the chain when the caller leaves it out."""

IDENTITY_COLUMNS = frozenset({"experience_id", "group_id", "rollout_index"})
"""The columns by which the chain counts and reports; no stage may change them."""


@dataclass(frozen=True)
class StageOutcome:
    """What one stage decided on a table of N rows.

    Attributes:
        reasons: N strings; null where the row stays, else why it is dropped, as a person will read it.
        columns: name -> N values, for changed or new columns. Values of dropped rows are ignored.
        waiting: row -> the question that a person is asked about it. Its whole group is decided later, from the first stage on.
        created: new tasks and experiences.
    """

    reasons: pa.Array
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    waiting: Mapping[int, Review] = field(default_factory=dict)
    created: Sequence[CreatedTask | CreatedGroup] = ()

    @classmethod
    def keep_all(cls, num_rows: int, columns: Mapping[str, pa.Array] | None = None) -> StageOutcome:
        """Keep every row."""
        return cls(pa.nulls(num_rows, pa.string()), columns or {})

    @classmethod
    def keep_where(cls, keep: pa.Array, reason: str | pa.Array) -> StageOutcome:
        """Keep rows where `keep` is true; drop those where it is false or null with `reason` (one for all, or N)."""
        dropped = pc.invert(pc.fill_null(keep, False))
        return cls(pc.if_else(dropped, reason, pa.scalar(None, pa.string())))


@dataclass(frozen=True)
class Drop:
    """The result of a row function that drops its row; created by `drop`."""

    reason: str


def drop(reason: str) -> Drop:
    """Drop the row from within a row function, with a reason that people read in the verdict."""
    if not isinstance(reason, str) or not reason.strip():  # type: ignore[redundant-expr]  # the user may pass anything
        raise ValueError(f"drop() takes a reason, a text that is not empty (got {reason!r})")
    return Drop(reason)


class UnavailableError(OperatorError):
    """Something that a stage depends on does not respond at all, so a smaller batch would fail as well.

    Loading tasks stops at once with this error; the next load decides on the tasks. Any stage may raise it.
    """


class StageConfig(BaseModel):
    """Base of every operator's `Config`: unknown keys are errors, and so are NaN and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Messages = Sequence[Mapping[str, Any]]
Embed = Callable[[str | None, int, Sequence[int], Sequence[str]], "NDArray[np.float32]"]
"""(model or None for the policy, maximum tokens per text, task ids, texts) -> one vector per text, [texts, dimensions]."""

ReadArrays = Callable[[Sequence[int], str], "list[NDArray[Any] | None]"]
"""(experience ids, name of an array) -> the array of each in its own shape, None where there is none."""


@dataclass(frozen=True)
class StageContext:
    """What a stage may use of the process that runs it.

    Attributes:
        base_dir: folder of the configuration file; relative paths start there.
        generate: answers chats with the run's policy: (chats, max_tokens, temperature) -> for each chat its text, or the error of
            that chat alone; None where there is no policy.
        model_path: the run's model, for a tokenizer or hidden states.
        usage: compares what stages spend on model calls with their budgets; by default counted in this process only.
        embed: returns the vectors of tasks' texts, computed once and stored; None unless the batch consists of tasks.
        read_taskset: reads a task set of the buffer, with the columns task_key, prompt and answer; None without a buffer.
        policy_version: returns the name of the weights that `generate` uses now. None if unknown; scores by them are then not reused.
        read_arrays: reads an experience's arrays from its segment; None without a buffer.
    """

    base_dir: Path = field(default_factory=Path.cwd)
    generate: Callable[[Sequence[Messages], int, float], Sequence[str | Exception]] | None = None
    model_path: str | None = None
    usage: UsageLedger = field(default_factory=MemoryUsage)
    embed: Embed | None = None
    read_taskset: Callable[[str], pa.Table] | None = None
    policy_version: Callable[[], str] | None = None
    read_arrays: ReadArrays | None = None


@dataclass(frozen=True)
class Place:
    """The position of a stage in its chain.

    Attributes:
        name: its name in verdicts and reports, such as `llm_judge#2`.
        base_dir: folder of the configuration file; relative paths in the stage's arguments start there.
        behind: the stages after it, in order. Only attributes that their constructors set are available.
    """

    name: str = ""
    base_dir: Path = field(default_factory=Path)
    behind: Sequence[Operator] = ()


class Operator(ABC):
    """One stage of a chain.

    A subclass lists its columns, sets `Config` to the class of its arguments, and implements `apply`. The constructor does
    nothing slow. Large imports, models and connections are opened in `prepare`, which the chain calls before the first batch.

    Attributes:
        reads: columns that `apply` reads; it gets these and the identity columns. None: all columns.
        writes: columns that it changes or adds; None: any.
        scores: columns that it adds, with their types. Their values depend only on the columns read, the arguments and `depends_on`. They
            are stored per experience and reused while these are unchanged. The `apply` of such a stage drops nothing; `decide`
            may. Unless the stage is `rowwise`, a row's score depends on all rows of its group that are still in the batch.
        error_column: the score column with the reason why a row has no score; such a row is scored again the next time.
        rowwise: every row is decided independently, so a batch may be cut anywhere and its parts run concurrently.
        keys: names that it looks up among the features and metadata of tasks, which are not columns of the batch.
        asks: names of the questions it may ask people. None: not known in advance, so the answers are always read for it.
        group_column: column whose equal values form a group. Unless the stage is `rowwise`, the rows of a group are scored together.
            A stage that writes this column starts a grouping, to which the later stages with the same `group_column` belong.
        replaces_with: fields of the tasks that it creates in place of all rows, such as `metadata.summary`; empty where rows continue.
            These tasks skip the stage and its grouping, so no other stage may read columns that the grouping adds.
        answers: number of answers in a group that it creates; None: it creates no groups, or the number varies.
        timeout_s: longest duration of one call of `apply`, unless the stage sets `run.timeout_s`.
        seconds_per_row: added to `timeout_s` for each row of the call, for stages that run or ask a model.
        prepare_timeout_s: longest duration of `prepare`; None: no limit, for loading or fetching something large.
        remedy: advice for a run in which the stage drops many rows, other than changing stages; shown beside their share.
        revision: a number that the author raises when the rules change, set as `class Mine(Operator, revision=2)`. None (also for subclasses):
            any edit of the file changes the rules and so the version of the chain.
        place: its position in the chain; set after the constructor.
    """

    Config: ClassVar[type[StageConfig]] = StageConfig
    reads: frozenset[str] | None = frozenset()
    writes: frozenset[str] | None = frozenset()
    scores: Mapping[str, pa.DataType] = {}
    error_column: str | None = None
    rowwise: bool = False
    keys: frozenset[str] = frozenset()
    asks: frozenset[str] | None = frozenset()
    group_column: str = "group_id"
    replaces_with: Sequence[str] = ()
    answers: int | None = None
    timeout_s: float = DEFAULT_S
    seconds_per_row: float = 0.0
    prepare_timeout_s: float | None = LOADING_S
    remedy: ClassVar[str | None] = None
    revision: ClassVar[int | None] = None
    place: Place = Place()

    def __init_subclass__(cls, *, revision: int | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.revision = revision

    def __init__(self, config: StageConfig) -> None:
        self.config: Any = config

    @classmethod
    def from_args(cls, args: object) -> Operator:
        """Build from the value under the stage's name in YAML: a mapping, or nothing.

        Raises:
            ConfigError: an unknown key (with the nearest one) or a value of the wrong type.
        """
        return cls(parse_section(cls.Config, args))

    @property
    def base_dir(self) -> Path:
        """Folder of the configuration file, where relative paths in the arguments start. Set after the constructor."""
        return self.place.base_dir

    def join_chain(self, place: Place) -> None:
        """Take a position in a chain. Called once, after all stages are constructed and before any other method."""
        self.place = place

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        """Check that the columns which this stage reads exist, and return the schema that the next stage sees.

        A stage that adds columns other than its scores extends this method, so that later stages may read them.

        Raises:
            ConfigError: a column is missing.
        """
        missing = sorted((self.reads or frozenset()) - set(schema.names))
        if missing:
            raise ConfigError(
                f"reads the column {missing[0]!r}, which the batch does not have", allowed=", ".join(schema.names)
            )
        for name, kind in self.scores.items():
            position = schema.get_field_index(name)
            added = pa.field(name, kind)
            schema = schema.append(added) if position < 0 else schema.set(position, added)
        return schema

    def prepare(self, context: StageContext) -> None:  # noqa: B027 - most stages have nothing to open
        """Open what is slow to open. Called once, before the first batch."""

    def close(self) -> None:  # noqa: B027
        """Close what `prepare` opened. Called once, after the last batch."""

    @abstractmethod
    def apply(self, table: pa.Table) -> StageOutcome:
        """Decide on every row of `table`. Pure: no state survives the call, and the table is not changed."""

    def decide(self, table: pa.Table) -> StageOutcome:
        """Decide by the stage's scores, which are columns of `table`: return reasons and what is created.

        For stages that score and decide in one entry. Called for all rows, whether their scores are new or stored.
        """
        return StageOutcome.keep_all(table.num_rows)

    @property
    def may_ask(self) -> bool:
        """Whether it may make rows wait for a person."""
        return self.asks is None or bool(self.asks)

    def depends_on(self) -> str | None:
        """Return what else its scores depend on, such as the weights of a model that learns; None: they are never reused."""
        return ""

    def label_columns(self) -> frozenset[str]:
        """Return names that may be label columns (`label_KIND`): those of `reads`; a stage that reads all columns names them here."""
        return self.reads or frozenset()

    def score_spec(self) -> dict[str, Any]:
        """Return everything that determines its scores: `spec` without what only `decide` uses."""
        return self.spec()

    def spec(self) -> dict[str, Any]:
        """Return everything that determines its decisions, as plain JSON values; part of the chain's version."""
        spec: dict[str, Any] = self.config.model_dump(mode="json")
        if self.revision is None:
            return {"args": spec, "code": source_digest(type(self))}
        return spec if self.revision == 1 else {**spec, "revision": self.revision}


def check_plain(args: Mapping[str, object]) -> None:
    """Refuse arguments that JSON cannot hold or that pipeline versions could not distinguish: dates, NaN, sets.

    Raises:
        ConfigError: names the argument.
    """
    for key, value in args.items():
        try:
            json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the argument {str(key)!r} is neither a finite number, a text, true or false nor a list or mapping of them: {error}",
                value=str(value),
                todo="write a date as a text, in quotes",
            ) from error


def source_digest(plugin: object) -> str:
    """Return a digest of the file that defines a user's plug-in, so that an edited rule gives another pipeline version."""
    try:
        return hashlib.sha256(Path(inspect.getfile(plugin)).read_bytes()).hexdigest()[:16]  # type: ignore[arg-type]
    except (TypeError, OSError):
        return ""
