"""One run's configuration: sections from where they are used, put together, read from YAML with overrides.

Validation is pure: no disk, network or GPU beyond reading the file itself. `load_config` returns a `RunConfig` that
knows the folder its relative paths start from. The resolved configuration is what the run row stores.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from rftcore.explorer.config import ExplorerConfig
from rftcore.trainer.config import TrainerConfig
from rftdata.config import (
    BufferConfig,
    EvalConfig,
    SamplingConfig,
    Section,
    SelectorConfig,
    SyncConfig,
    TasksetConfig,
)
from rftdata.errors import ConfigError


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run.")
    seed: int = Field(0, ge=0, description="Seed of task order, sampling and training.")
    mode: Literal["both", "train"] = Field(
        "both", description="train: no explorer; groups come from elsewhere, written through the Python interface."
    )


class ModelSection(Section):
    path: str = Field(description="Folder of a model, Hugging Face id, or a checkpoint's folder.")


class AlgorithmSection(Section):
    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(description="grpo, sft, or your own by path; further keys are the algorithm's own.")
    group_size: int = Field(8, ge=1, description="Rollouts per task.")
    min_group_size: int | None = Field(
        None, ge=1, description="A group with fewer good rollouts is dropped; 2 by default, 1 where group_size is 1."
    )

    @property
    def smallest_group(self) -> int:
        """The group size below which a group is dropped."""
        return self.min_group_size or min(self.group_size, 2)

    @property
    def args(self) -> dict[str, Any]:
        """The algorithm's own keys; its `Config` validates them."""
        return dict(self.model_extra or {})


class PipelinesSection(Section):
    experience: list[Any] = Field(default_factory=list, description="Stages between explorer and trainer, in order.")


class RunConfig(Section):
    """The whole file."""

    run: RunSection
    buffer: BufferConfig = BufferConfig()
    model: ModelSection
    tasks: list[TasksetConfig] = Field(min_length=1)
    selector: SelectorConfig = SelectorConfig()
    pipelines: PipelinesSection = PipelinesSection()
    algorithm: AlgorithmSection
    explorer: ExplorerConfig
    trainer: TrainerConfig
    sampling: SamplingConfig = SamplingConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig = EvalConfig()
    monitor: list[str] = Field(
        default_factory=list, description="Where else metrics go: tensorboard, or your own by path."
    )
    steps: int = Field(gt=0, description="Trainer steps of the run.")

    _base_dir: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def base_dir(self) -> Path:
        """Folder that relative paths in the configuration start from."""
        return self._base_dir

    @model_validator(mode="after")
    def _names_are_unique(self) -> RunConfig:
        names = [taskset.name for taskset in (*self.tasks, *self.eval.tasks, *self.eval.test)]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"tasksets need names of their own: {', '.join(doubled)} is used more than once")
        if self.eval.tasks and self.eval.every % self.trainer.checkpoint_every:
            raise ValueError(
                f"eval.every ({self.eval.every}) must be a multiple of trainer.checkpoint_every "
                f"({self.trainer.checkpoint_every}): the best evaluated policy is kept as a checkpoint"
            )
        return self


def load_config(file: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read and validate a configuration file.

    Args:
        file: the YAML file; relative paths in it start from its folder.
        overrides: `a.b=value` strings; the value is read as YAML.

    Raises:
        ConfigError: unreadable file, unknown key (with the nearest valid one), wrong value, malformed override.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the configuration file cannot be read: {error.strerror}", value=str(file), todo="correct the path"
        ) from error
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}", todo="mend the file") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must hold a mapping of sections", value=type(raw).__name__)
    for override in overrides or []:
        _apply_override(raw, override)
    return parse_config(raw, file.resolve().parent, str(file))


def parse_config(raw: dict[str, Any], base_dir: Path, origin: str) -> RunConfig:
    """Validate a mapping; `origin` names it in errors."""
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        raise _config_error(error, origin) from error
    config._base_dir = base_dir
    return config


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError("an override must look like a.b=value", value=override)
    node = raw
    *parents, last = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"the override {override!r} goes through {parent!r}, which is not a section")
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of the override {override!r} is not valid YAML") from error


def _config_error(error: ValidationError, origin: str) -> ConfigError:
    first, *others = error.errors(include_url=False)
    where = ".".join(str(part) for part in first["loc"]) or "the file"
    more = f"; {len(others)} more after this one" if others else ""
    if first["type"] == "extra_forbidden":
        allowed = _allowed_keys(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), allowed, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "remove the key or correct it"
        return ConfigError(f"{origin}: unknown key {where!r}", allowed=", ".join(allowed), todo=hint + more)
    message = re.sub(r"^Value error, ", "", first["msg"])
    if first["type"] == "missing":
        return ConfigError(f"{origin}: {where!r} is missing", todo="add it" + more)
    value = first["input"] if not isinstance(first["input"], dict) else None
    return ConfigError(f"{origin}: {where!r}: {message}", value=value, todo="correct it" + more)


def _allowed_keys(location: tuple[int | str, ...]) -> list[str]:
    """Keys that the section at `location` accepts."""
    model: Any = RunConfig
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return []
        model = _section_of(field.annotation)
    return sorted(model.model_fields) if hasattr(model, "model_fields") else []


def _section_of(annotation: Any) -> Any:
    if hasattr(annotation, "model_fields"):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _section_of(argument)
        if found is not None:
            return found
    return None
