"""Texts that models, tools and labellers write are shown as they are: a terminal obeys none of them, and none is markup."""

from __future__ import annotations

import pytest

from rftcore.cli import run_command
from rftdata import Buffer, Group, Rollout
from tests.store.writing.test_turns import TASK, single
from tests.support.store_roles import publish_versions

ERROR = "ValueError: no number in '[/INST] [red]\x1b[2J 4'"


@pytest.mark.parametrize(
    "words",
    [
        ["report", "texts"],
        ["status", "texts"],
        ["sql", "SELECT error FROM rft.rollout"],
        ["query", "SELECT error FROM rollout"],
        ["sql", "SELECT error::integer FROM rft.rollout"],
    ],
)
def test_an_error_that_quotes_a_model_reaches_a_terminal_as_text(
    buffer: Buffer, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    publish_versions(buffer, 8)
    run = buffer.create_run(name="texts", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer(run) as writer:
        writer.insert(Group([single(0), Rollout(1, "failed", error=ERROR)], **TASK))
    code = run_command([*words, "--buffer", buffer.config.uri])
    shown = capsys.readouterr()
    assert "[/INST] [red]\\x1b[2J 4" in shown.out + shown.err and "\x1b" not in shown.out + shown.err
    assert code == (2 if "::" in words[1] else 0)
