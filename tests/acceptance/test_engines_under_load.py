"""Both engines follow one contract under concurrent load: updates during a response, cancellation, refusal, closing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rftcore.engines import ENGINES
from rftcore.engines.base import Decoding, Engine, EngineConfig, Generation
from rftcore.sync.base import Publication
from rftcore.sync.files.weights_file import write_atomically
from rftdata.errors import RftError
from tests.support.models import make_tiny_model
from tests.support.waiting import until_it_happens
from tests.support.weights import write_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = EngineConfig(dtype="float32", max_num_seqs=16, kv_cache_gib=0.25)
EXACT = 1e-3
# A random model ends a response by chance, after fifty tokens or so; its greedy ones run until the context is full.
LONG = Decoding(max_tokens=10_000)
ENDLESS = Decoding(max_tokens=10_000, temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context_length=512)


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    engine_class = ENGINES.load(request.param)
    os.environ.update(engine_class.process_environment(CONFIG))
    engine = engine_class(model, CONFIG)
    yield engine
    engine.close()


def reference(folder: Path, noise: int = 0) -> Any:
    """The model in transformers; with `noise` its weights are moved, differently for each number."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(noise)
    with torch.no_grad():
        for parameter in loaded.parameters() if noise else ():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.2)
    return loaded


def publish(weights: Any, folder: Path, version: int) -> Publication:
    return write_atomically(
        folder / f"{version}.safetensors", lambda draft: write_weights(weights.named_parameters(), draft)
    )


def push(engine: Engine, weights: Any, folder: Path, version: int) -> None:
    publication = publish(weights, folder, version)
    engine.load_weights(publication.uri, version, publication.checksum)


def worst(weights: Any, prompt: Sequence[int], generation: Generation, decoding: Decoding, tokens: range) -> float:
    """Largest |recorded - recomputed| over some tokens of a response, under temperature and nucleus of `decoding`."""
    import torch

    with torch.no_grad():
        logits = weights(torch.tensor([[*prompt, *generation.token_ids]])).logits[0].float() / decoding.temperature
    worst_difference = 0.0
    for index in tokens:
        probabilities, order = logits[len(prompt) - 1 + index].softmax(-1).sort(descending=True)
        kept = probabilities.cumsum(0) - probabilities < decoding.top_p
        place = int((order == generation.token_ids[index]).nonzero())
        expected = (probabilities[place] / probabilities[kept].sum()).log().item()
        assert kept[place], "a token outside the nucleus was sampled"
        worst_difference = max(worst_difference, abs(generation.logprobs[index] - expected))
    return worst_difference


def test_each_token_was_computed_by_the_version_its_span_names(engine: Engine, model: Path, tmp_path: Path) -> None:
    old, new = reference(model), reference(model, noise=1)
    prompts = [engine.tokenizer.encode(f"u:{number}+2=\na:") for number in range(64)]

    async def update_in_mid_response(newer: Publication) -> list[Generation]:
        waiting = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in prompts]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)  # most are at work or wait
        await asyncio.to_thread(engine.load_weights, newer.uri, 2, newer.checksum)
        late = asyncio.create_task(engine.generate(prompts[0], Decoding(max_tokens=20)))
        return [*await asyncio.gather(*waiting), await late]

    def num_split() -> int:
        push(engine, old, tmp_path, 1)
        *generations, late = asyncio.run(update_in_mid_response(publish(new, tmp_path, 2)))
        assert late.version_spans == [(0, 2)]
        assert worst(new, prompts[0], late, LONG, range(len(late.token_ids))) < EXACT
        for prompt, generation in zip(prompts, generations, strict=True):
            ends = [start for start, _ in generation.version_spans[1:]] + [len(generation.token_ids)]
            for (start, version), end in zip(generation.version_spans, ends, strict=True):
                weights, other = (old, new) if version == 1 else (new, old)
                assert worst(weights, prompt, generation, LONG, range(start, end)) < EXACT
                if end - start > 20:
                    assert worst(other, prompt, generation, LONG, range(start, end)) > 0.05, (
                        "the check must be able to fail"
                    )
        return sum(len(generation.version_spans) == 2 for generation in generations)

    if type(engine).__name__ == "VllmEngine":
        until_it_happens(lambda: num_split() or None, "a response is open during the update")
    else:
        assert num_split() == 0, "this engine updates between batches"


def test_the_recorded_probability_is_that_of_the_tempered_nucleus(engine: Engine, model: Path, tmp_path: Path) -> None:
    weights = reference(model)
    push(engine, weights, tmp_path, 3)
    decoding = Decoding(temperature=0.7, top_p=0.9, max_tokens=24)
    prompt = engine.tokenizer.encode("u:3*4=\na:")

    async def sample() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(prompt, decoding) for _ in range(8)))

    for generation in asyncio.run(sample()):
        assert worst(weights, prompt, generation, decoding, range(len(generation.token_ids))) < EXACT


def test_many_more_requests_than_fit_at_once_all_get_their_own_answer(engine: Engine) -> None:
    before = engine.num_generated_tokens

    async def sample() -> list[Generation]:
        prompts = [engine.tokenizer.encode(f"u:{number}\na:") for number in range(100)]
        return await asyncio.gather(
            *(engine.generate(prompt, Decoding(temperature=0, max_tokens=6)) for prompt in prompts)
        )

    generations = asyncio.run(sample())
    assert len({tuple(generation.token_ids) for generation in generations}) > 20
    assert engine.num_generated_tokens - before == sum(len(generation.token_ids) for generation in generations)


def test_a_seed_repeats_one_request(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("u:5+5=\na:")

    async def sample(seed: int) -> Generation:
        return await engine.generate(prompt, Decoding(max_tokens=12, seed=seed))

    first, again, other = (asyncio.run(sample(seed)) for seed in (1, 1, 2))
    assert first.token_ids == again.token_ids != other.token_ids


def test_a_stop_text_ends_the_response_and_is_cut_from_its_text(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("u:9-3=\na:")
    free = asyncio.run(engine.generate(prompt, Decoding(temperature=0, max_tokens=12)))
    stop = free.text[3:5]
    stopped = asyncio.run(engine.generate(prompt, Decoding(temperature=0, max_tokens=12, stop=(stop,))))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_a_prompt_that_does_not_fit_is_refused_alone(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("u:1+1=\na:")

    async def sample() -> list[Generation | BaseException]:
        long, short = engine.generate([5] * 5000, Decoding()), engine.generate(prompt, Decoding(max_tokens=2))
        return await asyncio.gather(long, short, return_exceptions=True)

    refused, answered = asyncio.run(sample())
    assert isinstance(refused, RftError) and "5000 tokens" in str(refused)
    assert isinstance(answered, Generation)


def test_a_cancelled_request_leaves_and_the_others_continue(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("u:8+1=\na:")

    async def sample() -> Generation:
        cancelled = asyncio.create_task(engine.generate(prompt, ENDLESS))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return await engine.generate(prompt, Decoding(max_tokens=2))

    assert asyncio.run(sample()).token_ids


def test_a_stream_of_the_endpoint_is_the_answer_in_parts(engine: Engine) -> None:
    """vLLM shows its tokens while it samples; transformers answers whole batches."""
    from openai import AsyncOpenAI

    from rftcore.gateway import Gateway, GatewaySession, SessionSettings
    from rftcore.workflows.task import Model

    async def streamed(**given: Any) -> tuple[list[str], Model]:
        model = Model(engine, Decoding(temperature=0, max_tokens=200))
        gateway, session = Gateway(), GatewaySession(model, SessionSettings())
        async with AsyncOpenAI(base_url=gateway.open(session), api_key="none", max_retries=0) as client:
            chat: Any = [{"role": "user", "content": "8+1="}]
            stream = await client.chat.completions.create(model="policy", messages=chat, stream=True, **given)
            parts = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
        await gateway.close()
        return [part for part in parts if part], model

    parts, model = asyncio.run(streamed())
    [turn] = model.turns
    assert "".join(parts) == turn.response and len(turn.response_token_ids) == 200
    assert len(parts) > 2 if type(engine).__name__ == "VllmEngine" else len(parts) == 1
    stop = turn.response[30:32]
    parts, model = asyncio.run(streamed(stop=[stop]))
    assert "".join(parts) == model.turns[0].response and stop not in model.turns[0].response


def test_closing_aborts_what_is_open_and_refuses_what_comes_later(engine: Engine) -> None:
    """The last test of an engine: it closes it."""
    prompt = engine.tokenizer.encode("u:8+1=\na:")

    async def sample() -> list[Generation]:
        waiting = [asyncio.create_task(engine.generate(prompt, ENDLESS)) for _ in range(64)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(*waiting)

    assert "abort" in {generation.finish_reason for generation in asyncio.run(sample())}
    with pytest.raises(RftError, match="closed"):
        asyncio.run(engine.generate(prompt, Decoding()))
