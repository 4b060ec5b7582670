"""`ResolvedRun`: a configuration and the objects that it names, each built once.

A process creates one from its configuration and passes it on. Everything is built on first use, so a role builds only what it needs,
and reading a configuration builds nothing. If something cannot be built, every use of it raises.

Chains are shared: the part of the process that prepares one closes it before another part prepares it again. Between processes, only
the configuration is passed, never a `ResolvedRun`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from operators.chain.build import build_chain
from operators.chain.chain import Chain
from rftcore.algorithms import build_algorithm
from rftcore.config.engine import engine_config
from rftcore.config.run import RunConfig
from rftcore.config.taskset import RunTasksetConfig
from rftcore.engines import ENGINES
from rftcore.engines.adapters import reason_to_merge
from rftcore.engines.base import Engine, EngineConfig
from rftcore.model_folder import names_folder, resolve_model, stored_model
from rftcore.monitor import MONITORS, Monitor
from rftcore.rewards import LoadedReward, load_rewards
from rftcore.rewards.reward_model import RewardModel
from rftcore.workflows import WORKFLOWS
from rftcore.workflows.task import Workflow
from rftdata.attempts.run_models import ModelUse
from rftdata.config import SelectorConfig
from rftdata.errors import RftError, refuse
from rftdata.pipeline.task_batches import TASK_BATCH_SCHEMA
from rftdata.selectors import Selector, check_selector

if TYPE_CHECKING:
    from rftcore.algorithms.algorithm import Algorithm


T = TypeVar("T")


class built_once(cached_property[T]):
    """A cached property that remembers the error of the first use, too, so that a plug-in that hangs or downloads does so once."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        errors: dict[str | None, RftError] = instance.__dict__.setdefault("_errors", {})
        if self.attrname in errors:
            raise errors[self.attrname]
        try:
            return super().__get__(instance, owner)
        except RftError as error:
            errors[self.attrname] = error
            raise


@dataclass(frozen=True)
class ModelFolder:
    """A model of a run: what it is used as, its folder, and the setting that names it."""

    used_as: ModelUse
    folder: Path
    key: str


class ResolvedRun:
    """The objects that a configuration names.

    Attributes:
        config: the configuration itself, for plain settings.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def renamed(self, name: str) -> ResolvedRun:
        """Return the same run under another name; objects already built are shared."""
        new = copy.copy(self)
        new.config = self.config.model_copy(update={"run": self.config.run.model_copy(update={"name": name})})
        new.config._base_dir = self.config.base_dir
        return new

    def for_taskset(self, name: str) -> ResolvedRun:
        """Return the same run as the rollouts of a taskset see it: with the settings of `explorer` that the taskset replaces, and with the
        workflow and the rewards that these name. Objects already built are shared; without settings of its own it is this object.
        """
        taskset = next((each for each in self.config.tasksets if each.name == name), None)
        if taskset is None or not taskset.of_explorer:
            return self
        views: dict[str, ResolvedRun] = self.__dict__.setdefault("_views", {})
        if name not in views:
            views[name] = view = copy.copy(self)
            view.config = self.config.model_copy(update={"explorer": self.config.explorer_of(taskset)})
            view.config._base_dir = self.config.base_dir
            for built in ("workflow", "rewards", "_errors", "_views"):
                view.__dict__.pop(built, None)
        return views[name]

    def views(self, tasksets: Iterable[RunTasksetConfig]) -> list[tuple[str, ResolvedRun]]:
        """Return the different views of tasksets, each with whose it is: this run, with an empty text, for those without settings of their own."""
        tasksets = list(tasksets)
        own = [taskset.name for taskset in tasksets if taskset.of_explorer]
        plain = [("", self)] if len(own) < len(tasksets) or not own else []
        return [*plain, *((f"the taskset {name!r}", self.for_taskset(name)) for name in own)]

    @built_once
    def experience_chain(self) -> Chain:
        """The chain of `pipelines.experience`, between explorer and trainer.

        Raises:
            PluginError, ConfigError: a stage does not exist, cannot be loaded or does not fit experiences.
        """
        config = self.config
        smallest = config.algorithm.smallest_group
        try:
            return build_chain(config.pipelines.experience, config.base_dir, min_group_size=smallest)
        except RftError as error:
            raise error.about("pipelines.experience") from error

    @built_once
    def task_chain(self) -> Chain:
        """The chain of `pipelines.task`.

        Raises:
            PluginError, ConfigError: a stage does not exist, cannot be loaded or does not fit tasks.
        """
        config = self.config
        try:
            return build_chain(
                config.pipelines.task,
                config.base_dir,
                schema=TASK_BATCH_SCHEMA,
                require_reward=False,
                reads_labels=False,
            )
        except RftError as error:
            raise error.about("pipelines.task") from error

    @built_once
    def model_folder(self) -> Path:
        """The folder of the run's model, downloaded and converted if needed.

        Raises:
            ModelError: the model does not exist.
        """
        return self._folder(self.config.model.path)

    @property
    def engine_dtype(self) -> str | None:
        """The type of an engine's weights: float32, bfloat16 or float16; None if only the engine knows.

        Raises:
            ConfigError: see `engine`.
        """
        engine, dtype = self.config.explorer.engine, self.engine(worker_index=0).dtype
        if dtype != "auto" or engine not in ENGINES.builtins:
            return None if dtype == "auto" else dtype
        stored = self._model_values
        found = stored.get("dtype") or stored.get("torch_dtype")
        # What is stored as float32 vLLM rounds by itself, unless it is told otherwise.
        if engine == "vllm" and found in (None, "float32"):
            return "bfloat16"
        return found if found in ("float32", "bfloat16", "float16") else None

    @property
    def _model_values(self) -> Mapping[str, Any]:
        """The config.json of the run's model; empty if it is not on this machine."""
        folder = stored_model(self._path(self.config.model.path))
        try:
            found = {} if folder is None else json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}  # opening the model reports what is wrong
        return found if isinstance(found, dict) else {}

    @property
    def reason_to_merge(self) -> str | None:
        """Why engines get adapters merged into the model's weights; None if they get them alone, or none are trained."""
        lora, choice = self.config.trainer.lora, self.config.sync.adapters
        if lora is None or choice == "alone":
            return None
        if choice == "merged":
            return "sync.adapters is merged"
        return reason_to_merge(self.config.explorer.engine, lora.rank, self._model_values.get("model_type"))

    @property
    def sends_adapters_alone(self) -> bool:
        """Whether engines get the adapters of trainer.lora alone, and not whole weights."""
        return self.config.trainer.lora is not None and self.reason_to_merge is None

    @built_once
    def teacher_folder(self) -> Path | None:
        """The folder of the teacher that the trainer computes; None without one.

        Raises:
            ModelError: the model does not exist.
        """
        teacher = self.algorithm.config.teacher
        return None if teacher is None else self._folder(teacher.path, "algorithm.teacher")

    @built_once
    def scoring_teacher_folder(self) -> Path | None:
        """The folder of the teacher that scores rollouts in the explorer; None without one, or with a server.

        Raises:
            ModelError: the model does not exist.
        """
        teacher = self.config.explorer.teacher
        return None if teacher is None or teacher.path is None else self._folder(teacher.path, "explorer.teacher.path")

    @built_once
    def critic_folder(self) -> Path | None:
        """The folder of the model that a critic starts from; None for the policy's, and without a critic.

        Raises:
            ModelError: the model does not exist.
        """
        critic = self.algorithm.config.critic
        return None if critic is None or critic.path is None else self._folder(critic.path, "algorithm.critic.path")

    @built_once
    def models(self) -> Sequence[ModelFolder]:
        """All models of the run, the policy's first.

        Raises:
            ModelError: a model does not exist.
            PluginError: a reward is unknown or cannot be loaded.
        """
        others: list[tuple[ModelUse, Path | None, str]] = [
            ("critic", self.critic_folder, "algorithm.critic.path"),
            ("teacher", self.teacher_folder, "algorithm.teacher"),
            ("teacher", self.scoring_teacher_folder, "explorer.teacher"),
            *(
                ("reward", reward.function.folder, "explorer.reward")
                for _, view in self.views(self.config.tasksets)
                for reward in view.rewards.values()
                if isinstance(reward.function, RewardModel)
            ),
        ]
        policy = ModelFolder("policy", self.model_folder, "model.path")
        return [policy, *(ModelFolder(use, folder, key) for use, folder, key in others if folder is not None)]

    def check_model_folder(self) -> None:
        """Refuse a model.path that names a folder without a model. A Hugging Face id is not looked up.

        Raises:
            ModelError: the folder does not exist, or lacks a part of a model.
        """
        if names_folder(self.config.model.path):
            self.model_folder  # noqa: B018

    def _folder(self, path: str, key: str = "model.path") -> Path:
        return resolve_model(self._path(path), key=key)

    def _path(self, path: str) -> str:
        return str(self.config.base_dir / path) if path.startswith((".", "/")) else path

    @built_once
    def algorithm(self) -> Algorithm:
        """The algorithm with which the trainer learns.

        Raises:
            PluginError, ConfigError: see `build_algorithm`.
        """
        section = self.config.algorithm
        return build_algorithm(section.name, section.args, group_size=section.group_size, base_dir=self.config.base_dir)

    @property
    def has_greedy_baseline(self) -> bool:
        """Whether the explorer samples a greedy rollout for each group: explorer.greedy_baseline, or what the algorithm needs.

        Raises:
            PluginError, ConfigError: see `build_algorithm`.
        """
        wanted = self.config.explorer.greedy_baseline
        return "baseline_rewards" in self.algorithm.columns if wanted is None else wanted

    @built_once
    def rewards(self) -> Mapping[str, LoadedReward]:
        """The rewards by `RewardConfig.key`.

        Raises:
            PluginError: a name is unknown or cannot be loaded.
            ConfigError: a reward does not accept its arguments.
        """
        return load_rewards(self.config.explorer.reward, self.config.base_dir)

    @built_once
    def workflow(self) -> Workflow:
        """The workflow that produces rollouts.

        Raises:
            PluginError: it is unknown or cannot be loaded.
        """
        return WORKFLOWS.load(self.config.explorer.workflow, self.config.base_dir)

    @built_once
    def selectors(self) -> Mapping[str, Selector]:
        """The selector of each taskset, built on a single dummy task to read its properties.

        Raises:
            PluginError, ConfigError: a selector does not exist, cannot be loaded or rejects its arguments.
        """
        chosen = {"": self.config.selector} | {each.name: each.selector for each in self.config.tasks if each.selector}
        built, errors = {}, []
        for name, selector in chosen.items():
            try:
                built[name] = self._selector(selector)
            except RftError as error:
                errors.append(error)
        refuse(errors)
        return {taskset.name: built.get(taskset.name, built[""]) for taskset in self.config.tasks}

    def _selector(self, chosen: SelectorConfig) -> Selector:
        return check_selector(chosen.type, chosen.args, self.config.base_dir)

    @built_once
    def engine_class(self) -> type[Engine]:
        """The class of the rollout engine; this may import its packages.

        Raises:
            PluginError: it is unknown or cannot be loaded.
        """
        return ENGINES.load(self.config.explorer.engine, self.config.base_dir)

    @built_once
    def monitors(self) -> Sequence[type[Monitor]]:
        """The classes of the monitors; this imports their packages.

        Raises:
            PluginError: a monitor is unknown or cannot be loaded.
        """
        return [MONITORS.load(name, self.config.base_dir) for name in self.config.monitor]

    def engine(self, worker_index: int) -> EngineConfig:
        """Return the engine's settings; see `engine_config`."""
        return engine_config(self.config, worker_index, sends_adapters_alone=self.sends_adapters_alone)

    @built_once
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and response, by the engine's settings and the model's config.json; None if neither sets it.

        Raises:
            ModelError, ConfigError: see `model_folder` and `engine`.
        """
        _ = self.model_folder  # is fetched if it is not on this machine
        return self.stored_context_length

    @property
    def stored_context_length(self) -> int | None:
        """The same without fetching the model: None, too, if it is not on this machine.

        Raises:
            ConfigError: see `engine`.
        """
        values = self._model_values
        text = values.get("text_config")
        limit = (text if isinstance(text, dict) else values).get("max_position_embeddings")
        asked = self.engine(worker_index=0).context_length
        return min((length for length in (asked, limit) if isinstance(length, int)), default=None)
