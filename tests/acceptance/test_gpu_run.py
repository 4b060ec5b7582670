"""`rft run` on one shared CUDA device, and on two. `pytest -m gpu`; RFT_TEST_WARM names the example's warm checkpoint, which is made otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rftdata
from rftdata.maintenance.states import wrong_states
from rftdata.maintenance.verification import verify
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import EXAMPLE, call_rft, report, rows
from tests.support.warm_up import warm_up

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

_STEPS = 20
_ADAPTERS = ("trainer.lora={rank: 16}", "trainer.learning_rate=1.0e-3", "sync.adapters=alone")
# What is trained, and the way of what is sent: an engine that shares one GPU with the trainer, or one on another.
_CASES = {
    "weights-ipc": ("explorer.sleep=true",),
    "adapters-ipc": ("explorer.sleep=true", *_ADAPTERS),
    "adapters-nccl": _ADAPTERS,
}
_TRANSFERS = (
    "select transfer_id, t.group_id, num_bytes, send_seconds, pause_seconds from rft.weight_transfer t"
    " join rft.weight_receipt using (transfer_id) order by 1"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    return os.environ.get("RFT_TEST_WARM") or warm_up(tmp_path_factory.mktemp("warm")).model


@pytest.mark.parametrize("case", _CASES)
def test_a_run_sends_what_it_trains_into_a_live_engine_and_learns(case: str, model: Path | str, tmp_path: Path) -> None:
    import torch

    trained, backend = case.split("-")
    if torch.cuda.device_count() < (2 if backend == "nccl" else 1):
        pytest.skip("not enough CUDA devices")
    buffer = tmp_path / "buffer"
    # Without graphs and compilation, which take longer than the run.
    settings = (
        f"model.path={model}",
        f"steps={_STEPS}",
        f"eval.every={_STEPS}",
        "trainer.compile=false",
        "explorer.engine_args={dtype: bfloat16, context_length: 64, max_num_seqs: 256, enforce_eager: true}",
        *_CASES[case],
    )
    options = [part for setting in settings for part in ("--set", setting)]
    try:
        print(call_rft("run", EXAMPLE / "grpo.yaml", "--plain", "--buffer", buffer, *options, timeout=200).stdout)
        result = report(call_rft, buffer, "sort-grpo")
        assert result["status"] == "finished"
        gain = next(gain for gain in result["gains"] if gain["purpose"] == "test" and gain["decoding"] == "sampled")
        assert gain["difference"] > 2 * gain["standard_error"], gain
        stale = rows(buffer, "select count(*) as n from rft.draw where staleness > 0")
        assert stale == [{"n": 0}]
        receipts = rows(
            buffer,
            "select backend, r.status::text as status, count(*) as n from rft.weight_receipt r join rft.weight_transfer using (transfer_id)"
            " group by 1, 2",
        )
        assert [(found["backend"], found["status"]) for found in receipts] == [(backend, "applied")]
        assert receipts[0]["n"] >= _STEPS - 1
        sizes = [row["num_bytes"] for row in rows(buffer, "select num_bytes from rft.policy_version order by 1 desc")]
        assert (sizes[0] < (Path(model) / "model.safetensors").stat().st_size / 5) is (trained == "adapters")
        differences = rows(buffer, "select (metrics->>'logprob_diff')::float8 as difference from rft.v_train_step")
        assert max(row["difference"] for row in differences) < 0.1, "more than the noise of bfloat16"
        print(call_rft("report", "sort-grpo", "--buffer", buffer).stdout)
        print(*rows(buffer, _TRANSFERS), sep="\n")
        with rftdata.open(str(buffer)) as opened:
            assert [*verify(opened), *wrong_states(opened.database)] == []
    finally:
        EmbeddedServer(buffer).stop()
