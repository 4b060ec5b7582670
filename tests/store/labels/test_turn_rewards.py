"""Rewards of turns: rows that people correct by SQL, with history, undo and live effect, as rewards of experiences are."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet
import pytest

from rftcore.algorithms import build_algorithm
from rftcore.cli import run_command
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftdata import Buffer, Group, Rollout, exchange, labels
from rftdata.config import RetentionConfig
from rftdata.errors import QueryError, RftError
from rftdata.experience import AbandonedTry
from rftdata.maintenance.archive import archive
from rftdata.maintenance.purge import purge
from rftdata.maintenance.restore_run import restore_run
from rftdata.maintenance.retention import apply
from rftdata.reports import lineage
from tests.store.writing.test_turns import TASK, single, walk
from tests.support.store_roles import Roles, publish_versions, selecting, tokens


@pytest.fixture
def walks(buffer: Buffer) -> Buffer:
    """A row of the turns 0, 1, 3 with rewards 0, 0.5, 1, its branch of turn 2 with 0, and a row of one turn with 0.25."""
    publish_versions(buffer, 8)
    run = buffer.create_run(name="walks", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer(run) as writer:
        writer.insert(Group([walk(), single()], **TASK))
    return buffer


def turns(buffer: Buffer) -> list[tuple[int, int, float, float]]:
    found = buffer.sql("SELECT experience_id, turn, reward_sampled, reward FROM rft.turn_reward ORDER BY 1, 2")
    return [tuple(row.values()) for row in found.to_pylist()]


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    """The same rows in a run that decides on them, as one group that an explorer has written."""
    roles = Roles(buffer, num_tasks=1, batch_groups=1)
    with roles.attempt():
        roles.plan()
        (claimed,) = roles.claim()
        rollouts = [walk(0.0), single(1, 0.0)]
        rollouts[0].tries = [AbandonedTry("lost")]
        for sequence in (s for rollout in rollouts for s in rollout.sequences):
            sequence.policy_spans = [(start, roles.version) for start, _ in sequence.policy_spans]
        roles.insert(Group(rollouts, claimed.group_id, claimed.claim_token))
        roles.decide()
    return roles


def status(buffer: Buffer) -> str:
    return str(buffer.sql("SELECT status::text AS s FROM rft.rollout_group")["s"][0])


def test_what_a_workflow_recorded_is_a_row_for_each_turn(walks: Buffer) -> None:
    assert turns(walks) == [(1, 0, 0, 0), (1, 1, 0.5, 0.5), (1, 3, 1, 1), (2, 2, 0, 0), (3, 0, 0.25, 0.25)]


def test_an_update_writes_labels_and_reopens_the_group(walks: Buffer) -> None:
    assert status(walks) == "ready"
    walks.sql("UPDATE rft.turn_reward SET reward = reward + 1 WHERE experience_id = 1 AND turn > 0")
    assert status(walks) == "sealed"
    found = walks.sql(
        "SELECT experience_id, turn, old_value, new_value, final, source::text AS source, label_batch_id FROM rft.label ORDER BY label_id"
    ).to_pylist()
    assert [tuple(row.values()) for row in found] == [(1, 1, 0.5, 1.5, False, "sql", 1), (1, 3, 1, 2, False, "sql", 1)]
    rewards = walks.sql("SELECT reward, num_labels FROM rft.v_experience ORDER BY experience_id").to_pylist()
    assert [tuple(row.values()) for row in rewards] == [(1, 2), (1, 0), (0, 0)]  # no experience's own reward changed
    assert walks.sql("SELECT rft.reward_at(1, 0) AS r")["r"].to_pylist() == [1]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE rft.turn_reward SET reward_sampled = 1",
        "UPDATE rft.turn_reward SET reward = 1, turn = 7",
        "DELETE FROM rft.turn_reward",
        "TRUNCATE rft.turn_reward",
    ],
)
def test_facts_of_turns_are_refused_with_a_hint(walks: Buffer, statement: str) -> None:
    with pytest.raises(RftError, match=r"rft.turn_reward holds facts.*UPDATE rft.turn_reward SET reward"):
        walks.sql(statement)


@pytest.mark.parametrize(
    "rows",
    ["(3, 1, 0, 0)", "(99, 0, 0, 0)", "(2, 4, 0, 0)", "(4, 0, 0, 0), (4, 1, 0, 0)"],
    ids=["an experience that has rows", "no experience", "another turn", "more turns"],
)
def test_rewards_of_turns_that_the_experience_does_not_have_are_refused(walks: Buffer, rows: str) -> None:
    before = turns(walks)
    with walks.writer("walks") as writer:
        writer.insert(Group([Rollout(0, "ok", 0.0, [tokens(0.0)])], **{**TASK, "task_key": "without"}))
    with pytest.raises(QueryError, match=r"has not the turns of the inserted rows"):
        walks.sql(f"INSERT INTO rft.turn_reward (experience_id, turn, reward_sampled, reward) VALUES {rows}")
    assert turns(walks) == before


def test_a_reward_that_trainers_would_read_as_infinite_is_refused(walks: Buffer) -> None:
    with pytest.raises(RftError, match="turn_reward_reward_check"):
        walks.sql("UPDATE rft.turn_reward SET reward = 1e39 WHERE experience_id = 1 AND turn = 0")
    with pytest.raises(RftError):
        labels.set_turn_rewards(walks, {(1, 0): -1e300}, author="ada")


def test_undo_restores_turns_and_experiences_of_one_batch(walks: Buffer) -> None:
    first = labels.set_turn_rewards(walks, {(1, 0): 0.5, (1, 3): 0.25, (3, 0): 0.25}, author="ada", reason="seen")
    assert (first.num_changed, first.num_unchanged) == (2, 1)
    with psycopg.connect(walks.config.uri) as client:
        client.execute("SELECT set_config('rft.label_batch', (SELECT rft.begin_label_batches(1))::text, true)")
        client.execute("UPDATE rft.experience SET reward = 0.75 WHERE experience_id = 1")
        client.execute("UPDATE rft.turn_reward SET reward = 0.75 WHERE experience_id = 1 AND turn IN (1, 3)")
    second = int(walks.sql("SELECT max(label_batch_id) AS b FROM rft.label")["b"][0].as_py())
    undone = labels.undo(walks, first.label_batch_id, author="ada")
    assert (undone.num_changed, undone.overruled, undone.overruled_turns) == (1, (), ((1, 3),))
    assert labels.undo(walks, second, author="bob").num_changed == 3
    assert turns(walks)[:3] == [(1, 0, 0, 0), (1, 1, 0.5, 0.5), (1, 3, 1, 0.25)]
    assert walks.sql("SELECT reward FROM rft.experience WHERE experience_id = 1")["reward"].to_pylist() == [1]
    assert [row["turn"] for row in labels.history(walks, 1, label_batch_id=first.label_batch_id)] == [3, 0]


def test_a_file_sets_rewards_of_experiences_and_of_turns(walks: Buffer, tmp_path: Path) -> None:
    file = tmp_path / "rewards.csv"
    file.write_text("experience_id,turn,reward\n1,,0.5\n1,3,0.75\n2,2,0.125\n")
    assert labels.import_rewards(walks, file, author="ada").num_changed == 3
    assert [row[3] for row in turns(walks)] == [0, 0.5, 0.75, 0.125, 0.25]
    file.write_text("experience_id,turn,reward\n1,3.5,0.75\n")
    with pytest.raises(QueryError, match=r"row 1 of .* has no usable experience_id and reward.*1, 0.75, 3.5"):
        labels.import_rewards(walks, file, author="ada")


@pytest.mark.parametrize(
    ("key", "message"),
    [((1, 2), r"experience 1 has no turn 2.*allowed: 0, 1, 3"), ((9, 0), "unknown experience 9")],
)
def test_an_unknown_turn_is_refused_and_nothing_is_written(walks: Buffer, key: tuple[int, int], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        labels.set_turn_rewards(walks, {(1, 0): 0.5, key: 1.0}, author="ada")
    assert labels.batches(walks) == []


def test_a_step_trains_on_the_rewards_that_stand_and_records_them(roles: Roles) -> None:
    buffer = roles.buffer
    labels.set_turn_rewards(buffer, {(1, 3): 0.25}, author="ada")
    with roles.attempt() as attempt:
        assert attempt.draw(1, 1, timeout_s=0) is None  # the pipeline decides again first
        roles.decide()
        drawn = attempt.draw(1, 1, ARRAYS, timeout_s=5)
        assert drawn is not None and attempt.is_current(drawn)
        read = train_batch(drawn, build_algorithm("gigpo")).step_rewards_BA
        assert read is not None and read.tolist() == [[0, 0.5, 0.25], [0, 0, 0], [0.25, 0, 0]]
        # After the draw: the batch stays what it is, in this process and any other, and lineage says so.
        labels.set_turn_rewards(buffer, {(1, 0): 0.125, (2, 2): 0.125}, author="ada")
        assert not attempt.is_current(drawn)
        again = attempt.draw(1, 1, ARRAYS, timeout_s=5)
        assert again is not None
        assert [found.tolist() for found in again.arrays("step_reward") if found is not None] == [
            [0, 0.5, 0.25],
            [0],
            [0.25],
        ]
    assert again.rows["turn_rewards"].to_pylist() == [[0, 0.5, 0.25], None, None]
    uses = [lineage.uses(buffer.database, i)[0] for i in (1, 2, 3)]
    assert [use.corrected_since for use in uses] == [True, True, False]
    assert [(use.turn_rewards_used, use.turn_rewards_now) for use in uses] == [
        ([0, 0.5, 0.25], [0.125, 0.5, 0.25]),
        (None, [0.125]),
        (None, [0.25]),
    ]


def test_a_pinned_selection_trains_on_the_rewards_of_its_cut(walks: Buffer) -> None:
    labels.set_turn_rewards(walks, {(1, 3): 0.25}, author="ada")
    pinned = selecting(walks, "select experience_id from rft.experience where num_turns > 1", "pinned")
    labels.set_turn_rewards(walks, {(1, 0): 0.125, (1, 3): 0.75}, author="bob")
    labels.set_turn_rewards(walks, {(1, 3): 0.875}, author="bob")
    later = selecting(walks, "select experience_id from rft.experience where num_turns > 1", "later")
    assert pinned.source_hash != later.source_hash
    for run, expected in ((pinned, [0, 0.5, 0.25]), (later, [0.125, 0.5, 0.875]), (pinned, [0, 0.5, 0.25])):
        with walks.attempt(run) as attempt:  # checks the hash again
            drawn = attempt.draw(1, 1, ("step_reward",), timeout_s=5)
            assert drawn is not None and attempt.is_current(drawn)
            (found,) = drawn.arrays("step_reward")
            assert found is not None and found.dtype == "float32" and found.tolist() == expected
            attempt.release(drawn)


def test_a_fork_copies_corrected_rewards_of_turns(roles: Roles) -> None:
    buffer = roles.buffer
    labels.set_turn_rewards(buffer, {(1, 3): 0.25}, author="ada")
    buffer.fork("roles", name="other", step=0, keep_rollouts=True)
    assert buffer.sql("SELECT run, try, error FROM rft.v_rollout_try ORDER BY rollout_id").to_pylist() == [
        {"run": run, "try": 1, "error": "lost"} for run in ("roles", "other")
    ]
    sealed = buffer.sql("SELECT max(experience_id) AS last FROM rft.experience")["last"][0].as_py()
    assert [(key - sealed + 3, *rest) for key, *rest in turns(buffer)[5:]] == turns(buffer)[:5]


def test_rows_of_before_schema_0003_are_trained_with_their_arrays_and_get_rows_by_a_repair(
    walks: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(walks.config.segments))
    before = turns(walks)
    with psycopg.connect(walks.config.uri) as owner:
        owner.execute("ALTER TABLE rft.turn_reward DISABLE TRIGGER USER")
        owner.execute("DELETE FROM rft.turn_reward")
        owner.execute("ALTER TABLE rft.turn_reward ENABLE TRIGGER USER")
        owner.execute(
            "UPDATE rft.buffer SET turn_rewards_from = (SELECT max(segment_id) + 1 FROM rft.segment)"
        )  # as the migration does
    with walks.attempt("walks") as attempt:
        drawn = attempt.draw(1, 1, ARRAYS, timeout_s=5)
        assert drawn is not None
        assert [found.tolist() for found in drawn.arrays("step_reward") if found is not None] == [
            [0, 0.5, 1],
            [0],
            [0.25],
        ]
    with pytest.raises(QueryError, match=r"no rewards of turns are stored for experience 1.*rft doctor --repair"):
        labels.set_turn_rewards(walks, {(1, 3): 0.25}, author="ada")
    assert run_command(["doctor", "--buffer", walks.config.uri]) == 0
    assert "before schema 0003 are in arrays alone" in capsys.readouterr().out
    assert run_command(["doctor", "--buffer", walks.config.uri, "--repair"]) == 0
    assert "rewards of turns of 3 experiences were added" in capsys.readouterr().out
    assert turns(walks) == before
    assert labels.set_turn_rewards(walks, {(1, 3): 0.25}, author="ada").num_changed == 1
    assert run_command(["doctor", "--buffer", walks.config.uri]) == 0
    assert "in arrays alone" not in capsys.readouterr().out


def test_the_doctor_compares_turns_with_their_arrays_and_repairs_what_follows_from_them(
    walks: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(walks.config.segments))

    def doctor(*options: str) -> str:
        run_command(["doctor", "--buffer", walks.config.uri, *options])
        return capsys.readouterr().out

    facts = "SELECT experience_id, num_turns, turn_index, num_trained_tokens FROM rft.experience ORDER BY 1"
    before, right = turns(walks), walks.sql(facts).to_pylist()
    assert "the turns of all experiences agree with their arrays" in doctor()
    with psycopg.connect(walks.config.uri) as owner:
        owner.execute(
            "ALTER TABLE rft.turn_reward DISABLE TRIGGER USER; ALTER TABLE rft.experience DISABLE TRIGGER USER"
        )
        owner.execute("UPDATE rft.experience SET num_turns = 2, num_trained_tokens = 4 WHERE experience_id = 1")
        owner.execute("DELETE FROM rft.turn_reward WHERE experience_id = 1 AND turn = 3")
        owner.execute("DELETE FROM rft.turn_reward WHERE experience_id = 2")
        owner.execute("UPDATE rft.turn_reward SET reward_sampled = 9 WHERE experience_id = 3")
        owner.execute("ALTER TABLE rft.turn_reward ENABLE TRIGGER USER; ALTER TABLE rft.experience ENABLE TRIGGER USER")
    labels.set_turn_rewards(walks, {(3, 0): 0.5}, author="ada")
    found = [line for line in doctor().splitlines() if line.startswith("WRONG  experience")]
    assert [line.split(";")[0] for line in found] == [
        "WRONG  experience 1: num_turns is 2, and 3 by its arrays",
        "WRONG  experience 2: rft.turn_reward has no rewards of turns, and the array step_reward turn 2: 0",
        "WRONG  experience 3: rft.turn_reward has turn 0: 9, and the array step_reward turn 0: 0.25",
    ]
    assert "has turn 0: 0, turn 1: 0.5, and the array step_reward turn 0: 0, turn 1: 0.5, turn 3: 1" in found[0]
    repaired = doctor("--repair")
    assert "facts about the turns of 2 experiences were wrong and are corrected" in repaired
    assert "experience 3" in repaired and "not corrected, because its turns have labels" in repaired
    assert turns(walks)[:4] == before[:4] and walks.sql(facts).to_pylist() == right


def test_an_archived_run_keeps_its_rewards_of_turns_and_refuses_labels(walks: Buffer) -> None:
    labels.set_turn_rewards(walks, {(1, 3): 0.25}, author="ada")
    walks.find_run("walks").end("finished", "done")
    before = turns(walks)
    archive(walks, "walks", author="ada")
    assert turns(walks) == before
    with pytest.raises(QueryError, match=r'"walks" is archived: UPDATE of rft.turn_reward is refused'):
        walks.sql("UPDATE rft.turn_reward SET reward = 1 WHERE experience_id = 3")
    query = "SELECT turn, reward_sampled, reward FROM turn WHERE experience_id = 1 ORDER BY turn"
    rows = [tuple(row.values()) for row in walks.query(query).read_all().to_pylist()]
    assert rows == [(0, 0, 0), (1, 0.5, 0.5), (3, 1, 0.25)]
    restore_run(walks, "walks")
    assert labels.set_turn_rewards(walks, {(3, 0): 1.0}, author="ada").num_changed == 1


def test_a_purge_keeps_rewards_of_turns_and_their_labels_as_it_keeps_rewards(walks: Buffer) -> None:
    labels.set_turn_rewards(walks, {(1, 3): 0.25}, author="ada")
    before = turns(walks)
    assert purge(walks, "experience_id = 1", reason="asked", author="ada").num_experiences == 1
    assert turns(walks) == before
    assert [row["turn"] for row in labels.history(walks, 1)] == [3]


def test_a_label_of_a_turn_protects_a_group_from_retention(walks: Buffer) -> None:
    rules = RetentionConfig(max_experiences=0, keep_labelled=True)
    with walks.database.transaction() as connection:
        connection.execute("UPDATE rft.run SET status = 'finished'")
    walks.sql("UPDATE rft.turn_reward SET reward = 0.75 WHERE experience_id = 3")
    assert apply(walks, rules, author="ada").num_protected == 3


def test_duckdb_shows_rewards_of_turns_as_sampled_and_as_they_stand(walks: Buffer) -> None:
    labels.set_turn_rewards(walks, {(1, 3): 0.25}, author="ada")
    query = "SELECT turn, reward_sampled, reward, experience_reward FROM turn WHERE experience_id = 1 ORDER BY turn"
    found = [tuple(row.values()) for row in walks.query(query).read_all().to_pylist()]
    assert found == [(0, 0, 0, 1), (1, 0.5, 0.5, 1), (3, 1, 0.25, 1)]
    assert walks.query("SELECT count(*) AS n FROM turn_reward").read_all()["n"].to_pylist() == [5]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_an_export_and_its_import_keep_rewards_of_turns_and_their_labels(
    walks: Buffer, other: Buffer, tmp_path: Path, suffix: str
) -> None:
    labels.set_turn_rewards(walks, {(1, 3): 0.25, (2, 2): 0.5}, author="ada", reason="seen")
    walks.sql("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 1")
    file = tmp_path / f"walks.{suffix}"
    exchange.export(walks, file)
    exchange.load(other, file)
    assert turns(other) == turns(walks)
    history = "SELECT experience_id, turn, old_value, new_value, author, reason FROM rft.label ORDER BY label_id"
    assert sorted(map(repr, other.sql(history).to_pylist())) == sorted(map(repr, walks.sql(history).to_pylist()))
    batch = other.sql("SELECT min(label_batch_id) AS b FROM rft.label WHERE turn = 3")["b"][0].as_py()
    assert labels.undo(other, batch, author="ada").num_changed == 2
    assert [row[3] for row in turns(other)] == [0, 0.5, 1, 0, 0.25]


def test_rewards_and_labels_of_turns_that_do_not_fit_are_refused(walks: Buffer, other: Buffer, tmp_path: Path) -> None:
    labels.set_turn_rewards(walks, {(1, 3): 0.25}, author="ada")
    file = tmp_path / "walks.jsonl"
    exchange.export(walks, file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    label = rows[0]["labels"][0]
    for change, message in (
        (
            {"turn_rewards": [0.0, 1.0]},
            r"one value for each of the array step_reward .got 2.; allowed: the shape \[3\]",
        ),
        ({"turn_rewards": [0.0, None, 1.0]}, "not only finite numbers"),
        ({"labels": [label | {"turn": 2}]}, r"a turn that the row does not have .got 2.; allowed: \[0, 1, 3\]"),
        ({"labels": [label | {"old_value": None}]}, "is of a turn and has no old_value"),
    ):
        file.write_text("\n".join(json.dumps(row) for row in ({**rows[0], **change}, *rows[1:])))
        with pytest.raises(QueryError, match=message):
            exchange.load(other, file)


def test_a_file_of_before_has_labels_without_turns(walks: Buffer, other: Buffer, tmp_path: Path) -> None:
    walks.sql("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 1")
    file = tmp_path / "walks.parquet"
    exchange.export(walks, file)
    table = pyarrow.parquet.read_table(file)
    old = pa.list_(pa.struct([field for field in table.schema.field("labels").type.value_type if field.name != "turn"]))
    found = [
        rows and [{k: v for k, v in row.items() if k != "turn"} for row in rows] for rows in table["labels"].to_pylist()
    ]
    place = table.schema.get_field_index("labels")
    pyarrow.parquet.write_table(
        table.drop_columns("turn_rewards").set_column(place - 1, "labels", pa.array(found, old)), file
    )
    exchange.load(other, file)
    assert other.sql("SELECT turn, new_value FROM rft.label").to_pylist() == [{"turn": None, "new_value": 0.5}]
    assert turns(other) == turns(walks)


def test_the_commands_set_turns_and_rollouts(
    walks: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(walks.config.segments))

    def label(*words: str) -> str:
        assert run_command(["label", *words, "--buffer", walks.config.uri]) == 0
        return capsys.readouterr().out

    assert "label batch 1: 1 changed" in label("set", "1", "-0.5", "--turn", "3", "--reason", "seen")
    assert "label batch 2: 1 changed" in label("set", "1", "0.75", "--turn", "3")
    assert "1 labelled again since then and not changed: turn 3 of 1" in label("undo", "1")
    assert run_command(["show", "1", "--buffer", walks.config.uri]) == 0
    shown = capsys.readouterr().out
    assert "label of turn 3 of" in shown and "1 → -0.5: seen" in shown
    assert "label batch 4: 2 changed" in label("rollout", "1", "0.25")
    assert [row["turn"] for row in json.loads(label("history", "1", "--json"))] == [None, 3, 3]
    assert run_command(["label", "set", "1", "1", "--turn", "0", "--final", "--buffer", walks.config.uri]) == 2
    assert "the reward of a turn cannot be final" in capsys.readouterr().err


def test_a_rollout_of_several_rows_is_labelled_as_one_trial(roles: Roles) -> None:
    buffer = roles.buffer
    assert buffer.sql("SELECT rft.label_rollout(1, 1.0) AS n")["n"].to_pylist() == [2]
    assert buffer.sql("SELECT alpha, beta FROM rft.task_stat").to_pylist() == [{"alpha": 2, "beta": 2}]
    assert len(labels.batches(buffer)) == 1
    done = labels.set_rollout_reward(buffer, 1, 0.5, author="ada", final=True)
    assert done.num_changed == 2
    assert buffer.sql("SELECT alpha, beta FROM rft.task_stat").to_pylist() == [{"alpha": 1.5, "beta": 2.5}]
    labels.undo(buffer, done.label_batch_id, author="ada")
    assert buffer.sql("SELECT alpha, beta FROM rft.task_stat").to_pylist() == [{"alpha": 2, "beta": 2}]
    with pytest.raises(RftError, match="rollout 99 has no experience"):
        buffer.sql("SELECT rft.label_rollout(99, 1.0)")
    with pytest.raises(QueryError, match="does not exist"):
        labels.set_rollout_reward(buffer, 99, 1.0, author="ada")
