"""Damaged files of a tokenizer are found before a role starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rftcore.checks.models import check_models
from rftcore.checks.run import check_named
from rftcore.config.run import parse_config
from rftcore.findings import Findings
from rftcore.resolved import ResolvedRun
from tests.support.models import make_tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("whole") / "model", context_length=64)


@pytest.fixture
def resolved(whole: Path, tmp_path: Path) -> ResolvedRun:
    shutil.copytree(whole, tmp_path / "model")
    raw = {
        "run": {"name": "sums"},
        "model": {"path": "./model"},
        "tasks": [{"name": "a", "source": "none"}],
        "algorithm": {"name": "grpo"},
        "explorer": {"engine": "transformers", "reward": "exact_match"},
        "trainer": {},
        "steps": 1,
    }
    return ResolvedRun(parse_config(raw, tmp_path, "test"))


def test_whole_files_pass(resolved: ResolvedRun) -> None:
    findings = Findings()
    check_named(resolved, findings)
    check_models(resolved, findings)
    assert findings.errors == []


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["empty", "cut"])
def test_a_damaged_file_is_named(resolved: ResolvedRun, tmp_path: Path, name: str, share: float) -> None:
    file = tmp_path / "model" / name
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    for check in (check_named, check_models):
        findings = Findings()
        check(resolved, findings)
        (error,) = map(str, findings.errors)
        assert "the tokenizer of model.path cannot be read" in error and str(file) in error
