"""Settings of an engine's scheduler that the device or the method of speculative decoding does not allow are found before an engine starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rftcore.checks.run import check_named
from rftcore.checks.scheduling import check_device, check_drafts
from rftcore.findings import Findings
from rftcore.resolved import ResolvedRun
from rftdata.errors import ConfigError
from tests.unit.config.test_config import config

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that reports one GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-1, 80000'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def resolved(**engine_args: Any) -> ResolvedRun:
    return ResolvedRun(config(explorer={"engine": "vllm", "engine_args": engine_args}))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("drafts", [NGRAM, {"model": "./draft", "disable_padded_drafter_batch": True}])
def test_drafts_of_the_finished_step_are_refused_where_steps_are_scheduled_ahead(drafts: dict[str, Any]) -> None:
    findings = Findings()
    check_named(resolved(vllm={"speculative_config": drafts}), findings)
    (error,) = (error for error in map(str, findings.errors) if "speculative" in error)
    assert "set explorer.engine_args.async_scheduling: false" in error
    check_drafts(resolved(vllm={"speculative_config": drafts}, async_scheduling=False))
    check_drafts(resolved(vllm={"speculative_config": drafts}, own_process=False))


@pytest.mark.usefixtures("gpu")
def test_drafts_of_another_model_are_scheduled_ahead() -> None:
    check_drafts(resolved(vllm={"speculative_config": {"method": "draft_model", "model": "./draft"}}))


@pytest.mark.usefixtures("no_gpu")
def test_a_cpu_schedules_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    check_drafts(resolved(vllm={"speculative_config": NGRAM}))
    with pytest.raises(ConfigError, match="async_scheduling needs a GPU"):
        check_device(resolved(async_scheduling=True))
    check_device(resolved(async_scheduling=False))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check_device(resolved(async_scheduling=True))
