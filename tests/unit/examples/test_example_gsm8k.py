"""GSM8K: answers are read and compared as numbers, questions come from files, and the page's figures are the estimate's."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rftcore.config.run import load_config
from rftcore.resolved import ResolvedRun
from rftcore.trainer.estimates.memory import GIB, Trained, engine_memory, training_memory
from rftcore.trainer.model_shape import model_shape
from rftcore.workflows import check_workflow_args
from rftcore.workflows.single_turn import chat_messages
from rftcore.workflows.task import Task, Turn
from rftdata.config import TasksetConfig
from rftdata.errors import TaskSourceError
from rftdata.experience import Sequence
from rftdata.tasks import read_tasks
from tests.support.published_models import QWEN_1_5B

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "gsm8k"
ROWS = [
    {
        "question": "Natalia sold 48 clips in April and half as many in May. How many?",
        "answer": "48/2 = <<48/2=24>>24\n48+24 = 72\n#### 72",
    },
    {"question": "A car costs $1,080. How much are two?", "answer": "Twice 1080.\n#### 2,160"},
]


def reward(response: str, answer: str) -> float:
    score = ResolvedRun(load_config(FOLDER / "config.yaml")).rewards["./reward.py:accuracy"]
    sequence = Sequence(prompt="", response=response, token_ids=[1, 2], num_prompt_tokens=1, finish_reason="stop")
    task = Task.from_row(
        {"task_id": 1, "taskset": "t", "task_key": "k", "payload": {"prompt": "?", "answer": answer, "metadata": {}}}
    )
    return score(Turn([], response, "stop", sequence), task)  # type: ignore[operator, return-value]


@pytest.mark.parametrize(
    "response",
    [
        r"So she has \boxed{1080} dollars.",
        r"\boxed{\$1{,}080.00}",
        r"\boxed{1,080 \text{ dollars}}",
        r"\boxed{\frac{2160}{2}}",
        r"\boxed{x = 1080}",
        r"\boxed{1080 \text{ m}^2}",
        r"First \boxed{7}, no: \boxed{1080}",
        "540 + 540 = 1080\n#### 1,080",
        "The answer is $1,080. That is 2 * 540 = 1080 for 2 people.",
        "the final answer is: 540 * 2 = 1080",
    ],
)
def test_a_right_answer_is_found_however_it_is_written(response: str) -> None:
    assert reward(response, "1080") == 1.0
    assert reward(response, "1,080") == 1.0
    assert reward(response, "1081") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "1080",
        "It costs 1080.",
        r"\boxed{}",
        r"\boxed{1080",
        r"\boxed{many}",
        "#### ",
        r"\boxed{1080/0}",
        r"#### 1080 \boxed{12}",
    ],
)
def test_without_a_final_answer_there_is_no_reward(response: str) -> None:
    assert reward(response, "1080") == 0.0


def test_signs_and_parts_count() -> None:
    assert reward("#### -3", "-3") == 1.0 and reward("#### 3", "-3") == 0.0
    assert reward(r"\boxed{10-3}", "10") == 1.0  # no sign, but a minus
    assert reward("The answer is 0.5.", "1/2") == 1.0
    assert Fraction("18.50") == Fraction(37, 2) and reward("#### $18.50", "18.5") == 1.0


def tasks(**args: Any) -> list[Any]:
    return list(read_tasks(TasksetConfig(name="gsm8k", source="./tasks.py:gsm8k", args=args), FOLDER))


def test_questions_come_from_a_file_or_from_a_copy_of_the_repository(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "main").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), tmp_path / "main" / "test-00000-of-00001.parquet")
    both = tasks(path=str(tmp_path))
    assert [task["payload"]["answer"] for task in both] == ["72", "2,160"]
    assert both[1]["payload"]["metadata"]["solution"] == "Twice 1080."
    assert tasks(path=str(tmp_path / "train.jsonl")) == both
    assert [task["payload"] for task in tasks(path=str(tmp_path), split="test")] == [both[0]["payload"]]


def test_a_folder_without_questions_and_a_solution_without_an_answer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskSourceError, match="no questions of GSM8K"):
        tasks(path=str(tmp_path))
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "Why?", "answer": "Because."}) + "\n")
    with pytest.raises(TaskSourceError, match="no answer after '####'"):
        tasks(path=str(tmp_path))


@pytest.mark.parametrize("name", ["config.yaml", "lora.yaml"])
def test_the_prompt_asks_for_a_boxed_answer(name: str) -> None:
    config = load_config(FOLDER / name)
    resolved = ResolvedRun(config)
    check_workflow_args(config.explorer.workflow, resolved.workflow, 3, config.explorer.workflow_args)
    task = Task.from_row(
        {
            "task_id": 1,
            "taskset": "t",
            "task_key": "k",
            "payload": {"prompt": "Why {0}?", "answer": "1", "metadata": {}},
        }
    )
    [message] = chat_messages(task, None, None, config.explorer.workflow_args["template"])
    assert message["content"].startswith("Why {0}?\n") and message["content"].endswith(r"within \boxed{}.")


@pytest.mark.parametrize("name", ["config.yaml", "lora.yaml"])
def test_the_figures_of_the_page_are_the_estimate(name: str) -> None:
    page = (FOLDER / "README.md").read_text()
    section, end, total = page.partition(f"`{name}`, GiB")[2].partition("| together |")
    section += end + total.partition("\n")[0]
    figures = {part: float(size) for part, size in re.findall(r"^\| ([a-z ]+) \| ([\d.]+) \|", section, re.MULTILINE)}
    config, shape = load_config(FOLDER / name), model_shape(QWEN_1_5B.to_dict())
    found = training_memory(config.trainer, Trained(policy=shape, has_reference=True))
    wanted = {part.name: part.size_bytes / GIB for part in found.parts} | {"together": found.size_bytes / GIB}
    assert list(figures) == list(wanted)
    assert figures == pytest.approx(wanted, abs=0.05)
    engine = engine_memory(shape, "bfloat16")
    assert (engine.weights_bytes / GIB, engine.cache_token_bytes) == (pytest.approx(2.9, abs=0.05), 28 * 1024)
    assert "2.9 GiB" in page and "28 KiB" in page
