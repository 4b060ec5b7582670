"""A plain Python function of one row as a stage, for rules of a few lines.

    from operators.base import drop

    def no_apologies(row, words=("sorry",)):
        "Keep rows whose response does not apologise."
        apologies = [word for word in words if word in row["response"]]
        return drop(f"says {apologies[0]}") if apologies else True

    - ./my_rules.py:no_apologies: {words: [sorry, apologise]}

The function gets the row as a dict and the stage's arguments by name. It returns True (keep the row), False (drop it),
`drop(reason)` (drop it for this reason) or a dict of changed columns (keep the row). Its attribute `reads`, a set of column
names, avoids converting the other columns; the function may change the columns it reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from operators.base import Drop, Operator, StageConfig, StageOutcome, check_plain, source_digest
from rftdata.config_errors import unknown_key
from rftdata.errors import ConfigError, OperatorError
from rftdata.user_code import time_limits


class RowFunction(Operator):
    """Calls `function(row, **args)` for every row."""

    writes = None
    rowwise = True

    def __init__(self, name: str, function: Callable[..., object], args: object) -> None:
        super().__init__(StageConfig())
        if not isinstance(args, Mapping | None):
            raise ConfigError("the arguments are not a mapping", value=args)
        self.name = name
        self.function = function
        self.args = dict(args or {})
        check_plain(self.args)
        declared = getattr(function, "reads", None)
        self.reads = None if declared is None else frozenset(declared)
        self._check_arguments()

    def _check_arguments(self) -> None:
        signature = inspect.signature(self.function)
        parameters = list(signature.parameters.values())[1:]
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            names = [parameter.name for parameter in parameters]
            for key in self.args:
                if key not in names:
                    raise unknown_key(str(key), names)
        try:
            signature.bind({}, **self.args)
        except TypeError as error:
            raise ConfigError(
                f"the function cannot be called with a row and these arguments: {error}",
                value=self.args,
                todo="its first parameter is the row; the others come from the YAML",
            ) from error

    def spec(self) -> dict[str, Any]:
        return {"args": self.args, "code": source_digest(self.function)}

    def apply(self, table: pa.Table) -> StageOutcome:
        columns = [name for name in table.column_names if self.reads is None or name in self.reads]
        reasons: list[str | None] = []
        changes: dict[int, Mapping[str, object]] = {}
        limited = time_limits.current()
        if limited is not None:
            limited.noun, limited.items = "experience", table["experience_id"].to_pylist()
        for position, row in enumerate(table.select(columns).to_pylist()):
            if limited is not None:
                limited.position = position
            answer = self._answer(row, table, position)
            if isinstance(answer, np.bool_):
                answer = bool(answer)
            if answer is True or (isinstance(answer, Mapping) and not answer):
                reasons.append(None)
            elif isinstance(answer, Mapping):
                reasons.append(None)
                changes[position] = answer
            elif answer is False:
                reasons.append(f"{self.name} returned False")
            elif isinstance(answer, Drop):
                reasons.append(answer.reason)
            else:
                raise OperatorError(
                    f"{self.name} returned {type(answer).__name__} for experience {table['experience_id'][position]}",
                    value=answer,
                    allowed="True, False, drop(reason), or a dict of changed columns",
                    todo="return drop(…) with this text as the reason: from operators.base import drop"
                    if isinstance(answer, str)
                    else None,
                )
        return StageOutcome(pa.array(reasons, pa.string()), self._changed_columns(table, changes))

    def _answer(self, row: dict[str, Any], table: pa.Table, position: int) -> object:
        try:
            return self.function(row, **self.args)
        except Exception as error:
            what = f"{self.name} raised for experience {table['experience_id'][position]}"
            raise OperatorError(f"{what}: {type(error).__name__}: {error}", todo="fix the function") from error

    def _changed_columns(self, table: pa.Table, changes: Mapping[int, Mapping[str, object]]) -> dict[str, pa.Array]:
        names = sorted({name for change in changes.values() for name in change})
        unknown = [name for name in names if name not in table.column_names]
        if unknown:
            raise OperatorError(
                f"{self.name} set a column that the batch does not have",
                value=unknown[0],
                allowed=", ".join(table.column_names),
            )
        columns = {}
        for name in names:
            values = table[name].to_pylist()
            for position, change in changes.items():
                if name in change:
                    values[position] = change[name]
            columns[name] = pa.array(values, table.schema.field(name).type)
        return columns
