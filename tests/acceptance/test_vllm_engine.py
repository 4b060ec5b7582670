"""vLLM, in this process and in its own: the log-probabilities it reports are those that transformers computes, after every kind of weight update."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from rftcore.engines.base import Decoding, Generation
from rftcore.engines.request_work import follow_requests
from rftcore.engines.structure import Structure
from rftcore.engines.vllm_engine import VllmEngine
from rftcore.sync.base import Publication
from rftcore.sync.transfer.plan import TransferError
from rftcore.sync.transfer.reception import Reception
from rftdata.errors import EngineStoppedError, ModelError, RftError
from tests.support.live_engine import BLOCK_TOKENS, CONFIG, EXACT, ON_GPU, Live
from tests.support.models import CHARACTERS, make_character_tokenizer, make_tiny_model
from tests.support.waiting import PATIENCE_S, until_it_happens, wait_until
from tests.support.weights import complete_state, write_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


# Two more processes that import vLLM take half a minute of processor time.
@pytest.fixture(
    scope="module",
    params=["in this process", "in its own process", pytest.param("in three processes", marks=pytest.mark.long)],
)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    is_tied = request.param != "in three processes"
    # So few starts as possible: what concerns the scheduler is not repeated with two workers.
    config = CONFIG.model_copy(update={"own_process": request.param != "in this process"})
    if not is_tied:
        if ON_GPU and torch.cuda.device_count() < 2:
            pytest.skip("two workers need two GPUs")
        config = config.model_copy(update={"tensor_parallel_size": 2, "kv_cache": "keep"})
    os.environ.update(VllmEngine.process_environment(config))
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("model")
    model = make_tiny_model(folder / "model", tied=is_tied)
    engine = VllmEngine(model, config)
    yield Live(engine, AutoModelForCausalLM.from_pretrained(model), folder)
    engine.close()


def test_log_probabilities_agree_with_transformers_before_and_after_an_update(live: Live) -> None:
    assert live.worst_difference() < EXACT
    live.change_reference()
    assert live.worst_difference() > 0.05, "the check must be able to fail: stale weights look different"
    live.push()
    assert live.worst_difference() < EXACT


def test_log_probabilities_are_of_the_distribution_sampled_from(live: Live) -> None:
    assert live.worst_difference(temperature=0.7) < EXACT
    # With a nucleus the kept tokens share all of the probability, so each is likelier than without.
    ids, generations = live.sample(8, Decoding(max_tokens=16, top_k=2))
    gains = [a - b for g in generations for a, b in zip(g.logprobs, live.expected(ids, g), strict=True)]
    assert min(gains) > -EXACT
    assert max(gains) > 0.1


def test_an_answer_has_the_structure_that_is_asked_for_and_the_log_probabilities_of_what_was_allowed(
    live: Live,
) -> None:
    ids, _ = live.sample(1, Decoding(max_tokens=1))
    texts = ("12", "34")
    for structure, allowed in (
        (Structure("choice", texts), set(texts)),
        (Structure("regex", "[0-9]{3}"), None),
    ):
        _, generations = live.sample(4, Decoding(max_tokens=8, structure=structure))
        for one in generations:
            assert one.text in allowed if allowed else one.text.isdigit() and len(one.text) == 3
            # Among few tokens each is likelier than among all; of two digits that are forced, the second is certain.
            free = live.expected(ids, one)
            assert all(forced > among_all - EXACT for forced, among_all in zip(one.logprobs, free, strict=True))
            assert structure.kind == "regex" or abs(one.logprobs[1]) < EXACT
    with pytest.raises(RftError, match="vLLM refuses the request"):
        live.sample(1, Decoding(max_tokens=8, structure=Structure("regex", "([")))
    assert live.worst_difference() < EXACT


def test_a_prompt_is_computed_once_for_the_answers_that_share_it(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, cached, read = "u:1+2=\na:3\n" * 4 + "u:7*8=\na:", list[int](), live.engine._generation
    monkeypatch.setattr(
        live.engine, "_generation", lambda output: (cached.append(output.num_cached_tokens), read(output))[1]
    )
    ids, generations = live.sample(8, Decoding(max_tokens=16), prompt)
    assert 32 < len(ids) < 64
    whole_blocks = (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert sorted(cached)[1:] == [whole_blocks] * 7, "the first answer may find them, too"
    assert all(abs(a - b) < EXACT for g in generations for a, b in zip(g.logprobs, live.expected(ids, g), strict=True))
    live.change_reference()
    live.push()
    ids, generations = live.sample(8, Decoding(max_tokens=16), prompt)
    assert all(abs(a - b) < EXACT for g in generations for a, b in zip(g.logprobs, live.expected(ids, g), strict=True))


def test_requests_that_vllm_lets_wait_are_reported_as_such(live: Live) -> None:
    ids = live.engine.tokenizer.encode("u:7*8=\na:")
    numbers, seen = [0, 0], set()

    def follow(waiting: int, worked_on: int) -> None:
        numbers[0] += waiting
        numbers[1] += worked_on
        seen.add(tuple(numbers))

    async def sample() -> None:
        follow_requests(follow)
        await asyncio.gather(*live.started(ids))

    asyncio.run(sample())
    assert numbers == [0, 0]
    assert any(waiting and worked_on == CONFIG.max_num_seqs for waiting, worked_on in seen), (
        "as many as fit, and some wait"
    )


def test_requests_in_flight_during_an_update_name_the_version_of_every_token(live: Live) -> None:
    ids = live.engine.tokenizer.encode("u:7*8=\na:")

    async def sample_and_update(publication: Publication) -> list[Generation]:
        tasks = live.started(ids)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(live.load, publication)
        return await asyncio.gather(*tasks)

    def differences_after_a_switch() -> list[float] | None:
        before = live.engine.policy_version_id
        live.change_reference()
        found = []
        for generation in asyncio.run(sample_and_update(live.publish())):
            versions = [version for _, version in generation.version_spans]
            assert versions in ([before], [live.version], [before, live.version])
            starts = [start for start, version in generation.version_spans if version == live.version]
            switch = starts[0] if starts else len(generation.token_ids)
            new = live.expected(ids, generation)[switch:]
            difference = max((abs(a - b) for a, b in zip(generation.logprobs[switch:], new, strict=True)), default=0)
            if versions != [before, live.version]:
                assert difference < EXACT
            elif len(new) >= 10:  # of a few tokens all might be alike by chance
                found.append(difference)
        return found or None

    after_switch = until_it_happens(differences_after_a_switch, "requests run while the weights change")
    if live.engine.config.kv_cache == "recompute":
        assert max(after_switch) < EXACT
    else:
        assert min(after_switch) > max(0.01, 2 * EXACT), "they go on with the old policy's keys and values"


def test_a_request_that_is_interrupted_tells_what_it_sampled_and_can_be_continued(live: Live) -> None:
    ids = live.engine.tokenizer.encode("u:4*5=\na:")

    async def interrupted() -> list[Generation] | None:
        request = asyncio.create_task(
            live.engine.generate_named("mine", ids, Decoding(max_tokens=100, stop=("never!",)))
        )
        parts: list[Generation] = []
        while sum(len(part.token_ids) for part in parts) < 4:
            if request.done():  # a short answer ends before it can be asked for
                return None
            await asyncio.sleep(0.01)
            known = sum(len(part.token_ids) for part in parts)
            told = await asyncio.to_thread(live.engine.unfinished, {"mine": known, "other": 0})
            parts += [part for name, part in told.items() if name == "mine" and part.token_ids]
        request.cancel()
        return parts

    parts = until_it_happens(lambda: asyncio.run(interrupted()), "a request is interrupted after its first tokens")
    token_ids = [token for part in parts for token in part.token_ids]
    logprobs = [logprob for part in parts for logprob in part.logprobs]
    assert len(logprobs) == len(token_ids) and parts[-1].version_spans == [(0, live.engine.policy_version_id)]
    rest = asyncio.run(live.engine.generate([*ids, *token_ids], Decoding(max_tokens=100 - len(token_ids))))
    whole = replace(rest, token_ids=token_ids + rest.token_ids, logprobs=logprobs + rest.logprobs)
    assert max(abs(a - b) for a, b in zip(whole.logprobs, live.expected(ids, whole), strict=True)) < EXACT


def test_a_prompt_that_was_cached_is_computed_with_new_weights(live: Live) -> None:
    """Its blocks are full, so that a later request would begin with them."""
    prompt = "u:what is twice twelve and then three hundred minus eleven times nine?\na:"
    live.sample(2, Decoding(max_tokens=4), prompt)
    live.change_reference()
    live.push()
    ids, generations = live.sample(2, Decoding(max_tokens=4), prompt)
    for generation in generations:
        assert generation.logprobs == pytest.approx(live.expected(ids, generation), abs=EXACT)


def test_weights_published_again_are_kept_under_the_new_version(live: Live) -> None:
    before = live.engine.policy_version_id
    live.version += 1
    live.engine.set_policy_version(live.version)
    _, generations = live.sample(4, Decoding(max_tokens=8))
    assert live.version != before
    assert {span for generation in generations for span in generation.version_spans} == {(0, live.version)}
    assert live.worst_difference() < EXACT


def test_a_file_that_is_not_the_published_one_is_refused_and_the_old_weights_stay(live: Live) -> None:
    path = live.folder / "broken.safetensors"
    write_weights(live.reference.named_parameters(), path)
    with pytest.raises(ModelError, match="checksum"):
        live.engine.load_weights(str(path), 99, "0" * 16)
    with pytest.raises(ModelError, match="does not exist"):
        live.engine.load_weights(str(live.folder / "nowhere.safetensors"), 99)
    assert live.engine.policy_version_id != 99
    assert live.worst_difference() < EXACT


def test_weights_sent_into_the_engine_are_those_it_samples_from(live: Live) -> None:
    live.change_reference()
    assert live.worst_difference() > 0.05
    live.transfer()
    assert live.worst_difference() < EXACT
    _, generations = live.sample(4, Decoding(max_tokens=8))
    assert {span for generation in generations for span in generation.version_spans} == {(0, live.version)}


def test_weights_are_compared_with_a_model_loaded_anew(live: Live) -> None:
    live.change_reference()
    live.transfer()
    path = live.folder / "compared.safetensors"
    write_weights(live.reference.named_parameters(), path)
    assert live.engine.differing_weights(str(path)) == []
    state = complete_state(live.reference.named_parameters())
    for name, part in (
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ):
        changed = state[name].clone()
        changed.view(-1)[-1] *= 1.001
        save_file({**state, name: changed}, path, metadata={"format": "pt"})
        assert [found.partition(",")[0].partition(" (")[0] for found in live.engine.differing_weights(str(path))][
            :1
        ] == [part]
    assert live.worst_difference() < EXACT, "the engine's own weights are as they were"
    if live.reference.config.tie_word_embeddings:
        # vLLM's own reload leaves the head's prepacked copy of a tied embedding old, if it is given no head.
        live.change_reference()
        state = complete_state(live.reference.named_parameters())
        save_file({name: state[name] for name in state if name != "lm_head.weight"}, path, metadata={"format": "pt"})
        live.engine._llm.llm_engine.collective_rpc("load_weights_file", args=(str(path),))
        write_weights(live.reference.named_parameters(), path)
        assert live.engine.differing_weights(str(path)) == ["lm_head.weight, prepacked"]
        live.push()
        assert live.engine.differing_weights(str(path)) == []


def test_a_transfer_that_breaks_off_stops_sampling_until_another_has_succeeded(live: Live) -> None:
    live.change_reference()
    with pytest.raises(TransferError) as caught:
        live.transfer(break_off=True)
    assert caught.value.is_half_applied
    with ThreadPoolExecutor() as pool:
        sampling = pool.submit(live.worst_difference)
        with pytest.raises(TimeoutError):
            sampling.result(timeout=0.5)
        live.transfer()
        assert sampling.result(timeout=PATIENCE_S) < EXACT


def test_a_sleeping_engine_computes_nothing_until_it_has_weights_again(live: Live) -> None:
    """On a CPU no memory is freed, and the scheduler, the requests and the order of the calls are those of a GPU."""
    if live.engine.reception.num_ranks > 1:
        pytest.skip("such an engine has its GPUs for itself")
    ids = live.engine.tokenizer.encode("u:7*8=\na:")

    async def sample_and_sleep() -> list[Generation]:
        tasks = live.started(ids)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(live.engine.sleep)
        open_before = sum(not task.done() for task in tasks)
        tasks.append(asyncio.create_task(live.engine.generate(ids, Decoding(max_tokens=100))))  # waits in the scheduler
        await asyncio.sleep(0.3)
        assert not await asyncio.to_thread(live.engine.wake, True)  # room for weights alone
        assert not await asyncio.to_thread(live.engine.wake)
        await asyncio.sleep(0.3)
        assert sum(not task.done() for task in tasks) == open_before + 1
        await asyncio.to_thread(live.push)
        return await asyncio.gather(*tasks)

    def slept_amid_a_response() -> bool | None:
        before = live.engine.policy_version_id
        live.change_reference()
        generations = asyncio.run(sample_and_sleep())
        spans = [[version for _, version in generation.version_spans] for generation in generations]
        assert spans[-1] == [live.version]
        return [before, live.version] in spans or None

    until_it_happens(slept_amid_a_response, "the engine falls asleep while requests run")
    assert live.worst_difference() < EXACT
    live.engine.sleep()
    assert not live.engine.wake(weights_only=True)
    live.transfer()  # while another process would still have the device
    with ThreadPoolExecutor() as pool:
        sampling = pool.submit(live.worst_difference)
        with pytest.raises(TimeoutError):
            sampling.result(timeout=0.5)
        assert live.engine.wake()
        assert sampling.result(timeout=PATIENCE_S) < EXACT


def test_every_process_of_an_engine_is_a_rank_with_its_device(live: Live) -> None:
    size = live.engine.config.tensor_parallel_size
    devices = [str(torch.cuda.get_device_properties(index).uuid) if ON_GPU else "cpu" for index in range(size)]
    assert live.engine.reception == Reception(
        dtype="float32", device=",".join(devices), num_ranks=size, kv_cache=live.engine.config.kv_cache
    )


def test_an_idle_engine_uses_no_processor_time(live: Live) -> None:
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]

    def rests() -> bool:
        before = processor_time()
        time.sleep(0.5)
        return processor_time() - before < 0.1

    def processor_time() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    # Not at once: threads of torch and vLLM's further processes poll for a while before they sleep.
    wait_until(rests, "the rest of an idle engine", pause_s=0)


@pytest.mark.parametrize(
    "wrong",
    [
        Decoding(max_tokens=0),
        Decoding(temperature=-1.0),
        Decoding(top_p=0.0),
        Decoding(stop=("",)),
        Decoding(seed=2**64),
    ],
)
def test_a_request_that_vllm_refuses_leaves_the_engine_as_it_was(live: Live, wrong: Decoding) -> None:
    with pytest.raises(RftError):
        live.sample(1, wrong)
    assert live.worst_difference() < EXACT


def test_a_response_ends_at_the_limit_or_by_itself_and_states_which(live: Live) -> None:
    _, generations = live.sample(16, Decoding(max_tokens=4))
    for generation in generations:
        assert generation.finish_reason in ("stop", "length")
        assert (generation.finish_reason == "length") == (
            generation.token_ids[-1] != live.engine.tokenizer.eos_token_id
        )
        assert len(generation.token_ids) == len(generation.logprobs) <= 4


def test_an_engine_whose_process_is_killed_fails_what_waits_for_it(live: Live) -> None:
    """The last test of the engine, which it ends."""
    if not live.engine.config.own_process:
        pytest.skip("the engine has no process of its own")
    publication = live.publish()
    [core] = [child for child in psutil.Process().children() if "EngineCore" in " ".join(child.cmdline())]

    async def killed() -> list[object]:
        tasks = live.started(live.engine.tokenizer.encode("u:7*8=\na:"))
        await asyncio.sleep(0.2)
        core.suspend()  # so that the change of weights waits for it
        tasks.append(asyncio.create_task(asyncio.to_thread(live.load, publication)))
        await asyncio.sleep(0.2)
        core.kill()
        return await asyncio.gather(*tasks, return_exceptions=True)

    *answers, change = asyncio.run(asyncio.wait_for(killed(), PATIENCE_S))
    whole = [answer for answer in answers if isinstance(answer, Generation)]
    assert {answer.finish_reason for answer in whole} <= {"stop", "length"}
    assert len(whole) < len(answers)
    assert {type(error) for error in [*answers, change] if error not in whole} == {EngineStoppedError}
    with pytest.raises(EngineStoppedError, match="engine core"):
        live.sample(1, Decoding(max_tokens=1))


@pytest.mark.long
def test_special_tokens_within_an_answer_are_in_its_text_and_can_end_it(tmp_path: Path) -> None:
    """All characters are special tokens here, as those that mark the calls of tools are."""
    model, tokenizer = make_tiny_model(tmp_path / "model"), make_character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*CHARACTERS]})
    tokenizer.save_pretrained(model)
    engine = VllmEngine(model, CONFIG)
    try:
        prompt = tokenizer.encode("u:1+2=\na:", add_special_tokens=False)
        free, stopped = (
            asyncio.run(engine.generate(prompt, Decoding(max_tokens=40, seed=1, stop=stop))) for stop in ((), ("e",))
        )
    finally:
        engine.close()
    sampled = "".join(tokenizer.convert_ids_to_tokens(free.token_ids))
    assert free.text == sampled.replace("<bos>", "").replace("<pad>", "").replace("<unk>", "").replace("<eos>", "")
    assert "e" in free.text
    assert stopped.text == free.text.partition("e")[0] and stopped.finish_reason == "stop"
