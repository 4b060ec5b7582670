"""Retention rules: what is too old or too much is purged, and what is labelled or may still be used stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rftcore.cli import run_command
from rftdata import Buffer, labels
from rftdata.config import RetentionConfig
from rftdata.maintenance import retention
from tests.support.lossy_line import LossyLine
from tests.support.store_roles import Roles, own_group, selecting


def retained(buffer: Buffer, **rules: Any) -> tuple[dict[str, int], int]:
    done = retention.apply(buffer, RetentionConfig.model_validate(rules), author="ada")
    return {text: part.num_experiences for text, part in done.purged.items()}, done.num_protected


@pytest.fixture
def aged(buffer: Buffer) -> Buffer:
    """A finished run of five groups of two, the oldest ten days old, the newest six, in two tasksets; the second oldest is labelled."""
    run = buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
    for i in range(5):
        group = own_group(task_key=str(i))
        group.taskset = "odd" if i % 2 else "even"
        with buffer.writer(run) as writer:
            writer.insert(group)
    with buffer.database.transaction() as connection:
        connection.execute("SET LOCAL rft.purge = 'the test makes them old'")
        connection.execute(
            "UPDATE rft.experience SET created_at = now() - (11 - (experience_id + 1) / 2) * interval '1 day'"
        )
    buffer.sql("UPDATE rft.run SET status = 'finished'")
    labels.set_rewards(buffer, {3: 0.5}, author="bo")
    buffer.sql("UPDATE rft.rollout_group SET status = 'ready'")
    return buffer


def kept(buffer: Buffer) -> list[int]:
    found: list[int] = buffer.sql(
        "SELECT experience_id FROM rft.experience WHERE experience_id NOT IN (SELECT experience_id FROM rft.v_purged) ORDER BY 1"
    )["experience_id"].to_pylist()
    return found


def test_retention_by_age_keeps_what_is_labelled(aged: Buffer) -> None:
    assert retained(aged, max_age_days=7.5) == ({"max_age_days 7.5": 4}, 2)
    assert kept(aged) == [3, 4, 7, 8, 9, 10]
    assert aged.sql("SELECT DISTINCT kind::text AS k, reason FROM rft.v_purged").to_pylist() == [
        {"k": "retention", "reason": "retention: max_age_days 7.5"}
    ]
    assert retained(aged, max_age_days=7.5) == ({}, 2)
    assert retained(aged, max_age_days=7.5, keep_labelled=False) == ({"max_age_days 7.5": 2}, 0)


def test_all_groups_are_read_once_for_limits_that_purge_nothing_and_again_only_before_a_purge(
    aged: Buffer, through: Buffer, line: LossyLine
) -> None:
    def num_reads() -> int:
        """Transactions that read the groups, but for those that have locked the rows of some."""
        reads = [one for one in line.carried if any("AS protected" in text for text in one)]
        return sum(not any("lock_purged" in text for text in one) for one in reads)

    rules = {"max_age_days": 99, "max_experiences": 10, "tasksets": {"even": {"max_bytes": 2**40}}}
    assert retained(through, **rules) == ({}, 0)
    assert num_reads() == 1
    assert retained(through, max_age_days=99, max_experiences=9) == ({"max_experiences 9": 2}, 0)
    assert num_reads() == 3, "at first, and when it is its turn"
    assert kept(aged) == [3, 4, 5, 6, 7, 8, 9, 10]


def test_an_age_before_all_dates_is_refused(aged: Buffer) -> None:
    assert retained(aged, max_age_days=365_000) == ({}, 0)
    for days in (1e300, 800_000):
        with pytest.raises(ValidationError, match="max_age_days"):
            retained(aged, max_age_days=days)


def test_retention_by_number_and_by_size_keeps_the_newest(aged: Buffer) -> None:
    assert retained(aged, max_experiences=7, keep_labelled=False) == ({"max_experiences 7": 4}, 0)
    assert kept(aged) == [5, 6, 7, 8, 9, 10]
    sizes = aged.database.fetch("retention_groups", keep_labelled=True, starting_run_id=None, experience_ids=None)
    assert retained(aged, max_bytes=int(sizes[0]["num_bytes"]))[0] == {f"max_bytes {sizes[0]['num_bytes']}": 4}
    assert kept(aged) == [9, 10]


@pytest.mark.parametrize("kind", ["experience", "group"])
def test_retention_spares_stored_selections_and_what_people_compared(aged: Buffer, kind: str) -> None:
    run = selecting(aged, f"select {kind}_id from rft.experience where experience_id = 1", "selecting")
    aged.sql("INSERT INTO rft.preference_pair (chosen_id, rejected_id) VALUES (6, 5)")
    assert retained(aged, max_experiences=0) == ({"max_experiences 0": 4}, 6)
    assert kept(aged) == [1, 2, 3, 4, 5, 6]
    aged.sql("UPDATE rft.run SET status = 'finished' WHERE run_id = %s", [run.run_id])
    assert retained(aged, max_experiences=0) == ({"max_experiences 0": 2}, 4)
    assert retained(aged, max_experiences=0, keep_labelled=False) == ({"max_experiences 0": 4}, 0)


def test_retention_of_one_taskset_leaves_the_others(aged: Buffer) -> None:
    assert retained(aged, tasksets={"even": {"max_experiences": 2}}) == ({"taskset even: max_experiences 2": 4}, 0)
    assert kept(aged) == [3, 4, 7, 8, 9, 10]


def test_retention_spares_what_may_still_be_trained_on(buffer: Buffer) -> None:
    roles = Roles(buffer, steps=3)
    with roles.attempt() as attempt:
        roles.work()
        roles.train(attempt, 1)
        attempt.commit_checkpoint(1, "/c/1")
        roles.work()
        roles.train(attempt, 2)
        roles.work()
        # Step 1 is in a checkpoint; step 2 is not, and step 3 is waiting.
        assert retained(buffer, max_experiences=0) == ({"max_experiences 0": 4}, 8)
    # The run was killed here: step 2 is drawn again, whole.
    with roles.attempt() as attempt:
        assert attempt.start_step == 1
        assert len(roles.train(attempt, 2)) == 2


def test_retention_applies_to_groups_on_which_no_run_will_decide(buffer: Buffer) -> None:
    """Imported ones, and those that were relabelled after the end of their run."""
    for status in ("created", "finished", "interrupted"):
        run = buffer.create_run(name=status, config={}, seed=1, steps=3, pipeline_version="p1")
        if status == "interrupted":
            with buffer.attempt(run):
                pass
        with buffer.writer(run) as writer:
            writer.insert(own_group(task_key=status))
        buffer.sql("UPDATE rft.run SET status = %s::rft.run_status WHERE run_id = %s", [status, run.run_id])
    assert buffer.sql("SELECT DISTINCT status::text AS s FROM rft.rollout_group").to_pylist() == [{"s": "sealed"}]
    assert retained(buffer, max_experiences=0) == ({"max_experiences 0": 4}, 2)
    assert kept(buffer) == [5, 6]


def test_retention_spares_the_run_that_is_about_to_start(buffer: Buffer) -> None:
    runs = [
        buffer.create_run(name=name, config={}, seed=1, steps=3, pipeline_version="none", mode="train")
        for name in ("starts", "stored")
    ]
    for run in runs:
        with buffer.writer(run) as writer:
            writer.insert(own_group(task_key="a"), own_group(task_key="b"))
    rules = RetentionConfig(max_experiences=1)
    done = retention.apply(buffer, rules, author="ada", starting_run_id=runs[0].run_id)
    assert done.num_experiences == 4 and done.num_protected == 4
    assert kept(buffer) == [1, 2, 3, 4]
    assert retention.apply(buffer, rules, author="ada").num_experiences == 4


def test_retention_from_the_command_line(
    aged: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(aged.config.segments))
    monkeypatch.setenv("RFT_BUFFER", aged.config.uri)
    assert run_command(["retention"]) == 2
    assert "no retention rule" in capsys.readouterr().err
    assert run_command(["retention", "--max-age-days", "-1"]) == 2
    assert "max_age_days" in capsys.readouterr().err
    assert run_command(["retention", "--max-age-days", "7.5", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "4 experiences would be purged" in out and "2 exceed the limits but stay" in out and len(kept(aged)) == 10
    aged.sql('UPDATE rft.run SET config = \'{"buffer": {"retention": {"max_age_days": 7.5}}}\'')
    assert run_command(["retention", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["purged"]["max_age_days 7.5"]["num_experiences"] == 4 and len(kept(aged)) == 6


def test_a_run_that_starts_applies_the_rules_or_states_why_not(
    aged: Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    from rftcore.launch.supervisor import apply_retention
    from rftcore.launch.terminal.views import LineView

    view, run = LineView(), aged.find_run("r")
    apply_retention(None, aged, run, view)
    apply_retention(RetentionConfig(), aged, run, view)
    assert len(kept(aged)) == 10
    rules = RetentionConfig(max_age_days=7.5)
    apply_retention(rules, aged, run, view)
    assert "buffer.retention: 4 experiences purged" in capsys.readouterr().out and len(kept(aged)) == 6
    for file in Path(str(aged.config.segments)).iterdir():
        file.unlink()
    apply_retention(RetentionConfig(max_age_days=0.5), aged, run, view)
    assert "warning: buffer.retention is not applied: the folder of the segments" in capsys.readouterr().out
    assert len(kept(aged)) == 6
