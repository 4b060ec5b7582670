"""Reward that is the score of a model trained on preferences (`algorithm: reward_model`): `reward: reward_model:FOLDER`.

The folder is a checkpoint of the run that trained it, or a copy. The score is the scalar head's output at the last token, as in training.
The tokens are those that the policy sampled, so both models must have the same tokenizer: train the reward model from the same base.

The model is loaded at the first call, in each process that rewards are called in: set `explorer.reward_processes: 1` for a large one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rftcore.whole_models import open_whole
from rftcore.workflows.task import Task, Turn
from rftdata.errors import PluginError, RftError

PREFIX = "reward_model:"


def gives_scores(folder: Path) -> bool:
    """Return whether the model in a folder was saved with a scalar head, as reward models and critics are."""
    try:
        architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError):
        return False
    return any(str(name).endswith("ForTokenClassification") for name in architectures or [])


class RewardModel:
    """A reward function that scores with a model.

    Args:
        folder: folder of the model, in the format of checkpoints.

    Raises:
        PluginError: there is no model in it, or one without a scalar head.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise PluginError(
                "there is no model in the folder of the reward model",
                value=str(folder),
                allowed="a folder with config.json and safetensors",
                todo=f"correct the path after {PREFIX}; it is relative to the configuration file",
            )
        if not gives_scores(folder):
            raise PluginError(
                "the model in the folder of the reward model has no scalar head, so it gives no scores",
                value=str(folder),
                allowed="a checkpoint of a run with algorithm: reward_model",
                todo="train one from preference pairs first",
            )
        self.folder = folder

    def __call__(self, turn: Turn, task: Task) -> dict[str, float]:
        """Return the score as the part `reward_model`.

        Raises:
            RftError: see `score`.
        """
        return {"reward_model": self.score(list(turn.sequence.token_ids))}

    def score(self, token_ids: Sequence[int]) -> float:
        """Return the score of a prompt with its response.

        Raises:
            RftError: the model has fewer tokens than the policy.
        """
        import torch

        size = self._model.get_input_embeddings().weight.shape[0]
        if max(token_ids) >= size:
            raise RftError(
                f"the reward model {self.folder} has no token {max(token_ids)}, which the policy uses",
                allowed=f"0 to {size - 1}",
                todo="train the reward model from a model with the policy's tokenizer",
            )
        with torch.inference_mode():
            scores_1T1 = self._model(input_ids=torch.tensor([token_ids], device=self._model.device)).logits
        return float(scores_1T1[0, -1, 0])

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForTokenClassification

        model = open_whole(AutoModelForTokenClassification, self.folder, key=f"the path after {PREFIX}", num_labels=1)
        return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
