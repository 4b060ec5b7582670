"""`ResolvedRun`: a configuration, and what it names, each built once.

A process makes one of its configuration and passes it on. Everything is built on first use, so a role builds only what it works with
and a configuration that is merely read builds nothing. What cannot be built raises there, each time it is asked for.

Chains are shared: who prepares one closes it before another part of the process prepares it again. A process passes the configuration to
another process, and never a `ResolvedRun`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from operators.chain.build import build_chain
from operators.chain.chain import Chain
from rftcore.algorithms import build_algorithm
from rftcore.config import RunConfig
from rftcore.engines import ENGINES
from rftcore.engines.base import Engine, EngineConfig
from rftcore.models import resolve_model
from rftcore.monitor import MONITORS, Monitor
from rftcore.rewards import Reward, load_rewards
from rftcore.workflows import WORKFLOWS
from rftcore.workflows.task import Workflow
from rftdata.config import SelectorConfig
from rftdata.config_errors import parse_section
from rftdata.errors import RftError
from rftdata.pipeline.tasks import TASK_BATCH_SCHEMA
from rftdata.selectors import Selector, check_selector

if TYPE_CHECKING:
    from rftcore.algorithms.algorithm import Algorithm


class ResolvedRun:
    """What a configuration names, as objects.

    Attributes:
        config: the configuration, for plain settings.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def renamed(self, name: str) -> ResolvedRun:
        """The same run under another name; it shares what is built already."""
        new = copy.copy(self)
        new.config = self.config.model_copy(update={"run": self.config.run.model_copy(update={"name": name})})
        new.config._base_dir = self.config.base_dir
        return new

    @cached_property
    def experience_chain(self) -> Chain:
        """The chain of `pipelines.experience`, between explorer and trainer.

        Raises:
            PluginError, ConfigError: a stage that does not exist, load or fit experiences.
        """
        config = self.config
        smallest = config.algorithm.smallest_group
        try:
            return build_chain(config.pipelines.experience, config.base_dir, min_group_size=smallest)
        except RftError as error:
            raise error.about("pipelines.experience") from error

    @cached_property
    def task_chain(self) -> Chain:
        """The chain of `pipelines.task`.

        Raises:
            PluginError, ConfigError: a stage that does not exist, load or fit tasks.
        """
        config = self.config
        try:
            return build_chain(config.pipelines.task, config.base_dir, schema=TASK_BATCH_SCHEMA, require_reward=False)
        except RftError as error:
            raise error.about("pipelines.task") from error

    @cached_property
    def model_folder(self) -> Path:
        """The folder of the run's model, fetched and converted where needed.

        Raises:
            ModelError: there is no such model.
        """
        path = self.config.model.path
        return resolve_model(str(self.config.base_dir / path) if path.startswith((".", "/")) else path)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The rule that the trainer learns by.

        Raises:
            PluginError, ConfigError: see `build_algorithm`.
        """
        section = self.config.algorithm
        return build_algorithm(section.name, section.args, group_size=section.group_size, base_dir=self.config.base_dir)

    @cached_property
    def rewards(self) -> Mapping[str, Reward]:
        """The reward functions by their names in the configuration.

        Raises:
            PluginError: a name that is unknown or does not load.
        """
        return load_rewards(self.config.explorer.reward, self.config.base_dir)

    @cached_property
    def workflow(self) -> Workflow:
        """The workflow that tries tasks.

        Raises:
            PluginError: it is unknown or does not load.
        """
        return WORKFLOWS.load(self.config.explorer.workflow, self.config.base_dir)

    @cached_property
    def selectors(self) -> Mapping[str, Selector]:
        """What selects from each taskset, over one task that does not exist: what it says of itself.

        Raises:
            PluginError, ConfigError: a selector that does not exist, load or take its arguments.
        """
        default = self._selector(self.config.selector)
        return {
            taskset.name: default if taskset.selector is None else self._selector(taskset.selector)
            for taskset in self.config.tasks
        }

    def _selector(self, chosen: SelectorConfig) -> Selector:
        return check_selector(chosen.type, chosen.args, self.config.base_dir)

    @cached_property
    def engine_class(self) -> type[Engine]:
        """The class of the rollout engine; its packages may be imported.

        Raises:
            PluginError: it is unknown or does not load.
        """
        return ENGINES.load(self.config.explorer.engine, self.config.base_dir)

    @cached_property
    def monitors(self) -> Sequence[type[Monitor]]:
        """The classes of the monitors; their packages are imported.

        Raises:
            PluginError: one that is unknown or does not load.
        """
        return [MONITORS.load(name, self.config.base_dir) for name in self.config.monitor]

    def engine(self, worker_index: int) -> EngineConfig:
        """The engine's settings; every explorer samples from a stream of its own.

        Raises:
            ConfigError: a setting that is unknown or wrong.
        """
        settings = {"seed": self.config.run.seed * 1000 + worker_index, **self.config.explorer.engine_args}
        return parse_section(EngineConfig, settings, "the engine's settings", within="explorer.engine_args")

    @cached_property
    def context_length(self) -> int | None:
        """Most tokens of prompt and response, by the engine's settings and the model's config.json; None where neither says.

        Raises:
            ModelError, ConfigError: see `model_folder` and `engine`.
        """
        folder = self.model_folder
        try:
            model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            limit = (model.get("text_config") or model).get("max_position_embeddings")
        except (OSError, ValueError, AttributeError):
            limit = None  # opening the model says what is wrong with it
        asked = self.engine(worker_index=0).context_length
        return min((length for length in (asked, limit) if length), default=None)
