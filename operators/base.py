"""What a pipeline stage is: a pure function from a batch of whole groups to one decision per row.

A stage gets an Arrow table with one row per experience, groups whole, and says for every row whether it stays, why not
if not, and which columns change. It never filters, reorders or mutates the table itself: `operators.chain` does that in
one place, so that counting, reasons and group rules are the same for every stage. Same table in, same outcome out.

Not here: what is stored (the caller writes verdicts), retries (the caller makes smaller batches), concurrency.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, ValidationError

from rftdata import claims
from rftdata.errors import ConfigError

BATCH_SCHEMA = claims.BATCH_SCHEMA.append(pa.field("priority", pa.float64()))
"""The columns of a batch. `metrics` is JSON text; `priority` is added by the chain when the caller leaves it out."""

IDENTITY_COLUMNS = frozenset({"experience_id", "group_id", "rollout_index"})
"""What the chain itself counts and reports by; no stage may change them."""


@dataclass(frozen=True)
class StageOutcome:
    """What one stage decided on a table of N rows.

    Attributes:
        reasons: N strings; null where the row stays, else why it is dropped, in words for people.
        columns: name -> N values, for columns that change or are new. Values of dropped rows are ignored.
    """

    reasons: pa.Array
    columns: Mapping[str, pa.Array] = field(default_factory=dict)

    @classmethod
    def keep_all(cls, num_rows: int, columns: Mapping[str, pa.Array] | None = None) -> StageOutcome:
        """Every row stays."""
        return cls(pa.nulls(num_rows, pa.string()), columns or {})

    @classmethod
    def keep_where(cls, keep: pa.Array, reason: str | pa.Array) -> StageOutcome:
        """Rows stay where `keep` is true; false and null are dropped with `reason` (one for all, or N)."""
        dropped = pc.invert(pc.fill_null(keep, False))
        return cls(pc.if_else(dropped, reason, pa.scalar(None, pa.string())))


class StageConfig(BaseModel):
    """Base of every operator's `Config`: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Operator(ABC):
    """One stage of a chain.

    A subclass names its columns, sets `Config` to the class of its arguments, and writes `apply`. `reads` is None when
    the stage may look at every column. The constructor does nothing slow: what needs a big import, a model or a
    connection is opened in `prepare`, which the chain calls before the first batch.
    """

    Config: ClassVar[type[StageConfig]] = StageConfig
    reads: frozenset[str] | None = frozenset()
    writes: frozenset[str] = frozenset()

    def __init__(self, config: StageConfig) -> None:
        self.config: Any = config

    @classmethod
    def from_args(cls, args: object) -> Operator:
        """Build from what stands behind the stage's name in YAML: a mapping, or nothing.

        Raises:
            ConfigError: an unknown key (with the nearest one) or a value of the wrong type.
        """
        return cls(parse_config(cls.Config, args))

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        """Check that the columns this stage reads exist; return the schema that the next stage will see.

        Raises:
            ConfigError: a column is missing.
        """
        missing = sorted((self.reads or frozenset()) - set(schema.names))
        if missing:
            raise ConfigError(
                f"reads the column {missing[0]!r}, which the batch does not have", allowed=", ".join(schema.names)
            )
        return schema

    def prepare(self) -> None:  # noqa: B027 - most stages have nothing to open
        """Open what is slow to open. Called once, before the first batch."""

    @abstractmethod
    def apply(self, table: pa.Table) -> StageOutcome:
        """Decide on every row of `table`. Pure: no state survives the call, the table is not changed."""

    def spec(self) -> dict[str, Any]:
        """Everything that determines what this stage decides, as plain JSON values; part of the chain's version."""
        spec: dict[str, Any] = self.config.model_dump(mode="json")
        ours = type(self).__module__.partition(".")[0] == "operators"
        return spec if ours else {"args": spec, "code": source_digest(type(self))}


def parse_config(config_class: type[StageConfig], args: object) -> StageConfig:
    """Validate YAML arguments against a config class, one clear sentence per failure."""
    if args is None:
        args = {}
    allowed = ", ".join(config_class.model_fields) or "no arguments"
    if not isinstance(args, Mapping):
        raise ConfigError("its arguments are not a mapping", value=args, allowed=allowed)
    unknown = [str(key) for key in args if key not in config_class.model_fields]
    if unknown:
        raise unknown_key(unknown[0], list(config_class.model_fields))
    try:
        return config_class.model_validate(dict(args))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise ConfigError(f"the key {place!r} is missing", allowed=allowed) from error
        where = f"the key {place!r} is wrong: " if place else ""
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}{message}", value=first["input"], allowed=allowed) from error


def unknown_key(key: str, known: list[str]) -> ConfigError:
    """The error for a key that a stage does not have, naming the nearest one it has."""
    near = difflib.get_close_matches(key, known, n=1)
    return ConfigError(
        f"there is no key {key!r}",
        allowed=", ".join(known) or "no arguments",
        todo=f"did you mean {near[0]!r}?" if near else None,
    )


def source_digest(plugin: object) -> str:
    """Digest of the file that a user's plug-in stands in, so that an edited rule is another pipeline version."""
    try:
        return hashlib.sha256(Path(inspect.getfile(plugin)).read_bytes()).hexdigest()[:16]  # type: ignore[arg-type]
    except (TypeError, OSError):
        return ""
