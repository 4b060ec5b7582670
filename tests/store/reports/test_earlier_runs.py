"""A second run of one name: the message about the first, and the run that `rft status` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rftcore.cli import run_command
from rftcore.launch import supervisor
from rftcore.launch.local_processes.launcher import LocalLauncher
from rftcore.launch.terminal.views import LineView
from rftcore.run.earlier import earlier_run
from rftdata import Buffer
from rftdata.errors import ConfigError
from rftdata.workers.worker import Worker
from tests.store.launch.test_joining import configured, end, store
from tests.support.models import make_unopened_model


@pytest.fixture(autouse=True)
def found_by_environment(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))


def said(buffer: Buffer, name: str = "words") -> str | None:
    return earlier_run(configured(name, buffer), buffer)


def test_the_first_run_of_a_name_has_no_earlier_one(buffer: Buffer) -> None:
    store(buffer, "words-of-others")
    buffer.create_run(
        name="words",
        config={"run": {"name": "words"}, "import": {"run": "words"}},
        seed=1,
        steps=0,
        pipeline_version="none",
    )
    assert said(buffer) is None


@pytest.mark.parametrize(
    ("status", "how", "todo"),
    [
        ("interrupted", "it was interrupted at step 0 of 1 (it ended)", "rft run --resume words"),
        ("failed", "it failed at step 0 of 1 (it ended)", "rft run --resume words"),
        ("finished", "it finished at step 0 of 1 (it ended)", "rft run --resume words --set steps=2"),
    ],
)
def test_a_second_run_reports_how_the_first_ended_and_how_to_continue_it(
    buffer: Buffer, status: str, how: str, todo: str
) -> None:
    store(buffer, "words")
    assert "it did not begin to train" in str(said(buffer))
    end(buffer, "words", status)
    text = str(said(buffer))
    assert text.startswith(f"the run words exists already: {how}. This is a new run; ") and text.endswith(todo)
    assert store(buffer, "words") == "words-2"
    assert "the run words-2 exists already (and 1 more before it): it did not begin to train" in str(said(buffer))


def test_a_run_at_work_is_to_be_watched_and_not_resumed(buffer: Buffer) -> None:
    store(buffer, "words")
    with Worker(buffer.find_run("words"), "trainer"):
        text = str(said(buffer))
    assert "it is at work, at step 0 of 1" in text and text.endswith("to watch that one: rft status words")


def test_status_without_a_name_shows_the_run_at_work(buffer: Buffer, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> str:
        assert run_command(["status", *arguments, "--json"]) == 0
        return str(json.loads(capsys.readouterr().out)["run"])

    for name in ("first", "second", "third"):
        store(buffer, name)
    first, second = (buffer.find_run(name) for name in ("first", "second"))
    assert shown() == "third"
    with Worker(first, "explorer"):
        assert shown() == "first"
        with Worker(second, "replay"):
            assert shown() == "first"
        with Worker(second, "trainer"):
            assert (shown(), shown("third")) == ("second", "third")
            assert run_command(["status"]) == 0
            assert "also at work: first: rft status first" in capsys.readouterr().out
    assert shown() == "third"


def test_run_mentions_the_earlier_run_before_it_creates_another(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_unopened_model(tmp_path)
    store(buffer, "words")
    end(buffer, "words", "interrupted")
    config = configured("words", buffer, tmp_path)
    priority = config.sampling.priority.model_copy(update={"formula": "no_such_column + 1"})
    config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"priority": priority})})
    # The database refuses the formula where the run would be stored: so nothing has been made when the message is there.
    with LocalLauncher([config]) as launcher, pytest.raises(ConfigError, match="no_such_column"):
        supervisor.run(config, launcher, view=LineView())
    assert "the run words exists already: it was interrupted at step 0 of 1" in capsys.readouterr().out
    assert buffer.sql("SELECT name FROM rft.run")["name"].to_pylist() == ["words"]
