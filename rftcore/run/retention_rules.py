"""The rules of `rft retention`: those of the command line, else those of a configuration file, else those of the newest run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcore.config.run import load_config
from rftdata.buffer import Buffer
from rftdata.config import RetentionConfig
from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError


@dataclass(frozen=True)
class RetentionLimits:
    """Limits of the command line; None where it names none.

    Attributes:
        taskset: the limits hold for its experiences; None for all.
        labelled_too: also purge labelled groups, whichever rules are used.
    """

    max_age_days: float | None = None
    max_experiences: int | None = None
    max_bytes: int | None = None
    taskset: str | None = None
    labelled_too: bool = False

    @property
    def values(self) -> dict[str, float]:
        """Limits that are set, by their names in the configuration."""
        limits = {
            "max_age_days": self.max_age_days,
            "max_experiences": self.max_experiences,
            "max_bytes": self.max_bytes,
        }
        return {name: value for name, value in limits.items() if value is not None}


def retention_rules(buffer: Buffer, file: Path | None, limits: RetentionLimits) -> RetentionConfig:
    """Return the rules that apply.

    Args:
        file: a configuration, whose buffer.retention is used if `limits` has none.

    Raises:
        ConfigError: there is no rule, or one is invalid.
    """
    if limits.values:
        values: dict[str, Any] = {"tasksets": {limits.taskset: limits.values}} if limits.taskset else limits.values
    elif file is not None:
        configured = load_config(file).buffer.retention
        values = {} if configured is None else configured.model_dump()
    else:
        values = (buffer.find_run().config.get("buffer") or {}).get("retention") or {}
    if limits.labelled_too:
        values["keep_labelled"] = False
    rules = parse_section(RetentionConfig, values, "the retention rules")
    if not rules.has_limits:
        raise ConfigError(
            "there is no retention rule",
            todo="give --max-age-days, --max-experiences or --max-bytes, or set buffer.retention",
        )
    return rules
