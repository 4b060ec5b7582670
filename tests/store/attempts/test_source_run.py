"""From `sampling.source` in a configuration to a run: what is stored with it, how long it lasts, what it refuses."""

from __future__ import annotations

import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rftcore.cli import run_command
from rftcore.config.run import RunConfig, parse_config
from rftcore.launch.preparation import has_finished, prepare_run
from rftcore.launch.signals import StartInterrupted, StopSignals
from rftcore.resolved import ResolvedRun
from rftdata import Buffer
from rftdata.errors import ConfigError, QueryError
from tests.support.store_roles import own_group

pytestmark = pytest.mark.usefixtures("beside_a_model")

SQL = "select experience_id from rft.experience"


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    """Five groups of two."""
    run = buffer.create_run(name="source", config={}, seed=1, steps=1, pipeline_version="none", mode="train")
    with buffer.writer(run) as writer:
        writer.insert(*[own_group(task_key=str(i)) for i in range(5)])
    return buffer


def configured(sql: str = SQL, *, epochs: int = 1, pin_labels: bool = True, **changes: Any) -> RunConfig:
    raw = {
        "run": {"name": "again"},
        "model": {"path": "./model"},
        "algorithm": {"name": "sft"},
        "trainer": {"batch_groups": 4},
        "sampling": {"source": {"sql": sql, "pin_labels": pin_labels}, "epochs": epochs},
    }
    return parse_config({**raw, **changes}, Path(), "test")


def test_a_run_lasts_as_long_as_its_selection_unless_it_is_configured_to_end_earlier(stored: Buffer) -> None:
    assert prepare_run(ResolvedRun(configured()), stored).planned_steps == 3
    assert prepare_run(ResolvedRun(configured(epochs=4)), stored).planned_steps == 10
    assert prepare_run(ResolvedRun(configured(steps=2)), stored).planned_steps == 2
    row = stored.find_run("again")
    assert (row.mode, row.source_sql, row.source_rows, row.label_cut) == ("train", SQL, 10, 0)


def test_more_steps_than_it_lasts_are_refused_and_no_run_is_stored(stored: Buffer) -> None:
    with pytest.raises(ConfigError, match=r"got 4.*allowed: up to 3; raise sampling.epochs"):
        prepare_run(ResolvedRun(configured(steps=4)), stored)
    with pytest.raises(QueryError, match="selects nothing"):
        prepare_run(ResolvedRun(configured(f"{SQL} where reward > 5")), stored)
    assert [row["name"] for row in stored.sql("SELECT name FROM rft.run").to_pylist()] == ["source"]


def test_the_algorithm_must_learn_from_what_is_selected(stored: Buffer) -> None:
    with pytest.raises(ConfigError, match="selects experiences, and dpo learns from pairs"):
        prepare_run(ResolvedRun(configured(algorithm={"name": "dpo"})), stored)
    stored.sql("INSERT INTO rft.preference_pair (chosen_id, rejected_id) VALUES (1, 2)")
    with pytest.raises(ConfigError, match="selects pairs, and sft learns from experiences"):
        prepare_run(ResolvedRun(configured("select pair_id from rft.v_pair")), stored)
    of_pairs = configured("select pair_id from rft.v_pair", algorithm={"name": "dpo"})
    assert prepare_run(ResolvedRun(of_pairs), stored).source_kind == "pair"
    of_groups = configured("select group_id from rft.v_group", algorithm={"name": "dpo", "pairs": {}})
    assert prepare_run(ResolvedRun(of_groups), stored).source_kind == "group"
    with pytest.raises(ConfigError, match=r"selects stored pairs, and online_dpo forms.*pairs: null"):
        prepare_run(ResolvedRun(configured("select pair_id from rft.v_pair", algorithm={"name": "online_dpo"})), stored)


@pytest.mark.parametrize("resumes", [False, True], ids=["new", "resumed"])
def test_a_signal_stops_a_start_before_the_run_is_stored_or_leaves_it_stored(stored: Buffer, resumes: bool) -> None:
    row = prepare_run(ResolvedRun(configured()), stored) if resumes else None

    def runs() -> list[tuple[str, int]]:
        found = stored.sql("SELECT name, planned_steps FROM rft.run ORDER BY run_id").to_pylist()
        return [(run["name"], run["planned_steps"]) for run in found]

    before = runs()
    with StopSignals() as signals:
        with pytest.raises(StartInterrupted):
            prepare_run(
                ResolvedRun(configured(steps=2)),
                stored,
                resumed=row,
                before_storing=lambda: os.kill(os.getpid(), signal.SIGTERM),
            )
        assert runs() == before
    with StopSignals() as signals:

        def interrupted() -> None:
            signals.defer()
            os.kill(os.getpid(), signal.SIGTERM)

        prepare_run(ResolvedRun(configured(steps=2)), stored, resumed=row, before_storing=interrupted)
        assert signals.first is signal.SIGTERM
    assert runs() == [run for run in before if run[0] != "again"] + [("again", 2)]


def test_a_resumed_run_keeps_its_selection(stored: Buffer) -> None:
    row = prepare_run(ResolvedRun(configured()), stored)
    stored.sql("UPDATE rft.experience SET reward = 7 WHERE experience_id = 1")
    again = prepare_run(ResolvedRun(configured()), stored, resumed=row)
    unchanged = ("source_sql", "source_hash", "source_rows", "label_cut", "planned_steps", "source_epochs")
    assert {key: getattr(again, key) for key in unchanged} == {key: getattr(row, key) for key in unchanged}
    for key, other in {
        "sql": configured(f"{SQL} where true"),
        "pin_labels": configured(pin_labels=False),
        "epochs": configured(epochs=2),
        "batch_groups": configured(trainer={"batch_groups": 5}),
    }.items():
        with pytest.raises(ConfigError, match=rf"\.{key} has changed"):
            prepare_run(ResolvedRun(other), stored, resumed=row)
    with pytest.raises(ConfigError, match=r"sampling\.source\.sql has changed.*allowed: None"):
        prepare_run(ResolvedRun(configured()), stored, resumed=stored.find_run("source"))


def test_a_run_that_ended_early_on_purpose_can_continue(stored: Buffer) -> None:
    row = prepare_run(ResolvedRun(configured(steps=2)), stored)
    with stored.attempt(row) as attempt:
        seen = [attempt.draw(step, 4) for step in (1, 2)]
        attempt.commit_checkpoint(2, "/nowhere")
        attempt.finish("done")
    done = stored.find_run("again")
    assert has_finished(configured(steps=2), done) and not has_finished(configured(), done)
    more = prepare_run(ResolvedRun(configured()), stored, resumed=done)
    assert more.planned_steps == 3
    with stored.attempt(more) as attempt:
        seen += [attempt.draw(3, 4), attempt.draw(4, 4)]
    drawn = [batch.rows["experience_id"].to_pylist() for batch in seen if batch is not None]
    assert [len(ids) for ids in drawn] == [4, 4, 2, 0]
    assert sorted(chain.from_iterable(drawn)) == list(range(1, 11))


def test_check_deep_states_what_would_be_trained_on(
    stored: Buffer, tmp_path: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["check", "--deep", str(tiny_config)]) == 0
    assert "sampling.source: 10 experiences, 3 steps, hash " in capsys.readouterr().err
    assert (
        run_command(["check", "--deep", str(tiny_config), "--set", "sampling.source.sql=select 1 as experience_id"])
        == 0
    )
    assert run_command(["check", "--deep", str(tiny_config), "--set", "sampling.source.sql=select 1"]) == 2
    assert "must return one column" in capsys.readouterr().err
    assert stored.sql("SELECT count(*) AS n FROM rft.run")["n"].to_pylist() == [1]


@pytest.fixture
def tiny_config(buffer: Buffer, tmp_path: Path, tiny_model: Path) -> Path:
    import yaml

    raw = configured().model_dump(mode="json", include={"run", "algorithm", "trainer", "sampling"})
    raw["model"] = {"path": str(tiny_model)}
    raw["buffer"] = {"uri": buffer.config.uri, "segments": buffer.config.segments}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "run.yaml"
