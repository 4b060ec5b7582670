"""`sync.method: nccl` on a real buffer, by gloo: offers, acknowledgements and groups, with engines that come, sleep, differ and are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rftdata
from rftcore.engines.base import EngineConfig
from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.reporting.report import build_report
from rftcore.reporting.table import print_report
from rftcore.sync.base import LIVE_URI, Publication
from rftcore.sync.fallback import LivePublisher
from rftcore.sync.files.adapters_file import PREFIX
from rftcore.sync.files.weights_file import iterate_weights, write_atomically
from rftcore.sync.transfer.explorer_side import LiveReceiver
from rftcore.sync.transfer.group import TransferGroup
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.receiver import TransferReceiver
from rftcore.sync.transfer.reception import Reception
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.policies import newest_policy
from rftdata.config import SyncConfig
from rftdata.errors import FencedError, RftError
from rftdata.workers.worker import Worker
from tests.support.models import make_tiny_model
from tests.support.sending import OneRank
from tests.support.store_roles import taken_over
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.weights import complete_state, write_weights

# No test waits for these limits, except where an explorer must not acknowledge (`IMPATIENT`).
SYNC = SyncConfig(method="nccl", acknowledge_s=PATIENCE_S, timeout_s=2 * PATIENCE_S, bucket_mib=1)
IMPATIENT = SYNC.model_copy(update={"acknowledge_s": 5.0})
RECEPTION = Reception(dtype="bfloat16", device="cpu", num_ranks=1)
Tensors = dict[str, Tensor]


class Model(OneRank):
    """The trainer's weights, in more buckets of the smallest size than are on their way at once."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.path = path
        self._model = AutoModelForCausalLM.from_pretrained(path)

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter))

    @property
    def state(self) -> Tensors:
        return complete_state(self._model.named_parameters())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.state.items()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_tiny_model(tmp_path_factory.mktemp("model") / "model", hidden_size=256, num_layers=6))


class Crew:
    """A run whose trainer is the test, with explorers that do nothing but take weights."""

    def __init__(self, buffer: rftdata.Buffer, model: Model, folder: Path) -> None:
        self.buffer, self.model, self.folder = buffer, model, folder
        self.run = buffer.create_run(name="live", config={}, seed=1, steps=9, pipeline_version="p1")
        self.files: list[str] = []
        self.choices: list[str] = []

    def trainer(self, attempt: Attempt, sync: SyncConfig = SYNC) -> LivePublisher:
        return LivePublisher(attempt, sync, self.model, self.write_file, self.choices.append)

    def write_file(self, name: str) -> Publication:
        self.files.append(name)
        return write_atomically(self.folder / name, lambda draft: write_weights(self.model.tensors(), draft))

    def rows(self, query: str) -> list[dict[str, Any]]:
        return self.buffer.sql(query).to_pylist()

    def outcomes(self) -> list[tuple[int, str]]:
        """(transfer, status) of all receipts, in order."""
        query = "select transfer_id, status::text as status from rft.weight_receipt order by transfer_id, worker_id"
        return [(row["transfer_id"], row["status"]) for row in self.rows(query)]


class Explorer:
    """A thread with an engine that takes the run's newest weights, as an explorer's loop does, until it is stopped."""

    def __init__(
        self,
        crew: Crew,
        dtype: Any = "bfloat16",
        *,
        asleep: bool = False,
        kv_cache: Any = "recompute",
        wide: str = "",
        adapter_rank: int | None = None,
    ) -> None:
        self.crew = crew
        self.worker = Worker(crew.run, "explorer")
        settings = EngineConfig(dtype=dtype, num_threads=1, adapter_rank=adapter_rank)
        self.engine = TransformersEngine(crew.model.path, settings)
        self.dtype = getattr(torch, dtype)
        if wide:
            self.engine._model.get_submodule(wide).float()
        reception = replace(self.engine.reception, kv_cache=kv_cache)
        self.receiver = LiveReceiver(
            crew.run,
            self.worker.worker_id,
            SYNC,
            reception,
            self.engine.receive_weights,
            self.engine.refuse_unfit,
        )
        self.receiver.set_ready(True)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work)
        if not asleep:
            self.wake()

    def wake(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        while not self._stopped.is_set():
            policy = newest_policy(self.crew.run)
            if policy is not None and policy.policy_version_id != self.engine.policy_version_id:
                if policy.uri == LIVE_URI:
                    self.receiver.take(policy, self._stopped.is_set)
                else:
                    self.engine.load_weights(policy.uri, policy.policy_version_id, policy.checksum)
            self.receiver.wait(0.1)

    def has(self, version: int) -> bool:
        """Whether the engine's weights are the trainer's, in the engine's type, under this version."""
        found = self.engine._model.state_dict()
        expected = self.crew.model.state.items()
        return self.engine.policy_version_id == version and all(
            torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in expected
        )

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self.receiver.leave()
        self.worker.stop()
        self.engine.close()


@pytest.fixture
def crew(buffer: rftdata.Buffer, model: Model, tmp_path: Path) -> Crew:
    return Crew(buffer, model, tmp_path)


@pytest.fixture
def attempt(crew: Crew) -> Iterator[Attempt]:
    with crew.buffer.attempt(crew.run) as attempt:
        yield attempt


@pytest.fixture
def join(crew: Crew) -> Iterator[Callable[..., Explorer]]:
    explorers: list[Explorer] = []

    def joined(**settings: Any) -> Explorer:
        explorers.append(Explorer(crew, **settings))
        return explorers[-1]

    yield joined
    for explorer in explorers:
        explorer.stop()


@pytest.fixture
def trainer(crew: Crew, attempt: Attempt) -> Iterator[LivePublisher]:
    trainer = crew.trainer(attempt)
    yield trainer
    trainer.close()


@pytest.fixture
def impatient_trainer(crew: Crew, attempt: Attempt) -> Iterator[LivePublisher]:
    trainer = crew.trainer(attempt, IMPATIENT)
    yield trainer
    trainer.close()


class Stuck:
    """An engine that gets as far as `until` in a transfer, and then keeps the trainer waiting."""

    def __init__(self, crew: Crew, until: str) -> None:
        self.crew, self.until = crew, until
        self.waits = threading.Event()
        self._released = threading.Event()
        self.worker = Worker(crew.run, "explorer")
        self.receiver = LiveReceiver(crew.run, self.worker.worker_id, SYNC, RECEPTION, self.receive)
        self.receiver.set_ready(True)
        self._thread = threading.Thread(target=self._work)
        if until == "offered":
            self.waits.set()
        else:
            self._thread.start()

    def receive(self, plan: TransferPlan, version: int) -> str:
        end = TransferReceiver()
        if self.until == "joined":
            end.group = TransferGroup(
                plan.backend, (plan.host, plan.port), plan.group_id, plan.first_rank, plan.num_ranks, plan.timeout_s
            )
        if self.until == "received":
            end.receive(plan, 0, list)
        self.waits.set()
        self._released.wait()
        end.leave()
        raise RftError("it was stuck")

    def _work(self) -> None:
        wait_until(lambda: newest_policy(self.crew.run))
        policy = newest_policy(self.crew.run)
        assert policy is not None
        while not self.waits.is_set():
            self.receiver.take(policy, self._released.is_set)

    def stop(self) -> None:
        self._released.set()
        if self._thread.is_alive():
            self._thread.join()
        self.receiver.leave()
        self.worker.stop()


@pytest.mark.parametrize("until", ["offered", "acknowledged", "joined", "received"])
def test_a_trainer_whose_run_was_taken_over_waits_for_no_engine(crew: Crew, attempt: Attempt, until: str) -> None:
    """It ends its waits for an acknowledgement, at the meeting place, for the engine's part in a call, and for a receipt."""
    stuck = Stuck(crew, until)
    trainer = crew.trainer(
        attempt, SYNC.model_copy(update={"acknowledge_s": 10 * PATIENCE_S, "timeout_s": 10 * PATIENCE_S})
    )
    try:
        with ThreadPoolExecutor() as pool:
            life = pool.submit(trainer.publish, 0)
            wait_until(lambda: stuck.waits.is_set() and crew.rows("select transfer_id from rft.weight_transfer"))
            with taken_over(crew.buffer, crew.run), pytest.raises(FencedError):
                life.result(PATIENCE_S)
            trainer.close()
    finally:
        stuck.stop()


@pytest.mark.parametrize("container", ["this", "another"])
def test_the_trainer_meets_processes_of_another_container_of_its_host_name_at_its_address(
    crew: Crew, attempt: Attempt, join: Callable[..., Explorer], container: str
) -> None:
    explorer = join()
    if container == "another":
        crew.buffer.sql("UPDATE rft.worker SET pid_space = 'kernel.1' WHERE role = 'explorer'")
    trainer = crew.trainer(attempt, SYNC.model_copy(update={"address": "127.0.0.2"}))
    try:
        assert explorer.has(trainer.publish(0))
    finally:
        trainer.close()
    (row,) = crew.rows("select address from rft.weight_transfer")
    assert row["address"].partition(":")[0] == ("127.0.0.1" if container == "this" else "127.0.0.2")


def test_explorers_come_and_go_between_versions(
    crew: Crew, trainer: LivePublisher, join: Callable[..., Explorer]
) -> None:
    first, second = join(), join()
    versions = [trainer.publish(0), trainer.publish(1)]
    assert first.has(versions[1]) and second.has(versions[1])
    crew.model.change()
    assert not first.has(versions[1])
    third = join()
    version = trainer.publish(2)
    assert first.has(version) and second.has(version) and third.has(version)
    second.stop()
    crew.model.change()
    assert first.has(trainer.publish(3))
    assert third.has(trainer.publish(4))
    transfers = crew.rows(
        "select group_id, num_ranks, backend, dtype, status::text as status, error, num_bytes from rft.weight_transfer order by transfer_id"
    )
    assert [(row["group_id"], row["num_ranks"]) for row in transfers] == [(1, 3), (1, 3), (3, 4), (4, 3), (4, 3)]
    assert {(row["backend"], row["dtype"], row["status"], row["error"]) for row in transfers} == {
        ("gloo", "bfloat16", "ended", None)
    }
    num_weights = sum(tensor.numel() for tensor in crew.model.state.values())
    assert {row["num_bytes"] for row in transfers} == {2 * num_weights}, "float32 would be twice that"
    assert set(crew.outcomes()) == {(n, "applied") for n in range(1, 6)}
    assert crew.files == []
    why = "not all of trainer and engines have GPUs"
    assert crew.choices == [f"into {n} live engines by gloo: {why}" for n in (2, 3, 2)]
    checksums = crew.rows("select checksum, uri from rft.policy_version order by policy_version_id")
    assert [row["uri"] for row in checksums] == [LIVE_URI] * 5
    same = [row["checksum"] for row in checksums]
    assert same[0] == same[1] != same[2] != same[3] == same[4]


def test_receipts_and_the_report_show_whether_the_kv_cache_was_kept(
    crew: Crew, trainer: LivePublisher, join: Callable[..., Explorer], capsys: pytest.CaptureFixture[str]
) -> None:
    join(), join(kv_cache="keep")
    trainer.publish(0)
    trainer.publish(1)
    rows = crew.rows("select kv_cache::text as kv_cache from rft.weight_receipt order by transfer_id, worker_id")
    assert [row["kv_cache"] for row in rows] == ["recompute", "keep"] * 2
    report = build_report(crew.buffer)
    assert [(r.kv_cache, r.num_applied, r.num_failed) for r in report.receipts] == [("recompute", 2, 0), ("keep", 2, 0)]
    assert all(r.mean_pause_s and r.max_pause_s and 0 < r.mean_pause_s <= r.max_pause_s for r in report.receipts)
    print_report([report])
    printed = " ".join(capsys.readouterr().out.split())
    assert "live weights, KV cache recomputed 2 applied, 0 failed; engines paused for" in printed
    assert "live weights, KV cache kept 2 applied, 0 failed; engines paused for" in printed


def test_auto_uses_files_without_gpus_and_names_the_reason(
    crew: Crew, attempt: Attempt, join: Callable[..., Explorer]
) -> None:
    join()
    trainer = crew.trainer(attempt, SYNC.model_copy(update={"method": "auto"}))
    trainer.publish(0)
    trainer.publish(1)
    trainer.close()
    assert crew.choices == ["through files (memory): not all of trainer and engines have GPUs"]
    assert crew.files == ["step-000000", "step-000001"] and crew.outcomes() == []


def test_adapters_go_alone_into_engines_of_any_type(
    crew: Crew, attempt: Attempt, join: Callable[..., Explorer]
) -> None:
    """They are sent in float32, as in files: an engine of bfloat16 keeps them in that type, beside its weights."""
    half, full = join(adapter_rank=4), join(dtype="float32", adapter_rank=4)
    name = "model.layers.2.mlp.down_proj.weight"
    num_outputs, num_inputs = crew.model.state[name].shape
    a, b = torch.randn(4, num_inputs), torch.randn(num_outputs, 4)

    class Adapters(OneRank):
        def tensors(self) -> Iterator[tuple[str, Tensor]]:
            layer = PREFIX + name.removesuffix(".weight")
            yield from [(f"{layer}.lora_A.weight", a), (f"{layer}.lora_B.weight", b)]

    config = {"r": 4, "lora_alpha": 8}
    trainer = LivePublisher(attempt, SYNC, Adapters(), crew.write_file, crew.choices.append, config)
    version = trainer.publish(0)
    b += 1
    version = trainer.publish(1)
    trainer.close()
    base = dict(iterate_weights(crew.model.path / "model.safetensors"))
    for explorer in (half, full):
        found = explorer.engine._model.state_dict()
        assert explorer.engine.policy_version_id == version
        assert [
            torch.equal(ours, sent)
            for ours, sent in zip(explorer.engine._adapters.tensors.values(), (a, b), strict=True)
        ] == [True] * 2
        assert all(torch.equal(found[other], base[other].to(explorer.dtype)) for other in base)
    assert crew.choices == ["adapters alone, into 2 live engines by gloo: not all of trainer and engines have GPUs"]
    assert crew.outcomes() == [(1, "applied")] * 2 + [(2, "applied")] * 2 and crew.files == []
    transfer = crew.rows("select dtype, num_bytes, adapters from rft.weight_transfer order by transfer_id")[0]
    assert transfer == {"dtype": "float32", "num_bytes": 4 * (a.numel() + b.numel()), "adapters": config}


def test_weights_go_into_a_file_while_no_engine_is_there(
    crew: Crew, trainer: LivePublisher, join: Callable[..., Explorer]
) -> None:
    version = trainer.publish(0)
    assert crew.files == ["step-000000"]
    late = join()
    wait_until(lambda: late.has(version))
    assert crew.rows("select method from rft.policy_version") == [{"method": "memory"}]


def test_an_engine_that_does_not_acknowledge_in_time_is_sent_the_weights_when_it_asks(
    crew: Crew, impatient_trainer: LivePublisher, join: Callable[..., Explorer]
) -> None:
    trainer, awake, stale = impatient_trainer, join(), join(asleep=True)
    version = trainer.publish(0)
    assert awake.has(version) and not stale.has(version)
    assert crew.outcomes() == [(1, "applied")]
    assert crew.files == []
    stale.wake()

    def serve() -> bool:
        trainer.serve_missed(version)  # as the trainer does while it waits for groups
        return stale.has(version)

    wait_until(serve)
    assert crew.outcomes() == [(1, "applied"), (2, "applied")] and crew.files == []
    crew.model.change()
    version = trainer.publish(1)
    assert awake.has(version) and stale.has(version)


def test_weights_that_no_engine_took_are_sent_when_an_engine_asks_for_them(
    crew: Crew, impatient_trainer: LivePublisher, join: Callable[..., Explorer]
) -> None:
    trainer, only = impatient_trainer, join(asleep=True)
    version = trainer.publish(0)
    assert crew.outcomes() == [] and trainer.live_since is None
    only.wake()

    def serve() -> bool:
        trainer.serve_missed(version)
        return only.has(version)

    wait_until(serve)
    assert crew.files == [] and trainer.live_since == 0
    [row] = crew.rows("select uri, checksum from rft.policy_version")
    assert row == {"uri": LIVE_URI, "checksum": trainer.publication.checksum} and row["checksum"]


def test_an_engine_of_another_type_is_left_out_with_the_reason(
    crew: Crew, trainer: LivePublisher, join: Callable[..., Explorer]
) -> None:
    half, full = join(), join(dtype="float32")
    version = trainer.publish(0)
    assert half.has(version)
    error = crew.rows("select error from rft.weight_receipt where status = 'failed'")[0]["error"]
    assert error == f"its engine is float32, that of explorer {half.worker.worker_id} is bfloat16"

    def serve() -> bool:
        trainer.serve_missed(version)
        return full.has(version)

    wait_until(serve)


def test_an_engine_gets_in_float32_the_weights_that_it_keeps_in_float32(
    crew: Crew, trainer: LivePublisher, join: Callable[..., Explorer]
) -> None:
    """The other engine rounds them, as the trainer would have done."""
    wide = "model.layers.1.post_attention_layernorm"
    norm, plain = join(wide=wide), join()
    crew.model.change()
    version = trainer.publish(0)
    assert norm.has(version) and plain.has(version)
    found = {explorer: explorer.engine._model.get_submodule(wide).weight for explorer in (norm, plain)}
    assert found[norm].dtype == torch.float32 and found[plain].dtype == torch.bfloat16
    assert not torch.equal(found[norm], found[norm].bfloat16().float()), "rounding would show"
    sent = crew.rows("select in_float32, num_bytes from rft.weight_transfer")[0]
    num_weights = sum(tensor.numel() for tensor in crew.model.state.values())
    assert sent["in_float32"] == [f"{wide}.weight"] and sent["num_bytes"] == 2 * (num_weights + len(found[norm]))
    receipts = crew.rows("select in_float32 from rft.weight_receipt order by worker_id")
    assert [row["in_float32"] for row in receipts] == [[f"{wide}.weight"], []]
    plan = TransferPlan(
        transfer_id=7,
        group_id=7,
        backend="gloo",
        host="",
        port=0,
        num_ranks=2,
        first_rank=1,
        dtype="bfloat16",
        bucket_bytes=1,
        timeout_s=1,
        tensors=crew.model.weight_tensors(),
    )
    with pytest.raises(
        RftError, match=r"rounds tensors that the engine keeps in float32 \(got .model\.layers\.1\.post"
    ):
        norm.engine.receive_weights(plan, 9)


def test_an_engine_does_not_acknowledge_weights_without_the_head_that_its_model_ties(
    crew: Crew, attempt: Attempt, join: Callable[..., Explorer]
) -> None:
    """If it did, and then refused them, the whole group would wait for it."""
    join()

    class Headless(OneRank):
        def tensors(self) -> Iterator[tuple[str, Tensor]]:
            yield from ((name, tensor) for name, tensor in crew.model.tensors() if name != "lm_head.weight")

    trainer = LivePublisher(attempt, SYNC.model_copy(update={"acknowledge_s": 1.5}), Headless(), crew.write_file)
    version = trainer.publish(0)
    wanted = "select wanted_version from rft.weight_receiver"
    wait_until(lambda: crew.rows(wanted) == [{"wanted_version": version}], "a refusal")
    trainer.serve_missed(version)
    trainer.close()
    assert crew.outcomes() == []
    assert crew.files == ["step-000000"]


@pytest.mark.parametrize("file_s", [0.0, PATIENCE_S])
def test_busy_engines_are_waited_for_as_long_as_a_file_would_take(
    crew: Crew, trainer: LivePublisher, join: Callable[..., Explorer], file_s: float
) -> None:
    explorer = join()
    trainer.publish(0)
    trainer._file_s = file_s
    explorer.receiver.set_ready(False)
    crew.model.change()
    with ThreadPoolExecutor() as pool:
        publishing = pool.submit(trainer.publish, 1)
        if file_s:
            wait_until(lambda: crew.rows("select 1 from rft.weight_receiver where not ready"))
            assert not publishing.done()
            explorer.receiver.set_ready(True)
        version = publishing.result()
    assert crew.files == ([] if file_s else ["step-000001"])
    wait_until(lambda: explorer.has(version))


def test_an_evaluation_gets_a_file_of_weights_that_went_into_engines(
    crew: Crew, trainer: LivePublisher, join: Callable[..., Explorer]
) -> None:
    join()
    version = trainer.publish(0)
    file = trainer.as_file(version)
    assert trainer.as_file(version) is file and crew.files == ["step-000000"]
    newest = newest_policy(crew.run)
    assert newest is not None and (newest.uri, newest.checksum) == (file.uri, file.checksum)


def test_the_trainer_knows_since_when_engines_have_what_was_sent(
    crew: Crew, trainer: LivePublisher, join: Callable[..., Explorer]
) -> None:
    """A version is also a file if there was no engine to send it to, or if an evaluation asks for it."""
    found = []
    for step in range(5):
        if step == 1:
            join()
        crew.model.change()
        version = trainer.publish(step)
        found.append(trainer.live_since)
        if step == 2:
            trainer.as_file(version)
            assert trainer.live_since is None
    assert found == [None, 1, 1, 3, 3]


_KILLED = """
import os, sys, threading
from rftcore.sync.transfer.explorer_side import LiveReceiver
from rftcore.sync.transfer.reception import Reception
from rftcore.sync.transfer.receiver import TransferReceiver
from rftdata import open as open_buffer
from rftdata.config import BufferConfig, SyncConfig
from rftdata.attempts.policies import newest_policy
from rftdata.workers.worker import Worker

def load(tensors):
    next(tensors)
    os.kill(os.getpid(), 9)

buffer = open_buffer(BufferConfig(uri=sys.argv[1], segments=sys.argv[2], min_free_bytes=0))
run = buffer.find_run("live")
worker = Worker(run, "explorer")
receiver = LiveReceiver(
    run,
    worker.worker_id,
    SyncConfig(timeout_s=float(sys.argv[3])),
    Reception(dtype="bfloat16", device="cpu", num_ranks=1),
    lambda plan, version: TransferReceiver().receive(plan, 0, load),
)
receiver.set_ready(True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()  # its starter has ended
print("ready", flush=True)
while True:
    policy = newest_policy(run)
    if policy is not None:
        receiver.take(policy, lambda: False)
    receiver.wait(0.1)
"""


def test_an_engine_killed_in_the_middle_of_a_transfer_is_left_behind(
    crew: Crew, trainer: LivePublisher, join: Callable[..., Explorer], tmp_path: Path
) -> None:
    other = join()
    config = crew.buffer.config
    versions: list[int] = []
    publishing = threading.Thread(target=lambda: versions.append(trainer.publish(0)), daemon=True)
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, config.uri, str(config.segments), str(SYNC.timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)},
    ) as killed:
        try:
            assert killed.stdout is not None and killed.stdout.readline() == "ready\n"
            crew.model.change()
            publishing.start()
            assert killed.wait(timeout=PATIENCE_S) == -signal.SIGKILL
        finally:
            killed.kill()
    publishing.join(PATIENCE_S)
    assert versions, "it waits for the time limit of the transfer"
    (version,) = versions
    assert other.has(version)
    assert not other.engine._has_mixed_weights
    broken, repaired = crew.rows("select num_ranks, error from rft.weight_transfer order by transfer_id")
    assert broken["num_ranks"] == 3 and "broke off" in broken["error"]
    assert repaired == {"num_ranks": 2, "error": None}
    crew.model.change()
    assert other.has(trainer.publish(1))


def test_a_trainer_that_dies_in_the_middle_leaves_an_engine_that_waits_for_the_next_one(
    crew: Crew, join: Callable[..., Explorer]
) -> None:
    explorer = join()

    class BreaksOff(OneRank):
        is_sending = False

        def tensors(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in crew.model.state.items():
                if name == "lm_head.weight" and self.is_sending:
                    raise MemoryError("the trainer is killed here")
                yield name, tensor
            self.is_sending = True  # the first walk is for the list

    with crew.buffer.attempt(crew.run) as attempt:
        trainer = LivePublisher(attempt, SYNC, BreaksOff(), crew.write_file)
        with pytest.raises(MemoryError):
            trainer.publish(0)
        wait_until(lambda: crew.outcomes() == [(1, "failed")])
        trainer.close()
    assert explorer.engine._has_mixed_weights
    with crew.buffer.attempt(crew.run) as attempt:
        trainer = crew.trainer(attempt)
        assert explorer.has(trainer.publish(0))
        trainer.close()
    assert not explorer.engine._has_mixed_weights
