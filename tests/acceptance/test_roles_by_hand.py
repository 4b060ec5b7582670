"""`rft explore`, `rft process` and `rft train` started one by one, without Ray: they meet at the buffer and make one run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import rftdata
from rftdata.maintenance.verification import verify
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import EXAMPLE, Rft, report, rows
from tests.support.small_runs import RUN, STEPS, settings, start
from tests.support.waiting import PATIENCE_S, printed_by, wait_until
from tests.support.warm_up import Warm

Start = Callable[..., "subprocess.Popen[str]"]

ROLES = {"explore": "explorer", "process": "pipeline", "train": "trainer"}


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Start]:
    """Starts a role; what still runs when the test fails is ended."""
    started: list[subprocess.Popen[str]] = []

    def call(verb: str, *options: object) -> subprocess.Popen[str]:
        started.append(start(verb, *options, ray_folder=tmp_path / "ray"))
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "buffer"
    EmbeddedServer(tmp_path / "buffer").stop()


def wait_for_worker(buffer: Path, role: str, process: subprocess.Popen[str]) -> None:
    def has_joined() -> bool:
        if not (buffer / "host").exists():  # its server is being made
            return False
        with rftdata.open(str(buffer)) as opened:
            return opened.sql("select 1 from rft.worker where role = %s", [role]).num_rows > 0

    wait_until(has_joined, f"the {role} has joined", process=process, pause_s=0.5)


def assert_one_finished_run(buffer: Path, rft: Rft, processes: dict[str, subprocess.Popen[str]], ray: Path) -> None:
    for verb, process in processes.items():
        output = printed_by(process)
        assert process.returncode == 0, f"rft {verb} ended with {process.returncode}:\n{output}"
        assert "Traceback" not in output, output
    assert [(row["name"], row["status"]) for row in rows(buffer, "select name, status::text from rft.run")] == [
        (RUN, "finished")
    ]
    steps = rows(buffer, "select trainer_step, num_groups, reason from rft.v_train_step order by 1")
    assert [row["trainer_step"] for row in steps] == list(range(1, STEPS + 1))
    workers = rows(
        buffer,
        "select role::text, error, stopped_at is not null as left, count(*) as n from rft.worker group by 1, 2, 3",
    )
    assert sorted((row["role"], row["error"], row["left"], row["n"]) for row in workers) == sorted(
        (role, None, True, 1) for role in ROLES.values()
    )
    assert report(rft, buffer, RUN)["status"] == "finished"
    with rftdata.open(str(buffer)) as opened:
        assert list(verify(opened)) == []
    assert not ray.exists()  # a role by itself has no use for Ray


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("order", [("train", "explore", "process"), ("process", "explore", "train")], ids="-".join)
def test_each_may_be_first(
    order: tuple[str, ...], buffer: Path, by_hand: Start, warm: Warm, rft: Rft, tmp_path: Path
) -> None:
    processes = {}
    for verb in order:
        processes[verb] = by_hand(verb, "--buffer", buffer, *settings(warm))
        wait_for_worker(buffer, ROLES[verb], processes[verb])
    assert_one_finished_run(buffer, rft, processes, tmp_path / "ray")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_started_at_the_same_moment_on_a_new_buffer_they_make_one_run(
    buffer: Path, by_hand: Start, warm: Warm, rft: Rft, tmp_path: Path
) -> None:
    # One of them names the buffer in the other way: both mean the same.
    processes = {
        "explore": by_hand("explore", *settings(warm), "--buffer", buffer),
        "process": by_hand("process", *settings(warm, f"buffer.uri={buffer}")),
        "train": by_hand("train", *settings(warm), "--buffer", buffer),
    }
    assert_one_finished_run(buffer, rft, processes, tmp_path / "ray")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_explorer_that_died_is_replaced_by_one_started_later(
    buffer: Path, by_hand: Start, warm: Warm, rft: Rft
) -> None:
    options = ("--buffer", buffer, *settings(warm, "explorer.lease_s=15"))
    processes = {verb: by_hand(verb, *options) for verb in ROLES}
    wait_for_worker(buffer, "explorer", processes["explore"])
    processes["explore"].kill()
    processes["explore"].communicate()
    processes["explore"] = by_hand("explore", *options)
    for verb, process in processes.items():
        output = printed_by(process)
        assert process.returncode == 0, f"rft {verb} ended with {process.returncode}:\n{output}"
    assert [row["status"] for row in rows(buffer, "select status::text from rft.run")] == ["finished"]
    assert report(rft, buffer, RUN)["steps"]["done"] == STEPS


def test_the_buffer_is_named_by_the_option_or_by_set_but_not_by_both(rft: Rft, tmp_path: Path) -> None:
    def resolved(*options: object) -> str:
        model = ("--set", "model.path=somebody/model")  # the example's own model is made by a script
        printed = rft("check", "--all", EXAMPLE / "grpo.yaml", *model, *options, cwd=tmp_path).stdout
        uri: str = yaml.safe_load(printed)["buffer"]["uri"]
        return uri

    assert resolved() == "./buffer"
    assert resolved("--set", "buffer.uri=./one") == "./one"
    assert resolved("--buffer", "./two") == "./two"
    # Said twice it is one buffer; of two, either choice would send experiences where one of the words did not say.
    assert resolved("--buffer", "./two", "--set", f"buffer.uri={tmp_path / 'two'}") == "./two"
    both = ("--buffer", "./two", "--set", "buffer.uri=./one")
    refused = rft("run", EXAMPLE / "grpo.yaml", *both, cwd=tmp_path, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("rft: two buffers are named") and refused.stderr.count("\n") == 1, refused.stderr
    assert all(word in refused.stderr for word in ("./one", "./two", "--set buffer.uri", "--buffer"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ROLES)
def test_a_role_of_a_run_that_does_not_exist_is_refused(verb: str, buffer: Path, by_hand: Start) -> None:
    rftdata.open(str(buffer)).close()
    process = by_hand(verb, "--buffer", buffer, "--run", "NOSUCH")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, output
    assert output.startswith("rft: ") and output.count("\n") == 1, output
    assert rows(buffer, "select name from rft.run") == []
