"""The transformers engine samples from the model's own distribution, regardless of the settings in its folder."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rftcore.engines import driver
from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.rollout_clock import RolloutClock, RolloutClocks
from rftdata.errors import ModelError
from tests.support.models import make_tiny_model
from tests.support.waiting import PATIENCE_S, wait_until

CONFIG = EngineConfig(dtype="float32", num_threads=1)


def greedy(model: Path) -> Generation:
    engine = TransformersEngine(model, CONFIG)
    try:
        prompt = engine.tokenizer.encode("u:1+2=\na:")
        return asyncio.run(engine.generate(prompt, Decoding(temperature=0, max_tokens=24)))
    finally:
        engine.close()


def test_a_models_own_generation_settings_do_not_change_the_distribution(tmp_path: Path) -> None:
    plain = greedy(make_tiny_model(tmp_path / "model"))
    file = tmp_path / "model" / "generation_config.json"
    settings = {
        **json.loads(file.read_text()),
        "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1,
        "min_new_tokens": 9,
    }
    file.write_text(json.dumps(settings))
    found = greedy(tmp_path / "model")
    assert found == plain


def test_a_model_with_a_missing_weight_is_not_sampled_from(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path) / "model.safetensors"
    whole = load_file(file)
    (missing, _), *rest = whole.items()
    save_file(dict(rest), file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"the files of the model .* lack 1 of its weights .got '{missing}'"):
        TransformersEngine(tmp_path, CONFIG, 1)


def test_weights_published_again_are_kept_under_the_new_version(tmp_path: Path) -> None:
    engine = TransformersEngine(make_tiny_model(tmp_path / "model"), CONFIG, 1)
    prompt = engine.tokenizer.encode("u:1+2=\na:")
    before = asyncio.run(engine.generate(prompt, Decoding(temperature=0, max_tokens=4)))
    engine.set_policy_version(2)
    after = asyncio.run(engine.generate(prompt, Decoding(temperature=0, max_tokens=4)))
    engine.close()
    assert (before.version_spans, after.version_spans) == ([(0, 1)], [(0, 2)])
    assert before.token_ids == after.token_ids


def test_unfinished_requests_are_reported_without_waiting_for_the_running_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing, asked = threading.Event(), threading.Event()

    class Long(TransformersEngine):
        """Let the batch last until unfinished requests were asked for."""

        def _step(self) -> Any:
            computing.set()
            asked.wait(2 * PATIENCE_S)
            return super()._step()

    monkeypatch.setattr(
        driver, "_UNFINISHED_S", 2 * PATIENCE_S
    )  # an answer that waits for the batch does not come before its end
    engine = Long(make_tiny_model(tmp_path / "model"), CONFIG)
    prompt = engine.tokenizer.encode("u:1+2=\na:")

    async def ask() -> None:
        running = asyncio.create_task(engine.generate_named("long", prompt, Decoding(temperature=0, max_tokens=4)))
        try:
            assert await asyncio.to_thread(computing.wait, PATIENCE_S)
            asking = asyncio.create_task(asyncio.to_thread(engine.unfinished, {"long": 0}))
            assert await asyncio.wait_for(asking, PATIENCE_S) == {}
            assert engine.stuck_s() > 0.0 and not running.done()
        finally:
            asked.set()
        await running

    asyncio.run(ask())
    engine.close()


def test_a_rollouts_time_counts_from_when_the_engine_works_on_its_request(tmp_path: Path) -> None:
    """Half of an explorer's rollouts wait in the engine; a limit of one rollout's time would otherwise end them before they begin."""
    computing, may_compute = threading.Event(), threading.Event()

    class Held(TransformersEngine):
        def _generate(self, prompts: Any, decoding: Any) -> Any:
            computing.set()
            may_compute.wait(2 * PATIENCE_S)
            return super()._generate(prompts, decoding)

    engine = Held(make_tiny_model(tmp_path / "model"), CONFIG.model_copy(update={"max_num_seqs": 1}))
    prompt = engine.tokenizer.encode("u:1+2=\na:")
    clocks: list[RolloutClock] = []

    async def rollout() -> Generation:
        async with RolloutClock(2 * PATIENCE_S, RolloutClocks()) as clock:
            clocks.append(clock)
            return await engine.generate(prompt, Decoding(temperature=0, max_tokens=4))

    async def run() -> None:
        rollouts = [asyncio.create_task(rollout()) for _ in range(2)]
        try:
            assert await asyncio.to_thread(computing.wait, PATIENCE_S)
            await asyncio.to_thread(
                wait_until,
                lambda: [clock.is_suspended for clock in clocks] == [False, True],
                "the second request's waiting",
            )
        finally:
            may_compute.set()
        await asyncio.gather(*rollouts)
        assert not any(clock.is_suspended for clock in clocks)

    try:
        asyncio.run(run())
    finally:
        engine.close()
