"""Transfers of weights by gloo: engines get what was sent, in their type, and the header or the hashes reveal any difference."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.sync.addresses import LOOPBACK
from rftcore.sync.device_names import choose_backend
from rftcore.sync.files.weights_file import write_atomically
from rftcore.sync.tensors import HeldRows, from_json, to_json
from rftcore.sync.transfer.group import GroupError, TransferGroup, open_store, refuse_missing
from rftcore.sync.transfer.hashes import hashes_of
from rftcore.sync.transfer.plan import TransferError, TransferPlan
from rftcore.sync.transfer.receiver import TransferReceiver
from rftcore.sync.transfer.sender import Sent, TransferSender
from rftdata.errors import ModelError, RftError
from tests.support.models import make_tiny_model
from tests.support.preloaded import PreloadedCall
from tests.support.sending import Tensors, held, wire
from tests.support.waiting import PATIENCE_S
from tests.support.weights import complete_state, write_weights

CONFIG = EngineConfig(dtype="bfloat16", num_threads=1)
TENSORS: Tensors = [
    (f"layer.{i}", torch.randn(40 + i, 7, generator=torch.Generator().manual_seed(i))) for i in range(9)
]

# A time limit that no test waits for: something else ends the wait before.
FAR_S = 2 * PATIENCE_S

_group_ids = itertools.count(1)


class Sending:
    """A trainer of `num_trainers` ranks that sends to `num_engines`, each with one rank."""

    def __init__(self, num_engines: int = 1, timeout_s: float = PATIENCE_S, num_trainers: int = 1) -> None:
        self.num_trainers = num_trainers
        self.num_ranks = num_trainers + num_engines
        self.timeout_s = timeout_s
        self.store = open_store(LOOPBACK, timeout_s)
        self.senders = [TransferSender(rank) for rank in range(num_trainers)]
        self.group_id = next(_group_ids)

    def plan(
        self,
        tensors: Tensors,
        rank: int = 0,
        *,
        transfer_id: int = 1,
        dtype: str = "bfloat16",
        tied: dict[str, str] | None = None,
    ) -> TransferPlan:
        """The plan of a member; of the first engine, `rank` is the number of trainers."""
        return TransferPlan(
            transfer_id=transfer_id,
            group_id=self.group_id,
            backend="gloo",
            host=LOOPBACK,
            port=self.store.port,
            num_ranks=self.num_ranks,
            first_rank=rank,
            tensors=wire(tensors, self.num_trainers, tied),
            dtype=dtype,
            bucket_bytes=4000,
            timeout_s=self.timeout_s,
        )

    def send(self, plan: TransferPlan, tensors: Iterable[tuple[str, Tensor]], rank: int = 0) -> Sent:
        tied = [tensor.name for tensor in plan.tensors if tensor.same_as]
        rows = held(tensors, rank, self.num_trainers, tied)
        return self.senders[rank].send(plan, rows, self.store if rank == 0 else None)


@pytest.fixture(autouse=True, scope="module")
def _modules_are_no_garbage() -> Iterator[None]:
    """Exclude the million objects of imported modules from the collections after tests, which would take most of their time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool
    gc.collect()  # groups refer to themselves, and would be closed while those of a later test are formed


def received(plan: TransferPlan) -> tuple[list[tuple[str, Tensor]], str]:
    taken: list[tuple[str, Tensor]] = []
    checksum = TransferReceiver().receive(plan, 0, taken.extend)
    return taken, checksum


def expect(taken: Tensors, tensors: Tensors) -> None:
    """Compare names, and values as bfloat16."""
    assert [name for name, _ in taken] == [name for name, _ in tensors]
    for (name, ours), (_, theirs) in zip(taken, tensors, strict=True):
        assert torch.equal(ours, theirs.bfloat16()), name


def test_two_engines_get_what_was_sent_in_their_type(pool: ThreadPoolExecutor) -> None:
    sending = Sending(num_engines=2)
    engines = [pool.submit(received, sending.plan(TENSORS, rank)) for rank in (1, 2)]
    sent = sending.send(sending.plan(TENSORS), TENSORS)
    for engine in engines:
        taken, checksum = engine.result(timeout=PATIENCE_S)
        expect(taken, TENSORS)
        assert checksum == sent.checksum
    assert len(sending.plan(TENSORS).buckets()) > 2
    assert sent.num_bytes == 2 * sum(tensor.numel() for _, tensor in TENSORS), "float32 on the wire would be twice that"


# Of an uneven number of rows, with fewer rows than ranks, with rows that end within a word, larger than a block, a number.
UNEVEN: Tensors = [
    (f"weight{shape}", torch.randn(shape, generator=torch.Generator().manual_seed(number)))
    for number, shape in enumerate([(5, 7), (1, 3), (2,), (7,), (301, 33), (1001,), (), (3, 5, 2), (64, 512), (2, 1)])
]


@pytest.mark.parametrize("num_trainers", [1, 3])
def test_tensors_that_an_engine_keeps_in_float32_are_not_rounded(pool: ThreadPoolExecutor, num_trainers: int) -> None:
    sending = Sending(num_engines=1, num_trainers=num_trainers)
    wide = [name for name, _ in UNEVEN][::2]
    plan = replace(sending.plan(UNEVEN), in_float32=tuple(wide))
    engine = pool.submit(received, replace(plan, first_rank=num_trainers))
    senders = [pool.submit(sending.send, plan, UNEVEN, rank) for rank in range(num_trainers)]
    checksums = {sender.result(timeout=PATIENCE_S).checksum for sender in senders}
    taken, checksum = engine.result(timeout=PATIENCE_S)
    for (name, ours), (_, theirs) in zip(taken, UNEVEN, strict=True):
        assert torch.equal(ours, theirs if name in wide else theirs.bfloat16()), name
    assert checksums == {checksum}
    assert plan.num_bytes == sum(tensor.numel() * (4 if name in wide else 2) for name, tensor in UNEVEN)


def test_members_that_expect_other_types_load_nothing(pool: ThreadPoolExecutor) -> None:
    sending = Sending()
    plan = sending.plan(TENSORS)
    engine = pool.submit(received, replace(plan, first_rank=1, in_float32=("layer.3",)))
    with contextlib.suppress(GroupError):
        sending.send(plan, TENSORS)
    with pytest.raises(TransferError, match="the sender sends another transfer, or other tensors") as caught:
        engine.result(timeout=PATIENCE_S)
    assert not caught.value.is_half_applied


@pytest.mark.parametrize("num_trainers", [2, 3])
def test_every_rank_of_the_trainer_sends_its_own_rows(pool: ThreadPoolExecutor, num_trainers: int) -> None:
    sending = Sending(num_engines=2, num_trainers=num_trainers)
    engines = [pool.submit(received, sending.plan(UNEVEN, num_trainers + number)) for number in range(2)]
    own = [[(n, torch.full_like(t, torch.nan)) for n, t in UNEVEN] for _ in range(num_trainers)]
    for rank, tensors in enumerate(own):
        for (_, blank), rows in zip(tensors, held(UNEVEN, rank, num_trainers), strict=True):
            if blank.ndim:
                blank[rows.first_row : rows.first_row + len(rows.rows)] = rows.rows
            else:
                blank.copy_(rows.rows)
    senders = [pool.submit(sending.send, sending.plan(UNEVEN), own[rank], rank) for rank in range(num_trainers)]
    checksums = {sender.result(timeout=PATIENCE_S).checksum for sender in senders}
    for engine in engines:
        taken, checksum = engine.result(timeout=PATIENCE_S)
        expect(taken, UNEVEN)
        checksums.add(checksum)
    alone = Sending()
    engine = pool.submit(received, alone.plan(UNEVEN, 1))
    checksums.add(alone.send(alone.plan(UNEVEN), UNEVEN).checksum)
    engine.result(timeout=PATIENCE_S)
    assert len(checksums) == 1, "the same weights have the same checksum, whoever sends which rows"


def test_a_rank_sends_no_more_than_its_rows_in_the_engines_type() -> None:
    plan = Sending(num_trainers=2).plan([("weight", torch.zeros(1 << 10, 1 << 10))])
    (bucket,) = plan.buckets()
    for message in bucket.messages:
        assert (1 << 20) < message.num_bytes < (1 << 20) + 2048, "half of 1024 · 1024 bfloat16, and a hash"
    assert plan.num_bytes == bucket.num_bytes == 2 << 20


def test_a_tensor_list_is_the_same_after_the_database() -> None:
    found = wire(UNEVEN, 3, {"weight(7,)": "weight(2,)"})
    assert from_json(to_json(found)) == found


def test_a_tied_tensor_travels_once_and_arrives_under_both_names(pool: ThreadPoolExecutor) -> None:
    sending, tied = Sending(), {"layer.3": "layer.0"}
    tensors = [*TENSORS[:3], ("layer.3", TENSORS[0][1]), *TENSORS[4:]]
    engine = pool.submit(received, sending.plan(tensors, 1, tied=tied))
    sent = sending.send(sending.plan(tensors, tied=tied), tensors)
    taken, checksum = engine.result(timeout=PATIENCE_S)
    assert dict(taken).keys() == dict(tensors).keys() and checksum == sent.checksum
    assert all(torch.equal(dict(taken)[name], tensor.bfloat16()) for name, tensor in tensors)
    assert sent.num_bytes == 2 * sum(tensor.numel() for name, tensor in tensors if name != "layer.3")


class Corrupting(TransferSender):
    """Turns one bit of the second bucket after its hashes were taken."""

    def _pack(self, bucket: Any, *others: Any) -> Tensor:
        packed = super()._pack(bucket, *others)
        if others[-1] == 1:
            packed[bucket.messages[self.rank].pieces[0].start + 5] ^= 1
        return packed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_byte_that_changes_on_the_way_is_caught_before_its_bucket_is_loaded(
    pool: ThreadPoolExecutor, rank: int
) -> None:
    sending = Sending(num_trainers=2)
    sending.senders[rank] = Corrupting(rank)
    plan = sending.plan(TENSORS)
    engine = pool.submit(received, sending.plan(TENSORS, 2))
    senders = [pool.submit(sending.send, plan, TENSORS, number) for number in range(2)]
    first, second, *_ = plan.buckets()
    with pytest.raises(TransferError, match=f"{second.slots[0].name} arrived with other bytes") as caught:
        engine.result(timeout=PATIENCE_S)
    assert caught.value.is_half_applied, "the first bucket was in order, and is loaded"
    assert len(first.slots) < len(TENSORS)
    for sender in senders:
        with contextlib.suppress(GroupError):  # or it had sent everything before
            sender.result(timeout=PATIENCE_S)


def test_members_of_different_transfers_do_not_exchange_weights(pool: ThreadPoolExecutor) -> None:
    sending = Sending()
    engine = pool.submit(received, sending.plan(TENSORS, 1, transfer_id=7))
    # The engine leaves the group; the sender notices, or had sent everything before.
    with contextlib.suppress(GroupError):
        sending.send(sending.plan(TENSORS, transfer_id=8), TENSORS)
    with pytest.raises(TransferError, match="another transfer") as caught:
        engine.result(timeout=PATIENCE_S)
    assert not caught.value.is_half_applied


def test_a_communicator_that_does_nothing_is_caught() -> None:
    """vLLM's NCCL communicator is one if its library does not load: collectives succeed at once and move nothing."""
    group: Any = FakeProcessGroup._create_internal(rank=1, world_size=3)
    members = torch.tensor([0, 1, 0])
    group.allreduce([members]).wait()
    with pytest.raises(GroupError, match="does not connect its 3 members"):
        refuse_missing(members, group_id=1)
    refuse_missing(torch.ones(3, dtype=torch.int64), group_id=1)


def test_a_member_that_does_not_come_ends_the_wait(pool: ThreadPoolExecutor) -> None:
    sending = Sending(num_engines=2, timeout_s=1.0)
    engine = pool.submit(received, sending.plan(TENSORS, 1))
    sender = pool.submit(sending.send, sending.plan(TENSORS), TENSORS)
    with pytest.raises(GroupError, match="does not come together"):
        sender.result(timeout=PATIENCE_S)
    with pytest.raises(TransferError) as caught:
        engine.result(timeout=PATIENCE_S)
    assert not caught.value.is_half_applied


def test_an_engine_whose_trainer_died_before_it_connects_does_not_wait_for_long(pool: ThreadPoolExecutor) -> None:
    sending = Sending(timeout_s=FAR_S)
    with socket.socket() as bound:  # its port is taken, and nothing listens there
        bound.bind((LOOPBACK, 0))
        engine = pool.submit(received, replace(sending.plan(TENSORS, 1), port=bound.getsockname()[1]))
        with pytest.raises(TransferError) as caught:
            engine.result(timeout=PATIENCE_S)
    assert not caught.value.is_half_applied


def test_an_engine_whose_trainer_is_suspended_asks_whether_it_is_still_wanted_and_gives_up() -> None:
    asked: list[int] = []
    with socket.create_server(
        (LOOPBACK, 0)
    ) as silent:  # the system accepts connections for a process that does not run
        address = silent.getsockname()[:2]
        with pytest.raises(GroupError, match="does not answer within 1 s"):
            TransferGroup("gloo", address, next(_group_ids), 1, 2, 1.0, lambda: asked.append(1))
        assert asked

        def no_longer_wanted() -> None:
            raise ModelError("another claim")

        with pytest.raises(ModelError, match="another claim"):
            TransferGroup("gloo", address, next(_group_ids), 1, 2, FAR_S, no_longer_wanted)


@pytest.mark.parametrize("adapters", [None, {"r": 4}])
def test_adapters_are_loaded_only_when_all_of_them_have_arrived(
    pool: ThreadPoolExecutor, adapters: dict[str, int] | None
) -> None:
    sending, taken = Sending(), list[tuple[str, Tensor]]()
    plan = replace(sending.plan(TENSORS), adapters=adapters)

    def breaks_off() -> Iterator[tuple[str, Tensor]]:
        yield from TENSORS[:7]
        raise OSError("the trainer fails")

    engine = pool.submit(TransferReceiver().receive, replace(plan, first_rank=1), 0, taken.extend)
    with pytest.raises(OSError, match="the trainer fails"):
        sending.send(plan, breaks_off())
    with pytest.raises(TransferError) as caught:
        engine.result(timeout=PATIENCE_S)
    assert caught.value.is_half_applied is (adapters is None)
    assert bool(taken) is (adapters is None)


def receive_and_be_killed(plan: TransferPlan) -> None:
    def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
        next(tensors)
        os.kill(os.getpid(), signal.SIGKILL)

    TransferReceiver().receive(plan, 0, load)


def test_an_engine_killed_in_the_middle_does_not_hang_the_others(pool: ThreadPoolExecutor) -> None:
    sending = Sending(num_engines=2, timeout_s=FAR_S)
    # Buckets enough that the sender cannot have put all of them into the sockets' buffers.
    tensors: Tensors = [(f"layer.{i}", torch.randn(1000, 1000)) for i in range(16)]
    killed = PreloadedCall(receive_and_be_killed, sending.plan(tensors, 2))
    try:
        survivor = pool.submit(received, sending.plan(tensors, 1))
        sender = pool.submit(sending.send, sending.plan(tensors), tensors)
        with pytest.raises(GroupError, match="broke off"):
            sender.result(timeout=PATIENCE_S)
        with pytest.raises(TransferError):
            survivor.result(timeout=PATIENCE_S)
        assert killed.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    finally:
        killed.kill()
        killed.wait()


def join_and_wait(plan: TransferPlan) -> None:
    group = TransferGroup("gloo", (plan.host, plan.port), plan.group_id, 1, 2, plan.timeout_s)
    group.broadcast(torch.zeros(1), 0).wait()


def test_a_member_whose_process_has_ended_is_noticed_without_any_error_of_a_connection() -> None:
    # gloo loses the error at times, after which both sides would wait to the end of the time limit.
    sending = Sending(timeout_s=FAR_S)
    member = PreloadedCall(join_and_wait, sending.plan(TENSORS, 1))
    try:
        group = TransferGroup("gloo", sending.store, sending.group_id, 0, 2, FAR_S)
        assert not group.is_broken()
        member.kill()
        member.wait()
        assert group.is_broken()
        group.abort()
    finally:
        member.kill()
        member.wait()


def send_and_fail(plan: TransferPlan, fails: str) -> None:
    """Run rank 1 of two, which fails in the middle of the tensors."""

    def rows() -> Iterator[HeldRows]:
        tensors = [(tensor.name, torch.zeros(tensor.shape)) for tensor in plan.tensors]
        for number, each in enumerate(held(tensors, 1, 2)):
            if number == 4:
                if fails == "raises":
                    raise MemoryError
                os.kill(os.getpid(), signal.SIGKILL if fails == "is killed" else signal.SIGSTOP)
            yield each

    print("started", flush=True)
    TransferSender(1).send(plan, rows())


@pytest.mark.parametrize("fails", ["raises", "is killed", "hangs"])
def test_a_rank_of_the_trainer_that_fails_ends_the_transfer_on_all_sides(pool: ThreadPoolExecutor, fails: str) -> None:
    tensors: Tensors = [(f"layer.{i}", torch.randn(1000, 1000)) for i in range(8)]
    # Only where no connection ends the wait does the time limit, within which all must have come together.
    sending = Sending(num_engines=1, num_trainers=2, timeout_s=6.0 if fails == "hangs" else FAR_S)
    other = PreloadedCall(
        send_and_fail, sending.plan(tensors), fails, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"started\n"
        engine = pool.submit(received, sending.plan(tensors, 2))
        first = pool.submit(sending.send, sending.plan(tensors), tensors, 0)
        with pytest.raises(GroupError):
            first.result(timeout=PATIENCE_S)
        with pytest.raises(TransferError) as caught:
            engine.result(timeout=PATIENCE_S)
        assert caught.value.is_half_applied, "the first buckets are loaded while the others travel"
        assert sending.senders[0].group is None
    finally:
        other.kill()
        other.wait()
        if other.stdout is not None:
            other.stdout.close()


def test_a_member_that_leaves_while_its_calls_hang_is_noticed_by_the_one_that_formed_the_group(
    pool: ThreadPoolExecutor,
) -> None:
    """Its connections stay open while its calls hang, until their time limit."""
    store, number = open_store(LOOPBACK, 10.0), next(_group_ids)
    places = [store, (LOOPBACK, store.port), (LOOPBACK, store.port)]
    joined = [pool.submit(TransferGroup, "gloo", place, number, rank, 3, 10.0) for rank, place in enumerate(places)]
    first, leaves, silent = (each.result(timeout=PATIENCE_S) for each in joined)
    leaves.broadcast(torch.zeros(1), 2)
    leaves.abort()
    with pytest.raises(GroupError, match="another member has left"):
        first.broadcast(torch.zeros(1), 2).wait()
    for group in (first, silent):
        group.abort()


def odd(number: int, stream: int) -> int:
    """splitmix64, made odd."""
    limit = (1 << 64) - 1
    z = (number * 0x9E3779B97F4A7C15 + stream) & limit
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & limit
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & limit
    return (z ^ (z >> 31)) | 1


def in_blocks(content: bytes, offset: int) -> Tensor:
    """The blocks of its tensor that a part touches, zeros around it."""
    start = offset % 1024
    framed = bytes(start) + content + bytes(-(start + len(content)) % 1024)
    return torch.frombuffer(bytearray(framed), dtype=torch.uint8)


def hash_of(content: bytes) -> int:
    return int(hashes_of(in_blocks(content, 0), [(0, len(content))]).item())


def test_the_hash_is_the_formula_of_its_docstring() -> None:
    content = random.Random(1).randbytes(2 * 1024 + 6)
    numbers = [
        int.from_bytes(content[i : i + 4], "little", signed=len(content) >= i + 4) for i in range(0, len(content), 4)
    ]
    expected = len(content) + sum(odd(1 + i // 256, 1) * odd(1 + i % 256, 0) * x for i, x in enumerate(numbers))
    assert hash_of(content) % (1 << 64) == expected % (1 << 64)


@given(st.integers(1, 6000), st.lists(st.integers(0, 3000), max_size=4), st.integers(0, 99))
def test_the_hashes_of_the_parts_of_a_tensor_add_up_to_its_own(num_words: int, cuts: list[int], seed: int) -> None:
    """Wherever it is cut: also within the numbers that are hashed, which are of 4 bytes, with elements of 2."""
    content = random.Random(seed).randbytes(2 * num_words)
    places = sorted({0, len(content), *(2 * cut for cut in cuts if 2 * cut < len(content))})
    spans = [(first, end - first) for first, end in itertools.pairwise(places)]
    packed = torch.cat([in_blocks(content[first : first + size], first) for first, size in spans])
    assert (sum(hashes_of(packed, spans).tolist()) - hash_of(content)) % (1 << 64) == 0


@pytest.mark.parametrize("num_words", [1, 2, 127, 128, 129, 70_003])
def test_every_small_change_gives_another_hash(num_words: int) -> None:
    generator = torch.Generator().manual_seed(num_words)
    words = torch.randint(-(1 << 62), 1 << 62, (num_words,), generator=generator)

    def hashed(changed: Tensor) -> int:
        return hash_of(changed.contiguous().numpy().tobytes())

    bits = [torch.arange(num_words) == place for place in sorted({0, num_words // 2, num_words - 1})]
    changes = [words ^ (one.long() << bit) for one in bits for bit in (0, 15, 31, 33, 63)]
    # Two changed signs, as of two weights: where they are alone in the high bits of their words they must not cancel.
    changes += [
        words ^ (one.long() << bit) ^ (two.long() << bit)
        for one, two in itertools.combinations(bits, 2)
        for bit in (31, 63)
    ]
    changes += [torch.cat([words, torch.zeros(1, dtype=torch.int64)]), ~words]
    if num_words > 2:
        changes += [words.roll(1), torch.cat([words[1:2], words[:1], words[2:]]), words.flip(0)]
    if num_words > 256:
        changes.append(torch.cat([words[128:256], words[:128], words[256:]]))  # blocks that change places
    found = {hashed(changed) for changed in changes}
    assert len(found) == len(changes) and hashed(words) not in found
    assert hashed(words.clone()) == hashed(words)


@pytest.mark.parametrize(
    ("trainer", "engines", "backend"),
    [
        ("cpu", ["cpu"], "gloo"),
        ("GPU-1", ["GPU-2", "cpu"], "gloo"),
        ("GPU-1", ["GPU-1"], "ipc"),
        ("GPU-1", ["GPU-1", "GPU-2"], "gloo"),
        ("GPU-1", ["GPU-2,GPU-3", "GPU-3"], "gloo"),
        ("GPU-1", ["GPU-2,GPU-3", "GPU-4"], "nccl"),
        ("GPU-1,GPU-2", ["GPU-3"], "nccl"),
        ("GPU-1,GPU-2", ["GPU-2"], "gloo"),
    ],
)
def test_nccl_is_chosen_if_every_process_has_its_own_gpu(trainer: str, engines: list[str], backend: str) -> None:
    assert choose_backend(trainer, engines)[0] == backend


class Live:
    """A real engine, and the model whose weights it is sent."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = folder
        path = make_tiny_model(folder / "model", tied=True, hidden_size=64, num_layers=1)
        self.engine = TransformersEngine(path, CONFIG)
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.first = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.seeds = itertools.count(1)
        self.prompt: list[int] = self.engine.tokenizer.encode("u:1+2=\na:")

    def state(self) -> Tensors:
        """The model's weights, different at every call, with the head that it ties to its embedding."""
        random = torch.Generator().manual_seed(next(self.seeds))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                first = self.first[name]
                parameter.copy_(first + torch.randn(first.shape, generator=random) * first.std())
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
    assert taken.result(timeout=PATIENCE_S) == sent.checksum
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
        taken.result(timeout=PATIENCE_S)
    assert caught.value.is_half_applied

    asked, num_tokens = threading.Event(), live.engine.num_generated_tokens

    async def ask() -> Generation:
        request = asyncio.create_task(live.greedy())
        await asyncio.sleep(0)  # now the engine has it
        asked.set()
        return await request

    waiting: Future[Generation] = pool.submit(asyncio.run, ask())
    assert asked.wait(PATIENCE_S)
    for _ in range(2):  # it takes commands in their order; between these two it would have sampled
        assert not live.engine.wake(), "its weights are mixed"
    assert live.engine.num_generated_tokens == num_tokens
    if repair == "transfer":
        again = Sending()
        taken = pool.submit(live.engine.receive_weights, again.plan(state, 1), 7)
        again.send(again.plan(state), state)
        taken.result(timeout=PATIENCE_S)
    else:
        file = write_atomically(live.folder / "weights", lambda draft: write_weights(state, draft))
        live.engine.load_weights(file.uri, 7, file.checksum)
    assert waiting.result(timeout=PATIENCE_S).version_spans == [(0, 7)]
    assert live.is_current()


def test_the_sender_takes_all_tensors_even_if_the_engines_fail() -> None:
    """The ranks of a trainer produce tensors together: one that stopped early would block the others."""
    sending = Sending()
    gone = TransferReceiver()
    taken: list[str] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in TENSORS:
            taken.append(name)
            yield name, tensor

    with ThreadPoolExecutor() as pool:
        group = pool.submit(TransferGroup, "gloo", (LOOPBACK, sending.store.port), sending.group_id, 1, 2, PATIENCE_S)
        joined = pool.submit(sending.senders[0].join, sending.plan(TENSORS), 0, sending.store)
        gone.group = group.result(timeout=PATIENCE_S)
        joined.result(timeout=PATIENCE_S)
    gone.leave()
    with pytest.raises(GroupError):
        sending.send(sending.plan(TENSORS), tensors())
    assert taken == [name for name, _ in TENSORS]
