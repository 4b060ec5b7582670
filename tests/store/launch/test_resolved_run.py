"""A configuration's plug-ins and chains are built once in a process, and a role of `rft run` leaves out what `rft run` has checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rftcore.cli import run_command
from rftcore.config.run import load_config
from rftcore.launch.by_hand import join_by_hand
from rftcore.launch.preparation import prepare_run
from rftcore.resolved import ResolvedRun
from rftcore.run.join import join_run
from rftdata import Buffer
from tests.support.checking import refuse_start
from tests.support.models import make_tiny_model

# Each constructor writes its class down.
COUNTED = """
from pathlib import Path

from operators.base import Operator, StageOutcome
from rftcore.algorithms.losses.sft import SFT
from rftdata.selectors.shuffle import Shuffle


class Counted:
    def __init__(self, *args, **kwargs):
        with Path(__file__).with_name("built.txt").open("a") as file:
            print(type(self).__name__, file=file)
        super().__init__(*args, **kwargs)


class Experiences(Counted, Operator):
    writes = frozenset()

    def apply(self, table):
        return StageOutcome.keep_all(table.num_rows)


class Tasks(Experiences):
    pass


class Own(Counted, SFT):
    pass


class Mixed(Counted, Shuffle):
    pass
"""
EVERYTHING = ["Experiences", "Mixed", "Own", "Tasks"]


@pytest.fixture
def file(buffer: Buffer, tmp_path: Path) -> Path:
    """A configuration whose stages, selector and algorithm write down that they are built."""
    (tmp_path / "counted.py").write_text(COUNTED)
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "run": {"name": "counted"},
        "buffer": {"uri": buffer.config.uri, "segments": buffer.config.segments},
        "model": {"path": str(make_tiny_model(tmp_path / "model", context_length=64))},
        "steps": 1,
        "trainer": {"batch_groups": 1},
        "tasks": [{"name": "sums", "source": "tasks.jsonl"}, {"name": "more", "source": "tasks.jsonl"}],
        "explorer": {"engine": "transformers", "reward": "exact_match", "max_tokens": 8},
        "selector": {"type": "./counted.py:Mixed"},
        "algorithm": {"name": "sft", "loss": "./counted.py:Own", "group_size": 2},
        "pipelines": {"experience": [{"./counted.py:Experiences": {}}], "task": [{"./counted.py:Tasks": {}}]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "run.yaml"


def built(file: Path) -> list[str]:
    """What was built since the last call."""
    note = file.with_name("built.txt")
    names = sorted(note.read_text().split()) if note.exists() else []
    note.unlink(missing_ok=True)
    return names


def test_the_deep_check_builds_everything_once(file: Path) -> None:
    assert run_command(["check", "--deep", str(file)]) == 0
    assert built(file) == EVERYTHING


def test_loading_tasks_builds_their_chain_once(file: Path) -> None:
    assert run_command(["tasks", "load", str(file)]) == 0
    assert built(file) == ["Tasks"]


def test_checking_and_preparing_a_run_builds_everything_once(buffer: Buffer, file: Path) -> None:
    resolved = ResolvedRun(load_config(file))
    refuse_start(resolved)
    row = prepare_run(resolved, buffer)
    assert built(file) == EVERYTHING
    assert row.pipeline_version == resolved.experience_chain.version


def test_a_fork_shares_what_is_built(file: Path) -> None:
    resolved = ResolvedRun(load_config(file))
    chain = resolved.experience_chain
    fork = resolved.renamed("fork")
    assert (fork.config.run.name, resolved.config.run.name) == ("fork", "counted")
    assert fork.experience_chain is chain and fork.config.base_dir == resolved.config.base_dir


@pytest.mark.parametrize(("by_hand", "expected"), [(False, []), (True, EVERYTHING)])
def test_only_a_role_that_a_person_started_checks_the_configuration(
    buffer: Buffer, file: Path, by_hand: bool, expected: list[str]
) -> None:
    config = load_config(file)
    prepare_run(ResolvedRun(config), buffer)
    built(file)
    joined = join_by_hand(config, "counted", "trainer") if by_hand else join_run(config, "counted")
    joined.buffer.close()
    assert built(file) == expected
