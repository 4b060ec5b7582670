"""The fallback engine samples from the model's own distribution, regardless of the settings in its folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftcore.engines.transformers_engine import TransformersEngine
from tests.support.models import make_tiny_model

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


def test_weights_published_again_are_kept_under_the_new_version(tmp_path: Path) -> None:
    engine = TransformersEngine(make_tiny_model(tmp_path / "model"), CONFIG, 1)
    prompt = engine.tokenizer.encode("u:1+2=\na:")
    before = asyncio.run(engine.generate(prompt, Decoding(temperature=0, max_tokens=4)))
    engine.set_policy_version(2)
    after = asyncio.run(engine.generate(prompt, Decoding(temperature=0, max_tokens=4)))
    engine.close()
    assert (before.version_spans, after.version_spans) == ([(0, 1)], [(0, 2)])
    assert before.token_ids == after.token_ids


def test_nobody_waits_for_what_a_running_batch_does_not_tell(tmp_path: Path) -> None:
    engine = TransformersEngine(make_tiny_model(tmp_path / "model"), CONFIG)
    prompt = engine.tokenizer.encode("u:1+2=\na:")

    async def ask() -> None:
        running = asyncio.create_task(
            engine.generate_named("long", prompt, Decoding(temperature=0, max_tokens=200, stop=("never",)))
        )
        while engine.stuck_s() == 0.0:
            await asyncio.sleep(0.001)
        assert await asyncio.to_thread(engine.unfinished, {"long": 0}) == {}
        assert engine.stuck_s() > 0.0 and not running.done(), "it waited for the batch"
        await running

    asyncio.run(ask())
    engine.close()
