"""Statistics of Data-Juicer's filters in the store: computed once, decided on again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rftdata
from rftcore.cli import run_command
from tests.support.stored_run import StoredRun

CONFIG = """
run: {name: sums}
buffer: {uri: "%(uri)s", segments: "%(segments)s"}
model: {path: tiny}
tasks: [{name: sums, source: none.jsonl}]
pipelines:
  experience: [{clean_email_mapper: {}}, {text_length_filter: {min_len: %(min_len)d}}, {sql: "FROM batch WHERE dj_text_len < 100"}]
algorithm: {name: grpo, group_size: 4}
explorer: {engine: none}
trainer: {batch_groups: 2, learning_rate: 0.001}
steps: 4
"""


def test_another_bound_is_decided_on_without_computing_again(
    buffer: rftdata.Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    run = StoredRun(buffer)
    run.attempt()
    group = run.group(0, [0.0, 0.0, 1.0, 1.0])
    buffer.sql(
        "INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept)"
        " SELECT experience_id, group_id, 'v1', true FROM rft.experience WHERE group_id = %s",
        [group],
    )

    def replay(version: str, min_len: int) -> dict[str, Any]:
        file = tmp_path / f"{version}.yaml"
        file.write_text(CONFIG % {"uri": buffer.config.uri, "segments": buffer.config.segments, "min_len": min_len})
        assert run_command(["pipeline", "replay", str(file), "--version", version, "--json"]) == 0
        done: dict[str, Any] = json.loads(capsys.readouterr().out)
        return done

    assert replay("loose", 1)["num_kept"] == 4
    scores = buffer.sql(
        "SELECT experience_id, stage, scores->>'dj_text_len' AS n FROM rft.score ORDER BY 1"
    ).to_pylist()
    texts = buffer.sql("SELECT length(response) AS n FROM rft.experience ORDER BY experience_id")["n"].to_pylist()
    assert [(row["stage"], float(row["n"])) for row in scores] == [("text_length_filter", n) for n in texts]
    # The stored values now equal no response's length, so a decision by them shows that they were not computed again.
    buffer.sql("UPDATE rft.score SET scores = '{\"dj_text_len\": 7}' WHERE experience_id <= 2")
    buffer.sql("UPDATE rft.score SET scores = '{\"dj_text_len\": 700}' WHERE experience_id > 2")
    assert replay("strict", 50)["dropped_by"] == {"text_length_filter": 2, "sql": 2}
    reasons = buffer.sql(
        "SELECT stage, reason FROM rft.verdict WHERE pipeline_version = 'strict' ORDER BY experience_id LIMIT 2"
    ).to_pylist()
    assert reasons == [{"stage": "text_length_filter", "reason": "text_len 7 < min_len 50"}] * 2
