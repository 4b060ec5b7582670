"""The results shown in docs/how-to/prepare-tasks.md and examples/clean_tasks are real."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.config.run import RunConfig, load_config
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.pipeline import load_tasks
from rftdata import Buffer
from rftdata.tasks import list_tasksets, show_tasks
from tests.store.tasks.test_task_pipeline import configuration
from tests.support.models import make_tiny_model

CHECKOUT = Path(__file__).resolve().parents[3]
EXAMPLE = CHECKOUT / "examples" / "clean_tasks"
PAGE = (CHECKOUT / "docs" / "how-to" / "prepare-tasks.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_every_source_of_the_page_loads(buffer: Buffer, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    shutil.copy(EXAMPLE / "problems.jsonl", tmp_path)
    (tmp_path / "data").mkdir()
    shutil.copy(EXAMPLE / "problems.jsonl", tmp_path / "data" / "train-00000.jsonl")
    (tmp_path / "data" / "test-00000.jsonl").write_text("not read")
    (tmp_path / "tasks.py").write_text(
        "def make(count):\n    yield from ({'question': str(i), 'answer': str(i)} for i in range(count))\n"
    )
    block = next(block for block in BLOCKS if "tasks" in block)
    load_tasks(ResolvedRun(configuration(tmp_path, [], tasks=block["tasks"])), buffer)
    found = {row["taskset"]: row["num_tasks"] for row in list_tasksets(buffer.database)}
    assert found == {"file": 39, "folder": 39, "sums": 100, "own": 20, "failed": 39}


def test_the_splits_of_the_page_are_disjoint_and_counted(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(EXAMPLE / "problems.jsonl", tmp_path)
    rows = [{"question": f"{n} + {n % 9} =", "answer": str(n), "book": n % 40} for n in range(200)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.csv").write_text(
        "question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows)
    )
    split, keyed = [block for block in BLOCKS if "tasks" in block][1:]
    load_tasks(ResolvedRun(configuration(tmp_path, [], **split)), buffer)
    found = {row["taskset"]: row["num_tasks"] for row in list_tasksets(buffer.database)}
    said = capsys.readouterr().err
    for taskset in found:
        counts = "train {train}, validation {validation}, test {test}".format(**found)
        assert f"tasks: {taskset}: tasks of the source by split: {counts}; it uses {taskset}" in said
    load_tasks(ResolvedRun(configuration(tmp_path, [], tasks=keyed["tasks"])), buffer)
    books = buffer.sql("SELECT DISTINCT payload -> 'metadata' -> 'book' AS book FROM rft.task WHERE taskset = 'books'")
    assert {row["taskset"]: row["num_tasks"] for row in list_tasksets(buffer.database)}["books"] == 5 * books.num_rows


@pytest.mark.parametrize("number", [1, 2])
def test_every_chain_of_the_page_runs(buffer: Buffer, tmp_path: Path, tiny: Path, number: int) -> None:
    pytest.importorskip("data_juicer")
    shutil.copy(EXAMPLE / "problems.jsonl", tmp_path)
    stages = [block for block in BLOCKS if "pipelines" in block][number - 1]["pipelines"]["task"]
    tasks = [{"name": "problems", "source": "problems.jsonl"}]
    load_tasks(ResolvedRun(configuration(tmp_path, stages, tasks=tasks, model={"path": str(tiny)})), buffer)
    shown = show_tasks(buffer.database, "problems", order="priority", limit=1)
    assert shown[0]["features"]["priority"] is not None


def example(model: Path, folder: Path) -> RunConfig:
    for name in ("config.yaml", "problems.jsonl"):
        shutil.copy(EXAMPLE / name, folder)
    return load_config(folder / "config.yaml", [f"model.path={model}"])


def test_the_example_cleans_scores_and_ranks_its_task_set(buffer: Buffer, tmp_path: Path, tiny: Path) -> None:
    pytest.importorskip("data_juicer")
    config = example(tiny, tmp_path)
    (done,) = load_tasks(ResolvedRun(config), buffer)
    rows = show_tasks(buffer.database, "problems", status="excluded")
    assert {row["prompt"].split()[0]: row["reason"] for row in rows if row["stage"] == "sql"} == {
        "???": "it has no answer",
        "What": "it has no answer",
    }
    assert done.dropped_by == {"sql": 2, "threshold": 3, "text_length_filter": 3, "document_deduplicator": 1}
    assert done.num_active == 30
    kept = show_tasks(buffer.database, "problems", order="priority", limit=100, status="active")
    priorities = [task["features"]["priority"] for task in kept]
    assert priorities == sorted(priorities, reverse=True) and len(set(priorities)) > 20
    for task in kept:
        assert set(task["features"]) >= {"quality", "difficulty", "diversity", "usage_frequency", "priority"}
    bakers = [task["features"]["diversity"] for task in kept if task["prompt"].startswith("A baker")]
    others = sorted(task["features"]["diversity"] for task in kept if not task["prompt"].startswith("A baker"))
    assert len(bakers) == 3 and sum(bakers) / 3 < others[len(others) // 2]
    # A set that grows: the old ones keep their ids, new ones are decided on.
    ids = {task["task_key"]: task["task_id"] for task in kept}
    with (tmp_path / "problems.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"question": "A dozen eggs cost 3 euros. What do 20 eggs cost, in euros?", "answer": "5", "steps": 2}
            )
            + "\n"
        )
    (grown,) = load_tasks(ResolvedRun(config), buffer)
    assert grown.num_active == 31
    now: dict[str, Any] = {
        task["task_key"]: task["task_id"] for task in show_tasks(buffer.database, "problems", limit=100)
    }
    assert {key: now[key] for key in ids} == ids
