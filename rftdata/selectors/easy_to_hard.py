"""Easy tasks first, by numbers that the tasks provide; after the hardest it starts again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rftdata.selectors.arguments import feature_list
from rftdata.selectors.base import Ids, TaskIds
from rftdata.selectors.epochs import EpochSelector, Places


class EasyToHard(EpochSelector):
    """Orders tasks by features, larger ones first.

    Args:
        features: keys of rft.task.features in which larger means easier (a pass rate, for example); the second one decides between
            equal values of the first, and so on. With a minus before a key (`-length`), larger means harder.
    """

    def __init__(self, task_ids: TaskIds, seed: int, *, features: Sequence[str]) -> None:
        super().__init__(task_ids, seed)
        names = feature_list("easy_to_hard", features)
        self._features = list(names)
        self._signs = [1.0 if name.startswith("-") else -1.0 for name in names]
        self.feature_keys = [name.removeprefix("-") for name in names]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "features": self._features}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A place by other features is meaningless, so the epoch begins again.
        same = state.get("features") == self._features
        super().load_state_dict(state if same else {**state, "last": None, "put_off": []})

    def places(self, positions: Ids, epoch: int) -> Places:
        # Equal features: in loading order.
        hard = [sign * self.features[key][positions] for sign, key in zip(self._signs, self.feature_keys, strict=True)]
        return [*hard, self.table.ids[positions]]
