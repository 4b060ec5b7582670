"""The first hour of a new user: the built wheel alone, in a folder with files of their own and no checkout in sight.

The runs that the tests are about are made by fixtures, each on top of the one before: the warm-up, then GRPO with a person who reviews. The files
of the user are in `first_hour`. The wheel is installed into an environment of its own, which borrows the dependencies of the tests' environment but not
the checkout.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import CHECKOUT, rft_environment, rows
from tests.support.models import make_tiny_model
from tests.support.waiting import RUN_S, printed_by, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

FILES = Path(__file__).parent / "first_hour"
STEPS = 3


@dataclass
class Place:
    """The user's folder and environment.

    Attributes:
        model: what runs after the warm-up start from.
    """

    folder: Path
    environment: Path
    model: str = "./model"

    @property
    def buffer(self) -> Path:
        return self.folder / "buffer"

    @property
    def variables(self) -> dict[str, str]:
        known = {key: value for key, value in rft_environment().items() if key not in ("RFT_BUFFER", "PYTHONPATH")}
        return {**known, "PATH": f"{self.environment / 'bin'}:{os.environ['PATH']}"}

    def call(self, *command: object, timeout: float = RUN_S) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder to its end."""
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def rft(self, *arguments: object) -> str:
        """Run `rft …`, which must succeed; what it prints."""
        done = self.call("rft", *arguments)
        assert done.returncode == 0, f"rft {arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start `rft …` and return at once."""
        return subprocess.Popen(
            ["rft", *map(str, arguments)],
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def rows(self, query: str) -> list[dict[str, Any]]:
        return rows(self.buffer, query)

    def steps(self, run: str) -> int:
        """Trainer steps that a run has done."""
        if not (self.buffer / "postgres" / "postmaster.pid").exists():
            return 0
        return len(self.rows(f"select 1 from rft.v_train_step where run = '{run}'"))

    def has_reviews(self) -> bool:
        """Whether anything waits for a person; asked by SQL, since a process for each look would cost more than the run."""
        if not (self.buffer / "postgres" / "postmaster.pid").exists():
            return False
        return bool(self.rows("select 1 from rft.v_review_queue limit 1"))

    def answer_reviews(self) -> int:
        """Answer what waits for a person: every reward is right as it is. Returns the number of answers."""
        waiting = json.loads(self.rft("label", "queue", "--json"))
        if waiting:
            with (self.folder / "answers.csv").open("w", newline="") as file:
                answers = csv.writer(file)
                answers.writerow(["experience_id", "reward"])
                answers.writerows([row["experience_id"], row["reward"]] for row in waiting)
            self.rft("label", "import", "answers.csv")
        return len(waiting)

    def review_until(self, run: str, step: int, process: subprocess.Popen[str]) -> int:
        """Answer what waits until a step is done; returns the number of answers."""
        answered = 0

        def is_done() -> bool:
            nonlocal answered
            if self.steps(run) < step and self.has_reviews():
                answered += self.answer_reviews()
            return self.steps(run) >= step

        wait_until(is_done, f"step {step}", process=process, pause_s=0.5)
        return answered


def finished(process: subprocess.Popen[str]) -> str:
    output = printed_by(process)
    assert process.returncode == 0, output
    return output


def environment_with_the_wheel(place: Path, wheel: Path) -> Path:
    """A virtual environment with the wheel and the dependencies of the environment of the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, capture_output=True)
    python = place / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel], check=True
    )
    # A folder in a .pth file is searched, but its own .pth files, that of the checkout among them, are not read.
    own, borrowed = (
        Path(
            subprocess.run(
                [each, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
        )
        for each in (python, sys.executable)
    )
    (own / "borrowed.pth").write_text(f"{borrowed}\n")
    return place


@pytest.fixture(scope="module")
def place(server_folders: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    environment = environment_with_the_wheel(tmp_path_factory.mktemp("installed") / "environment", wheel)
    folder = server_folders / "first-hour"
    shutil.copytree(FILES, folder)
    make_tiny_model(folder / "model", context_length=64)
    yield Place(folder, environment)
    for buffer in folder.glob("*/postgres"):
        EmbeddedServer(buffer.parent).stop()


def test_the_packages_are_those_of_the_wheel(place: Place) -> None:
    program = "import sys, rftdata, operators, rftcore.cli as cli; print(rftdata.__file__, operators.__file__, cli.__file__, *sys.path)"
    *files, path = place.call("python", "-c", program).stdout.split(maxsplit=3)
    assert all(Path(file).is_relative_to(place.environment) for file in files), files
    assert str(CHECKOUT) not in path.split()


@pytest.fixture(scope="module")
def warmed(place: Place) -> Place:
    """After the warm-up on a file of chats, from whose checkpoint everything later starts."""
    place.rft("run", "sft.yaml", "--plain")
    [checkpoint] = place.rows(
        "select uri from rft.checkpoint join rft.run using (run_id) where name = 'warm-up' and trainer_step = 20"
    )
    place.model = checkpoint["uri"]
    return place


@dataclass
class Reviewed:
    """What a run with a person who reviews printed in its two lives, and what was seen of it.

    Attributes:
        answered: reviews that the person answered in the first life.
        steps: done when the person paused.
        code: of the first life, whose trainer was killed.
    """

    answered: int
    steps: int
    code: int
    killed: str
    resumed: str


@pytest.fixture(scope="module")
def reviewed(warmed: Place) -> Reviewed:
    """The run `sums`: GRPO. A person reviews its answers, and its trainer is killed once."""
    place = warmed
    run = place.start("run", "grpo.yaml", "--plain", "--set", f"model.path={place.model}")
    try:
        # Every group asks about its first rollout, so the third step waits for as long as the person pauses.
        answered = place.review_until("sums", 2, run)
        steps = place.steps("sums")
        workers = json.loads(place.rft("status", "sums", "--json"))["workers"]
        [trainer] = [worker["pid"] for worker in workers if worker["role"] == "trainer"]
        os.kill(trainer, signal.SIGKILL)
        output = printed_by(run)
    finally:
        if run.poll() is None:
            run.terminate()
    again = place.start("run", "--resume", "--plain")
    place.review_until("sums", STEPS, again)
    return Reviewed(answered, steps, run.returncode, output, finished(again))


@pytest.fixture(scope="module")
def trained(warmed: Place, reviewed: Reviewed) -> Place:
    """After the warm-up and the run `sums`."""
    return warmed


def test_the_configuration_is_checked_before_anything_runs(place: Place) -> None:
    done = place.call("rft", "check", "--deep", "grpo.yaml", "--buffer", "./none")
    assert done.returncode == 0 and "81 tasks, the first prompt is '1+1='" in done.stderr, done.stderr
    assert "none will be created" in done.stderr and not (place.folder / "none").exists()


def test_the_model_is_warmed_up_on_a_file_of_chats(warmed: Place) -> None:
    place = warmed
    losses = [
        row["loss"]
        for row in place.rows(
            "select (metrics->>'loss')::float as loss from rft.v_train_step where run = 'warm-up' order by trainer_step"
        )
    ]
    assert len(losses) == 20 and losses[-1] < 0.7 * losses[0], losses
    chat = place.rows(
        "select prompt, response from rft.v_experience where run = 'warm-up' and task_key is not null limit 1"
    )
    assert "+" in chat[0]["prompt"] and chat[0]["response"].strip().isdigit(), chat


def test_a_person_reviews_while_grpo_trains_and_a_killed_trainer_continues(trained: Place, reviewed: Reviewed) -> None:
    place, output = trained, reviewed.killed
    assert reviewed.answered >= 8 and reviewed.steps == 2
    assert reviewed.code != 0, output
    assert "the trainer of the run 'sums' was killed by signal 9" in output, output
    assert "rft run --resume sums" in output and "Traceback" not in output, output
    assert "finished" in reviewed.resumed
    curve = place.rows("select trainer_step, num_groups from rft.v_train_step where run = 'sums' order by 1")
    assert [row["trainer_step"] for row in curve] == [1, 2, 3] and all(row["num_groups"] for row in curve)
    assert place.rows("select experience_id from rft.v_consumption group by 1 having count(*) > 1") == []
    shaped = place.rows("select count(*) as n from rft.v_experience where run = 'sums' and reward_shaped < reward")
    assert shaped[0]["n"] >= 4 * STEPS


def test_a_reward_is_corrected_by_sql_and_the_history_reports_it(trained: Place) -> None:
    place = trained
    [row] = place.rows(
        "select min(experience_id) as experience_id from rft.v_experience where run = 'sums' and state like '%drawn%' and reward < 1"
    )
    key = row["experience_id"]
    place.rft("sql", f"update rft.experience set reward = 1 where experience_id = {key}")
    history = json.loads(place.rft("label", "history", key, "--json"))
    assert history[-1]["new_value"] == 1.0 and history[-1]["source"] == "sql", history
    assert "1" in place.rft("lineage", key) and place.rows(
        f"select reward from rft.experience where experience_id = {key}"
    ) == [{"reward": 1.0}]


def test_a_fork_continues_from_an_earlier_step_with_other_stages(trained: Place) -> None:
    place = trained
    stages = "pipelines.experience=[{./stages.py:to_the_point: {cost: 0.05}}, {drop_zero_variance_groups: {}}]"
    printed = place.rft("run", "--resume", "sums", "--at-step", 2, "--fork", "dearer", "--set", stages, "--plain")
    assert "dearer begins at step 2" in printed
    assert place.steps("dearer") >= 1 and place.steps("sums") == STEPS
    status = json.loads(place.rft("status", "dearer", "--json"))
    assert (status["status"], status["step"]) == ("finished", STEPS)


def test_other_stages_are_replayed_over_history_and_compared(trained: Place) -> None:
    place = trained
    strict = "pipelines.experience=[{./stages.py:to_the_point: {cost: 0.02}}, {reward_threshold: {min: 0.1}}]"
    place.rft("pipeline", "replay", "grpo.yaml", "--version", "strict", "--run", "sums", "--set", strict)
    versions = json.loads(place.rft("pipeline", "versions", "--run", "sums", "--json"))
    assert len(versions) == 2 and "strict" in json.dumps(versions), versions
    kept = place.rows(
        "select count(*) filter (where not kept) as dropped from rft.verdict where pipeline_version = 'strict'"
    )
    assert kept[0]["dropped"] > 0


def test_a_run_is_exported_and_imported_into_a_new_buffer(trained: Place) -> None:
    place = trained
    place.rft("export", "sums.parquet", "--run", "sums")
    place.rft("import", "sums.parquet", "--buffer", "./new")
    query = "select task_key, prompt, response, reward_sampled, reward, num_labels from rft.v_experience where run = 'sums' order by 1, 3, 4, 5"
    there = rows(place.folder / "new", query)
    assert there == place.rows(query) and len(there) >= 16 * STEPS
    [key] = rows(place.folder / "new", "select min(experience_id) as key from rft.experience")
    assert "sums" in place.rft("lineage", key["key"], "--origin", "--buffer", "./new")


def test_dpo_trains_on_pairs_of_the_stored_answers(trained: Place) -> None:
    place = trained
    place.rft("pairs", "build", "sums", "--margin", 0.05)
    place.rft("run", "dpo.yaml", "--plain", "--set", f"model.path={place.model}", "--set", "trainer.batch_groups=2")
    losses = place.rows(
        "select (metrics->>'loss')::float as loss from rft.v_train_step where run = 'preferences' order by trainer_step"
    )
    # Before the first update the policy is its own reference: -log sigmoid(0).
    assert losses[0]["loss"] == pytest.approx(0.6931, abs=1e-3) and len(losses) > 1


NOWHERE = Path("/proc/buffer")  # no user can make a folder there, root neither
# Where a mistake is not found, the run shall end by itself.
UNREVIEWED = ("--set", "pipelines.experience=[]", "--set", "steps=1")
# What is wrong, the command, and words of the message: what is wrong, and what is right or to be done.
REFUSED = {
    "a key that is misspelt": (
        ["run", "grpo.yaml", "--set", "trainer.lerning_rate=0.1"],
        ["trainer.lerning_rate", "did you mean 'learning_rate'?"],
    ),
    "a configuration that is not there": (["run", "gpro.yaml"], ["gpro.yaml", "correct the path"]),
    "tasks that are not there": (
        ["run", "grpo.yaml", "--set", "tasks=[{name: sums, source: summs.jsonl}]"],
        ["'sums'", "summs.jsonl", "sums.jsonl"],
    ),
    "an answer column that is not there": (
        ["run", "grpo.yaml", "--set", "tasks=[{name: others, source: sums.jsonl, answer: solution}]", *UNREVIEWED],
        ["'others'", "'solution'", "answer, question"],
    ),
    "a model that is not there": (
        ["run", "grpo.yaml", "--set", "model.path=./no-model"],
        ["no-model", "correct model.path"],
    ),
    "a buffer that cannot be written": (
        ["run", "grpo.yaml", "--buffer", NOWHERE],
        [str(NOWHERE), "cannot be created or written"],
    ),
    "longer answers than the context has room for": (
        ["check", "--deep", "grpo.yaml", "--set", "explorer.max_tokens=64"],
        ["explorer.max_tokens", "64", "32 tokens", "context_length"],
    ),
    "a chat without an answer": (
        ["run", "sft.yaml", "--set", "tasks=[{name: questions, source: questions.jsonl, prompt: messages}]"],
        ["row 1", "'questions'", "without a turn of the assistant"],
    ),
    "a stage that never returns": (
        [
            "pipeline",
            "preview",
            "grpo.yaml",
            "--rows",
            2,
            "--set",
            "pipelines.experience=[{./stages.py:endless: {run: {timeout_s: 2}}}]",
        ],
        ["./stages.py:endless", "within 2 s", "stages.py, line", "while True"],
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_one_paragraph_refuses(mistake: str, trained: Place) -> None:
    place = trained
    (place.folder / "questions.jsonl").write_text('{"messages": [{"role": "user", "content": "1+2="}]}\n')
    arguments, words = REFUSED[mistake]
    known = place.rows("select name from rft.run order by 1")
    done = place.call("rft", *arguments)
    assert done.returncode not in (0, 70), done.stdout[-2000:]
    said = " ".join(done.stderr.split())
    assert [word for word in words if word not in said] == [] and "Traceback" not in said, said
    assert place.rows("select name from rft.run order by 1") == known


def test_a_misspelt_attribute_in_the_reward_ends_the_run_and_a_second_run_of_one_name_reports_it(
    trained: Place,
) -> None:
    place = trained
    done = place.call(
        "rft",
        "run",
        "grpo.yaml",
        "--plain",
        "--set",
        "explorer.reward=./mistakes.py:misspelt",
        "--set",
        "explorer.max_refill=4",
        *UNREVIEWED,
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert "sums-2" in said and "rft run --resume sums" in said, said[:2000]
    assert done.returncode not in (0, 70), said[-2000:]
    assert "responze" in done.stderr and "mistakes.py" in done.stderr and "Traceback" not in done.stderr
    assert place.rows("select status from rft.run where name = 'sums-2'") != [{"status": "finished"}]


def test_a_reward_that_is_no_number_ends_the_run_and_each_kind_is_named(trained: Place) -> None:
    place = trained
    done = place.call(
        "rft",
        "run",
        "grpo.yaml",
        "--plain",
        "--set",
        "run.name=no-number",
        "--set",
        "explorer.reward=./mistakes.py:no_number",
        "--set",
        "trainer.batch_groups=32",
        "--set",
        "explorer.max_refill=0",
        *UNREVIEWED,
    )
    assert done.returncode not in (0, 70), done.stdout[-2000:]
    assert "mistakes.py:no_number" in done.stderr and "Traceback" not in done.stderr, done.stderr
    errors = "\n".join(
        row["error"] or ""
        for row in place.rows(
            "select distinct error from rft.rollout join rft.rollout_group using (group_id)"
            " join rft.run using (run_id) where name = 'no-number'"
        )
    )
    assert place.rows("select count(*) as n from rft.v_experience where run = 'no-number' and outcome = 'ok'") == [
        {"n": 0}
    ]
    assert all(word in errors for word in ("returned nothing", "1.0", "False", "nan")), errors
