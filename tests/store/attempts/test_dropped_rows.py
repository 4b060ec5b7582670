"""What the chain of a run dropped is not used again unawares: not in pairs, in their exports, nor in stored selections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftcore.cli import run_command
from rftcore.config.run import parse_config
from rftcore.launch.preparation import prepare_run
from rftcore.resolved import ResolvedRun
from rftdata import Buffer, Group, Rollout, labels
from rftdata.attempts.stored_selection import Selection, select
from rftdata.errors import ConfigError, QueryError
from rftdata.run import Run
from tests.support.store_roles import Roles, own_group, tokens

pytestmark = pytest.mark.usefixtures("beside_a_model")

GROUPS = "select group_id from rft.v_group where run = 'roles'"
PAIRS = "select pair_id from rft.v_pair where run = 'roles' and stands"
ROWS = "select experience_id from rft.v_experience where run = 'roles'"


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    """Groups 1 and 2 of four answers with rewards 0, 1, 0, 1 (experiences 1 to 4 and 5 to 8), and group 3 of two (9, 10).

    The chain dropped the first two answers of group 1, and all of group 3.
    """
    roles = Roles(buffer)
    roles.insert(*(own_group((0.0, 1.0, 0.0, 1.0), task_key=key) for key in "ab"), own_group(task_key="c"))
    roles.decide(keep=lambda row: row["experience_id"] not in (1, 2, 9, 10))
    return roles


@pytest.fixture
def command(roles: Roles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    config = roles.buffer.config
    assert config.segments is not None
    monkeypatch.setenv("RFT_SEGMENTS", config.segments)

    def call(*words: str) -> str:
        assert run_command([*words, "--buffer", config.uri]) == 0
        return capsys.readouterr().out

    return call


def configured(sql: str, algorithm: str, **source: Any) -> ResolvedRun:
    raw = {
        "run": {"name": "again"},
        "model": {"path": "./model"},
        "algorithm": {"name": algorithm},
        "trainer": {"batch_groups": 4},
        "sampling": {"source": {"sql": sql, **source}},
    }
    return ResolvedRun(parse_config(raw, Path(), "test"))


def made(buffer: Buffer, selected: Selection) -> Run:
    return buffer.create_run(
        name="selecting", config={}, seed=1, steps=9, pipeline_version="none", mode="train", selected=selected
    )


def drawn(buffer: Buffer, run: Run) -> list[int]:
    with buffer.attempt(run) as attempt:
        batch = attempt.draw(1, 10, timeout_s=5)
        assert batch is not None
        return sorted(batch.rows["experience_id"].to_pylist())


class TestPairs:
    def test_are_built_of_what_the_chain_kept(self, roles: Roles, command: Any) -> None:
        told = command("pairs", "build", "roles")
        assert "not compared, since the chain dropped them: 4 by gate (not wanted); --include-dropped" in told
        assert "v_preferred_pair" in told and "include_dropped: true" not in told
        built = roles.buffer.sql(
            "SELECT chosen_id, rejected_id, chosen_state, rejected_state FROM rft.v_pair"
        ).to_pylist()
        assert {row["chosen_id"] for row in built} | {row["rejected_id"] for row in built} == {3, 4, 5, 6, 7, 8}
        assert {(row["chosen_state"], row["rejected_state"]) for row in built} == {("ready", "ready")}

    def test_are_built_of_all_on_request_and_then_trained_on_only_on_request(self, roles: Roles, command: Any) -> None:
        told = command("pairs", "build", "roles", "--include-dropped")
        assert "not compared, since" not in told and "include_dropped: true}" in told
        rows = roles.buffer.sql("SELECT * FROM rft.v_pair WHERE chosen_id = 10").to_pylist()
        assert [
            (row["chosen_state"], row["chosen_finish_reason"], row["builder"]["include_dropped"]) for row in rows
        ] == [("dropped", "stop", True)]
        every = roles.buffer.sql("SELECT pair_id, chosen_id, rejected_id FROM rft.v_pair").to_pylist()
        whole = {row["pair_id"] for row in every if not {row["chosen_id"], row["rejected_id"]} & {1, 2, 9, 10}}
        assert whole and len(whole) < len(every)
        selected = select(roles.database, PAIRS)
        assert set(selected.item_ids) == whole and selected.num_without == len(every) - len(whole)
        assert [(drop.stage, drop.num_experiences) for drop in selected.dropped] == [("gate", 4)]
        assert len(select(roles.database, PAIRS, include_dropped=True).item_ids) == len(every)

    def test_are_exported_without_what_was_dropped(self, roles: Roles, command: Any, tmp_path: Path) -> None:
        command("pairs", "build", "roles", "--include-dropped")
        told = command("pairs", "export", str(tmp_path / "some.jsonl"), "roles")
        assert "left out: pairs with answers that the chain dropped, 4 by gate (not wanted); --include-dropped" in told
        some = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
        assert {row["chosen_id"] for row in some} | {row["rejected_id"] for row in some} == {3, 4, 5, 6, 7, 8}
        assert "left out" not in command("pairs", "export", str(tmp_path / "all.jsonl"), "roles", "--include-dropped")
        assert len((tmp_path / "all.jsonl").read_text().splitlines()) > len(some)

    def test_another_chain_of_a_resumed_run_brings_nothing_back(self, roles: Roles, command: Any) -> None:
        """What was trained on and given up is not decided again: the verdicts of the earlier chain stay those that count."""
        with roles.attempt() as attempt:
            assert attempt.draw(1, 2, timeout_s=5) is not None
            attempt.commit_checkpoint(1, "/checkpoints/1")

        def left_out() -> list[dict[str, Any]]:
            facts = (
                "SELECT experience_id, state, dropped_by FROM rft.v_experience WHERE dropped_by IS NOT NULL ORDER BY 1"
            )
            return roles.buffer.sql(facts).to_pylist()

        before = left_out()
        assert [row["experience_id"] for row in before] == [1, 2, 9, 10]
        roles.run.refreshed().continue_with({}, steps=4, pipeline_version="p2")
        roles.insert(own_group(task_key="later"))  # experiences 11 and 12
        roles.decide(keep=lambda row: row["experience_id"] != 12, version="p2")
        assert left_out() == [*before, {"experience_id": 12, "state": "dropped", "dropped_by": "gate"}]
        assert "not compared, since the chain dropped them: 5 by gate" in command("pairs", "build", "roles")
        assert select(roles.database, ROWS).item_ids == (3, 4, 5, 6, 7, 8, 11)

    def test_a_rollout_with_a_dropped_turn_is_left_out_whole(self, roles: Roles, command: Any) -> None:
        """Its other turn alone would look like an answer of one turn."""
        turns = Rollout(0, "ok", 1.0, [tokens(1.0), tokens(1.0)])
        group = Group(
            [turns, Rollout(1, "ok", 0.0, [tokens(0.0)])], source="import", taskset="mine", task_key="turns", payload={}
        )
        roles.insert(group)  # experiences 11, 12 and 13
        roles.decide(keep=lambda row: row["turn_index"] == 0)
        command("pairs", "build", "roles")
        assert roles.buffer.sql("SELECT * FROM rft.v_pair WHERE group_id = 4").num_rows == 0


class TestSelections:
    def test_experiences_that_were_dropped_are_not_trained_on(self, roles: Roles) -> None:
        selected = select(roles.database, ROWS)
        assert selected.item_ids == (3, 4, 5, 6, 7, 8)
        assert selected.describe_dropped() == (
            "sampling.source leaves out 4 experiences, since chains had dropped experiences: 4 by gate (not wanted); "
            "sampling.source.include_dropped: true trains on them"
        )
        assert select(roles.database, ROWS, include_dropped=True).item_ids == tuple(range(1, 11))

    def test_groups_are_trained_on_without_dropped_experiences_whatever_a_later_verdict_is(self, roles: Roles) -> None:
        selected = select(roles.database, GROUPS)
        assert (selected.item_ids, selected.left_out) == ((1, 2), {1: (1, 2)})
        run = made(roles.buffer, selected)
        # A correction brings back what it is about. A new selection has it, the stored one does not.
        labels.set_rewards(roles.buffer, {1: 0.5}, author="ada")
        assert select(roles.database, GROUPS).left_out == {1: (2,)}
        assert drawn(roles.buffer, run) == [3, 4, 5, 6, 7, 8]
        assert drawn(roles.buffer, made(roles.buffer, select(roles.database, GROUPS))) == [1, 3, 4, 5, 6, 7, 8]

    def test_a_correction_brings_back_what_it_is_about_and_groups_that_one_stage_dropped_whole(
        self, roles: Roles
    ) -> None:
        roles.insert(own_group((0.0, 1.0), task_key="d"))  # group 4; experience 11 is dropped
        roles.decide(keep=lambda row: row["experience_id"] != 11)
        with roles.attempt() as attempt:
            assert attempt.draw(1, 1, timeout_s=5) is not None  # group 1
            attempt.commit_checkpoint(1, "/checkpoints/1")
        # Of a group that was trained on, which is not decided again; of another answer; of a group that was dropped for what its answers had in common.
        labels.set_rewards(roles.buffer, {1: 0.5, 12: 0.5, 9: 0.5}, author="ada")
        assert select(roles.database, ROWS).item_ids == (1, 3, 4, 5, 6, 7, 8, 9, 10, 12)

    def test_a_group_with_too_few_remaining_rollouts_is_left_out(self, roles: Roles) -> None:
        roles.insert(own_group(task_key="d"))  # group 4
        roles.decide(keep=lambda row: row["experience_id"] != 11)
        selected = select(roles.database, GROUPS, min_rollouts=2)
        assert (selected.item_ids, selected.num_without) == ((1, 2), 2)
        assert select(roles.database, GROUPS).item_ids == (1, 2, 4)
        assert prepare_run(configured(GROUPS, "grpo"), roles.buffer).source_rows == 2

    def test_a_selection_of_nothing_else_is_refused(self, roles: Roles) -> None:
        with pytest.raises(QueryError, match=r"dropped all 1 rows .*2 by gate \(not wanted\); .*include_dropped: true"):
            select(roles.database, f"{GROUPS} and group_id = 3")

    def test_a_run_reports_what_it_leaves_out_and_later_verdicts_change_nothing(self, roles: Roles) -> None:
        said: list[str] = []
        run = prepare_run(configured(ROWS, "sft"), roles.buffer, report=said.append)
        assert run.source_rows == 6 and len(said) == 1 and "leaves out 4 experiences" in said[0]
        said.clear()
        assert (
            prepare_run(configured(ROWS, "sft", include_dropped=True), roles.buffer, report=said.append).source_rows
            == 10
        )
        assert said == []
        assert prepare_run(configured(ROWS, "sft"), roles.buffer, resumed=run, report=said.append).source_rows == 6
        with pytest.raises(ConfigError, match=r"sampling\.source\.include_dropped has changed"):
            prepare_run(configured(ROWS, "sft", include_dropped=True), roles.buffer, resumed=run)


def test_groups_have_the_states_of_their_experiences(roles: Roles) -> None:
    def states() -> dict[int, str]:
        rows = roles.buffer.sql("SELECT group_id, state FROM rft.v_group WHERE run = 'roles'").to_pylist()
        return {row["group_id"]: row["state"] for row in rows}

    assert states() == {1: "ready", 2: "ready", 3: "dropped"}
    with roles.attempt() as attempt:
        assert attempt.draw(1, 1, timeout_s=5) is not None
        attempt.commit_checkpoint(1, "/checkpoints/1")
        assert states() == {1: "drawn", 2: "ready", 3: "dropped"}
        consumed = roles.buffer.sql("SELECT DISTINCT run, group_id FROM rft.v_consumption").to_pylist()
        assert consumed == [{"run": "roles", "group_id": 1}]
    labels.set_rewards(roles.buffer, {9: 0.5}, author="ada")
    roles.buffer.sql("UPDATE rft.rollout_group SET trainable = false WHERE group_id = 2")
    assert states() == {1: "drawn", 2: "closed", 3: "awaits verdict"}
