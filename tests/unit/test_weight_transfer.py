"""The wire of `sync.method: nccl`, by gloo: what is sent arrives in the engines' type, and what differs is caught before or by the hashes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.sync import transfer
from rftcore.sync.devices import choose_backend
from rftcore.sync.transfer import Sent, TransferReceiver, TransferSender
from rftcore.sync.transfer_group import LOOPBACK, GroupError, TransferGroup, hashes_of, open_store, refuse_missing
from rftcore.sync.transfer_plan import TransferError, TransferPlan
from rftcore.sync.weights_file import complete_state, write_atomically, write_weights
from rftdata.errors import ModelError, RftError
from tests.support.models import make_tiny_model

Tensors = list[tuple[str, Tensor]]

CONFIG = EngineConfig(dtype="bfloat16", num_threads=1)
TENSORS: Tensors = [(f"layer.{i}", torch.randn(40 + i, 7, generator=torch.Generator().manual_seed(i))) for i in range(9)]  # fmt: skip

_group_ids = itertools.count(1)


class Sending:
    """A trainer that sends to `num_engines`, each with one rank."""

    def __init__(self, num_engines: int = 1, timeout_s: float = 20.0) -> None:
        self.num_ranks = num_engines + 1
        self.timeout_s = timeout_s
        self.store = open_store(LOOPBACK, timeout_s)
        self.sender = TransferSender()
        self.group_id = next(_group_ids)

    def plan(self, tensors: Tensors, rank: int = 0, *, transfer_id: int = 1, dtype: str = "bfloat16") -> TransferPlan:
        return TransferPlan(
            transfer_id=transfer_id, group_id=self.group_id, backend="gloo", host=LOOPBACK, port=self.store.port, num_ranks=self.num_ranks,
            first_rank=rank, tensors=tuple((name, tuple(tensor.shape)) for name, tensor in tensors), dtype=dtype, bucket_bytes=2000,
            timeout_s=self.timeout_s,
        )  # fmt: skip

    def send(self, plan: TransferPlan, tensors: Iterable[tuple[str, Tensor]]) -> Sent:
        self.sender.join(plan, self.store)
        return self.sender.send(plan, tensors)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def received(plan: TransferPlan) -> tuple[Tensors, str]:
    taken: Tensors = []
    checksum = TransferReceiver().receive(plan, 0, taken.extend)
    return taken, checksum


def test_two_engines_get_what_was_sent_in_their_type(pool: ThreadPoolExecutor) -> None:
    sending = Sending(num_engines=2)
    engines = [pool.submit(received, sending.plan(TENSORS, rank)) for rank in (1, 2)]
    sent = sending.send(sending.plan(TENSORS), TENSORS)
    for engine in engines:
        taken, checksum = engine.result(timeout=30)
        assert [name for name, _ in taken] == [name for name, _ in TENSORS]
        assert all(torch.equal(ours, theirs.bfloat16()) for (_, ours), (_, theirs) in zip(taken, TENSORS, strict=True))
        assert checksum == sent.checksum
    assert len(list(sending.plan(TENSORS).buckets())) > 2
    assert sent.num_bytes == 2 * sum(tensor.numel() for _, tensor in TENSORS), "float32 on the wire would be twice that"


def test_a_byte_that_changes_on_the_way_is_caught_before_its_bucket_is_loaded(pool: ThreadPoolExecutor) -> None:
    sending = Sending()
    plan = sending.plan(TENSORS)
    engine = pool.submit(received, sending.plan(TENSORS, 1))
    sending.sender.join(plan, sending.store)
    group = sending.sender.group
    assert group is not None
    # What a sender does, with one bit of the second bucket turned after the hashes were taken.
    group.broadcast(transfer._header(plan, group.device)).wait()
    stream = iter(TENSORS)
    first_tensors = 0
    for number, bucket in enumerate(itertools.islice(plan.buckets(), 2)):
        packed = transfer._pack(bucket, plan, stream, group.device)
        hashes = hashes_of([transfer._bytes_of(packed, slot) for slot in bucket.slots])
        packed[: 8 * len(hashes)].view(torch.int64).copy_(hashes)
        if number == 1:
            packed[bucket.slots[0].start + 5] ^= 1
        else:
            first_tensors = len(bucket.slots)
        group.broadcast(packed).wait()
    with pytest.raises(TransferError, match=f"layer.{first_tensors} arrived with other bytes") as caught:
        engine.result(timeout=30)
    assert caught.value.is_half_applied, "the first bucket was in order, and is loaded"


def test_members_of_different_transfers_do_not_exchange_weights(pool: ThreadPoolExecutor) -> None:
    sending = Sending()
    engine = pool.submit(received, sending.plan(TENSORS, 1, transfer_id=7))
    # The engine leaves the group; the sender notices, or had sent everything before.
    with contextlib.suppress(GroupError):
        sending.send(sending.plan(TENSORS, transfer_id=8), TENSORS)
    with pytest.raises(TransferError, match="another transfer") as caught:
        engine.result(timeout=30)
    assert not caught.value.is_half_applied


def test_a_communicator_that_does_nothing_is_caught() -> None:
    """Such as NCCL's in vLLM when its library does not load: collectives succeed at once and move nothing."""
    group: Any = FakeProcessGroup._create_internal(rank=1, world_size=3)
    members = torch.tensor([0, 1, 0])
    group.allreduce([members]).wait()
    with pytest.raises(GroupError, match="does not connect its 3 members"):
        refuse_missing(members, group_id=1)
    refuse_missing(torch.ones(3, dtype=torch.int64), group_id=1)


def test_a_member_that_does_not_come_ends_the_wait(pool: ThreadPoolExecutor) -> None:
    sending = Sending(num_engines=2, timeout_s=1.0)
    engine = pool.submit(received, sending.plan(TENSORS, 1))
    started = time.monotonic()
    with pytest.raises(GroupError, match="does not come together"):
        sending.sender.join(sending.plan(TENSORS), sending.store)
    with pytest.raises(TransferError) as caught:
        engine.result(timeout=30)
    assert not caught.value.is_half_applied
    assert time.monotonic() - started < 20


def test_an_engine_killed_in_the_middle_does_not_hang_the_others(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    sending = Sending(num_engines=2)
    program = tmp_path / "killed.py"
    program.write_text(
        "import os, pickle, sys\n"
        "from rftcore.sync.transfer import TransferReceiver\n"
        "def load(tensors):\n"
        "    next(tensors)\n"
        "    os.kill(os.getpid(), 9)\n"
        "TransferReceiver().receive(pickle.load(sys.stdin.buffer), 0, load)\n"
    )
    # Buckets enough that the sender cannot have put all of them into the sockets' buffers.
    tensors: Tensors = [(f"layer.{i}", torch.randn(1000, 1000)) for i in range(16)]
    killed = subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)},
    )  # fmt: skip
    survivor = pool.submit(received, sending.plan(tensors, 1))
    assert killed.stdin is not None
    pickle.dump(sending.plan(tensors, 2), killed.stdin)
    killed.stdin.close()
    with pytest.raises(GroupError, match="broke off"):
        sending.send(sending.plan(tensors), tensors)
    ended = time.monotonic()
    with pytest.raises(TransferError):
        survivor.result(timeout=30)
    assert time.monotonic() - ended < 5, "the time limit of a transfer is 20 s here"
    assert killed.wait(timeout=30) == -signal.SIGKILL


def odd(number: int, stream: int) -> int:
    """splitmix64, made odd."""
    limit = (1 << 64) - 1
    z = (number * 0x9E3779B97F4A7C15 + stream) & limit
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & limit
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & limit
    return (z ^ (z >> 31)) | 1


def test_the_hash_is_the_formula_of_its_docstring() -> None:
    words = [3, -1, 1 << 40, 0, 77]
    folded = [(word % (1 << 64)) ^ ((word % (1 << 64)) >> 32) for word in words]
    expected = (sum(odd(i + 1, 0) * word for i, word in enumerate(folded)) * odd(1, 1) + len(words)) % (1 << 64)
    found = hashes_of([torch.tensor(words).view(torch.uint8)]).item()
    assert found % (1 << 64) == expected


@pytest.mark.parametrize("num_words", [1, 2, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 70 * (1 << 16) + 3])
def test_every_small_change_gives_another_hash(num_words: int) -> None:
    generator = torch.Generator().manual_seed(num_words)
    words = torch.randint(-(1 << 62), 1 << 62, (num_words,), generator=generator)

    def hashed(changed: Tensor) -> int:
        return int(hashes_of([changed.contiguous().view(torch.uint8)]).item())

    bits = [torch.arange(num_words) == place for place in sorted({0, num_words // 2, num_words - 1})]
    changes = [words ^ (one.long() << bit) for one in bits for bit in (0, 15, 31, 33, 63)]
    # Two changed signs, as of two weights: where they are alone in the high bits of their words they must not cancel.
    changes += [words ^ (one.long() << 63) ^ (two.long() << 63) for one, two in itertools.combinations(bits, 2)]
    changes += [torch.cat([words, torch.zeros(1, dtype=torch.int64)]), ~words]
    if num_words > 2:
        changes += [words.roll(1), torch.cat([words[1:2], words[:1], words[2:]]), words.flip(0)]
    found = {hashed(changed) for changed in changes}
    assert len(found) == len(changes) and hashed(words) not in found
    assert hashed(words.clone()) == hashed(words)


@pytest.mark.parametrize(
    ("trainer", "engines", "backend"),
    [
        ("cpu", ["cpu"], "gloo"),
        ("GPU-1", ["GPU-2", "cpu"], "gloo"),
        ("GPU-1", ["GPU-1"], "gloo"),
        ("GPU-1", ["GPU-2,GPU-3", "GPU-3"], "gloo"),
        ("GPU-1", ["GPU-2,GPU-3", "GPU-4"], "nccl"),
    ],
)
def test_nccl_is_chosen_where_all_have_gpus_of_their_own(trainer: str, engines: list[str], backend: str) -> None:
    assert choose_backend(trainer, engines)[0] == backend


class Live:
    """A real engine, and the model whose weights it is sent."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = folder
        path = make_tiny_model(folder / "model", tied=True, hidden_size=64, num_layers=1)
        self.engine = TransformersEngine(path, CONFIG)
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.prompt: list[int] = self.engine.tokenizer.encode("u:1+2=\na:")

    def state(self) -> Tensors:
        """The weights changed once more, with the head that the model ties to its embedding."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std())
        return list(complete_state(self.model.named_parameters()).items())

    async def greedy(self) -> Generation:
        return await self.engine.generate(self.prompt, Decoding(temperature=0, max_tokens=6))

    def is_current(self) -> bool:
        """Whether the engine's greedy tokens and their log-probabilities are those of the model in the engine's type."""
        generation = asyncio.run(self.greedy())
        with torch.no_grad():
            ids = torch.tensor([self.prompt + generation.token_ids])
            logprobs = self.model.bfloat16()(ids).logits[0].float().log_softmax(-1)
        self.model.float()
        expected = [logprobs[len(self.prompt) - 1 + i, t].item() for i, t in enumerate(generation.token_ids)]
        return all(abs(a - b) < 0.2 for a, b in zip(generation.logprobs, expected, strict=True))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = Live(tmp_path_factory.mktemp("live"))
    yield live
    live.engine.close()


def test_a_live_engine_samples_from_what_it_was_sent(live: Live, pool: ThreadPoolExecutor) -> None:
    state, sending = live.state(), Sending()
    assert not live.is_current()
    taken = pool.submit(live.engine.receive_weights, sending.plan(state, 1), 5)
    sent = sending.send(sending.plan(state), state)
    assert taken.result(timeout=30) == sent.checksum
    assert live.is_current()
    assert asyncio.run(live.greedy()).version_spans == [(0, 5)]


def test_an_engine_refuses_another_type_on_the_wire_than_its_own(live: Live) -> None:
    with pytest.raises(RftError, match=r"type that is not the engine's .got 'float32'.; allowed: bfloat16"):
        live.engine.receive_weights(Sending().plan(live.state(), 1, dtype="float32"), 9)


def test_an_engine_refuses_weights_without_the_head_that_the_model_ties(live: Live) -> None:
    state = [(name, tensor) for name, tensor in live.state() if name != "lm_head.weight"]
    with pytest.raises(ModelError, match=r"lm_head\.weight missing"):
        live.engine.receive_weights(Sending().plan(state, 1), 9)


@pytest.mark.parametrize("repair", ["transfer", "file"])
def test_an_engine_with_weights_of_two_versions_does_not_sample_until_they_are_replaced(
    live: Live, pool: ThreadPoolExecutor, repair: str
) -> None:
    state, sending = live.state(), Sending()
    taken = pool.submit(live.engine.receive_weights, sending.plan(state, 1), 6)

    def breaks_off() -> Iterator[tuple[str, Tensor]]:
        yield from state[: len(state) // 2]
        raise OSError("the trainer fails")

    with pytest.raises(OSError, match="the trainer fails"):
        sending.send(sending.plan(state), breaks_off())
    with pytest.raises(TransferError) as caught:
        taken.result(timeout=30)
    assert caught.value.is_half_applied

    waiting: Future[Generation] = pool.submit(asyncio.run, live.greedy())
    with pytest.raises(TimeoutError):
        waiting.result(timeout=0.5)
    if repair == "transfer":
        again = Sending()
        taken = pool.submit(live.engine.receive_weights, again.plan(state, 1), 7)
        again.send(again.plan(state), state)
        taken.result(timeout=30)
    else:
        file = write_atomically(live.folder / "weights", lambda draft: write_weights(state, draft))
        live.engine.load_weights(file.uri, 7, file.checksum)
    assert waiting.result(timeout=30).version_spans == [(0, 7)]
    assert live.is_current()


def test_all_tensors_are_taken_from_the_trainer_even_if_the_engines_fail() -> None:
    """The other ranks of a trainer follow, and cannot turn back."""
    sending = Sending(num_engines=1, timeout_s=2.0)
    gone = TransferReceiver()
    taken: list[str] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in TENSORS:
            taken.append(name)
            yield name, tensor

    with ThreadPoolExecutor() as pool:
        group = pool.submit(TransferGroup, "gloo", (LOOPBACK, sending.store.port), sending.group_id, 1, 2, 5.0)
        sending.sender.join(sending.plan(TENSORS), sending.store)
        gone.group = group.result(timeout=30)
    gone.leave()
    with pytest.raises(GroupError):
        sending.sender.send(sending.plan(TENSORS), tensors())
    assert taken == [name for name, _ in TENSORS]
