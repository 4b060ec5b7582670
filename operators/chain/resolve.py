"""Turn a stage's name in YAML into an operator, importing only what that operator needs."""

from __future__ import annotations

from pathlib import Path

from operators import OPERATORS
from operators.base import Operator
from operators.chain.row_function import RowFunction
from operators.data_juicer.catalogue import operator_names
from operators.data_juicer.stage import juicer_stage
from rftdata.config_errors import did_you_mean
from rftdata.errors import PluginError


def resolve_stage(name: str, args: object, base_dir: Path | None = None) -> Operator:
    """Return the operator for one entry of a pipeline.

    Raises:
        PluginError: the name is unknown, or does not refer to a stage.
        ConfigError: its arguments are wrong.
    """
    own = OPERATORS.names()
    is_path = ":" in name or "." in name
    if not is_path and name not in own:
        juicer = operator_names()
        if name in juicer:
            return juicer_stage(name, args)
        raise PluginError(
            "unknown operator",
            value=name,
            allowed=f"{', '.join(own)}, or one of {len(juicer)} Data-Juicer operators by its own name",
            todo=did_you_mean(
                name, [*own, *juicer], "for your own operator write './file.py:attr' or 'package.module:attr'"
            ),
        )
    target = OPERATORS.load(name, base_dir)
    if isinstance(target, type) and issubclass(target, Operator):
        return target.from_args(args)
    if callable(target) and not isinstance(target, type):
        return RowFunction(name, target, args)
    raise PluginError(
        "this is not a pipeline stage",
        value=name,
        allowed="a subclass of operators.base.Operator, or a function of one row",
    )
