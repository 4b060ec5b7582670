"""`pipelines.task` on a real database: verdicts, scores and statuses of tasks, versions beside each other, and what grows."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rftcore.cli import run_command
from rftcore.config.run import RunConfig, parse_config
from rftcore.launch.preparation import prepare_run
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline import task_decisions
from rftcore.task_pipeline.pipeline import load_tasks
from rftcore.task_pipeline.task_decisions import TasksDecided, decide_tasks
from rftdata import Buffer
from rftdata.errors import ConfigError, OperatorError, TaskSourceError
from rftdata.tasks import list_tasksets, load_taskset
from tests.support.models import make_unopened_model

ROWS = [{"question": f"How much is {i} plus {i}?", "answer": str(2 * i), "level": i % 5} for i in range(20)]
LEVELS = {"difficulty_score": {"features": {"level": [0, 4]}}}
EASY = {"sql": {"query": "SELECT * FROM batch WHERE (metadata->>'level')::INT < 4", "reason": "level 4 is too hard"}}


def write(folder: Path, rows: list[dict[str, Any]], name: str = "sums.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def configuration(folder: Path, stages: list[Any], **changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "run": {"name": "r"},
        "model": {"path": "./model"},
        "algorithm": {"name": "grpo"},
        "explorer": {},
        "trainer": {"batch_groups": 2, "learning_rate": 0.001},
        "steps": 1,
        "tasks": [{"name": "sums", "source": "sums.jsonl"}],
        "pipelines": {"task": stages},
    }
    return parse_config({**raw, **changes}, folder, "test")


def statuses(buffer: Buffer) -> dict[str, int]:
    rows = buffer.sql("SELECT status::text AS s, count(*) AS n FROM rft.task GROUP BY 1").to_pylist()
    return {row["s"]: row["n"] for row in rows}


def tally(buffer: Buffer, query: str) -> dict[int, int]:
    return {row["task_id"]: row["n"] for row in buffer.sql(query).to_pylist()}


def decide(buffer: Buffer, config: RunConfig, *, again: bool = False) -> TasksDecided:
    """Run the pipeline over a set that is loaded already."""
    chain = ResolvedRun(config).task_chain
    chain.prepare()
    return decide_tasks(chain, buffer, config.tasks[0], again=again)


def features(buffer: Buffer) -> list[dict[str, Any]]:
    rows = buffer.sql("SELECT features::text AS f FROM rft.task ORDER BY task_id")["f"].to_pylist()
    return [json.loads(row) for row in rows]


def count(buffer: Buffer, table: str) -> int:
    found: int = buffer.sql(f"SELECT count(*) AS n FROM {table}")["n"].to_pylist()[0]
    return found


def test_a_dropped_task_stays_stored_excluded_with_stage_and_reason(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    (done,) = load_tasks(ResolvedRun(configuration(tmp_path, [LEVELS, EASY, "task_priority"])), buffer)
    assert (done.num_decided, done.num_active, done.num_excluded, done.dropped_by) == (20, 16, 4, {"sql": 4})
    assert statuses(buffer) == {"active": 16, "excluded": 4}
    row = buffer.sql("SELECT * FROM rft.v_task WHERE status = 'excluded' ORDER BY task_id LIMIT 1").to_pylist()[0]
    assert (row["kept"], row["stage"], row["reason"]) == (False, "sql", "level 4 is too hard")
    assert row["features"] == {"difficulty": 1.0}  # what was found out before it was dropped
    runs = buffer.sql(
        "SELECT stage, rows_in, rows_kept, rows_dropped, run_id, taskset FROM rft.operator_run ORDER BY 1"
    )
    assert [tuple(r.values()) for r in runs.to_pylist()] == [
        ("difficulty_score", 20, 20, 0, None, "sums"),
        ("sql", 20, 16, 4, None, "sums"),
        ("task_priority", 16, 16, 0, None, "sums"),
    ]
    assert buffer.sql("SELECT num_tasks FROM rft.v_dropped_task")["num_tasks"].to_pylist() == [4]
    stages = buffer.sql(
        "SELECT p.stages::text AS stages FROM rft.pipeline p JOIN rft.task_verdict USING (pipeline_version) LIMIT 1"
    )
    names = [next(iter(stage)) for stage in json.loads(stages["stages"].to_pylist()[0])]
    assert names == ["difficulty_score", "sql", "task_priority"]


def test_the_same_version_does_nothing_and_a_new_one_decides_beside_the_old(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    first = configuration(tmp_path, [LEVELS, EASY])
    load_tasks(ResolvedRun(first), buffer)
    verdicts, runs = count(buffer, "rft.task_verdict"), count(buffer, "rft.operator_run")
    (done,) = load_tasks(ResolvedRun(first), buffer)
    assert done.num_decided == 0
    assert (count(buffer, "rft.task_verdict"), count(buffer, "rft.operator_run")) == (verdicts, runs) == (20, 2)
    (done,) = load_tasks(ResolvedRun(configuration(tmp_path, ["quality_score"])), buffer)
    assert (done.num_decided, done.num_active, done.num_excluded) == (20, 20, 0)
    versions = buffer.sql("SELECT pipeline_version, count(*) AS n FROM rft.task_verdict GROUP BY 1")["n"].to_pylist()
    assert versions == [20, 20]
    features = buffer.sql("SELECT features FROM rft.task LIMIT 1")["features"].to_pylist()[0]
    assert list(features) == ["quality"]  # the old version's scores stay in its verdicts


def test_a_run_is_prepared_with_only_the_tasks_that_passed(buffer: Buffer, tmp_path: Path, tiny_model: Path) -> None:
    write(tmp_path, ROWS)
    (tmp_path / "model").symlink_to(tiny_model)
    prepare_run(ResolvedRun(configuration(tmp_path, [LEVELS, EASY])), buffer)
    (row,) = buffer.database.fetch("active_task_ids", taskset="sums")
    levels = (
        "SELECT DISTINCT (payload #>> '{metadata,level}')::int AS n FROM rft.task WHERE task_id = ANY (%s) ORDER BY 1"
    )
    assert len(row["task_ids"]) == 16
    assert buffer.sql(levels, [row["task_ids"]])["n"].to_pylist() == [0, 1, 2, 3]


def test_only_the_new_rows_of_a_growing_source_are_decided_on(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS[:10])
    config = configuration(tmp_path, [LEVELS, "task_priority"])
    load_tasks(ResolvedRun(config), buffer)
    before = buffer.sql("SELECT task_id, features, task_verdict_id FROM rft.task ORDER BY 1").to_pylist()
    write(tmp_path, ROWS)
    (done,) = load_tasks(ResolvedRun(config), buffer)
    assert done.num_decided == 10
    assert buffer.sql("SELECT task_id, features, task_verdict_id FROM rft.task ORDER BY 1").to_pylist()[:10] == before
    rows_in = buffer.sql(
        "SELECT rows_in FROM rft.operator_run WHERE stage = 'difficulty_score' ORDER BY operator_run_id"
    )
    assert rows_in["rows_in"].to_pylist() == [10, 10]


def test_stages_that_compare_tasks_see_the_whole_set_and_repeat_no_verdict(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS[:10])
    config = configuration(tmp_path, [EASY])  # sql may look at all rows, so it is given them all
    load_tasks(ResolvedRun(config), buffer)
    write(tmp_path, ROWS[:12])
    (done,) = load_tasks(ResolvedRun(config), buffer)
    assert done.num_decided == 12
    assert count(buffer, "rft.task_verdict") == 12


def test_new_tasks_cannot_be_selected_before_they_are_decided_on(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    config = configuration(tmp_path, [LEVELS])
    load_taskset(buffer.database, config.tasks[0], tmp_path, pending=True)
    assert statuses(buffer) == {"pending": 20}
    load_tasks(ResolvedRun(config), buffer)
    assert statuses(buffer) == {"active": 20}
    write(tmp_path, [*ROWS, {"question": "one more"}])
    load_taskset(buffer.database, config.tasks[0], tmp_path, pending=True)
    load_tasks(ResolvedRun(configuration(tmp_path, [])), buffer)  # without a pipeline
    assert statuses(buffer) == {"active": 21}
    assert not any(buffer.sql("SELECT status_pinned AS p FROM rft.task")["p"].to_pylist())


def test_a_status_that_a_person_sets_stays_whatever_a_pipeline_decides(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    load_tasks(ResolvedRun(configuration(tmp_path, [EASY])), buffer)
    buffer.sql("UPDATE rft.task SET status = 'active' WHERE payload ->> 'answer' = '8'")  # level 4, dropped
    buffer.sql("UPDATE rft.task SET status = 'excluded' WHERE payload ->> 'answer' = '0'")  # level 0, kept
    by_hand = "SELECT payload ->> 'answer' AS a, status::text AS s FROM rft.task WHERE status_pinned ORDER BY task_id"
    expected = [{"a": "0", "s": "excluded"}, {"a": "8", "s": "active"}]
    for stages in ([EASY, LEVELS], [LEVELS], [EASY]):
        load_tasks(ResolvedRun(configuration(tmp_path, stages)), buffer)
        assert buffer.sql(by_hand).to_pylist() == expected
    assert statuses(buffer) == {"active": 16, "excluded": 4}


def test_content_corrected_before_it_was_tried_is_decided_on_again_and_scores_are_no_change(
    buffer: Buffer, tmp_path: Path
) -> None:
    config = configuration(tmp_path, [LEVELS])
    write(tmp_path, ROWS[:3])
    load_tasks(ResolvedRun(config), buffer)
    write(tmp_path, [{**ROWS[0], "level": 4}, *ROWS[1:4]])
    (done,) = load_tasks(ResolvedRun(config), buffer)
    assert done.num_decided == 2  # the corrected one and the new one
    assert buffer.sql("SELECT features FROM rft.task ORDER BY task_id")["features"].to_pylist() == [
        {"difficulty": level / 4} for level in (4, 1, 2, 3)
    ]


def test_features_of_the_source_stay_and_those_of_stages_lie_over_them(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, [{"question": "How much is that?", "features": {"level": 2, "topic": "sums"}}])
    stage = {"difficulty_score": {"features": {"level": [0, 4]}}}
    load_tasks(ResolvedRun(configuration(tmp_path, [stage])), buffer)
    row = buffer.sql("SELECT features, source_features FROM rft.task").to_pylist()[0]
    assert row["features"] == {"level": 2, "topic": "sums", "difficulty": 0.5}
    assert row["source_features"] == {"level": 2, "topic": "sums"}
    write(tmp_path, [{"question": "How much is that?", "features": {"level": 2, "topic": "sums"}}, ROWS[0]])
    load_tasks(ResolvedRun(configuration(tmp_path, [stage])), buffer)  # nothing of it has changed
    assert count(buffer, "rft.task") == 2


def test_a_stage_may_correct_prompts_and_answers_of_tasks_that_were_not_tried(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, [{"question": "  what?  ", "answer": " 1"}, {"question": "fine", "answer": "2"}])
    (tmp_path / "mine.py").write_text(
        "def strip(row):\n    return {'prompt': row['prompt'].strip(), 'answer': row['answer'].strip()}\n"
    )
    config = configuration(tmp_path, ["./mine.py:strip"])
    load_tasks(ResolvedRun(config), buffer)
    query = "SELECT payload, source_payload FROM rft.task ORDER BY task_id"
    first, second = buffer.sql(query).to_pylist()
    assert (first["payload"]["prompt"], first["payload"]["answer"]) == ("what?", "1")
    assert first["source_payload"]["prompt"] == "  what?  "
    assert (second["payload"]["prompt"], second["source_payload"]) == ("fine", None)
    (done,) = load_tasks(ResolvedRun(config), buffer)
    assert done.num_decided == 0
    load_tasks(ResolvedRun(configuration(tmp_path, ["quality_score"])), buffer)
    assert buffer.sql(query).to_pylist()[0]["payload"]["prompt"] == "  what?  "
    buffer.sql(
        "INSERT INTO rft.rollout_group (run_id, attempt_id, ordinal, task_id, explore_step, group_size)"
        " SELECT 1, 1, 0, min(task_id), 0, 2 FROM rft.task"
    )
    with pytest.raises(
        OperatorError, match="changes the prompt or answer of 1 tasks of 'sums' that were already tried"
    ):
        load_tasks(ResolvedRun(config), buffer)


def test_the_chat_of_a_task_is_shown_as_its_contents_and_not_changed(buffer: Buffer, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How much is 1 plus 1?"}]
    write(tmp_path, [{"question": chat, "answer": "2"}])
    (tmp_path / "mine.py").write_text(
        "def sees(row):\n    return row['prompt'] == 'Be brief.\\nHow much is 1 plus 1?'\n"
        "def upper(row):\n    return {'prompt': row['prompt'].upper()}\n"
    )
    (done,) = load_tasks(ResolvedRun(configuration(tmp_path, ["./mine.py:sees"])), buffer)
    assert done.num_active == 1
    with pytest.raises(OperatorError, match="changes the prompt of task 1, which is a chat"):
        load_tasks(ResolvedRun(configuration(tmp_path, ["./mine.py:upper"])), buffer)


@pytest.mark.parametrize("whole_set", [False, True])
def test_a_task_on_which_a_stage_raises_is_excluded_alone_with_the_error(
    buffer: Buffer, tmp_path: Path, whole_set: bool
) -> None:
    write(tmp_path, ROWS)
    (tmp_path / "mine.py").write_text("def fragile(row):\n    return 10 / (int(row['answer']) - 8) != 0\n")
    compares = {"sql": "SELECT *, count(*) OVER () AS together FROM batch"}
    stages = [*([compares] if whole_set else []), "./mine.py:fragile"]
    (done,) = load_tasks(ResolvedRun(configuration(tmp_path, stages)), buffer)
    assert (done.num_active, done.num_excluded) == (19, 1)
    assert not whole_set or features(buffer)[0]["together"] == 19
    row = buffer.sql("SELECT answer, reason FROM rft.v_task WHERE NOT kept").to_pylist()[0]
    assert row["answer"] == "8" and "the stage failed" in row["reason"] and "ZeroDivisionError" in row["reason"]
    errors = buffer.sql("SELECT error FROM rft.operator_run WHERE error IS NOT NULL")["error"].to_pylist()
    assert errors and all("ZeroDivisionError" in error for error in errors)


def test_one_new_task_that_fails_does_not_refuse_the_set(buffer: Buffer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def fragile(row):\n    return int(row['answer']) >= 0\n")
    write(tmp_path, ROWS[:3])
    config = configuration(tmp_path, ["./mine.py:fragile"])
    load_tasks(ResolvedRun(config), buffer)
    write(tmp_path, [*ROWS[:3], {"question": "How much?", "answer": "much"}])
    (done,) = load_tasks(ResolvedRun(config), buffer)
    assert (done.num_decided, done.num_active, done.num_excluded) == (1, 3, 1)


@pytest.mark.parametrize("whole_set", [False, True])
def test_tasks_on_which_a_stage_failed_are_tried_again(buffer: Buffer, tmp_path: Path, whole_set: bool) -> None:
    """A service that is unavailable while a set grows is not asked about every new task, and the run does not lose them."""
    (tmp_path / "mine.py").write_text(
        """
from pathlib import Path

here = Path(__file__).parent


def asks(row):
    with open(here / "asked.txt", "a") as file:
        file.write("x")
    if row["task_id"] > 20 and not (here / "up").exists():
        raise ConnectionError("refused")
    return True
"""
    )
    compares = {"sql": "SELECT *, count(*) OVER () AS together FROM batch"}
    config = configuration(tmp_path, ["./mine.py:asks", *([compares] if whole_set else [])])
    write(tmp_path, ROWS)
    load_tasks(ResolvedRun(config), buffer)
    more = [{"question": f"And {number}?", "answer": str(number)} for number in range(400)]
    write(tmp_path, [*ROWS, *more])
    asked = tmp_path / "asked.txt"
    asked.unlink()
    (done,) = load_tasks(ResolvedRun(config), buffer)
    assert (done.num_active, done.num_excluded) == (20, 400)
    assert len(asked.read_text()) < (500 if whole_set else 20)
    reasons = buffer.sql("SELECT DISTINCT reason FROM rft.v_task WHERE NOT kept")["reason"].to_pylist()
    assert all(reason.startswith("the stage failed: ") and "ConnectionError" in reason for reason in reasons)
    failed = buffer.sql("SELECT sum(rows_in) AS n FROM rft.operator_run WHERE error IS NOT NULL").to_pylist()
    assert failed == [{"n": 400}]  # each once, not once for each that failed with it
    (tmp_path / "up").touch()
    if whole_set:  # it is decided on again when there is something new
        write(tmp_path, [*ROWS, *more, {"question": "One more?", "answer": "1"}])
    (done,) = load_tasks(ResolvedRun(config), buffer)
    assert (done.num_active, done.num_excluded) == (421 if whole_set else 420, 0)
    (done,) = load_tasks(ResolvedRun(config), buffer)
    assert done.num_decided == 0


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [
                {"sql": "SELECT b.*, 1 AS one FROM batch b JOIN batch c USING (experience_id)"},
                {"task_priority": {"weights": {"hardness": 1}}},
            ],
            r"the taskset 'sums': stage 2 of the pipeline \(task_priority\) failed on a batch of 20 rows: .*'hardness'.*allowed: .*level",
        ),
        (
            [{"sql": "SELECT * REPLACE ('x' AS task_key) FROM batch"}],
            r"the taskset 'sums': stage 1 of pipelines.task \(sql\) changes task_key",
        ),
        ([{"sql": "SELECT * FROM batch WHERE error(prompt) = ''"}], r"the taskset 'sums': stage 1 .*How much is"),
        (
            ["quality_score", "./asks.py:Ask"],
            r"the taskset 'sums': stage 2 of pipelines.task \(./asks.py:Ask\) waits for a person",
        ),
    ],
)
def test_a_stage_that_cannot_work_is_a_clear_error_and_stores_no_verdict(
    buffer: Buffer, tmp_path: Path, stages: list[Any], message: str
) -> None:
    write(tmp_path, ROWS)
    (tmp_path / "asks.py").write_text(
        "import pyarrow as pa\nfrom operators.base import Operator, Review, StageOutcome\n\nclass Ask(Operator):\n"
        "    asks = frozenset({'r'})\n\n"
        "    def apply(self, table):\n"
        "        reasons = pa.nulls(table.num_rows, pa.string())\n"
        "        return StageOutcome(reasons, waiting={0: Review('r', 'Is it right?', 9.0, 'pass')})\n"
    )
    with pytest.raises(OperatorError, match=message):
        load_tasks(ResolvedRun(configuration(tmp_path, stages)), buffer)
    assert count(buffer, "rft.task_verdict") == 0
    assert statuses(buffer) == {"pending": 20}


TWO_SETS = [{"name": "sums", "source": "sums.jsonl"}, {"name": "more", "source": "more.jsonl"}]


@pytest.mark.parametrize(
    ("changes", "stages", "message"),
    [
        ({"tasks": [TWO_SETS[0], {"name": "more", "source": "absent.jsonl"}]}, [], r"'more' does not exist"),
        ({"tasks": [TWO_SETS[0], {**TWO_SETS[1], "prompt": "text"}]}, [], r"'more' has no column 'text'"),
        ({"eval": {"tasks": [{"name": "eval", "source": "absent.jsonl"}], "every": 20}}, [], r"'eval' does not exist"),
        (
            {},
            ["quality_score", LEVELS],
            r"the taskset 'more': stage 2 of the pipeline \(difficulty_score\): no task has the number 'level'",
        ),
        (
            {},
            [{"quality_score": {"columns": {"level": [0, 4]}}}],
            r"the taskset 'more': stage 1 .*'level'.*allowed: steps",
        ),
    ],
)
def test_a_mistake_in_one_set_is_reported_before_anything_of_another_is_stored(
    buffer: Buffer, tmp_path: Path, changes: dict[str, Any], stages: list[Any], message: str
) -> None:
    write(tmp_path, ROWS)
    write(tmp_path, [{"question": "Why?", "answer": "so", "steps": 2}], "more.jsonl")
    config = configuration(tmp_path, stages, **{"tasks": TWO_SETS, **changes})
    with pytest.raises((OperatorError, TaskSourceError), match=message):
        load_tasks(ResolvedRun(config), buffer)
    assert count(buffer, "rft.task") == 0 and list_tasksets(buffer.database) == []


def test_a_mistake_in_a_set_creates_no_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, ROWS)
    raw = configuration(tmp_path, [], tasks=TWO_SETS, explorer={"reward": "exact_match"}).model_dump(mode="json")
    make_unopened_model(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({**raw, "model": {"path": str(tmp_path)}}))
    for verb in (["run"], ["train"], ["tasks", "load"]):
        assert run_command([*verb, "run.json"]) == 2
        assert "the file of the taskset 'more' does not exist" in capsys.readouterr().err
        assert not (tmp_path / "buffer").exists()


def test_other_sets_are_decided_on_when_one_cannot_be(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, ROWS)
    write(tmp_path, [{"question": "Why?", "answer": "so"}], "more.jsonl")
    broken = {"sql": "SELECT *, CASE WHEN prompt = 'Why?' THEN error('no') ELSE 1 END AS one FROM batch"}
    config = configuration(tmp_path, [broken], tasks=[TWO_SETS[1], TWO_SETS[0]])
    with pytest.raises(OperatorError, match="the taskset 'more'"):
        load_tasks(ResolvedRun(config), buffer)
    assert statuses(buffer) == {"pending": 1, "active": 20}


def test_where_stages_compare_tasks_a_number_may_first_appear_in_any_row(buffer: Buffer, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"question": f"q{n}", "answer": "1"} for n in range(4_100)]
    write(tmp_path, rows[:-4] + [{**row, "level": 1} for row in rows[-4:]])
    stages = ["naive_grouper", {"task_priority": {"weights": {"level": 1}}}]
    (done,) = load_tasks(ResolvedRun(configuration(tmp_path, stages)), buffer)
    assert (done.num_active, done.num_excluded) == (4_100, 0)
    # A name that no row has is found by the load itself.
    with pytest.raises(OperatorError, match=r"no task has the number 'hardness'"):
        load_tasks(
            ResolvedRun(configuration(tmp_path, [stages[0], {"task_priority": {"weights": {"hardness": 1}}}])),
            buffer,
        )


def test_a_stored_set_is_not_read_again_to_be_checked(buffer: Buffer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\ndef make():\n"
        "    Path(__file__).with_suffix('.log').write_text(Path(__file__).with_suffix('.log').read_text() + '.')\n    yield {'question': 'Why?'}\n"
    )
    (tmp_path / "mine.log").touch()
    config = configuration(tmp_path, [], tasks=[{"name": "own", "source": "./mine.py:make"}])
    for _ in range(3):
        load_tasks(ResolvedRun(config), buffer)
    assert (tmp_path / "mine.log").read_text() == ".."  # looked at, then loaded


def test_a_pipeline_that_drops_everything_is_refused_and_states_by_which_stage(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    config = configuration(tmp_path, [{"sql": "SELECT * FROM batch WHERE false"}])
    for _ in range(2):
        with pytest.raises(
            TaskSourceError, match=r"no task of 'sums' is left to select: all 20 are excluded \(sql: 20\)"
        ):
            load_tasks(ResolvedRun(config), buffer)
    assert count(buffer, "rft.task_verdict") == 20  # nothing vanishes
    (done,) = load_tasks(ResolvedRun(configuration(tmp_path, [LEVELS])), buffer)
    assert done.num_active == 20


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("drop_truncated", r"stage 1 of the pipeline \(drop_truncated\): reads the column 'finish_reason'"),
        ({"text_length_filter": {"text_key": "response"}}, "text_key is not a column of the batch"),
        ({"quality_scores": {}}, "unknown operator.*did you mean 'quality_score'"),
    ],
)
def test_a_stage_that_does_not_fit_tasks_is_refused_without_data(tmp_path: Path, stage: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = ResolvedRun(configuration(tmp_path, [stage])).task_chain


def test_a_data_juicer_operator_looks_at_the_prompt_of_a_task(buffer: Buffer, tmp_path: Path) -> None:
    pytest.importorskip("data_juicer")
    write(tmp_path, [*ROWS[:3], {"question": "Hm?"}])
    (done,) = load_tasks(ResolvedRun(configuration(tmp_path, [{"text_length_filter": {"min_len": 10}}])), buffer)
    assert (done.num_active, done.dropped_by) == (3, {"text_length_filter": 1})


def test_evaluation_tasks_are_left_as_they_are(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    write(tmp_path, ROWS, "val.jsonl")
    evaluation = {"every": 8, "tasks": [{"name": "val", "source": "val.jsonl"}]}
    config = configuration(
        tmp_path, [EASY], eval=evaluation, trainer={"batch_groups": 2, "learning_rate": 0.1, "checkpoint_every": 8}
    )
    load_tasks(ResolvedRun(config), buffer)
    rows = {row["taskset"]: (row["active"], row["excluded"]) for row in list_tasksets(buffer.database)}
    assert rows == {"sums": (16, 4), "val": (20, 0)}


def test_an_interrupted_load_continues_where_it_stopped(buffer: Buffer, tmp_path: Path) -> None:
    num_tasks = task_decisions.BATCH_TASKS + 14
    last = str(2 * (num_tasks - 1))
    (tmp_path / "mine.py").write_text(
        "import pathlib\n"
        "def stops(row):\n"
        f"    if row['answer'] == '{last}' and not (pathlib.Path(__file__).parent / 'go').exists():\n"
        "        raise KeyboardInterrupt\n"
        "    return True\n"
    )
    write(tmp_path, [{"question": f"How much is {i} plus {i}?", "answer": str(2 * i)} for i in range(num_tasks)])
    config = configuration(tmp_path, ["./mine.py:stops"])
    with pytest.raises(KeyboardInterrupt):
        load_tasks(ResolvedRun(config), buffer)
    assert statuses(buffer) == {"active": task_decisions.BATCH_TASKS, "pending": 14}
    (tmp_path / "go").touch()
    (done,) = load_tasks(ResolvedRun(config), buffer)
    assert (done.num_decided, done.num_active, count(buffer, "rft.task_verdict")) == (14, num_tasks, num_tasks)


def test_two_processes_that_load_at_once_decide_once(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    config = configuration(tmp_path, [LEVELS, EASY])
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: load_tasks(ResolvedRun(config), buffer)[0], range(4)))
    assert sorted(one.num_decided for one in done) == [0, 0, 0, 20]
    assert {one.num_active for one in done} == {16}
    assert (count(buffer, "rft.task"), count(buffer, "rft.task_verdict"), count(buffer, "rft.operator_run")) == (
        20,
        20,
        2,
    )


def test_tasks_that_are_in_an_evaluation_set_of_the_buffer_are_excluded_by_its_name(
    buffer: Buffer, tmp_path: Path
) -> None:
    write(tmp_path, ROWS)
    write(tmp_path, [ROWS[3], ROWS[7]], "held_out.jsonl")
    stage = {"decontaminate": {"against": ["taskset:held_out"]}}
    config = configuration(tmp_path, [stage])
    with pytest.raises(ConfigError, match=r"no task of this set \(got 'held_out'\)"):
        load_tasks(ResolvedRun(config), buffer)
    held_out = configuration(tmp_path, [], tasks=[{"name": "held_out", "source": "held_out.jsonl"}])
    load_taskset(buffer.database, held_out.tasks[0], tmp_path)
    (done,) = load_tasks(ResolvedRun(config), buffer)
    assert (done.num_active, done.num_excluded) == (18, 2)
    reasons = buffer.sql("SELECT DISTINCT reason FROM rft.task_verdict WHERE NOT kept ORDER BY 1")["reason"].to_pylist()
    assert reasons == [
        "all of prompt is in taskset:held_out row 1: How much is 3 plus 3?",
        "all of prompt is in taskset:held_out row 2: How much is 7 plus 7?",
    ]
