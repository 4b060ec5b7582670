"""What the device and the model choose where a configuration says nothing, and what they leave alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftcore.config.run import RunConfig, parse_config
from rftcore.run.defaults import slow_limit, with_defaults
from tests.support.models import make_tiny_model


def config_of(explorer: dict[str, Any], **sections: Any) -> RunConfig:
    raw = {
        "run": {"name": "defaults"},
        "model": {"path": "./none"},
        "tasks": [{"name": "sums", "source": "./sums.jsonl"}],
        "algorithm": {"name": "grpo", "group_size": 8},
        "explorer": {"reward": "exact_match", **explorer},
        "trainer": {"batch_groups": 16, "learning_rate": 1e-5},
        "steps": 1,
        **sections,
    }
    return parse_config(raw, Path("/"), "a test")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


ON_GPU = {"trainer": {"batch_groups": 16, "learning_rate": 1e-5, "num_gpus": 1}}


def test_a_gpu_samples_more_and_longer_answers_than_a_cpu() -> None:
    cpu, sentence = with_defaults(config_of({}))
    assert (cpu.explorer.max_tokens, cpu.explorer.claim_groups, cpu.explorer.engine_args) == (
        256,
        16,
        {"max_num_seqs": 64},
    )
    assert sentence == (
        "chosen for a CPU: explorer.engine_args.max_num_seqs 64, explorer.max_tokens 256, explorer.claim_groups 16, explorer.rollout_timeout_s 600"
    )
    gpu, _ = with_defaults(config_of({}, **ON_GPU))
    assert (gpu.explorer.max_tokens, gpu.explorer.claim_groups, gpu.explorer.engine_args) == (
        2048,
        64,
        {"max_num_seqs": 256},
    )


def test_values_that_the_file_sets_stay() -> None:
    given = {"max_tokens": 32000, "claim_groups": 3, "rollout_timeout_s": 20.0, "engine_args": {"max_num_seqs": 7}}
    config = config_of(given, **ON_GPU)
    assert with_defaults(config) == (config, None)


def test_the_limit_of_a_rollout_follows_the_length_of_answers() -> None:
    chosen, _ = with_defaults(config_of({"max_tokens": 32000}, **ON_GPU))
    assert chosen.explorer.rollout_timeout_s == 3200.0 and slow_limit(chosen) is None
    sentence = slow_limit(config_of({"max_tokens": 32000, "rollout_timeout_s": 600}))
    assert sentence is not None and "fewer than 53.3 tokens per second; 3200 s allow for 10" in sentence


def test_several_explorers_share_the_groups_of_a_batch() -> None:
    chosen, _ = with_defaults(config_of({"num_explorers": 3}, **ON_GPU))
    assert chosen.explorer.claim_groups == 6


def test_a_short_context_limits_the_chosen_answers(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    chosen, _ = with_defaults(
        config_of({"engine_args": {"context_length": 64}}, model={"path": str(tmp_path / "model")})
    )
    assert chosen.explorer.max_tokens == 63
