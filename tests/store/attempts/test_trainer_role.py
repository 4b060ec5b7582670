"""The trainer role itself on a real buffer: a tiny model, stored groups, and the test in the place of the explorer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import torch
from psycopg.types.json import Jsonb

from rftcore.config.run import RunConfig, parse_config
from rftcore.launch.preparation import stored_config
from rftcore.reporting.report import build_report
from rftcore.resolved import ResolvedRun
from rftcore.run.join import JoinedRun
from rftcore.sync.files.weights_file import iterate_weights, open_weights
from rftcore.trainer.role import TrainerRole
from rftcore.trainer.shared_device import trainer_device_of
from rftdata import Buffer
from rftdata.attempts.evaluations import Answer, Evaluation, claim_evaluation, fail_evaluation, finish_evaluation
from rftdata.attempts.sampling import SamplingConfig
from rftdata.errors import ConfigError, FencedError, RftError, RoleFailedError
from rftdata.pipeline.queue import claim_sealed_groups
from rftdata.pipeline.records import Verdicts, dropped, kept
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.workers.worker import Worker
from tests.support.models import make_tiny_model
from tests.support.store_roles import own_group, taken_over
from tests.support.waiting import PATIENCE_S

Rewards = Callable[[Evaluation], float | None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def training(buffer: Buffer, tiny: Path) -> Iterator[Training]:
    with ThreadPoolExecutor() as pool:
        training = Training(buffer, tiny, pool)
        yield training
        if training.was_started:
            training.stop()  # a trainer that a failed test left waiting must not hold up the others


class Training:
    """One run that trains on stored groups, one group a step.

    The test decides when a group is ready, and answers evaluations.
    """

    def __init__(self, buffer: Buffer, model: Path, pool: ThreadPoolExecutor) -> None:
        self.buffer = buffer
        self.model = model
        self.pool = pool
        self.was_started = False

    def start(self, steps: int, **sections: dict[str, Any]) -> None:
        """Store the run and a sealed group for every step."""
        self.config = self.configured(steps, **sections)
        self.run = self.buffer.create_run(
            name="stored", config=stored_config(self.config), seed=1, steps=steps, pipeline_version="p1", mode="train"
        )
        self.was_started = True
        with self.buffer.writer(self.run) as writer:
            writer.insert(*[own_group(task_key=str(step)) for step in range(steps)])
        self.explorer: int = self.buffer.database.fetch(
            "insert_worker",
            run_id=self.run.run_id,
            role="explorer",
            host="here",
            pid=os.getpid(),
            pid_space="",
            pid_started=0,
        )[0]["worker_id"]

    def configured(self, steps: int, **sections: dict[str, Any]) -> RunConfig:
        raw: dict[str, Any] = {
            "run": {"name": "stored"},
            "buffer": {"uri": self.buffer.config.uri, "segments": self.buffer.config.segments},
            "model": {"path": str(self.model)},
            "tasks": [{"name": "t", "source": "./none.py:none"}],
            "algorithm": {"name": "sft", "group_size": 1},
            "explorer": {"reward": "exact_match"},
            "trainer": {"batch_groups": 1, "checkpoint_every": 1, "autocast": "none"},
            "sync": {"method": "checkpoint"},
            "steps": steps,
        }
        for name, section in sections.items():
            raw[name] = {**raw.get(name, {}), **section}
        return parse_config(raw, self.model, "the test")

    def set_rewards(self, reward: float) -> None:
        """Give all groups the same rewards."""
        self.buffer.sql("UPDATE rft.experience SET reward = %s", [reward])

    def make_ready(self, count: int, *, keep: bool = True) -> None:
        """Verdicts on that many more groups: so many steps can be drawn."""
        batch = claim_sealed_groups(self.run, self.explorer, count=count, lease_s=60)
        assert batch is not None
        decisions = kept(batch.table) if keep else dropped(batch.table, "gate", "not wanted")
        commit_verdicts(self.run, self.explorer, "p1", batch, Verdicts(decisions))

    def attempt(self) -> Future[None]:
        """One life of the trainer, in a thread; it holds the run when this returns."""
        before = self.rows("select count(*) as n from rft.run_attempt")[0]["n"]
        life = self.pool.submit(self.train)
        self.wait_for(f"(select count(*) > {before} from rft.run_attempt)", life)
        return life

    def train(self) -> None:
        with (
            Worker(self.run, "trainer") as worker,
            self.buffer.attempt(self.run, sampling=SamplingConfig(max_staleness=1000)) as attempt,
        ):
            device = trainer_device_of(self.config, attempt, worker)
            TrainerRole(JoinedRun(self.buffer, self.run, ResolvedRun(self.config)), worker, attempt, device).train()

    def stop(self) -> None:
        self.run.request_stop()

    def answer(self, rewards: Rewards) -> list[Evaluation]:
        """Answer what is asked; where `rewards` gives None the evaluation fails. What was answered."""
        answered = []
        while asked := claim_evaluation(self.run, self.explorer, lease_s=60):
            reward = rewards(asked)
            if reward is None:
                fail_evaluation(self.run, asked.evaluation_id, self.explorer, "it failed")
                continue
            given = Answer(task_id=1, reward=reward, response="", num_response_tokens=1, finish_reason="stop")
            finish_evaluation(self.run, asked.evaluation_id, self.explorer, [given], seconds=1.0)
            answered.append(asked)
        return answered

    def answer_until_done(self, future: Future[None], rewards: Rewards) -> list[Evaluation]:
        answered = []
        while not future.done():
            answered += self.answer(rewards)
            time.sleep(0.02)
        future.result()
        return answered

    def wait_for(self, what: str, future: Future[None]) -> None:
        """Wait until a condition in SQL holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.rows(f"select {what} as yes")[0]["yes"]:
            if future.done():
                future.result()
            assert time.monotonic() < deadline, f"it never came: {what}"
            time.sleep(0.02)

    def rows(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.buffer.sql(query).to_pylist()
        return found

    def steps(self) -> list[int]:
        """Steps of the present history that are on record."""
        return [row["trainer_step"] for row in self.rows("select trainer_step from rft.v_train_step order by 1")]

    def checkpoints(self) -> list[int]:
        """Steps with a checkpoint whose files are there."""
        found = self.rows("select trainer_step, uri from rft.checkpoint where deleted_at is null order by 1")
        assert all((Path(row["uri"]) / "model.safetensors").is_file() for row in found)
        return [row["trainer_step"] for row in found]


def validation(every: int, *tasksets: str) -> dict[str, Any]:
    return {"every": every, "tasks": [{"name": name, "source": "./none.py:none"} for name in tasksets]}


def test_a_trainer_whose_run_was_taken_over_does_not_wait_for_the_last_validation(training: Training) -> None:
    training.start(1, eval=validation(1, "easy"))
    training.make_ready(1)
    life = training.attempt()
    training.wait_for("exists (select from rft.worker where waiting_for like '%%the last validation')", life)
    with taken_over(training.buffer, training.run), pytest.raises(FencedError):
        life.result(PATIENCE_S)


def test_a_trainer_compiles_while_it_waits_for_its_first_batch(training: Training) -> None:
    training.start(2, trainer={"compile": True})
    life = training.attempt()
    training.wait_for("exists (select from rft.worker where waiting_for like '1 ready groups%%')", life)
    training.make_ready(2)
    life.result(PATIENCE_S)
    activities = [
        row["activity"] for row in training.rows("select activity from rft.worker_span order by worker_id, ordinal")
    ]
    assert activities.count("compiling") == 1
    assert activities.index("compiling") < activities.index("training")


def test_a_trainer_with_a_batch_trains_at_once(training: Training) -> None:
    training.start(1, trainer={"compile": True})
    training.make_ready(1)
    training.attempt().result(PATIENCE_S)
    assert not training.rows("select from rft.worker_span where activity = 'compiling'")


def test_a_stop_is_honoured_while_groups_are_ready(training: Training) -> None:
    training.start(200, trainer={"checkpoint_every": 50})
    training.make_ready(1)
    life = training.attempt()
    training.wait_for("exists (select from rft.train_step)", life)
    with publication_held_up(training):  # so it is in its second step when it is asked to stop
        training.make_ready(199)
        training.wait_for("exists (select from rft.draw where trainer_step = 2)", life)
        training.stop()
    life.result(timeout=PATIENCE_S)
    assert training.steps() == [1, 2] and training.checkpoints() == [2]
    assert training.rows("select status::text as status from rft.run")[0]["status"] == "running"


def test_a_checkpoint_is_not_judged_on_part_of_its_validation(training: Training) -> None:
    training.start(3, trainer={"keep_checkpoints": 1}, eval=validation(1, "easy", "hard"))
    training.make_ready(2)
    life = training.attempt()

    def rewards(asked: Evaluation) -> float:
        return {1: {"easy": 0.4, "hard": 0.4}, 2: {"easy": 1.0, "hard": -1.0}}.get(asked.trainer_step, {}).get(
            asked.taskset, 0.0
        )

    # Step 2 was answered on its easy taskset only when the checkpoint of step 3 is committed.
    training.wait_for("(select count(*) = 6 from rft.evaluation)", life)
    withheld = "taskset = 'hard' and trainer_step = 2"
    training.buffer.sql(f"update rft.evaluation set status = 'claimed', claimed_by = 0 where {withheld}")
    training.answer(rewards)
    training.make_ready(1)
    training.wait_for("exists (select from rft.checkpoint where trainer_step = 3)", life)
    assert training.checkpoints() == [1, 2, 3]
    training.buffer.sql(f"update rft.evaluation set status = 'planned', claimed_by = null where {withheld}")
    training.answer_until_done(life, rewards)
    assert training.checkpoints() == [1, 3]
    report = build_report(training.buffer)
    assert report.best_step == 1
    assert report.best_checkpoint is not None and report.best_checkpoint.trainer_step == 1


def test_the_tests_are_read_by_the_best_of_those_answered_in_full(training: Training) -> None:
    evaluation = {**validation(1, "easy", "hard"), "test": [{"name": "test", "source": "./none.py:none"}]}
    training.start(2, eval=evaluation)
    training.make_ready(2)

    def rewards(asked: Evaluation) -> float | None:
        if asked.trainer_step == 2:
            return 1.0 if asked.taskset == "easy" else None
        return 0.5

    asked = training.answer_until_done(training.attempt(), rewards)
    assert {one.trainer_step for one in asked if one.purpose == "test"} == {0, 1}
    assert build_report(training.buffer).best_step == 1


def test_a_checkpoint_whose_validation_failed_is_not_kept_forever(training: Training) -> None:
    training.start(4, trainer={"keep_checkpoints": 1}, eval=validation(1, "easy"))
    training.make_ready(2)
    life = training.attempt()
    training.wait_for("(select count(*) = 3 from rft.evaluation)", life)
    training.answer(lambda asked: None if asked.trainer_step == 1 else 1.0)
    training.make_ready(2)
    training.answer_until_done(life, lambda row: 0.0)
    assert training.checkpoints() == [2, 4]


def test_unanswered_validations_are_asked_again_with_the_weights_of_their_step(training: Training) -> None:
    training.start(5, trainer={"learning_rate": 0.01}, eval=validation(2, "easy", "hard"))
    training.make_ready(3)
    life = training.attempt()
    training.wait_for("exists (select from rft.train_step where trainer_step = 3)", life)
    held = "update rft.evaluation set status = 'claimed', claimed_by = 0 where trainer_step = 2 and taskset = 'easy'"
    training.buffer.sql(held)
    training.stop()
    life.result(timeout=PATIENCE_S)
    assert training.rows("select * from rft.evaluation where status = 'done'") == []
    folders = {row["trainer_step"]: Path(row["uri"]) for row in training.rows("select * from rft.checkpoint")}
    folders[0] = training.model

    training.make_ready(2)
    seen: set[int] = set()

    def rewards(asked: Evaluation) -> float:
        if asked.trainer_step in (0, 2):
            given = dict(iterate_weights(open_weights(asked.uri, asked.checksum)))
            stored = dict(iterate_weights(folders[asked.trainer_step] / "model.safetensors"))
            # In the type of the engines' weights, which is vLLM's choice for a model in float32.
            assert all(torch.equal(given[name], tensor.to(given[name].dtype)) for name, tensor in stored.items())
            seen.add(asked.trainer_step)
        return 1.0 if asked.trainer_step == 2 else 0.0

    training.answer_until_done(training.attempt(), rewards)
    assert seen == {0, 2}
    report = build_report(training.buffer)
    assert [[point.step for point in curve.points] for curve in report.evaluation_curves] == [[0, 2, 3, 4, 5]] * 2
    assert report.best_step == 2
    assert training.rows("select * from rft.evaluation where status <> 'done'") == []


def test_an_interrupted_reading_of_the_tests_is_done_by_the_next_life(training: Training) -> None:
    training.start(1, eval={"test": [{"name": "test", "source": "./none.py:none"}]})
    training.make_ready(1)
    life = training.attempt()
    training.wait_for("(select count(*) = 4 from rft.evaluation where purpose = 'test')", life)
    newest = training.rows("select uri from rft.policy_version order by policy_version_id desc limit 1")[0]["uri"]
    assert Path(newest).exists(), "an explorer that starts slowly still has to load the newest policy"
    training.stop()
    life.result(timeout=PATIENCE_S)
    asked = training.answer_until_done(training.attempt(), lambda row: 1.0)
    assert sorted((one.trainer_step, one.decoding) for one in asked) == [
        (0, "greedy"),
        (0, "sampled"),
        (1, "greedy"),
        (1, "sampled"),
    ]


def test_a_step_that_a_checkpoint_contains_is_on_record_whenever_the_trainer_ends(training: Training) -> None:
    """The database refuses the record of step 2, as if the process had been killed in front of it."""
    training.start(3)
    training.make_ready(3)
    with psycopg.connect(training.buffer.config.uri, autocommit=True) as connection:
        connection.execute("""
            CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'killed'; END $$;
            CREATE TRIGGER die BEFORE INSERT ON rft.train_step FOR EACH ROW WHEN (NEW.trainer_step = 2) EXECUTE FUNCTION die();
        """)
        with pytest.raises((RftError, psycopg.Error), match="killed"):
            training.train()
        connection.execute("DROP FUNCTION die CASCADE")
    assert training.checkpoints() == training.steps() == [1]
    orphan = training.run.folder / "checkpoints" / "attempt-1-step-000002"
    assert orphan.is_dir()
    training.train()
    assert training.steps() == [1, 2, 3]
    assert not orphan.exists(), "the next attempt removes what no checkpoint needs"
    assert training.checkpoints() == [2, 3]


def test_an_error_loses_no_step_before_it(training: Training) -> None:
    """The second step fails while the checkpoint of the first is being written."""
    training.start(2, algorithm={"name": "reinforce"})
    training.buffer.sql(
        "update rft.experience set reward = null where group_id = (select max(group_id) from rft.experience)"
    )
    training.make_ready(2)
    with pytest.raises(RoleFailedError, match="drawn without a reward"):
        training.train()
    assert training.steps() == training.checkpoints() == [1]


def test_what_selectors_report_of_themselves_is_recorded_with_the_step(training: Training) -> None:
    training.start(1)
    training.make_ready(1)
    run_id = training.run.run_id
    metrics = Jsonb({"tried": 3.0, "chosen_pass_rate": 0.5})
    training.buffer.database.run(
        "save_selector_states",
        run_id=run_id,
        tasksets=["sums"],
        selectors=["difficulty"],
        states=[Jsonb({})],
        metrics=[metrics],
    )
    training.train()
    (row,) = training.rows("SELECT metrics FROM rft.v_train_step")
    assert row["metrics"]["selector/sums/tried"] == 3 and row["metrics"]["selector/sums/chosen_pass_rate"] == 0.5


def test_what_a_killed_trainer_left_half_written_is_removed(training: Training) -> None:
    training.start(2)
    training.make_ready(1)
    life = training.attempt()
    training.wait_for("exists (select from rft.checkpoint)", life)
    training.stop()
    life.result(timeout=PATIENCE_S)
    folder = training.run.folder / "checkpoints"
    for name in ("attempt-1-step-000002.draft", "attempt-1-step-000002", "attempt-9-step-000002", "my-favourite"):
        (folder / name).mkdir()
    training.make_ready(1)
    training.train()
    assert sorted(path.name for path in folder.iterdir()) == [
        "attempt-1-step-000001",
        "attempt-2-step-000002",
        "attempt-9-step-000002",
        "my-favourite",
    ]


@contextmanager
def publication_held_up(training: Training) -> Iterator[None]:
    """No weights are announced within; draws, labels and steps that train are not held up."""
    with psycopg.connect(training.buffer.database.uri) as connection:
        connection.execute("LOCK TABLE rft.policy_version IN EXCLUSIVE MODE")
        yield


def in_step_one(training: Training) -> Future[None]:
    """Start a run whose first step waits to be published while the batch of the second is drawn ahead."""
    life = training.attempt()
    training.wait_for("exists (select from rft.policy_version)", life)
    return life


def test_a_label_counts_for_the_batch_that_was_drawn_before_it(training: Training) -> None:
    training.start(3)
    life = in_step_one(training)
    with publication_held_up(training):
        training.make_ready(3)
        training.wait_for("exists (select from rft.draw where trainer_step = 2)", life)
        assert training.steps() == []
        training.buffer.sql(
            "update rft.experience set reward = 0.25 where experience_id = (select min(experience_id) from rft.draw where trainer_step = 2)"
        )
    training.wait_for("exists (select from rft.train_step where trainer_step = 1)", life)
    training.wait_for("exists (select from rft.draw where trainer_step = 2 and item_id = 3)", life)
    training.make_ready(1)
    life.result(timeout=PATIENCE_S)
    used = training.rows(
        "select trainer_step, item_id, array_agg(reward_used order by slot) as rewards from rft.draw group by 1, 2 order by 1"
    )
    assert used == [
        {"trainer_step": 1, "item_id": 1, "rewards": [0.0, 1.0]},
        {"trainer_step": 2, "item_id": 3, "rewards": [0.0, 1.0]},
        {"trainer_step": 3, "item_id": 2, "rewards": [0.25, 1.0]},
    ]
    rewards = [
        row["metrics"]["reward"] for row in training.rows("select metrics from rft.v_train_step order by trainer_step")
    ]
    assert rewards == [0.5, 0.5, 0.625]


def test_without_labels_every_batch_is_drawn_once_and_ahead_of_its_step(training: Training) -> None:
    training.start(6)
    training.make_ready(6)
    # A step is published only when the next one has been drawn, however slowly the thread that draws runs.
    with psycopg.connect(training.buffer.config.uri, autocommit=True) as connection:
        connection.execute("""
            CREATE FUNCTION wait_for_the_next() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                FOR i IN 1..24000 LOOP
                    IF EXISTS (SELECT FROM rft.draw WHERE trainer_step = NEW.trainer_step + 1) THEN RETURN NEW; END IF;
                    PERFORM pg_sleep(0.01);
                END LOOP;
                RAISE 'step % was not drawn ahead', NEW.trainer_step + 1;
            END $$;
            CREATE TRIGGER wait_for_the_next BEFORE INSERT ON rft.policy_version FOR EACH ROW
                WHEN (NEW.trainer_step BETWEEN 1 AND 5) EXECUTE FUNCTION wait_for_the_next();
        """)
    training.train()
    assert training.rows("select count(*) as n, max(draw_id) as last from rft.draw") == [{"n": 12, "last": 12}]
    ahead = training.rows(
        "select count(*) as n from rft.train_step s join rft.batch b on b.trainer_step = s.trainer_step + 1"
        " where b.drawn_at < s.finished_at"
    )
    assert ahead == [{"n": 5}]


def test_a_stop_releases_what_was_drawn_for_the_step_that_never_came(training: Training) -> None:
    training.start(3)
    life = in_step_one(training)
    with publication_held_up(training):
        training.make_ready(2)
        training.wait_for("exists (select from rft.draw where trainer_step = 2)", life)
        training.stop()
    life.result(timeout=PATIENCE_S)
    assert training.steps() == [1] and training.checkpoints() == [1]
    assert training.rows("select distinct trainer_step from rft.draw") == [{"trainer_step": 1}]
    training.make_ready(1)
    training.train()
    assert training.steps() == [1, 2, 3]
    drawn = training.rows("select trainer_step, item_id, count(*) as n from rft.draw group by 1, 2 order by 1")
    assert drawn == [{"trainer_step": step, "item_id": step, "n": 2} for step in (1, 2, 3)]


@pytest.mark.parametrize(("algorithm", "expected"), [("grpo", 0.5), ("sft", 1.0)])
def test_the_sampling_temperature_concerns_algorithms_that_compare_with_what_was_sampled(
    training: Training, algorithm: str, expected: float
) -> None:
    training.start(1, algorithm={"name": algorithm, "group_size": 2}, explorer={"temperature": 0.5})
    assert learner_temperature(training) == expected


def test_greedy_rollouts_teach_nothing_to_an_algorithm_that_compares(training: Training) -> None:
    training.start(1, algorithm={"name": "grpo", "group_size": 2}, explorer={"temperature": 0.0})
    with pytest.raises(ConfigError, match="sampled rollouts"):
        learner_temperature(training)


def learner_temperature(training: Training) -> float:
    joined = JoinedRun(training.buffer, training.run, ResolvedRun(training.config))
    with (
        Worker(training.run, "trainer") as worker,
        training.buffer.attempt(training.run) as attempt,
    ):
        device = trainer_device_of(training.config, attempt, worker)
        return TrainerRole(joined, worker, attempt, device).learner.own.temperature


def test_a_run_whose_rewards_were_all_equal_is_not_finished(training: Training) -> None:
    training.start(2, algorithm={"name": "grpo", "group_size": 2}, trainer={"checkpoint_every": 2})
    training.set_rewards(0.5)
    life = training.attempt()
    training.make_ready(2)
    with pytest.raises(
        RftError, match=r"trained nothing: each of its 2 steps.*groups of equal rewards have no gradient"
    ):
        life.result(PATIENCE_S)
    assert training.steps() == [1, 2] and training.rows("select status::text as status from rft.run") == [
        {"status": "running"}
    ]


@pytest.mark.parametrize(
    ("steps", "how"),
    [
        (2, r"trained nothing: each of its 2 steps"),
        (25, r"20 steps in a row had nothing to train on; the last one: 0 of 1"),
    ],
)
def test_a_run_whose_chain_drops_everything_is_not_finished(training: Training, steps: int, how: str) -> None:
    training.start(steps, trainer={"checkpoint_every": min(steps, 5)})
    life = training.attempt()
    training.make_ready(steps, keep=False)
    with pytest.raises(RftError, match=how):
        life.result(PATIENCE_S)
    assert training.rows("select status::text as status from rft.run") == [{"status": "running"}]
    assert training.rows("select distinct outcome::text as outcome from rft.v_train_step") == [{"outcome": "skipped"}]
    assert training.rows("select max(trainer_step) as step from rft.checkpoint") == [{"step": min(steps, 20)}], (
        "nothing is lost with it"
    )


def test_a_run_whose_steps_all_had_nothing_to_train_is_not_finished(training: Training) -> None:
    training.start(
        2, algorithm={"name": "online_dpo", "group_size": 2, "pairs": {"margin": 2.0}}
    )  # rewards differ by 1
    life = training.attempt()
    training.make_ready(2)
    with pytest.raises(RftError, match=r"the run has trained nothing: each of its 2 steps.*groups_without_pair"):
        life.result(PATIENCE_S)
    assert training.rows("select status::text as status from rft.run") == [{"status": "running"}]
