"""An engine that hangs is replaced by one with current weights, and the run ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import rows
from tests.support.small_runs import STEPS, settings, start
from tests.support.waiting import printed_by
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_hanging_engine_is_replaced_by_one_with_current_weights(
    server_folders: Path, warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUNG", str(tmp_path / "hung"))
    buffer = server_folders / "hanging" / "buffer"
    engine = Path(__file__).with_name("hanging_engine.py")
    more = ["sync.method=nccl", "sync.acknowledge_s=5", "sync.timeout_s=10", "explorer.hang_s=20", "eval.every=2"]
    process = start("run", "--plain", "--buffer", buffer, *settings(warm, f"explorer.engine={engine}:HangsOnce", *more))
    output = printed_by(process)
    try:
        assert process.returncode == 0, output
        assert "its engine hangs" in output and "Traceback" not in output, output
        hung, current = rows(
            buffer, "select worker_id, error from rft.worker where role = 'explorer' order by worker_id"
        )
        assert "in _step" in hung["error"] and "time.sleep(3600)" in hung["error"]
        assert current["error"] is None
        # Each step trained on what the weights before it sampled, and the last ones went into the second engine.
        steps = rows(buffer, "select trainer_step, max(staleness) as oldest from rft.draw group by 1 order by 1")
        assert [(step["trainer_step"], step["oldest"]) for step in steps] == [(n, 0) for n in range(1, STEPS + 1)]
        applied = (
            f"select 1 as found from rft.weight_receipt where worker_id = {current['worker_id']} and status = 'applied'"
        )
        assert rows(buffer, applied), output
    finally:
        EmbeddedServer(buffer).stop()


@pytest.mark.long
def test_a_hanging_trainer_starts_again_from_its_last_checkpoint(
    server_folders: Path, warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUNG", str(tmp_path / "hung"))
    buffer = server_folders / "hanging trainer" / "buffer"
    backend = Path(__file__).with_name("hanging_trainer.py")
    process = start(
        "run",
        "--plain",
        "--buffer",
        buffer,
        *settings(warm, f"trainer.backend={backend}:HangsOnce", "trainer.hang_s=30"),
    )
    output = printed_by(process)
    try:
        assert process.returncode == 0, output
        assert "the trainer hangs: a step made no progress for more than 30 s (trainer.hang_s)" in output, output
        hung, current = rows(buffer, "select error from rft.worker where role = 'trainer' order by worker_id")
        assert "rank 0 (pid " in hung["error"] and "hanging_trainer.py" in hung["error"] and current["error"] is None
        steps = rows(buffer, "select trainer_step, max(attempt_id) as life from rft.v_train_step group by 1 order by 1")
        assert [step["trainer_step"] for step in steps] == list(range(1, STEPS + 1))
        assert len({step["life"] for step in steps}) == 2, "the second life went on where the first had its checkpoint"
    finally:
        EmbeddedServer(buffer).stop()
