"""A taskset may have a workflow, rewards, sampling and limits of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftcore.checks.plugins import check_task_plugins
from rftcore.config.run import RunConfig, parse_config
from rftcore.explorer.taskset_runners import decoding_of
from rftcore.findings import Findings
from rftcore.resolved import ResolvedRun
from rftdata.errors import ConfigError

OWN = {"name": "own", "source": "a.jsonl"}


def config(folder: Path, own: dict[str, Any], **explorer: Any) -> RunConfig:
    raw = {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "algorithm": {"name": "grpo"},
        "trainer": {"batch_groups": 1},
        "tasks": [{"name": "plain", "source": "a.jsonl"}, {**OWN, **own}],
        "explorer": {"reward": "exact_match", "temperature": 0.5, **explorer},
        "steps": 1,
    }
    return parse_config(raw, folder, "test")


def test_what_a_taskset_sets_replaces_the_explorer_s_settings_for_it_alone(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("async def play(task, model, score, *, size=3):\n    ...\n")
    own = {"workflow": "./w.py:play", "reward": [], "top_k": 5, "max_turns": 4, "stop": ["\n"]}
    resolved = ResolvedRun(config(tmp_path, own, workflow_args={"system": "s"}, max_turns=9))
    plain, view = resolved.for_taskset("plain"), resolved.for_taskset("own")
    assert plain is resolved and view is resolved.for_taskset("own")
    assert (plain.workflow.__name__, view.workflow.__name__) == ("single_turn", "play")
    assert list(plain.rewards) == ["exact_match"] and list(view.rewards) == []
    # Settings of another workflow are not its own.
    assert view.config.explorer.workflow_args == {} and plain.config.explorer.workflow_args == {"system": "s"}
    assert (view.config.explorer.max_turns, plain.config.explorer.max_turns) == (4, 9)
    found = decoding_of(view.config.explorer)
    assert (found.temperature, found.top_k, found.stop) == (0.5, 5, ("\n",))
    assert [whose for whose, _ in resolved.views(resolved.config.tasksets)] == ["", "the taskset 'own'"]
    again = ResolvedRun(RunConfig.model_validate(resolved.config.model_dump(mode="json")))
    assert again.for_taskset("own").config.explorer == view.config.explorer  # as it is stored with the run


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"top_p": 2}, "the taskset 'own': top_p = 2.0: .*less than or equal to 1"),
        ({"reward": ["a", "a"]}, "the taskset 'own': a is named more than once"),
        ({"workflw": "x"}, "no key 'tasks.1.workflw'.*did you mean 'workflow'"),
    ],
)
def test_a_wrong_setting_of_a_taskset_is_refused_with_its_name(tmp_path: Path, own: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, own)


def test_the_plug_ins_of_every_taskset_are_checked(tmp_path: Path) -> None:
    findings = Findings()
    check_task_plugins(ResolvedRun(config(tmp_path, {"workflow_args": {"colour": "x"}, "reward": "nope"})), findings)
    texts = [str(error) for error in findings.errors]
    assert len(texts) == 2 and all(text.startswith("the taskset 'own': ") for text in texts), texts
    assert "nope" in texts[0] and "colour" in texts[1]
