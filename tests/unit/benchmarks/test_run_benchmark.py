"""`rft bench run`: both systems train on the same questions to the same score, and what fails is reported beside what ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.processes import read_lines
from benchmarks.whole_runs.case import STEPS_AHEAD, Sizes, TrlSettings, settings, trl_case
from benchmarks.whole_runs.comparison import main
from benchmarks.whole_runs.places import Place, places, share_compiled_code
from benchmarks.whole_runs.summary import seconds_to, summary
from rftcore.config.run import load_config
from rftdata.errors import ConfigError
from tests.support.models import make_tiny_model
from tests.support.waiting import PATIENCE_S

CHECKOUT = Path(__file__).resolve().parents[3]
GPU_CONFIG = CHECKOUT / "examples" / "grpo_reasoning" / "gpu.yaml"
SIZES = Sizes(steps=4, every=2, target=None, limit_s=300.0)
COLOCATED = TrlSettings("colocate", liger=False, micro_batch=8, corrects=False)
WORK = """
def questions(first):
    return ({"question": f"what is {first + number}?", "answer": str(number)} for number in range(40))


def score(turn, task):
    return float(len(turn.response) % 2)
"""
CONFIG = """
run: {name: tiny, seed: 1}
model: {path: ./model}
tasks: [{name: train, source: "./work.py:questions", args: {first: 0}}]
eval: {every: 2, tasks: [{name: held-out, source: "./work.py:questions", args: {first: 40}, limit: 8}]}
algorithm: {name: grpo, group_size: 4}
explorer:
  engine: transformers
  engine_args: {dtype: float32, context_length: 64}
  workflow_args: {examples: [{prompt: "1 + 1", answer: "2"}]}
  reward: "./work.py:score"
  max_tokens: 4
trainer: {batch_groups: 2, learning_rate: 1.0e-3, warmup_steps: 2, autocast: none, checkpoint_every: 2}
steps: 4
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "model")
    (tmp_path / "work.py").write_text(WORK)
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


@pytest.mark.long
def test_both_systems_train_on_the_same_questions(config: Path, tmp_path: Path) -> None:
    sizes = ["--config", config, "--folder", tmp_path / "runs", "--steps", 4, "--every", 2, "--seeds", 1]
    systems = ["--systems", "on_policy,trl", "--generation", "server,transformers", "--scores", 0.01, "--warm-up"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "run", *map(str, [*sizes, *systems])],
        cwd=CHECKOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    ours, theirs = sorted(result["rows"], key=lambda row: row["system"])
    assert (theirs["system"], theirs["generation"]) == ("trl", "transformers")
    (failed,) = result["failed"]
    assert failed["generation"] == "server" and "NCCL" in failed["error"], "the reason of the attempt"
    assert failed["warm_up"], "later runs of TRL sample in the way that worked"
    assert [(row["system"], row["steps"]) for row in result["warm_ups"]] == [("on_policy", 2), ("trl", 2)]
    assert [row["runs"] for row in result["summary"]] == [1, 1]
    for row in (ours, theirs):
        assert row["steps"] == 4 and [point["step"] for point in row["points"]] == [0, 2, 4]
        assert 0 < row["first_sample_s"] <= row["points"][0]["seconds"] < row["points"][-1]["seconds"]
        assert 0 < row["step_seconds"]["median"] <= row["seconds"]
        assert row["num_trained"] > row["num_sampled"] > 0 and row["gpu_busy"] is None
    # The same weights answer the same questions greedily.
    assert ours["points"][0]["score"] == theirs["points"][0]["score"]
    assert {row["role"] for row in ours["step_table"]} == {"supervisor", "explorer", "pipeline", "trainer"}


def test_variants_differ_in_engines_and_age_of_samples_alone() -> None:
    def rest(variant: str) -> dict[str, Any]:
        plain = load_config(GPU_CONFIG, settings(GPU_CONFIG, SIZES, variant, 1)).model_dump(mode="json")
        assert (plain["explorer"].pop("sleep"), plain["sync"].pop("offset")) == (
            variant == "alternating",
            STEPS_AHEAD[variant],
        )
        assert ("correction" in plain["algorithm"]) == bool(STEPS_AHEAD[variant])
        plain["algorithm"].pop("correction", None)
        del plain["run"]["name"], plain["sampling"]["max_staleness"]
        explorer, num_explorers = plain["explorer"], plain["explorer"].pop("num_explorers")
        assert num_explorers == (1 if variant == "alternating" else 2)
        for settings_of, name in (
            (explorer, "claim_groups"),
            (explorer["engine_args"], "max_num_seqs"),
            (explorer["engine_args"], "gpu_memory_utilization"),
        ):
            settings_of[name] *= num_explorers
        return plain

    first, *others = map(rest, STEPS_AHEAD)
    assert all(other == first for other in others)
    assert first["pipelines"]["experience"] == [], "TRL drops no group"


def test_trl_gets_the_chats_and_numbers_of_the_configuration(config: Path, tmp_path: Path) -> None:
    case = trl_case(config, ["trainer.learning_rate=0.5"], SIZES, 1, COLOCATED, tmp_path / "questions")
    assert (case["learning_rate"], case["warmup_steps"], case["group_size"], case["max_tokens"]) == (0.5, 2, 4, 4)
    train, held_out = (read_lines(Path(case[name])) for name in ("train", "held_out"))
    assert len(train) == 4 * 2 and len({row["task"] for row in train}) == 8, "each question once while there are others"
    assert len(held_out) == 8 and not {row["task"] for row in train} & {row["task"] for row in held_out}
    *example, question = held_out[0]["prompt"]
    assert [message["content"] for message in example] == ["1 + 1", "2"]
    assert question == {"role": "user", "content": "what is 40?"}


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("trainer.epochs=2", "several updates"),
        ("trainer.lora={}", "adapters"),
        ("explorer.workflow=demonstration", "demonstration"),
        ("eval.tasks=[]", "eval.tasks is empty"),
    ],
)
def test_a_configuration_without_a_counterpart_is_refused(
    config: Path, tmp_path: Path, setting: str, what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        trl_case(config, [setting], SIZES, 1, COLOCATED, tmp_path / "questions")


def test_seconds_to_a_score_are_compared_with_the_fastest_run_of_trl() -> None:
    def row(system: str, seed: int, scores: list[float], seconds: float) -> dict[str, Any]:
        points = [{"step": n, "seconds": 10.0 + n * seconds, "score": score} for n, score in enumerate(scores)]
        return {"system": system, "seed": seed, "first_sample_s": 10.0, "points": points}

    rows = [
        row("alternating", 1, [0.0, 0.1, 0.3], 3.0),
        row("alternating", 2, [0.0, 0.3, 0.3], 3.0),
        row("trl", 1, [0.0, 0.1, 0.3], 10.0),
        row("trl-liger", 1, [0.0, 0.1, 0.3], 6.0),
        {"system": "trl", "seed": 2, "error": "killed"},
    ]
    assert seconds_to(rows[0], 0.2, start="process") == 16.0 and seconds_to(rows[0], 0.2, start="sample") == 6.0
    assert seconds_to(rows[0], 0.5, start="sample") is None
    ours, *_ = summary(rows, [0.2, 0.5])
    reached, missed = ours["scores"]
    assert (reached["sample"], reached["sample_of_trl"]) == (6.0, 0.5)
    assert (missed["sample"], missed["sample_of_trl"]) == (None, None)


def test_systems_are_compared_over_the_seeds_that_all_of_them_have() -> None:
    def row(system: str, seed: int, seconds: float) -> dict[str, Any]:
        points = [{"step": step, "seconds": seconds * step, "score": 0.3} for step in range(2)]
        figures = {"first_sample_s": 0.0, "seconds_per_step": seconds, "points": points}
        return {"system": system, "seed": seed, **figures}

    ours = [row("alternating", seed, seconds) for seed, seconds in ((1, 4.0), (2, 6.0), (3, 100.0))]
    theirs = [row("trl", 1, 8.0), row("trl", 2, 12.0), {"system": "trl", "seed": 3, "error": "killed"}]
    first, second = summary([*ours, *theirs], [0.2])
    assert (first["runs"], second["runs"]) == (3, 2)
    assert first["common_seeds"] == second["common_seeds"] == [1, 2]
    assert (first["seconds_per_step"], second["seconds_per_step"]) == (5.0, 10.0), "not the median with seed 3"
    assert first["scores"][0]["process_of_trl"] == 0.5


def test_systems_without_a_common_seed_are_not_compared() -> None:
    rows = [
        {"system": system, "seed": seed, "first_sample_s": 1.0, "seconds_per_step": 1.0, "points": []}
        for system, seed in (("alternating", 1), ("trl", 2))
    ]
    for found in summary(rows, [0.2]):
        assert (found["runs"], found["common_seeds"], found["seconds_per_step"]) == (1, [], None)
        assert found["scores"][0]["process"] is None


def test_layers_of_ours_need_not_be_compiled() -> None:
    compiled, plain = (
        load_config(GPU_CONFIG, [*settings(GPU_CONFIG, SIZES, "alternating", 1), *more]).trainer.compile
        for more in ([], ["trainer.compile=false"])
    )
    assert compiled is not False and plain is False


def test_runs_of_other_settings_are_not_taken_for_those_of_this_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"system": "trl", "seed": 1, "set": [], "error": "killed"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path), "--set", "trainer.compile=false"])
    assert "name another --folder" in capsys.readouterr().err


def test_several_gpus_divide_the_cores_and_share_caches_that_are_safe(tmp_path: Path) -> None:
    (alone,) = places(["0"], tmp_path)
    assert alone.prefix == [] and alone.environment()["CUDA_VISIBLE_DEVICES"] == "0"
    assert "VLLM_CACHE_ROOT" not in alone.environment() or "VLLM_CACHE_ROOT" in os.environ
    first, second = places(["0", "3"], tmp_path)
    if len(os.sched_getaffinity(0)) > 1:
        assert second.gpu == "3" and not set(first.cores) & set(second.cores) and first.prefix[0] == "taskset"
    ours, theirs = first.environment(), second.environment()
    assert ours["VLLM_CACHE_ROOT"] != theirs["VLLM_CACHE_ROOT"]
    for shared in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert ours[shared] == theirs[shared]


def test_code_compiled_for_one_gpu_is_copied_to_gpus_without_any(tmp_path: Path) -> None:
    chosen = places(["0", "1", "2"], tmp_path)
    share_compiled_code(chosen)
    first, second, third = map(_code, chosen)
    first.parent.mkdir(parents=True)
    first.write_text("compiled")
    third.parent.mkdir(parents=True)
    third.write_text("its own")
    share_compiled_code(chosen)
    assert (second.read_text(), third.read_text()) == ("compiled", "its own")


def _code(place: Place) -> Path:
    return Path(place.environment()["VLLM_CACHE_ROOT"]) / "graph.py"
