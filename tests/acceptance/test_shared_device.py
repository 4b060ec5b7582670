"""Engine and trainer use one device alternately (`explorer.sleep`): vLLM sleeps while the trainer trains, and samples with its weights afterwards.

On a CPU no memory is freed. Everything else is as on a GPU: rows, waits, vLLM's scheduler in a fork of the explorer, weights that are gone after a sleep.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import rows
from tests.support.small_runs import STEPS, settings, start
from tests.support.waiting import printed_by
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_run_on_a_shared_device_trains_on_samples_of_the_newest_weights(server_folders: Path, warm: Warm) -> None:
    buffer = server_folders / "shared" / "buffer"
    engine = "explorer.engine_args={dtype: float32, context_length: 64, kv_cache_gib: 0.0625, own_process: true}"
    more = ["explorer.engine=vllm", engine, "explorer.sleep=true", "eval.every=2"]
    process = start("run", "--plain", "--buffer", buffer, *settings(warm, *more))
    output = printed_by(process)
    try:
        assert process.returncode == 0, output
        assert "warning: explorer.sleep has no effect: an engine on a CPU frees nothing" in output
        steps = rows(buffer, "select trainer_step, max(staleness) as oldest from rft.draw group by 1 order by 1")
        assert [(step["trainer_step"], step["oldest"]) for step in steps] == [(n, 0) for n in range(1, STEPS + 1)]
        found = rows(buffer, "select metrics->>'logprob_diff' as difference from rft.train_step")
        assert max(float(row["difference"]) for row in found) < 1e-3, "it sampled from other weights"
        evaluations = rows(buffer, "select trainer_step, status::text as status from rft.evaluation order by 1")
        assert [(row["trainer_step"], row["status"]) for row in evaluations] == [(n, "done") for n in (0, 2, 4)]
        times = rows(
            buffer, "select role::text as role, activity from rft.worker_span join rft.worker using (worker_id)"
        )
        assert {"role": "explorer", "activity": "asleep"} in times
        assert rows(buffer, "select holder, wanted_by from rft.shared_device") == [{"holder": None, "wanted_by": None}]
        [log] = buffer.glob("**/logs/explorer*.log")
        assert "== explorer" in log.read_text() and "import vLLM again" not in log.read_text()
    finally:
        EmbeddedServer(buffer).stop()
