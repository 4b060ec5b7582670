"""Training from stored experiences with the processes a user starts: the same batches and weights, whichever process is killed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import yaml
from safetensors.numpy import load_file

from rftdata import Buffer, Group, Rollout
from rftdata import Sequence as Tokens
from tests.support.command_line import rft_environment
from tests.support.models import make_tiny_model
from tests.support.preloaded import Preloaded
from tests.support.ranks import ranks_of
from tests.support.waiting import printed_by, wait_until, wait_until_ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = 9
# Where the trainer stands when it is killed: at which row it is about to write, for which step.
KILLS = (("draw", 1), ("train_step", 2), ("checkpoint", 4), ("policy_version", 5), ("train_step", 9))
SQL = {
    "sft": "select experience_id from rft.v_experience where run = 'source' and reward > 0.4",
    "dpo": "select pair_id from rft.v_pair where run = 'source' and margin > 0.1",
    "ppo": "select experience_id from rft.v_experience where run = 'source'",
    "grpo": "select group_id, std_reward as priority from rft.v_group where run = 'source' and std_reward > 0.2",
}
# Importance weights and prioritised draws are part of what must repeat.
CHANGES: dict[str, dict[str, Any]] = {
    "grpo": {
        "algorithm": {"name": "grpo", "correction": "truncate"},
        "sampling": {"source": {"sql": SQL["grpo"]}, "epochs": 4, "order": "prioritized"},
    }
}
BLOCK = """
CREATE FUNCTION block() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(3600); RETURN NEW; END $$;
CREATE TRIGGER block BEFORE INSERT ON rft.{table} FOR EACH ROW WHEN (NEW.trainer_step = {step}) EXECUTE FUNCTION block();
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    """Sixteen groups of four answers of different lengths with rewards between 0 and 1, and pairs of best over worst."""
    draw = random.Random(5)
    groups = []
    for number in range(16):
        prompt = [draw.randrange(4, 40) for _ in range(6)]
        rollouts = []
        for index in range(4):
            response = [draw.randrange(4, 40) for _ in range(draw.randint(2, 12))]
            reward = round(draw.random(), 3)
            tokens = Tokens(
                prompt=str(prompt),
                response=str(response),
                token_ids=prompt + response,
                num_prompt_tokens=6,
                finish_reason="stop",
                reward=reward,
                behavior_logprobs=[-1.0] * len(response),
            )
            rollouts.append(Rollout(index, "ok", reward, [tokens]))
        groups.append(Group(rollouts, source="import", taskset="mine", task_key=str(number), payload={}))
    run = buffer.create_run(name="source", config={}, seed=1, steps=1, pipeline_version="none", mode="train")
    with buffer.writer(run) as writer:
        writer.insert(*groups)
    buffer.sql("""
        INSERT INTO rft.preference_pair (chosen_id, rejected_id, source)
        SELECT DISTINCT ON (group_id) first_value(experience_id) OVER g, last_value(experience_id) OVER g, 'rewards'::rft.pair_source
        FROM rft.experience
        WINDOW g AS (PARTITION BY group_id ORDER BY reward DESC ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)""")
    return buffer


class Trainers:
    """`rft train` processes on one buffer."""

    def __init__(self, buffer: Buffer, folder: Path, model: Path, algorithm: str) -> None:
        self.buffer = buffer
        self.folder = folder
        self.raw: dict[str, Any] = {
            "run": {"name": "x", "seed": 3},
            "buffer": {"uri": buffer.config.uri, "segments": buffer.config.segments, "min_free_bytes": 0},
            "model": {"path": str(model)},
            "algorithm": {"name": algorithm},
            "sampling": {"source": {"sql": SQL[algorithm]}, "epochs": 3},
            "trainer": {
                "batch_groups": 5,
                "learning_rate": 1e-3,
                "warmup_steps": 3,
                "lr_schedule": "cosine",
                "optimizer": {"weight_decay": 0.1},
                "autocast": "none",
                "checkpoint_every": 2,
                "num_threads": 2,
                "max_tokens_per_microbatch": 64,
            },
            "sync": {"method": "checkpoint"},
            "steps": STEPS,
            **CHANGES.get(algorithm, {}),
        }
        self.living: list[subprocess.Popen[str]] = []

    def start(self, name: str) -> subprocess.Popen[str]:
        """Train the run of that name, from where it stands; its first call makes it."""
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**self.raw, "run": {**self.raw["run"], "name": name}}))
        process = Preloaded(
            ["train", file],
            env=rft_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.living.append(process)
        return process

    def finish(self, name: str) -> None:
        process = self.start(name)
        output = printed_by(process)
        assert process.returncode == 0, output

    def kill_at(self, name: str, table: str, step: int) -> None:
        """Start, let it run into a row of that step, and kill it there; the row is never written."""
        with psycopg.connect(self.buffer.config.uri, autocommit=True) as connection:
            connection.execute(BLOCK.format(table=table, step=step))
            process = self.start(name)
            blocked = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
            wait_until(lambda: connection.execute(blocked).fetchall(), "the statement that blocks", process=process)
            found = connection.execute(blocked).fetchall()
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            for (pid,) in found:
                connection.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
            connection.execute("DROP FUNCTION block CASCADE")

    def start_and_hold(self, name: str) -> tuple[subprocess.Popen[str], int, Path]:
        """Start on two ranks, and suspend both while they write a checkpoint.

        Returns:
            The first rank, the second one's pid, and the draft of the checkpoint.
        """
        before = self.checkpoints()[-1:]
        process = self.start(name)
        wait_until(lambda: self.checkpoints()[-1:] != before, "a checkpoint", process=process)
        [rank], folder = ranks_of(process.pid), self.checkpoints()[-1][1].parent
        both = [process.pid, rank]

        def are_stopped() -> bool:
            return {psutil.Process(pid).status() for pid in both} == {psutil.STATUS_STOPPED}

        while process.poll() is None:
            for draft in folder.glob("*.draft"):
                for pid in both:
                    os.kill(pid, signal.SIGSTOP)
                wait_until(are_stopped, "both ranks are suspended", pause_s=0.01)
                if draft.exists():
                    return process, rank, draft
                for pid in both:
                    os.kill(pid, signal.SIGCONT)
        raise AssertionError("no checkpoint was caught while it was written")

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Step and folder of each committed checkpoint whose files are kept, oldest first."""
        found = self.buffer.sql(
            "SELECT trainer_step, uri FROM rft.checkpoint WHERE deleted_at IS NULL ORDER BY checkpoint_id"
        )
        return [(row["trainer_step"], Path(row["uri"])) for row in found.to_pylist()]

    def batches(self, name: str) -> list[tuple[Any, ...]]:
        """Every draw of the run's present history."""
        rows = self.buffer.sql(
            """SELECT d.trainer_step, d.slot, d.experience_id, d.pair_id, d.reward_used FROM rft.run r
               JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id
               JOIN rft.draw d ON d.attempt_id = h.attempt_id AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)
               WHERE r.name = %s ORDER BY 1, 2""",
            [name],
        ).to_pylist()
        return [tuple(row.values()) for row in rows]

    def digest(self, name: str) -> list[str]:
        """Of the last checkpoint's weights, of its optimizers' moments and, where there is one, of its critic's weights."""
        uri = self.buffer.sql(
            "SELECT uri FROM rft.checkpoint JOIN rft.run USING (run_id) WHERE name = %s AND trainer_step = %s",
            [name, STEPS],
        )["uri"][0].as_py()
        files = sorted(Path(uri).rglob("*.safetensors"))
        assert len(files) == (3 if self.raw["algorithm"]["name"] == "ppo" else 2)
        # Not of the files themselves: safetensors writes their headers in a new order each time.
        tensors = [(name, tensor.tobytes()) for file in files for name, tensor in sorted(load_file(file).items())]
        return [f"{name} {hashlib.sha256(values).hexdigest()}" for name, values in tensors]


@pytest.fixture
def trainers(request: pytest.FixtureRequest, stored: Buffer, tiny: Path, tmp_path: Path) -> Iterator[Trainers]:
    """Of the algorithm that a test is parametrized with."""
    trainers = Trainers(stored, tmp_path, tiny, request.param)
    yield trainers
    for process in trainers.living:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("trainers", ["sft", "dpo", "grpo"], indirect=True)
def test_killed_anywhere_it_ends_with_the_same_batches_and_the_same_weights_to_the_bit(trainers: Trainers) -> None:
    trainers.finish("straight")
    for table, step in KILLS:
        trainers.kill_at("killed", table, step)
        # Behind the run's label cut: neither its batches nor its weights may notice.
        trainers.buffer.sql("UPDATE rft.experience SET reward = reward - 1 WHERE experience_id % 3 = 0")
    trainers.finish("killed")
    lives = trainers.buffer.sql(
        "SELECT count(*) AS n FROM rft.run_attempt JOIN rft.run USING (run_id) WHERE name = 'killed'"
    )
    assert lives["n"].to_pylist() == [1 + len(KILLS)]
    assert trainers.batches("killed") == trainers.batches("straight")
    assert trainers.digest("killed") == trainers.digest("straight")
    # The comparison could fail: another seed draws in another order and ends elsewhere.
    trainers.raw["run"]["seed"] = 4
    trainers.raw["sampling"]["source"]["sql"] = SQL[trainers.raw["algorithm"]["name"]].partition(" and ")[0]
    trainers.finish("other")
    assert trainers.digest("other") != trainers.digest("straight")


@pytest.mark.parametrize("trainers", ["ppo"], indirect=True)
def test_a_killed_run_goes_on_with_its_critic_as_if_nothing_had_happened(trainers: Trainers) -> None:
    trainers.raw["algorithm"] |= {"group_size": 1, "critic": {"learning_rate": 1e-2, "warmup_steps": 3}}
    trainers.raw["trainer"]["mini_batches"] = 2
    trainers.finish("straight")
    trainers.kill_at(
        "killed", "train_step", 3
    )  # in the warm-up, after a checkpoint in which only the critic has moments
    trainers.kill_at("killed", "policy_version", 7)
    trainers.finish("killed")
    assert trainers.batches("killed") == trainers.batches("straight")
    assert trainers.digest("killed") == trainers.digest("straight")


@pytest.mark.parametrize("trainers", ["sft"], indirect=True)
def test_what_two_ranks_had_half_written_is_never_resumed_from(trainers: Trainers) -> None:
    # More steps than can be done before two checkpoints are caught while they are written; the last life does a few.
    trainers.raw |= {"steps": 10_000}
    trainers.raw["sampling"]["epochs"] = 10_000
    trainers.raw["trainer"] |= {"num_gpus": 2, "checkpoint_every": 1, "keep_checkpoints": 3}
    process, rank, draft = trainers.start_and_hold("held")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    killed_after, folder = trainers.checkpoints()[-1]
    assert draft.exists() and not draft.with_suffix("").exists() and folder.is_dir()
    wait_until_ended([rank])

    process, rank, second_draft = trainers.start_and_hold("held")
    assert not draft.exists() and second_draft.name.startswith("attempt-2-")
    trainers.buffer.find_run("held").request_stop()  # as Ctrl-C and SIGTERM of `rft run` do
    for pid in (process.pid, rank):
        os.kill(pid, signal.SIGCONT)
    output = printed_by(process)
    assert process.returncode == 0, output
    stopped_after, folder = trainers.checkpoints()[-1]
    assert (folder / "training" / "state.json").exists() and not list(folder.parent.glob("*.draft"))
    assert killed_after < stopped_after

    steps = trainers.raw["steps"] = stopped_after + 4
    trainers.raw["trainer"]["num_gpus"] = 1
    trainers.raw["trainer"]["checkpoint_every"] = steps
    trainers.finish("held")
    begun = trainers.buffer.sql(
        "SELECT trainer_step FROM rft.run_attempt a LEFT JOIN rft.checkpoint c ON c.checkpoint_id = a.from_checkpoint_id ORDER BY a.attempt_id"
    )
    assert begun["trainer_step"].to_pylist() == [None, killed_after, stopped_after]
    assert trainers.checkpoints()[-1][0] == steps and not list(folder.parent.glob("*.draft"))
    done = trainers.buffer.sql("SELECT trainer_step FROM rft.v_train_step WHERE run = 'held' ORDER BY 1")[
        "trainer_step"
    ]
    assert done.to_pylist() == list(range(1, steps + 1))
