"""Check that tasks will have the features by which selectors choose, before a run starts without them.

A feature comes from the source's column `features`, from a stage of `pipelines.task`, or from a person who set it in the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from operators.base import IDENTITY_COLUMNS
from operators.chain.chain import Chain
from rftcore.resolved import ResolvedRun
from rftdata.buffer import Buffer
from rftdata.config import TasksetConfig
from rftdata.errors import ConfigError
from rftdata.tasks.loading import is_current
from rftdata.tasks.stored import all_have_number, set_by_hand


class FeatureCheck:
    """Counts the tasks of one set that lack what its selector needs.

    Args:
        buffer: if given, features that its active tasks already have count.

    Raises:
        PluginError, ConfigError: a selector cannot be loaded.
    """

    def __init__(self, resolved: ResolvedRun, taskset: TasksetConfig, buffer: Buffer | None) -> None:
        config, chain = resolved.config, resolved.task_chain
        chosen = taskset.selector or config.selector
        self._taskset, self._selector, self._may_drop = taskset.name, chosen.type, bool(chain.stages)
        keys = resolved.selectors[taskset.name].feature_keys
        added = _added(chain)  # these are not looked for in the source
        self._lacking: dict[str, int] = {}
        if added is not None:
            # Stored tasks count if no load will change them; of the others, features set by hand stay.
            stands = buffer is not None and is_current(buffer.database, taskset, config.base_dir)
            stored = buffer if stands else None
            self._lacking = {key: 0 for key in keys if key not in added and not _is_stored(stored, taskset, key)}
        self._by_hand = {key: _by_hand(buffer, taskset, key) for key in self._lacking}
        self._num_tasks = 0
        self._there: set[str] = set(added or ())

    def see(self, task: Mapping[str, Any]) -> None:
        """Count a task of the source."""
        self._num_tasks += 1
        features = task["features"]
        self._there.update(features)
        for key in self._lacking:
            by_hand = self._by_hand[key].get(task["task_key"])
            self._lacking[key] += not (_is_number(features.get(key)) if by_hand is None else by_hand)

    def verdict(self, *, are_all: bool) -> list[str]:
        """Return a sentence for each feature that only some tasks lack, if a stage may drop those.

        Args:
            are_all: whether all tasks of the source were seen.

        Raises:
            ConfigError: tasks lack a feature that the selector needs.
        """
        found = []
        for key, number in self._lacking.items():
            if not number:
                continue
            what = (
                f"the selector {self._selector!r} of the taskset {self._taskset!r} needs the feature {key!r}, "
                f"which is not a number in {number:,} of its {self._num_tasks:,} tasks"
            )
            if self._may_drop and (number < self._num_tasks or not are_all):
                found.append(f"{what}: the stages of pipelines.task must drop those")
                continue
            raise ConfigError(
                what,
                allowed=f"features of these tasks: {', '.join(sorted(self._there)) or 'none'}",
                todo="name another feature, give the source a column `features` with it, or add a stage to pipelines.task that computes it",
            )
        return found


def _added(chain: Chain) -> frozenset[str] | None:
    """Return the features that the stages give tasks; None if one may give any."""
    added: frozenset[str] = frozenset()
    for stage in chain.stages:
        if stage.operator.writes is None:
            return None
        added |= stage.operator.writes | frozenset(stage.operator.scores)
    return added - IDENTITY_COLUMNS - {"prompt", "answer"}


def _is_stored(buffer: Buffer | None, taskset: TasksetConfig, key: str) -> bool:
    return buffer is not None and all_have_number(buffer.database, taskset.name, key)


def _by_hand(buffer: Buffer | None, taskset: TasksetConfig, key: str) -> dict[str, bool]:
    return {} if buffer is None else set_by_hand(buffer.database, taskset.name, key)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
