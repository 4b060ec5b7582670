"""The results shown in docs/how-to/train-on-chats.md are real: its file is read, and its chats are stored with the tokens to train on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import rftdata
from rftcore.config.run import parse_config
from rftcore.engines.no_engine import NoEngine
from rftcore.resolved import ResolvedRun
from rftdata.errors import ConfigError
from rftdata.tasks import load_taskset
from tests.support.checking import deep_sentences, refuse_names
from tests.support.explored_run import Run
from tests.support.models import make_tiny_model

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "train-on-chats.md").read_text(encoding="utf-8")
CHATS, QUESTIONS = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
LINE = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def place(tmp_path: Path, tiny: Path) -> Path:
    (tmp_path / "model").symlink_to(tiny)
    (tmp_path / "chats.jsonl").write_text(LINE)
    (tmp_path / "sums.csv").write_text("problem,solution\n1+1,2\n2+2,4\n")
    return tmp_path


@pytest.mark.parametrize(
    "changes", [{}, QUESTIONS, {"explorer": {**CHATS["explorer"], "workflow_args": {"turns": "last"}}}]
)
def test_the_configurations_of_the_page_pass_the_deep_check(place: Path, changes: dict[str, Any]) -> None:
    config = parse_config({**CHATS, **changes, "buffer": {"uri": str(place / "buffer")}}, place, "docs")
    (name,) = (taskset.name for taskset in config.tasks)
    refuse_names(resolved := ResolvedRun(config))
    assert any(said.startswith(f"taskset {name}: ") for said in deep_sentences(resolved))


def explore(buffer: rftdata.Buffer, place: Path, **workflow_args: Any) -> list[dict[str, Any]]:
    """Let an explorer write what the page's configuration asks for; the experiences with their arrays."""
    config = parse_config(CHATS, place, "docs")
    run = Run(buffer, place)
    buffer.sql("DELETE FROM rft.task")
    load_taskset(buffer.database, config.tasks[0], place)
    count = "SELECT count(*) AS n FROM rft.rollout JOIN rft.rollout_group g USING (group_id) WHERE run_id = %s"
    sections = {name: CHATS[name] for name in ("tasks", "algorithm", "sampling")}
    sections |= {"explorer": {**CHATS["explorer"], "workflow_args": workflow_args}, "trainer": {"batch_groups": 1}}
    with buffer.attempt(run.run) as attempt:
        run.publish(attempt, 0, "weights")
        run.explore(NoEngine(place / "model"), lambda: run.rows(count)[0]["n"] > 0, sections)
    found = buffer.sql(
        "SELECT experience_id, response, messages FROM rft.v_experience WHERE outcome = 'ok'"
    ).to_pylist()
    arrays = buffer.read_arrays([row["experience_id"] for row in found], ["token_ids", "loss_mask"])
    return [
        {**row, **{name: arrays[name][place].as_py() for name in arrays.column_names}}
        for place, row in enumerate(found)
    ]


@pytest.mark.parametrize(("turns", "answers"), [("all", "24<eos>"), ("last", "4<eos>")])
def test_the_tokens_of_the_answers_are_stored_as_those_that_count(
    buffer: rftdata.Buffer, place: Path, turns: str, answers: str
) -> None:
    tokenizer = NoEngine(place / "model").tokenizer
    found = explore(buffer, place, turns=turns)
    assert found
    for row in found:
        counted = [token for token, counts in zip(row["token_ids"], row["loss_mask"], strict=True) if counts]
        assert tokenizer.decode(counted) == answers
        assert row["messages"] == json.loads(LINE)["messages"]


def test_a_stored_chat_without_an_answer_ends_the_run_and_not_only_its_rollout(
    buffer: rftdata.Buffer, place: Path
) -> None:
    """Loading refuses such a row; a set that another configuration has loaded may hold one."""
    (place / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "1+1"}]}\n')
    with pytest.raises(ConfigError, match="a chat without a turn of the assistant"):
        explore(buffer, place)
