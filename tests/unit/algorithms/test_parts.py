"""Estimators of the KL divergence, aggregations and corrections, against numbers worked out by hand; and a user's own parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rftcore.algorithms import KL_ESTIMATORS, build_algorithm
from rftcore.algorithms.base import Signals
from rftcore.algorithms.kl import k3
from rftdata.errors import ConfigError, PluginError
from tests.support.algorithms import loss_and_gradient, step_batch


class TestKLEstimators:
    @pytest.mark.parametrize(
        ("kind", "expected"), [("k1", 0.6931472), ("k2", 0.2402265), ("k3", 0.1931472), ("abs", 0.6931472)]
    )
    def test_against_numbers(self, kind: str, expected: float) -> None:
        # p = 0.5, q = 0.25: log p - log q = log 2 = 0.6931472. k2 = 0.6931472² / 2; k3 = q/p - 1 - log(q/p) = 0.5 - 1 + 0.6931472.
        p, q = torch.tensor(0.5).log(), torch.tensor(0.25).log()
        assert KL_ESTIMATORS.load(kind)()(p, q, p).item() == pytest.approx(expected)

    @pytest.mark.parametrize(("anchor", "ratio"), [(0.4, 1.25), (0.1, 2.0)])
    def test_corrected_is_k3_times_the_ratio_up_to_two(self, anchor: float, ratio: float) -> None:
        p, q = torch.tensor(0.5).log(), torch.tensor(0.25).log()
        assert KL_ESTIMATORS.load("corrected")()(p, q, torch.tensor(anchor).log()).item() == pytest.approx(
            0.1931472 * ratio
        )

    def test_k1_and_k3_average_to_the_divergence(self) -> None:
        # Exactly, by summing over three outcomes instead of sampling them.
        p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
        divergence = (p * (p / q).log()).sum().item()
        assert (p * KL_ESTIMATORS.load("k1")()(p.log(), q.log(), p.log())).sum().item() == pytest.approx(divergence)
        assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx(divergence)

    def test_k3_of_policies_far_apart_is_finite(self) -> None:
        assert torch.isfinite(k3(torch.tensor(-500.0), torch.tensor(0.0)))


OWN_PARTS = """
from pydantic import Field
from rftcore.algorithms.aggregation import Aggregation
from rftcore.algorithms.base import PartConfig
from rftcore.algorithms.correction import Corrected, Correction
from rftcore.algorithms.kl import KLEstimator

class Power(PartConfig):
    power: int = Field(2, ge=1, description="Exponent of the distance.")

class Distance(KLEstimator):
    Config = Power
    def __call__(self, logprobs_N, reference_N, anchor_N):
        return (logprobs_N - reference_N).abs() ** self.config.power

class RootMean(Aggregation):
    def __call__(self, tokens_B, share_B, sequence_N):
        return (share_B / (share_B * tokens_B.sqrt()).sum() / tokens_B.sqrt())[sequence_N]

class Halved(Correction):
    def __call__(self, batch, signals):
        weight_N = 0.5 * signals.old_N.new_ones(len(signals.old_N))
        return Corrected(weight_N, weight_N > 0)
"""


class TestPartsOfOnesOwn:
    """An estimator, an aggregation and a correction that are not built in: by file, and by the entry point of an installed package."""

    @staticmethod
    def check(changes: dict[str, Any], folder: Path) -> None:
        # Sequences of 1 and 4 tokens: weights 1 / (1 + 2) and 1 / (3 · 2). Ratios are 1, A = ±0.7071058, weights halved.
        # KL: |0 - (-0.5)|³ = 0.125 at each token, times 0.2.
        algorithm = build_algorithm("grpo", changes, base_dir=folder)
        batch = step_batch([1.0, 0.0], tokens=[1, 4], behavior=[0.0] * 5)
        signals = Signals(old_N=torch.zeros(5), reference_N=torch.full((5,), -0.5))
        loss, _, metrics = loss_and_gradient(algorithm, batch, [0.0] * 5, signals)
        policy = -0.5 * 0.7071058 / 3 + 0.5 * 0.7071058 * 4 / 6
        assert loss == pytest.approx(policy + 0.2 * 0.125 * (1 / 3 + 4 / 6), abs=1e-6)
        assert metrics["correction_kept"] == 1.0 and metrics["kl_reference"] == pytest.approx(0.125)

    def test_are_named_by_file(self, tmp_path: Path) -> None:
        (tmp_path / "own.py").write_text(OWN_PARTS)
        kl = {"type": {"name": "./own.py:Distance", "power": 3}, "coef": 0.2}
        self.check({"kl": kl, "aggregation": "./own.py:RootMean", "correction": "./own.py:Halved"}, tmp_path)
        with pytest.raises(ConfigError, match=r"algorithm\.kl\.type\.power"):
            build_algorithm("grpo", {"kl": kl | {"type": {"name": "./own.py:Distance", "power": 0}}}, base_dir=tmp_path)

    def test_are_named_by_entry_point(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "installed_parts.py").write_text(OWN_PARTS)
        info = tmp_path / "installed_parts-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-parts\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[rftdata.kl]\ndistance = installed_parts:Distance\n[rftdata.aggregation]\nroot-mean = installed_parts:RootMean\n"
            "[rftdata.correction]\nhalved = installed_parts:Halved\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        kl = {"type": {"name": "distance", "power": 3}, "coef": 0.2}
        self.check({"kl": kl, "aggregation": "root-mean", "correction": "halved"}, tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kl": {"type": "k4", "coef": 0.1}}, r"unknown kl \(got 'k4'\); allowed: abs, corrected, k1, k2, k3"),
            ({"aggregation": "token_mean"}, "unknown aggregation.*did you mean 'token-mean'"),
            ({"correction": ["mask", "trunc"]}, r"unknown correction \(got 'trunc'\); allowed: mask, truncate"),
        ],
    )
    def test_an_unknown_name_lists_the_known_ones(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(PluginError, match=message):
            build_algorithm("grpo", changes)


class TestCorrections:
    def test_of_a_list_are_multiplied(self) -> None:
        # Sequence 0: ratios e^1 and e^-1, geometric mean 1, kept: weights 2 (truncated) and e^-1. Sequence 1: e^-1.5 and e^-0.5,
        # geometric mean e^-1 below 0.5, dropped. A = ±0.7071058; ρ = π / π_old = 1; the mean over four tokens.
        keys = [{"name": "truncate", "high": 2.0}, {"name": "mask", "level": "geometric", "low": 0.5, "high": 1.5}]
        batch = step_batch([1.0, 0.0], tokens=[2, 2], behavior=[-2.0, -1.0, -0.5, -1.5])
        signals = Signals(old_N=torch.tensor([-1.0, -2.0, -2.0, -2.0]))
        algorithm = build_algorithm("grpo", {"correction": keys})
        loss, gradient, metrics = loss_and_gradient(algorithm, batch, [-1.0, -2.0, -2.0, -2.0], signals)
        expected = [-0.7071058 * weight / 4 for weight in (2.0, math.exp(-1.0), 0.0, 0.0)]
        assert loss == pytest.approx(sum(expected)) and gradient == pytest.approx(expected, abs=1e-7)
        assert metrics["correction_kept"] == 0.25
