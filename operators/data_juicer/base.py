"""The base of all Data-Juicer stages: arguments, columns, and the operator itself once it is created."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from operators.base import CreatedTask, Operator, StageConfig
from operators.data_juicer import runtime
from operators.data_juicer.arguments import check_types
from operators.data_juicer.catalogue import DATA_KEYS, PACKAGE, RUNNING, Facts, facts, installed_version
from operators.data_juicer.columns import Plan
from rftdata.config_errors import unknown_key
from rftdata.errors import ConfigError

MODES = ("default", "ray")
OWN_ARGUMENTS = ("prefix", "mode")


@dataclass
class JuicerOutcome:
    """The result of an operator on rows without null texts: the contents of `StageOutcome`, before rows with nulls are added again."""

    reasons: list[str | None] | None = None
    columns: dict[str, pa.Array] = field(default_factory=dict)
    created: list[CreatedTask] = field(default_factory=list)


class JuicerOperator(Operator):
    """One Data-Juicer operator by its own name, with its own arguments, `prefix` and `mode`.

    Attributes:
        facts: its catalogue entry.
        args: its own arguments, as passed to it.
        op: the operator, after `prepare`.
    """

    # Some run a model, and some ask an endpoint about each row.
    seconds_per_row = 10.0
    prepare_timeout_s = None  # importing Data-Juicer takes long, and operators download models

    def __init__(self, name: str, args: object) -> None:
        super().__init__(StageConfig())
        if not isinstance(args, Mapping | None):
            raise ConfigError("the arguments are not a mapping", value=args)
        self.name = name
        self.facts: Facts = facts(name)
        self._version = installed_version()
        self.args: dict[str, Any] = {str(key): value for key, value in (args or {}).items()}
        self.mode = self.args.pop("mode", "default")
        self.prefix = self.args.pop("prefix", "dj_")
        self._check()
        self.reads = None
        self.writes = None
        self.op: Any = None
        self._plan: Plan | None = None

    def _check(self) -> None:
        arguments = self.facts.known_arguments
        for key in self.args if arguments is not None else ():
            if arguments is not None and key not in arguments:
                raise unknown_key(key, [*(self.facts.arguments or ()), "text_key", *OWN_ARGUMENTS])
        check_types(self.facts, self.args)
        if self.mode not in MODES:
            raise ConfigError("unknown mode", value=self.mode, allowed=", ".join(MODES))
        if not isinstance(self.prefix, str) or not re.fullmatch(r"[A-Za-z_]\w*", self.prefix):
            raise ConfigError(
                "prefix is not a valid beginning of a column name", value=self.prefix, allowed="letters, digits and _"
            )

    def spec(self) -> dict[str, Any]:
        args = {key: _without_secrets(value) for key, value in self.args.items() if key not in RUNNING}
        return {"args": args, "prefix": self.prefix, PACKAGE: self._version}

    def make(self) -> Any:
        """Create the operator, reading its columns under Data-Juicer's own names."""
        keys = {key: DATA_KEYS[key] for key in self.facts.data_keys}
        return runtime.make_operator(self.name, {**self.args, **keys})

    def close(self) -> None:
        self.op = None

    @property
    def plan(self) -> Plan:
        """The columns it reads and writes; known after `validate_schema`."""
        assert self._plan is not None
        return self._plan

    def unreadable(self, column: str) -> str:
        """Return the reason for dropping a row whose text is null."""
        return f"{column} is null, which {self.name} cannot read"


def on_tasks(schema: pa.Schema) -> bool:
    """Return whether the rows of a batch are tasks."""
    return "task_key" in schema.names


def with_columns(schema: pa.Schema, columns: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the schema with these columns added, or replaced where the name exists."""
    for name, kind in columns.items():
        position = schema.get_field_index(name)
        added = pa.field(name, kind)
        schema = schema.append(added) if position < 0 else schema.set(position, added)
    return schema


def _without_secrets(value: Any) -> Any:
    """Return an argument without secrets, as stored with a pipeline's version."""
    if isinstance(value, Mapping):
        return {key: _without_secrets(inner) for key, inner in value.items() if key != "api_key"}
    return value
