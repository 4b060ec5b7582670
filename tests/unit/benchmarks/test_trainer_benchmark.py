"""The trainer benchmark on a tiny model: both systems take the same step, and running out of memory is a result."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.shapes import SHAPES, write_model
from benchmarks.trainer import comparisons
from benchmarks.trainer import speed as trainer
from benchmarks.trainer.batches import BATCHES, make_batch, make_sequence
from benchmarks.trainer.case import Case
from benchmarks.trainer.steps import train_batch
from rftcore.trainer.batches.micro_batches import Cutting, split_batch
from tests.support.waiting import PATIENCE_S

CHECKOUT = Path(__file__).resolve().parents[3]
# Threads take address space, which one test limits.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


def measured(*options: str, address_space: int = resource.RLIM_INFINITY) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a run."""
    command = [sys.executable, "-m", "benchmarks", "trainer", "--shapes", "tiny", "--warm-up", "0", *options]
    ended = subprocess.run(
        command,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
        env=os.environ | ONE_THREAD,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (address_space, resource.RLIM_INFINITY)),
    )
    assert ended.stdout, ended.stderr[-2000:]
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.long
def test_both_systems_take_the_same_step() -> None:
    options = ["--cases", "A", "--systems", "ours,trl", "--steps", "2", "--scale", "0.03"]
    code, result = measured(*options, "--tokens", "512", "--sequences", "16,32")
    ours, *theirs = result["rows"]
    assert [row["system"] for row in result["rows"]] == ["ours", "trl", "trl"]
    for row in result["rows"]:
        assert row["status"] == "ok" and len(row["step_records"]) == 2
        assert row["tokens_per_second"] == pytest.approx(row["num_tokens"] / row["seconds"])
    assert all(line["computed_tokens"] < line["num_tokens"] for line in ours["step_records"])  # prompts are shared
    assert ours["agrees"] and ours["grad_norm_difference"] < 1e-5
    assert abs(ours["loss"]) > 1e-3 and ours["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-5)
    best = max(row["tokens_per_second"] for row in theirs)
    assert result["comparisons"][0]["speed_ratio"] == pytest.approx(ours["tokens_per_second"] / best)
    assert code == 0 and result["comparisons"][0]["peer"] == "trl"


@pytest.mark.long
def test_a_ladder_ends_with_the_longest_sequence_that_fits() -> None:
    # The embeddings of the last rung are 4 GB.
    options = ["--cases", "ladder", "--systems", "ours", "--checkpointing", "on", "--scale", "1"]
    code, result = measured(*options, "--rungs", "256,512,16000000", address_space=5 * 2**30)
    (row,) = result["rows"]
    assert (row["status"], row["num_tokens"], code) == ("out of memory", 512, 0), row["error"]
    assert result["longest"][0]["num_tokens"] == 512


@pytest.mark.long
def test_a_growing_batch_is_compared_by_its_first_step() -> None:
    options = ["--cases", "A", "--systems", "ours", "--steps", "1", "--scale", "0.03", "--tokens", "512"]
    code, result = measured(*options, "--ranks", "1,2", "--grow", "--warm-up", "1")
    one, two = result["rows"]
    assert two["num_tokens"] == 2 * one["num_tokens"] and code == 0
    for step, growth in enumerate((1, 2)):
        for count in ("num_tokens", "computed_tokens"):
            assert two["step_records"][step][count] == growth * one["step_records"][step][count]
    assert two["agrees"] and two["loss_difference"] < 1e-5 and two["grad_norm_difference"] < 1e-4
    (scaling,) = result["scaling"]
    assert scaling["speed_up"] == pytest.approx(two["tokens_per_second"] / one["tokens_per_second"])
    assert scaling["efficiency"] == pytest.approx(scaling["speed_up"] / 2)


@pytest.mark.parametrize("name", BATCHES)
def test_a_growing_batch_gives_each_gpu_the_same_work(name: str) -> None:
    assert speed_up_of_the_cut(name, ranks=8, copies=8) == 8.0
    assert name != "A" or speed_up_of_the_cut(name, ranks=8, copies=1) < 6.8


def speed_up_of_the_cut(name: str, ranks: int, copies: int) -> float:
    """The speed-up if time were only tokens computed, and every micro-batch waited for the slowest GPU; at 8B, with FlashAttention."""
    shape = SHAPES["8B"]

    def most_tokens(num_ranks: int, num_copies: int) -> int:
        batch = make_batch(name, shape).repeated(num_copies, shape.vocab_size)
        cutting = Cutting(
            max_tokens=16_384,
            sharing="always",
            kernel="segments",
            num_ranks=num_ranks,
            quadratic_at=12.0 * shape.hidden_size,
        )
        rounds = zip(*split_batch(train_batch(batch), cutting), strict=True)
        return sum(max(micro_batch.num_tokens for micro_batch in each) for each in rounds)

    return copies * most_tokens(1, 1) / most_tokens(ranks, copies)


def test_a_case_that_needs_more_gpus_is_not_run() -> None:
    case = Case("8B", "A", "ours", "bfloat16", False, 8192, ranks=8, copies=8)
    assert trainer.reason_not_to_run(case, {"name": "H200", "num_gpus": 8}) is None
    reason = trainer.reason_not_to_run(case, {"name": "H200", "num_gpus": 4})
    assert reason == "needs 8 GPUs, the machine has 4"
    assert trainer.reason_not_to_run(case, {"name": "CPU", "num_gpus": 0}) is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [(["--ranks", "1,0"], "0 is too small; allowed: 1 or more"), (["--grow", "--warm-up", "0"], "give 1 or more")],
)
def test_invalid_options_are_refused(options: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trainer.main(options)
    assert problem in capsys.readouterr().err


def row(system: str, micro_batch: int, grad_norm: float, status: str = "ok", ranks: int = 1) -> dict[str, Any]:
    case = Case("tiny", "A", system, "float32", False, micro_batch, ranks=ranks, steps=1, warm_up=0)  # type: ignore[arg-type]
    line = {
        "num_tokens": 100,
        "computed_tokens": 80,
        "loss": 0.5,
        "grad_norm": grad_norm,
        "seconds": 2.0,
        "peak_gib": 1.0,
    }
    return trainer.row_of(case, [line], 1e9) | {"status": status, "error": None}


def test_a_row_with_another_first_step_disagrees() -> None:
    rows = [row("trl", 16, 1.0), row("ours", 512, 1.00001), row("ours", 1024, 1.1), row("trl-liger", 16, float("nan"))]
    comparisons.compare_first_steps(rows, trainer.TOLERANCE)
    assert [each["agrees"] for each in rows] == [None, True, False, False]
    alone = [row("ours", 512, 1.0, ranks=8), row("ours", 512, 1.1, ranks=4), row("ours", 512, 1.0)]
    comparisons.compare_first_steps(alone, trainer.TOLERANCE)
    assert [each["agrees"] for each in alone] == [True, False, None], "without TRL the fewest GPUs are the reference"


def test_utilisation_counts_six_operations_of_a_parameter_and_a_token() -> None:
    measured = row("ours", 512, 1.0)
    assert measured["mfu"] == pytest.approx(6 * SHAPES["tiny"].num_active_parameters * 100 / 2.0 / 1e9)
    assert measured["computed_mfu"] == pytest.approx(0.8 * measured["mfu"])


@pytest.mark.parametrize("name", ["tiny", "tiny-experts"])
def test_shapes_have_the_parameters_of_their_models(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_model(SHAPES[name], tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    shape, sizes = SHAPES[name], {key: parameter.numel() for key, parameter in model.named_parameters()}
    assert shape.num_parameters == sum(sizes.values())
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    assert shape.num_active_parameters == sum(sizes.values()) - experts * 6 // 8


def test_published_shapes_have_the_published_parameters() -> None:
    published = {"135M": 134_515_008, "0.5B": 494_032_768, "1.5B": 1_543_714_304, "8B": 8_030_261_248}
    assert {name: SHAPES[name].num_parameters for name in published} == published


@pytest.mark.parametrize("name", BATCHES)
def test_batches_have_their_tokens_and_groups_of_unequal_rewards(name: str) -> None:
    batch, lengths = make_batch(name, SHAPES["tiny"]), BATCHES[name]
    assert batch.num_tokens == lengths.total
    for group in range(lengths.num_groups):
        members = [index for index, each in enumerate(batch.group_ids) if each == group]
        assert len(members) == 8 and len({batch.rewards[index] for index in members}) == 2
        assert len({batch.prompts[index].tobytes() for index in members}) == 1
    assert all(lengths.response[0] <= len(each) <= lengths.response[1] for each in batch.responses)


def test_a_sequence_has_the_requested_length() -> None:
    assert make_sequence(1000, SHAPES["tiny"]).num_tokens == 1000
