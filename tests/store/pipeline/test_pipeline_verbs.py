"""`rft pipeline preview|replay|diff|versions` and what the queue of reviews shows, as a person calls them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import rftdata
from rftcore.cli import run_command
from rftdata import labels
from tests.support.stored_run import StoredRun

CONFIG = """
run: {name: sums}
buffer: {uri: "%(uri)s", segments: "%(segments)s"}
model: {path: tiny}
tasks: [{name: sums, source: none.jsonl}]
pipelines:
  experience: %(stages)s
algorithm: {name: grpo, group_size: 4}
explorer: {engine: none}
trainer: {batch_groups: 2, learning_rate: 0.001}
steps: 4
"""


@pytest.fixture
def run(buffer: rftdata.Buffer, monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    """Experiences 1 to 4 with rewards 0, 0, 0, 1 and 5 to 8 with 1, 1, 1, 1; the stage `equal` of version v1 dropped the second group."""
    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    run = StoredRun(buffer)
    run.attempt()
    kept, dropped = run.group(0, [0.0, 0.0, 0.0, 1.0]), run.group(0, [1.0, 1.0, 1.0, 1.0])
    buffer.sql(
        "INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept)"
        " SELECT experience_id, group_id, 'v1', true FROM rft.experience WHERE group_id = %s",
        [kept],
    )
    run.drop(dropped, "equal", "all rewards are 1")
    return run


@pytest.fixture
def config(buffer: rftdata.Buffer, tmp_path: Path) -> Any:
    def write(stages: str) -> str:
        file = tmp_path / "config.yaml"
        file.write_text(CONFIG % {"uri": buffer.config.uri, "segments": buffer.config.segments, "stages": stages})
        return str(file)

    return write


def rft(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


SHAPED = '[{sql: "SELECT * REPLACE (reward + 0.5 AS reward) FROM batch"}, {reward_threshold: {max: 1.2}}]'


def test_a_preview_shows_what_every_stage_does_and_stores_nothing(
    run: StoredRun, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = rft(capsys, "pipeline", "preview", config(SHAPED), "--rows", "8", "--json")
    assert code == 0, err
    shown = json.loads(out)["experiences"]
    shaped, threshold = shown["stages"]
    assert (shown["num_experiences"], shown["num_groups"]) == (8, 2)
    changed = {change["experience_id"]: (change["before"], change["after"]) for change in shaped["changed"]}
    assert changed == {key: (float(key >= 4), float(key >= 4) + 0.5) for key in range(1, 9)}
    assert (threshold["rows_in"], threshold["rows_kept"]) == (8, 3)
    assert dict(map(tuple, threshold["dropped"])) == dict.fromkeys(range(4, 9), "reward 1.5 > max 1.2")
    code, out, err = rft(capsys, "pipeline", "preview", config(SHAPED), "--rows", "8")
    assert code == 0 and "1. sql: 8 in, 8 kept, 0 dropped" in out and "dropped 4: reward 1.5 > max 1.2" in out
    assert run.buffer.sql("SELECT count(*) AS n FROM rft.verdict")["n"].to_pylist() == [8]
    assert run.buffer.sql("SELECT count(*) AS n FROM rft.score")["n"].to_pylist() == [0]


def test_a_replay_decides_beside_the_verdicts_and_the_two_are_compared(
    run: StoredRun, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = rft(capsys, "pipeline", "replay", config(SHAPED), "--version", "shaped", "--json")
    assert code == 0, err
    done = json.loads(out)
    assert (done["num_groups"], done["num_experiences"], done["num_kept"]) == (2, 8, 3)
    assert done["dropped_by"] == {"reward_threshold": 5}
    states = run.buffer.sql("SELECT status::text AS s FROM rft.rollout_group ORDER BY 1")["s"].to_pylist()
    assert states == ["ready", "ready"]  # nothing that the run trains on has changed

    again = json.loads(rft(capsys, "pipeline", "replay", config(SHAPED), "--version", "shaped", "--json")[1])
    assert again["num_groups"] == 0
    run.buffer.sql("UPDATE rft.experience SET reward = 0.1 WHERE experience_id = 8")
    after_label = json.loads(rft(capsys, "pipeline", "replay", config(SHAPED), "--version", "shaped", "--json")[1])
    assert (after_label["num_groups"], after_label["num_kept"]) == (1, 0)  # one row is left: too few for its group

    code, out, err = rft(capsys, "pipeline", "versions", "--json")
    versions = {row["pipeline_version"]: row for row in json.loads(out)}
    assert versions["v1"]["used"] and not versions["shaped"]["used"]
    assert versions["shaped"]["stages"] == (
        "sql {query: SELECT * REPLACE (reward + 0.5 AS reward) FROM batch} > reward_threshold {max: 1.2}"
    )

    code, out, err = rft(capsys, "pipeline", "diff", "v1", "shaped", "--json")
    assert code == 0, err
    difference = json.loads(out)
    counts = {(row["before"], row["after"]): row["num_experiences"] for row in difference["counts"]}
    assert counts == {("kept", "kept"): 3, ("kept", "reward_threshold"): 1, ("equal", "reward_threshold"): 4}
    kept = next(row for row in difference["counts"] if row["after"] == "kept")
    assert (kept["num_rewards_changed"], kept["mean_reward_change"]) == (3, 0.5)
    assert [row["experience_id"] for row in difference["rows"]] == list(range(1, 9))
    assert rft(capsys, "pipeline", "diff", "v1", "shaped")[0] == 0

    code, out, err = rft(capsys, "lineage", "4", "--pipeline", "--json")
    shown = [(row["version"], row["what"], row["stage"]) for row in json.loads(out)]
    assert shown == [("v1", "kept", "all stages"), ("shaped", "dropped", "reward_threshold")]


def test_versions_do_not_differ_by_changes_of_a_final_reward(
    run: StoredRun, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    labels.set_rewards(run.buffer, {1: 0.25}, author="me", final=True)
    assert rft(capsys, "pipeline", "replay", config(SHAPED), "--version", "shaped")[0] == 0
    difference = json.loads(rft(capsys, "pipeline", "diff", "v1", "shaped", "--json")[1])
    kept = next(row for row in difference["counts"] if row["after"] == "kept")
    assert (kept["num_experiences"], kept["num_rewards_changed"]) == (3, 2)
    assert 1 not in [row["experience_id"] for row in difference["rows"]]


def test_a_replay_treats_unanswered_questions_as_answered(
    run: StoredRun, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = '[{human_review: {where: "reward = 0", otherwise: drop}}]'
    done = json.loads(rft(capsys, "pipeline", "replay", config(stages), "--version", "asked", "--json")[1])
    assert (done["num_kept"], done["dropped_by"]) == (4, {"human_review": 4})
    assert run.buffer.sql("SELECT count(*) AS n FROM rft.review")["n"].to_pylist() == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pipeline", "diff", "v1", "v2"], "no pipeline version of this name .*v2.*allowed: v1"),
        (["process", "CONFIG", "--version", "a"], "No such option: --version"),
        (["process", "CONFIG", "--replay"], "No such option: --replay"),
        (["pipeline", "preview", "CONFIG", "--version", "a"], "No such option: --version"),
        (["pipeline", "replay", "CONFIG", "--version", "v1"], "which only pipeline workers create"),
        (["pipeline", "replay", "CONFIG", "--version", "none"], "which only pipeline workers create"),
        (["pipeline", "replay", "CONFIG", "--version", "0123456789ab"], "which only pipeline workers create"),
        (
            ["pipeline", "replay", "CONFIG", "--version", "a b"],
            "invalid name of a version .*'a b'.*allowed: up to 64 letters, digits",
        ),
        (["pipeline", "replay", "CONFIG", "--version", ""], "invalid name of a version"),
        (["pipeline", "replay", "CONFIG", "--version", "../v\n"], "invalid name of a version"),
        (["pipeline", "replay", "CONFIG", "--version", "v" * 65], "invalid name of a version"),
    ],
)
def test_what_makes_no_sense_is_refused(
    run: StoredRun, config: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    file = config(SHAPED)
    code, _, err = rft(capsys, *(file if argument == "CONFIG" else argument for argument in arguments))
    assert code != 0 and re.search(message, " ".join(err.split())), err


def test_a_replay_without_a_name_never_has_a_version_that_a_run_trains_on(
    run: StoredRun, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    done = json.loads(rft(capsys, "pipeline", "replay", config(SHAPED), "--json")[1])
    assert done["version"].startswith("replay-")
    # An empty list of stages is a version like any other: its name stands for it alone.
    assert rft(capsys, "pipeline", "replay", config("[]"), "--version", "nothing")[0] == 0
    code, _, err = rft(capsys, "pipeline", "replay", config(SHAPED), "--version", "nothing")
    assert code != 0 and "already has other stages" in err


def test_a_replay_counts_rows_that_left_with_their_group_apart_from_dropped_ones(
    run: StoredRun, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the first group the stage leaves one row of four, which goes with the others."""
    file = config("[{reward_threshold: {min: 0.5}}]")
    code, out, err = rft(capsys, "pipeline", "replay", file, "--version", "one", "--json")
    assert code == 0, err
    done = json.loads(out)
    assert (done["num_kept"], done["dropped_by"], done["short_by"]) == (
        4,
        {"reward_threshold": 4},
        {"reward_threshold": 1},
    )
    _, out, _ = rft(capsys, "pipeline", "replay", file, "--version", "two")
    assert (
        "dropped by reward_threshold 4 (of these only because their group fell below min_group_size: reward_threshold 1)"
        in out
    )


def test_a_replay_counts_rows_on_which_a_stage_failed_apart_from_dropped_ones(
    run: StoredRun, config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def fragile(row):\n    return 1 / (row['experience_id'] - 6) and row['experience_id'] != 2\n"
    )
    file = config("['./mine.py:fragile']")
    code, out, err = rft(capsys, "pipeline", "replay", file, "--version", "one", "--json")
    assert code == 0, err
    done = json.loads(out)
    assert (done["num_kept"], done["dropped_by"], done["failed_by"]) == (
        6,
        {"./mine.py:fragile": 1},
        {"./mine.py:fragile": 1},
    )
    _, out, err = rft(capsys, "pipeline", "replay", file, "--version", "two")
    assert "dropped by ./mine.py:fragile 1; set aside because a stage failed: ./mine.py:fragile 1" in out
    assert "rft.operator_run" in err
    assert (
        "nothing was sealed, labelled or answered since"
        in rft(capsys, "pipeline", "replay", file, "--version", "two")[1]
    )


@pytest.mark.parametrize(("bad", "decided"), [("> 4", {"kept": 4, "set aside": 4}), ("< 5", {})])
def test_a_replay_continues_past_a_group_that_fails_alone_where_others_passed(
    run: StoredRun, config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str, decided: dict[str, int]
) -> None:
    """If the first rows that are tried fail, the stage is wrong: the replay ends with its error and stores nothing."""
    (tmp_path / "mine.py").write_text(
        f"def fragile(row):\n    assert not row['experience_id'] {bad}, 'no answer'\n    return True\n"
    )
    file = Path(config("['./mine.py:fragile']"))
    file.write_text(file.read_text().replace("pipelines:\n", "pipelines:\n  batch_groups: 1\n"))
    code, _, err = rft(capsys, "pipeline", "replay", str(file), "--version", "one")
    assert (code == 0) == bool(decided), err
    assert decided or "no answer" in err
    found = run.buffer.sql(
        "SELECT CASE WHEN kept THEN 'kept' ELSE 'set aside' END AS what, count(*) AS n FROM rft.verdict"
        " WHERE pipeline_version = 'one' GROUP BY 1"
    )
    assert dict(zip(found["what"].to_pylist(), found["n"].to_pylist())) == decided


def test_a_replay_of_a_run_without_groups_reports_it(
    buffer: rftdata.Buffer, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    StoredRun(buffer)
    code, _, err = rft(capsys, "pipeline", "replay", config(SHAPED), "--version", "mine")
    assert code == 2 and "has no sealed group of experiences yet" in err
    assert buffer.sql("SELECT count(*) AS n FROM rft.pipeline")["n"].to_pylist() == [0]


def test_a_replay_and_a_preview_use_the_staleness_when_a_group_was_sealed(
    run: StoredRun, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run.policy(0)
    run.buffer.sql("ALTER TABLE rft.experience DISABLE TRIGGER USER")
    run.buffer.sql("UPDATE rft.experience SET policy_version_min = %s", [first])
    run.buffer.sql("UPDATE rft.rollout_group SET sealed_at = clock_timestamp()")
    for step in range(1, 6):
        run.policy(step)
    stages = "[{drop_stale: {max: 2}}]"
    done = json.loads(rft(capsys, "pipeline", "replay", config(stages), "--version", "fresh", "--json")[1])
    assert (done["num_kept"], done["dropped_by"]) == (8, {})
    shown = json.loads(rft(capsys, "pipeline", "preview", config(stages), "--rows", "8", "--json")[1])["experiences"]
    assert all(row["kept"] for row in shown["decisions"])


def test_versions_that_differ_by_an_argument_are_distinguished(
    run: StoredRun, config: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def mine(row, least):\n    return row['reward'] >= least\n")
    for least in (12, 6):
        stages = f"[{{reward_threshold: {{max: {least}}}}}, {{./mine.py:mine: {{least: {least}}}}}, {{drop_truncated: {{}}}}]"
        code, _, err = rft(capsys, "pipeline", "replay", config(stages), "--version", f"at-{least}")
        assert code == 0, err
    rows = json.loads(rft(capsys, "pipeline", "versions", "--json")[1])
    found = {row["pipeline_version"]: row["stages"].split(" > ") for row in rows if row["stages"]}
    assert set(found) == {"at-12", "at-6"}
    for least in (12, 6):
        threshold, own, truncated = found[f"at-{least}"]
        assert threshold == f"reward_threshold {{max: {least}.0}}"
        assert re.fullmatch(rf".*mine {{least: {least}, code: [0-9a-f]{{12}}}}", own), own
        assert truncated.startswith("drop_truncated")
    out = rft(capsys, "pipeline", "versions")[1]
    assert "max: 12.0" in out and "max: 6.0" in out


def test_a_version_name_stands_for_one_list_of_stages(
    run: StoredRun, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rft(capsys, "pipeline", "replay", config(SHAPED), "--version", "mine")[0] == 0
    code, _, err = rft(capsys, "pipeline", "replay", config("[{drop_truncated: {}}]"), "--version", "mine")
    assert code != 0 and "already has other stages" in err


def test_tasks_are_previewed_before_there_is_a_buffer_and_none_is_made(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.jsonl").write_text('{"question": "1 + 1"}\n{"question": "a much longer question than that"}\n')
    raw = yaml.safe_load(Path(config("[]")).read_text())
    raw["buffer"] = {"uri": str(tmp_path / "buffer")}
    file = tmp_path / "first.yaml"
    raw["pipelines"] = {"task": ["usage_frequency", {"text_length_filter": {"min_len": 1, "max_len": 10}}]}
    file.write_text(json.dumps(raw))
    code, out, err = rft(capsys, "pipeline", "preview", str(file), "--rows", "5", "--json")
    assert code == 0, err
    stages = json.loads(out)["tasks"]["sums"]["stages"]
    assert [(stage["rows_in"], stage["rows_kept"]) for stage in stages] == [(2, 2), (2, 1)]
    assert not (tmp_path / "buffer").exists()
    raw["pipelines"]["task"] = [{"text_length_filter": {"max_len": "ten"}}]
    file.write_text(json.dumps(raw))
    code, _, err = rft(capsys, "pipeline", "preview", str(file), "--rows", "5")
    assert code == 2 and "pipelines.task: stage 1 of the pipeline (text_length_filter): the argument 'max_len'" in err
    raw["pipelines"] = {"experience": ["drop_truncated"]}
    file.write_text(json.dumps(raw))
    code, _, err = rft(capsys, "pipeline", "preview", str(file), "--rows", "5")
    assert code == 1 and "there is no buffer here" in err


def test_a_preview_shows_task_stages_too_before_any_run(
    buffer: rftdata.Buffer, config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.jsonl").write_text('{"question": "1 + 1"}\n{"question": "a much longer question than that"}\n')
    file = Path(config("[]"))
    file.write_text(
        file.read_text().replace("  experience: []", "  task: [{text_length_filter: {min_len: 1, max_len: 10}}]")
    )
    for is_loaded in (False, True):
        code, out, err = rft(capsys, "pipeline", "preview", str(file), "--rows", "5", "--json")
        assert code == 0, err
        (stage,) = json.loads(out)["tasks"]["sums"]["stages"]
        assert (stage["rows_in"], stage["rows_kept"]) == (2, 1) and "max_len 10" in stage["dropped"][0][1]
        assert json.loads(out)["tasks"]["sums"]["num_tasks"] == 2 and "experience" not in json.dumps(
            json.loads(out)["tasks"]
        )
        assert json.loads(out)["experiences"] is None
        assert buffer.sql("SELECT count(*) AS n FROM rft.task")["n"].to_pylist() == [2 if is_loaded else 0]
        assert rft(capsys, "tasks", "load", str(file))[0] == 0
    shown = rft(capsys, "pipeline", "preview", str(file), "--rows", "5")[1]
    assert "2 tasks of sums; nothing is stored" in shown
    broken = file.read_text().replace(
        "{text_length_filter: {min_len: 1, max_len: 10}}", "{difficulty_score: {features: {level: [1, 5]}}}"
    )
    file.with_name("broken.yaml").write_text(broken)
    code, _, err = rft(capsys, "pipeline", "preview", str(file.with_name("broken.yaml")), "--rows", "5")
    assert code == 1 and "the taskset 'sums': stage 1 of the pipeline (difficulty_score)" in err
    assert re.search(r"\btask +field +before +after", shown) and "experience" not in shown
