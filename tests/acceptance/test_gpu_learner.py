"""On a CUDA device: every preset trains as it does on the CPU. `pytest -m gpu`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.presets import presets
from rftcore.trainer.learner import Learner
from tests.support.learning import config, make_batch, save_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_presets_give_the_same_losses_on_a_gpu_as_on_a_cpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = str(save_model(tmp_path / "model", tied=True))
    differences = {}
    for name in sorted(presets()):
        changes = {"teacher": model} if "teacher_logits" in build_algorithm(name, {"teacher": model}).signals else {}
        losses = {}
        for device in ("cpu", "cuda"):
            algorithm = build_algorithm(name, changes)
            learner = Learner(model, config(), algorithm, 0, device=device)
            batch = make_batch(1, rewards=[float(index % 3) - 1.0 for index in range(12)])
            batch = replace(
                batch, teacher_logprobs_BT=batch.behavior_logprobs_BT / 2, step_rewards_B=torch.arange(12) / 12.0,
                state_B=torch.arange(12) % 4, baseline_rewards_B=torch.full((12,), 0.25), paired=algorithm.pairwise,
            )  # fmt: skip
            metrics = learner.update(batch, 1)
            assert metrics["skipped"] == 0.0, (name, device)
            losses[device] = metrics["loss"]
        differences[name] = abs(losses["cpu"] - losses["cuda"])
        # A critic and a reward model begin with a random head, drawn on another device here and there.
        if algorithm.trains_scorer or algorithm.config.critic is not None:
            assert math.isfinite(losses["cuda"])
        else:
            assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3, abs=1e-4), name
    print(f"{len(differences)} presets; largest difference of a loss {max(differences.values()):.2e}")
