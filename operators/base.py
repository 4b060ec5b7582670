"""What a pipeline stage is: a pure function from a batch of whole groups to one decision per row.

A stage gets an Arrow table with one row per experience, groups whole, and says for every row whether it stays, why not
if not, and which columns change. It never filters, reorders or mutates the table itself: `operators.chain.chain` does that in
one place, so that counting, reasons and group rules are the same for every stage. Same table in, same outcome out.

Scoring and deciding are separate stages. A stage that scores names its columns in `scores`: what it computed for an
experience is stored and handed back the next time, so that a threshold further down can change without computing it
again. A stage that asks a person names the rows in `waiting`; one that makes something new puts it in `created`.

Not here: what is stored (the caller writes verdicts and scores), finding the row on which a stage fails.
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
from rftdata.pipeline.records import Review as Review
from rftdata.user_code.time_limits import DEFAULT_S, LOADING_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BATCH_SCHEMA = records.BATCH_SCHEMA.append(pa.field("priority", pa.float64()))
"""The columns of a batch. `metrics` is JSON text; `priority` is added by the chain when the caller leaves it out."""

IDENTITY_COLUMNS = frozenset({"experience_id", "group_id", "rollout_index"})
"""What the chain itself counts and reports by; no stage may change them."""


@dataclass(frozen=True)
class StageOutcome:
    """What one stage decided on a table of N rows.

    Attributes:
        reasons: N strings; null where the row stays, else why it is dropped, in words for people.
        columns: name -> N values, for columns that change or are new. Values of dropped rows are ignored.
        waiting: row -> what a person is asked about it. Its whole group is decided later, from the first stage on.
        created: new tasks and experiences.
    """

    reasons: pa.Array
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    waiting: Mapping[int, Review] = field(default_factory=dict)
    created: Sequence[CreatedTask | CreatedGroup] = ()

    @classmethod
    def keep_all(cls, num_rows: int, columns: Mapping[str, pa.Array] | None = None) -> StageOutcome:
        """Every row stays."""
        return cls(pa.nulls(num_rows, pa.string()), columns or {})

    @classmethod
    def keep_where(cls, keep: pa.Array, reason: str | pa.Array) -> StageOutcome:
        """Rows stay where `keep` is true; false and null are dropped with `reason` (one for all, or N)."""
        dropped = pc.invert(pc.fill_null(keep, False))
        return cls(pc.if_else(dropped, reason, pa.scalar(None, pa.string())))


@dataclass(frozen=True)
class Drop:
    """What a function of one row returns to drop the row; made by `drop`."""

    reason: str


def drop(reason: str) -> Drop:
    """The answer of a function of one row that drops the row, and why, as people read it in the verdict."""
    if not isinstance(reason, str) or not reason.strip():  # type: ignore[redundant-expr]  # whatever the user gave
        raise ValueError(f"drop() takes a reason, a text that is not empty (got {reason!r})")
    return Drop(reason)


class UnavailableError(OperatorError):
    """What a stage depends on gives no answer at all, so no smaller batch would succeed.

    Loading tasks stops at once with this error, and the tasks are decided on the next time. Any stage may raise it.
    """


class StageConfig(BaseModel):
    """Base of every operator's `Config`: unknown keys are errors, and so are NaN and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Messages = Sequence[Mapping[str, Any]]
Embed = Callable[[str | None, int, Sequence[int], Sequence[str]], "NDArray[np.float32]"]
"""(model or None for the policy, tokens of a text at most, task ids, texts) -> one vector per text, [texts, dimensions]."""

ReadArrays = Callable[[Sequence[int], str], "list[NDArray[Any] | None]"]
"""(experience ids, name of an array) -> each one's array in its own shape, None where it has none."""


@dataclass(frozen=True)
class StageContext:
    """What a stage may use of the process it runs in.

    Attributes:
        base_dir: folder that relative paths start from: the configuration file's.
        generate: answers chats with the run's policy: (chats, max_tokens, temperature) -> a text for each, or the error that it met
            alone; None where there is no policy.
        model_path: the run's model, for a tokenizer or hidden states.
        usage: counts what stages spend on model calls against their budgets; by default in this process only.
        embed: gives the vectors of tasks' texts, computed once and stored; None where no tasks are decided on.
        read_taskset: the tasks of a set of the buffer, with the columns task_key, prompt and answer; None without a buffer.
        policy_version: names the weights that `generate` answers with now; None: nobody knows, and scores by them are not kept.
        read_arrays: reads what an experience has in its segment; None without a buffer.
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
    """Where a stage stands in its chain.

    Attributes:
        name: its name in verdicts and reports, such as `llm_judge#2`.
        base_dir: folder that relative paths in its arguments start from, the configuration file's.
        behind: the stages after it, in order; of their attributes only those exist that constructors set.
    """

    name: str = ""
    base_dir: Path = field(default_factory=Path)
    behind: Sequence[Operator] = ()


class Operator(ABC):
    """One stage of a chain.

    A subclass names its columns, sets `Config` to the class of its arguments, and writes `apply`. The constructor does
    nothing slow: what needs a big import, a model or a connection is opened in `prepare`, which the chain calls before the
    first batch.

    Attributes:
        reads: columns that `apply` looks at; no others are given to it, besides the identity columns. None: all there are.
        writes: columns that it changes or adds; None: any.
        scores: columns it adds that depend on nothing but the columns read, its arguments and `depends_on`, with their types. They
            are stored for every experience and not computed again while these are the same. The `apply` of such a stage drops
            nothing; `decide` may. Where it is not `rowwise`, a row's score depends on its whole group as far as it is still there.
        error_column: the score column that says why a row has no score; such a row is scored again the next time.
        rowwise: every row is decided by itself, so a batch may be cut anywhere and its parts run at the same time.
        keys: numbers that it looks for among the features and metadata of tasks, since the batch has no column of that name.
        asks: names of the questions it may ask people; None: not known before, so the answers are read for it in any case.
        group_column: says which rows belong together: those of one value are scored together, where it is not `rowwise`. A stage that
            writes such a column names it here, too; it and the stages behind it with the same `group_column` are one grouping.
        replaces_with: fields of the tasks that it creates in place of all rows, such as `metadata.summary`; empty where rows go on. These
            tasks pass neither it nor its grouping, so the chain refuses other stages that read what the grouping adds.
        answers: how many answers a group has that it creates; None: it creates none, or what it creates says.
        timeout_s: how long one call of `apply` may take, where `run.timeout_s` of the stage does not say.
        seconds_per_row: added to `timeout_s` for each row of the call, where a model is run or asked.
        prepare_timeout_s: how long `prepare` may take; None: as long as it needs, to load or fetch something large.
        revision: a number that its author raises when its rules change, set as `class Mine(Operator, revision=2)`. None, also for subclasses:
            any edit of its file is another rule, and another version of the chain.
        place: where it stands in its chain; known after the constructor.
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
    revision: ClassVar[int | None] = None
    place: Place = Place()

    def __init_subclass__(cls, *, revision: int | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.revision = revision

    def __init__(self, config: StageConfig) -> None:
        self.config: Any = config

    @classmethod
    def from_args(cls, args: object) -> Operator:
        """Build from what stands behind the stage's name in YAML: a mapping, or nothing.

        Raises:
            ConfigError: an unknown key (with the nearest one) or a value of the wrong type.
        """
        return cls(parse_section(cls.Config, args))

    @property
    def base_dir(self) -> Path:
        """Folder that relative paths in the arguments start from, the configuration file's; known after the constructor."""
        return self.place.base_dir

    def join_chain(self, place: Place) -> None:
        """Take its place in a chain. Called once, when all stages are constructed and before anything else is asked."""
        self.place = place

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        """Check that the columns this stage reads exist; return the schema that the next stage will see.

        A stage that adds other columns than its scores extends this, so that later stages may read them.

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
        """Close it again. Called once, after the last batch."""

    @abstractmethod
    def apply(self, table: pa.Table) -> StageOutcome:
        """Decide on every row of `table`. Pure: no state survives the call, the table is not changed."""

    def decide(self, table: pa.Table) -> StageOutcome:
        """What follows from its scores, which stand in `table`, for a stage that scores and decides in one entry: reasons, and what is created.

        Called for all rows, whether their scores were computed now or stored before.
        """
        return StageOutcome.keep_all(table.num_rows)

    @property
    def may_ask(self) -> bool:
        """Whether it may let rows wait for a person."""
        return self.asks is None or bool(self.asks)

    def depends_on(self) -> str | None:
        """What else its scores depend on, as it is now, such as the weights of a model that learns; None: they are never used again."""
        return ""

    def score_spec(self) -> dict[str, Any]:
        """Everything that determines its scores: `spec` without what `decide` alone looks at."""
        return self.spec()

    def spec(self) -> dict[str, Any]:
        """Everything that determines what this stage decides, as plain JSON values; part of the chain's version."""
        spec: dict[str, Any] = self.config.model_dump(mode="json")
        if self.revision is None:
            return {"args": spec, "code": source_digest(type(self))}
        return spec if self.revision == 1 else {**spec, "revision": self.revision}


def check_plain(args: Mapping[str, object]) -> None:
    """Refuse arguments of a function that a pipeline's version could not tell apart, or JSON not hold: dates, NaN, sets.

    Raises:
        ConfigError: names the argument.
    """
    for key, value in args.items():
        try:
            json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the argument {str(key)!r} is neither a finite number, a text, true or false nor a list or mapping of them: {error}",
                value=str(value), todo="write a date as a text, in quotes",
            ) from error  # fmt: skip


def source_digest(plugin: object) -> str:
    """Digest of the file that a user's plug-in stands in, so that an edited rule is another pipeline version."""
    try:
        return hashlib.sha256(Path(inspect.getfile(plugin)).read_bytes()).hexdigest()[:16]  # type: ignore[arg-type]
    except (TypeError, OSError):
        return ""
