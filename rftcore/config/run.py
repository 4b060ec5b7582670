"""A run's configuration: its sections, read from YAML with overrides.

Validation is pure: apart from reading the file it uses no disk, network or GPU. `load_config` returns a `RunConfig` with
the folder to which its relative paths refer. The run's row stores the resolved configuration.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from rftcore.config.explorer import ExplorerConfig
from rftcore.config.overrides import apply_override, overrides_by_stage
from rftcore.config.sections import AlgorithmSection, ModelSection, PipelinesSection, RunSection
from rftcore.config.taskset import RunEvalConfig, RunTasksetConfig
from rftcore.config.trainer import TrainerConfig
from rftdata.annotations.config import LabelsConfig
from rftdata.attempts.sampling import SamplingConfig
from rftdata.config import (
    BufferConfig,
    MixingConfig,
    Section,
    SelectorConfig,
    SyncConfig,
    merged,
)
from rftdata.config_errors import mistakes, parse_section
from rftdata.errors import ConfigError, RftError, SeveralErrors, refuse
from rftdata.planning.config import PlanConfig
from rftdata.planning.mixing import check_weights
from rftdata.planning.pacing import Pacing
from rftdata.yaml_text import read_yaml

STAGES = "stages"


class RunConfig(Section):
    """The whole configuration file."""

    run: RunSection = Field(description="The run: its name, its seed, and which roles it has.")
    buffer: BufferConfig = Field(BufferConfig(), description="Where experiences are stored.")
    model: ModelSection = Field(description="The model to train.")
    tasks: list[RunTasksetConfig] = Field(
        default_factory=list, description="The tasks of a run without sampling.source."
    )
    selector: SelectorConfig = Field(SelectorConfig(), description="How the next tasks of a taskset are chosen.")
    mixing: MixingConfig = Field(MixingConfig(), description="How the tasksets share the places of a step.")
    pipelines: PipelinesSection = Field(
        PipelinesSection(), description="The chains of stages that tasks and experiences pass."
    )
    algorithm: AlgorithmSection = Field(
        description="From what the model learns: a preset, and the parts that replace its own."
    )
    explorer: ExplorerConfig = Field(
        ExplorerConfig(), description="How the model is sampled: engine, workflow, reward and limits."
    )
    trainer: TrainerConfig = Field(description="How the model is trained: batches, optimizer, devices and checkpoints.")
    sampling: SamplingConfig = Field(
        SamplingConfig(),
        description="Which experiences a step trains on: fresh ones, earlier ones, or a stored selection.",
    )
    sync: SyncConfig = Field(
        SyncConfig(), description="How far explorers run ahead of the trainer, and how its weights reach them."
    )
    eval: RunEvalConfig = Field(
        RunEvalConfig(), description="Evaluations on held-out tasks, by which the best checkpoint is chosen."
    )
    labels: LabelsConfig = Field(
        LabelsConfig(), description="What people and stages can say about experiences besides the reward."
    )
    monitor: list[str] = Field(
        default_factory=list, description="Further receivers of metrics: tensorboard, or the path of your own."
    )
    steps: int | None = Field(
        None, gt=0, description="Trainer steps of the run; with sampling.source, by default as many as it provides."
    )

    _base_dir: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def base_dir(self) -> Path:
        """Folder to which relative paths in the configuration refer."""
        return self._base_dir

    @property
    def pacing(self) -> Pacing:
        """How far explorers may be ahead of the trainer."""
        return Pacing(interval=self.sync.interval, offset=self.sync.offset, window=self.sampling.window)

    def plan(self, source: str) -> PlanConfig:
        """Return what planning needs.

        Args:
            source: of the rollouts of planned groups.
        """
        return PlanConfig(
            tasksets=tuple(self.tasks),
            selector=self.selector,
            seed=self.run.seed,
            batch_groups=self.trainer.batch_groups,
            group_size=self.algorithm.group_size,
            max_refill=self.explorer.max_refill,
            pacing=self.pacing,
            over_sampling=self.sampling.over_sampling,
            source=source,
            fresh_share=self.sampling.fresh_share(),
            base_dir=self.base_dir,
            max_waiting_groups=self.pipelines.max_waiting_groups,
            mixing=self.mixing,
        )

    @property
    def tasksets(self) -> list[RunTasksetConfig]:
        """All tasksets, of training and of evaluations."""
        return [*self.tasks, *self.eval.tasks, *self.eval.test]

    def explorer_of(self, taskset: RunTasksetConfig) -> ExplorerConfig:
        """Return the settings of `explorer` for a taskset, with those of its own.

        Raises:
            ValidationError: they do not fit together.
        """
        own = taskset.of_explorer
        if not own:
            return self.explorer
        found = ExplorerConfig.model_validate({**self.explorer.model_dump(), **own})
        found.model_fields_set.intersection_update(self.explorer.model_fields_set | own.keys())
        return found

    @property
    def has_explorer(self) -> bool:
        """Whether the run samples. A run on a stored selection samples only for its evaluations."""
        asked = self.sampling.source is None or bool(self.eval.tasks or self.eval.test)
        return self.only_evaluates or (self.run.mode == "both" and asked)

    @property
    def has_pipeline(self) -> bool:
        """Whether the run has rollouts that pass stages."""
        return self.sampling.source is None and not self.only_evaluates

    @property
    def only_evaluates(self) -> bool:
        """Whether the run trains nothing and answers the evaluations of its model alone."""
        return self.run.mode == "eval"

    @model_validator(mode="after")
    def _has_something_to_train_on(self) -> RunConfig:
        if self.only_evaluates:
            if not (self.eval.tasks or self.eval.test):
                raise ValueError("run.mode is eval, and there is nothing to evaluate; add tasksets to eval.test")
            return self
        if self.sampling.source is None:
            for key, given in (
                ("tasks", self.tasks),
                ("explorer", "explorer" in self.model_fields_set),
                ("steps", self.steps),
            ):
                if not given:
                    raise ValueError(f"{key!r} is missing; add it, or sampling.source to train on what is stored")
            return self
        for key, given in (
            ("tasks", self.tasks),
            ("pipelines.task", self.pipelines.task),
            ("pipelines.experience", self.pipelines.experience),
        ):
            if given:
                raise ValueError(
                    f"{key} and sampling.source exclude each other: the run trains on the rows that the query selects; choose and drop in "
                    "its WHERE"
                )
        return self

    @model_validator(mode="after")
    def _adapters_are_trained(self) -> RunConfig:
        if self.sync.adapters == "alone" and self.trainer.lora is None:
            raise ValueError(
                "sync.adapters is alone, and no adapters are trained; set trainer.lora, or remove sync.adapters"
            )
        return self

    @model_validator(mode="after")
    def _sleeping_engines_keep_no_cache(self) -> RunConfig:
        if self.explorer.sleep and self.sync.kv_cache == "keep":
            raise ValueError(
                "sync.kv_cache: keep is of no use with explorer.sleep: an engine that sleeps frees its KV cache, and computes running requests again; set "
                "sync.kv_cache: recompute, or explorer.sleep: false"
            )
        return self

    @model_validator(mode="after")
    def _transfers_end_before_an_engine_hangs(self) -> RunConfig:
        longest = self.sync.acknowledge_s + self.sync.timeout_s
        if self.sync.method in ("nccl", "auto") and self.explorer.hang_s <= longest:
            raise ValueError(
                f"explorer.hang_s ({self.explorer.hang_s:g}) must be more than sync.acknowledge_s + sync.timeout_s ({longest:g}), for which an engine may"
                " wait for the trainer's weights; raise it, or lower these"
            )
        return self

    @model_validator(mode="after")
    def _surplus_is_replaced(self) -> RunConfig:
        if self.sampling.over_sampling and not self.explorer.max_refill:
            raise ValueError(
                "sampling.over_sampling samples groups that replace lost ones and those of a longer run, and explorer.max_refill is 0; raise"
                " max_refill, or remove over_sampling"
            )
        return self

    @model_validator(mode="after")
    def _settings_of_tasksets_fit(self) -> RunConfig:
        for taskset in self.tasksets:
            try:
                self.explorer_of(taskset)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                text = str(first["msg"]).removeprefix("Value error, ")
                place = f" {where} = {first['input']!r}:" if where else ""
                raise ValueError(f"the taskset {taskset.name!r}:{place} {text}") from error
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> RunConfig:
        names = [taskset.name for taskset in self.tasksets]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"tasksets need different names: {', '.join(doubled)} is used more than once")
        if self.eval.tasks and not self.only_evaluates and self.eval.every % self.trainer.checkpoint_every:
            raise ValueError(
                f"eval.every ({self.eval.every}) must be a multiple of trainer.checkpoint_every "
                f"({self.trainer.checkpoint_every}): the policy with the best evaluation is kept as a checkpoint"
            )
        return self

    @model_validator(mode="after")
    def _tasksets_can_be_sampled(self) -> RunConfig:
        try:
            check_weights(self.tasks)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        for taskset in self.tasks:
            if taskset.group_size is not None and taskset.group_size < self.algorithm.smallest_group:
                raise ValueError(
                    f"group_size ({taskset.group_size}) of the taskset {taskset.name!r} is below algorithm.min_group_size "
                    f"({self.algorithm.smallest_group}): every group of it would be dropped"
                )
        return self

    @model_validator(mode="after")
    def _explorers_have_a_share(self) -> RunConfig:
        if self.run.mode == "both" and self.sampling.fresh_share() == 0:
            raise ValueError(
                "sampling.mixture names no source that explorers supply, so they would plan nothing; add the source explorer "
                "or a taskset, or set run.mode to train"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_have_an_explorer(self) -> RunConfig:
        asked = " and ".join(key for key in ("tasks", "test") if getattr(self.eval, key))
        if asked and self.run.mode == "train":
            raise ValueError(
                f"eval.{asked} would wait forever, because with run.mode train there is no explorer; "
                "remove the eval section, and evaluate the checkpoints in a separate run"
            )
        if asked and self.explorer.engine == "none":
            raise ValueError(
                f"eval.{asked} needs an engine that samples, and explorer.engine is none; remove the eval section, "
                "and evaluate the checkpoints in a separate run"
            )
        return self


def load_config(file: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read and validate a configuration file.

    Args:
        file: the YAML file; relative paths in it refer to its folder.
        overrides: `a.b=value` strings; the value is read as YAML.

    Raises:
        ConfigError: the file is unreadable or has several stages, or there is an unknown key (the nearest is suggested), a wrong value
            or a malformed override.
    """
    raw = _read_mapping(file)
    for override in overrides or []:
        apply_override(raw, override)
    if STAGES in raw:
        raise ConfigError(
            f"{file} has stages, and this command works on one run",
            allowed="`rft run` and `rft check` take such a file",
            todo="name the run of a stage, which `rft status` lists, instead of the file",
        )
    return parse_config(raw, file.resolve().parent, str(file))


def load_stages(file: Path, overrides: list[str] | None = None, digest: str | None = None) -> list[RunConfig]:
    """Read a configuration file that may have stages; a file without stages is a single stage.

    Each item of `stages` has a `name` and the sections that differ from the rest of the file. Its run is named
    `<run.name>-<name>`. The model of a later stage is that of the previous one; until that has run, the file's model is used instead.

    Args:
        overrides: `a.b=value` changes all stages, whatever they set themselves; `stages.NAME.a.b=value` changes one.
        digest: SHA-256 of the file as it was checked; a file that has changed since is refused.

    Raises:
        ConfigError: as for `load_config`, with the stage's name; or a stage has no name, or two have the same.
    """
    found, errors = [], []
    for name, whole in _stage_mappings(_read_mapping(file, digest), overrides or [], str(file)):
        try:
            origin = str(file) if name is None else f"{file}, stage {name!r}"
            found.append(parse_config(whole, file.resolve().parent, origin))
        except ConfigError as error:
            errors.append(error)
    refuse(errors)
    return found


def config_mistakes(text: str, origin: str) -> list[tuple[str, RftError]]:
    """Return what `load_stages` finds wrong in the text of a file, each error with its key; the key is empty if the error is about the whole file.

    Args:
        origin: names the file in errors.
    """
    try:
        stages = _stage_mappings(_mapping(text, origin), [], origin)
    except SeveralErrors as error:
        return [("", each) for each in error.errors]
    except ConfigError as error:
        return [("", error)]
    return [
        (key, error if name is None else error.about(f"stage {name!r}"))
        for name, whole in stages
        for key, error in mistakes(RunConfig, whole)
    ]


def _stage_mappings(raw: dict[str, Any], overrides: list[str], origin: str) -> list[tuple[str | None, dict[str, Any]]]:
    """Return the name and the mapping of each stage, with overrides applied; a file without stages is a single stage without a name."""
    if STAGES not in raw:
        for override in overrides:
            apply_override(raw, override)
        return [(None, raw)]
    stages = raw.pop(STAGES)
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise ConfigError(f"{origin}: stages must be a list of mappings", allowed="[{name: sft, algorithm: …}, …]")
    names = [str(stage.get("name", "")) for stage in stages]
    if len(set(names)) < len(names) or not all(names):
        raise ConfigError(f"{origin}: every stage needs a name of its own", value=", ".join(names))
    by_stage = overrides_by_stage(overrides, names)
    found: list[tuple[str | None, dict[str, Any]]] = []
    for name, stage in zip(names, stages, strict=True):
        whole = merged(raw, {key: value for key, value in stage.items() if key != "name"})
        for override in by_stage[name]:
            apply_override(whole, override)
        run = whole.get("run")
        if isinstance(run, dict) and isinstance(run.get("name"), str):
            whole["run"] = {**run, "name": f"{run['name']}-{name}"}
        found.append((name, whole))
    return found


def _read_mapping(file: Path, digest: str | None = None) -> dict[str, Any]:
    try:
        data = file.read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}", todo="save the file as UTF-8") from error
    except OSError as error:
        raise ConfigError(
            f"the configuration file cannot be read: {error.strerror}", value=str(file), todo="correct the path"
        ) from error
    if digest not in (None, hashlib.sha256(data).hexdigest()):
        raise ConfigError(f"{file} has changed since it was checked", todo="look at it again, and start it again")
    return _mapping(text, str(file))


def _mapping(text: str, origin: str) -> dict[str, Any]:
    try:
        raw = read_yaml(text, origin)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{origin} is not valid YAML: {' '.join(str(error).split())}", todo="correct the file"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin} must contain a mapping of sections", value=type(raw).__name__)
    return raw


def parse_config(raw: dict[str, Any], base_dir: Path, origin: str) -> RunConfig:
    """Validate a mapping; `origin` names it in errors."""
    config = parse_section(RunConfig, raw, origin)
    config._base_dir = base_dir
    return config
