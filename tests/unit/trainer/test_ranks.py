"""Two ranks on the CPU train like one, and no process is left whichever rank ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rftcore.sync.addresses import LOOPBACK
from rftcore.sync.files.weights_stream import layout
from rftcore.sync.tensors import shapes_of
from rftcore.sync.transfer.group import GroupError, open_store
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.receiver import TransferReceiver
from rftcore.trainer.processes.learner_group import LearnerGroup
from rftcore.trainer.processes.shared_batch import SharedBatchMemory
from rftdata.errors import DiskFullError, ModelError, RoleFailedError
from rftdata.processes import process_lives
from rftdata.user_code.blocked_process import EXIT_CODE, read_report
from tests.support.learning import make_batch
from tests.support.preloaded import PreloadedCall
from tests.support.ranks import arguments, hang_while_watched, make_group, update_by_two, write_folder
from tests.support.small_disks import small_disks
from tests.support.waiting import PATIENCE_S, wait_until, wait_until_ended
from tests.support.weights import weights_of

# On a machine of several GPUs the ranks meet through NCCL.
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_folder(folder)
    return folder


def leave_process_group() -> None:
    """Leave the group of ranks that failed: this process is still in it, where a trainer's process would have ended."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="class")
def _no_process_group_left() -> Iterator[None]:
    yield
    leave_process_group()


@dataclass(frozen=True)
class Trained:
    """Metrics of the steps, and the weights after them."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]


def train(group: LearnerGroup) -> Trained:
    batches = [(step, make_batch(step, groups=groups)) for step, groups in ((1, 3), (2, 30), (3, 1))]
    # The first three sequences of a group are branches of one rollout.
    branched = [(step, replace(batch, rollout_index_B=batch.rollout_index_B // 3)) for step, batch in batches]
    metrics = [group.update(batch, step) for step, batch in branched]
    return Trained(metrics, weights_of(group))


@pytest.fixture(scope="class")
def alone(folder: Path) -> Trained:
    """The steps of one rank."""
    group = make_group(folder, 1)
    assert group.pids == []
    trained = train(group)
    leave_process_group()  # of its own, on a GPU
    return trained


@pytest.fixture(scope="class")
def group(folder: Path, alone: Trained) -> Iterator[LearnerGroup]:
    """Two ranks; made after `alone`, whose learner would otherwise join this process's group."""
    group = make_group(folder, 2)
    yield group
    group.close()


class Sending:
    """A transfer group of the ranks and one engine, which is this process."""

    def __init__(self, group: LearnerGroup, timeout_s: float = PATIENCE_S) -> None:
        self.store = open_store(LOOPBACK, timeout_s)
        self.group_id = next(_group_ids)
        self.receiver = TransferReceiver()
        self.plan = TransferPlan(
            transfer_id=1,
            group_id=self.group_id,
            backend="gloo",
            host=LOOPBACK,
            port=self.store.port,
            num_ranks=group.num_ranks + 1,
            first_rank=0,
            tensors=group.weight_tensors(),
            dtype="float32",
            bucket_bytes=1 << 15,
            timeout_s=timeout_s,
        )

    def send(self, group: LearnerGroup, takes: int | None = None) -> dict[str, Tensor]:
        """Send once; return the received weights.

        Args:
            takes: the number of tensors after which the engine fails.
        """
        tensors: dict[str, Tensor] = {}

        def load(arriving: Iterator[tuple[str, Tensor]]) -> None:
            for name, tensor in arriving:
                tensors[name] = tensor.clone()
                if len(tensors) == takes:
                    raise MemoryError("the engine fails")

        with ThreadPoolExecutor() as pool:
            plan = replace(self.plan, first_rank=group.num_ranks)
            taken = pool.submit(self.receiver.receive, plan, 0, load)
            sent = group.send_weights(self.plan, self.store)
            assert taken.result() == sent.checksum
        return tensors


_group_ids = itertools.count(1)


class TestSharedBatch:
    def test_readers_see_the_batch_to_the_bit(self) -> None:
        ours = SharedBatchMemory()
        theirs = SharedBatchMemory(os.dup(ours.fd))
        first = make_batch(0)
        for batch in (
            first,
            replace(first, behavior_logprobs_BT=torch.full_like(first.behavior_logprobs_BT, torch.nan), paired=True),
            replace(
                make_batch(1, groups=300), step_rewards_BA=torch.rand(1200, 1, dtype=torch.float64)
            ),  # the memory grows
            replace(make_batch(2, groups=1), state_BA=torch.empty(0, 1, dtype=torch.int64)),
        ):
            seen = theirs.read(ours.write(batch))
            for field in fields(batch):
                expected, found = getattr(batch, field.name), getattr(seen, field.name)
                if not isinstance(expected, torch.Tensor):
                    assert found == expected, field.name
                    continue
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape), field.name
                assert found.numpy().tobytes() == expected.numpy().tobytes(), field.name
        ours.close()
        theirs.close()

    def test_readers_share_the_writers_memory_and_cannot_change_it(self) -> None:
        ours = SharedBatchMemory()
        theirs = SharedBatchMemory(os.dup(ours.fd))
        batch = make_batch(0)
        seen = theirs.read(ours.write(batch))
        ours.write(replace(batch, rewards_B=batch.rewards_B + 1.0))
        assert torch.equal(seen.rewards_B, batch.rewards_B + 1.0)
        address = seen.rewards_B.data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                assert line.split()[1] == "r--s" and "rft-batch" in line
                break
        else:
            raise AssertionError("the batch lies in no mapping")


class TestTwoRanks:
    """Each test continues with the group of the test before, or with a new one if it runs alone."""

    def test_train_like_one_rank(self, alone: Trained, group: LearnerGroup) -> None:
        assert len(group.pids) == 1
        together = train(group)
        for expected, found in zip(alone.metrics, together.metrics, strict=True):
            for name in ("loss", "grad_norm", "num_tokens"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4), name
        assert together.weights.keys() == alone.weights.keys()
        for name, tensor in alone.weights.items():
            torch.testing.assert_close(together.weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)

    def test_compile_together_and_keep_their_weights(self, group: LearnerGroup) -> None:
        before = weights_of(group)
        group.compile("gradients")
        group.compile("signals")
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(group).items())

    def test_restore_a_checkpoint(self, group: LearnerGroup, tmp_path: Path) -> None:
        group.begin_checkpoint(tmp_path / "checkpoint")
        expected = [group.update(make_batch(step), step)["loss"] for step in (4, 5)]
        group.end_checkpoint()
        group.load_checkpoint(tmp_path / "checkpoint")
        assert [group.update(make_batch(step), step)["loss"] for step in (4, 5)] == expected
        group.save_pretrained(tmp_path / "model")
        assert (tmp_path / "model" / "tokenizer.json").exists()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="by gloo, between CPUs")
    def test_send_their_weights_together(self, group: LearnerGroup) -> None:
        sending = Sending(group)
        taken = [sending.send(group) for _ in range(2)]
        expected = weights_of(group)
        for tensors in taken:
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        assert group.weight_group_id == sending.group_id
        group.update(make_batch(8), 8)
        assert not torch.equal(sending.send(group)["lm_head.weight"], expected["lm_head.weight"])

    @pytest.mark.skipif(torch.cuda.is_available(), reason="by gloo, between CPUs")
    def test_continue_after_an_engine_has_left_a_transfer(self, group: LearnerGroup) -> None:
        sending = Sending(group, timeout_s=10.0)  # with messages as small as these, the ranks wait for its end
        with pytest.raises(GroupError, match="broke off"):
            sending.send(group, takes=2)
        assert group.weight_group_id is None
        group.update(make_batch(9), 9)
        again = Sending(group)
        assert again.send(group).keys() == {tensor.name for tensor in group.weight_tensors()}
        group.leave_weight_group()

    def test_can_be_called_again_after_a_full_disk(self, group: LearnerGroup, tmp_path: Path) -> None:
        tensors = group.weight_tensors()
        places = layout(dict(shapes_of(tensors)), "float32")
        with small_disks() as mount:
            mount(tmp_path / "disk", len(places.header) + places.num_bytes // 2)
            with pytest.raises(DiskFullError, match="no space for the weights file"):
                group.write_weights(places, tensors, tmp_path / "disk" / "weights")
        assert weights_of(group).keys() == places.slots.keys()

    def test_can_be_called_again_after_the_disk_of_one_was_full(self, group: LearnerGroup) -> None:
        tensors = group.weight_tensors()
        given = layout(dict(shapes_of(tensors)), "float32"), tensors, Path("/dev/full")
        assert group._others is not None
        with pytest.raises(DiskFullError, match="no space for the weights file /dev/full"):
            group._others.attempt(lambda: None, DiskFullError, "write_weights", *given)
        assert weights_of(group).keys() == given[0].slots.keys()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="by gloo, between CPUs")
    def test_an_error_of_one_rank_ends_the_waiting_call_and_forbids_others(
        self, group: LearnerGroup, folder: Path
    ) -> None:
        pid, mark = group.pids[0], folder / "1 fails"
        mark.touch()
        try:
            with pytest.raises(RoleFailedError, match=r"^rank 1: MemoryError: no room for the loss"):
                group.update(make_batch(6), 6)
        finally:
            mark.unlink()
        assert not process_lives(pid)
        with pytest.raises(RoleFailedError, match="were ended after an error"):
            group.update(make_batch(7), 7)
        with pytest.raises(RoleFailedError, match="were ended after an error"):
            group.check()


def test_an_error_of_all_ranks_is_raised_once(folder: Path) -> None:
    of_two, of_one = (
        replace(ranks, learner=replace(ranks.learner, model_path=str(folder / "none")))
        for ranks in (arguments(folder, 2), arguments(folder, 1))
    )
    with pytest.raises(ModelError) as alone:
        LearnerGroup(of_one, of_one.build_algorithm())
    leave_process_group()  # on a GPU it has joined one of its own
    with pytest.raises(ModelError) as together:
        LearnerGroup(of_two, of_two.build_algorithm())
    assert str(together.value).removeprefix("rank 1: ") == str(alone.value), "of the rank that fails first"


@pytest.mark.skipif(torch.cuda.is_available(), reason="by gloo, between CPUs")
def test_a_rank_that_hangs_in_a_transfer_ends_the_trainer(folder: Path) -> None:
    group = make_group(folder, 2)
    try:
        sending = Sending(group, timeout_s=1.0)
        (pid,) = group.pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RoleFailedError, match=rf"rank 1 \(pid {pid}\) of the trainer did not answer within 3 s"):
            sending.send(group)
        assert not process_lives(pid)
    finally:
        group.close()


class TestEnds:
    """A trainer in a process of its own, while both ranks hang in a call that no death ends."""

    @pytest.fixture
    def hanging(self, folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int]]:
        """Rank 0, and the pid of rank 1."""
        marks = [folder / name for name in ("hang", "0 hangs", "1 hangs")]
        marks[0].touch()
        process = PreloadedCall(
            getattr(request, "param", update_by_two),
            folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        pids: list[int] = []
        try:
            assert process.stdout is not None
            pids = [int(process.stdout.readline())]
            wait_until(lambda: all(mark.exists() for mark in marks), "both ranks hang", process=process)
            yield process, pids[0]
        finally:
            process.kill()
            process.communicate()
            wait_until_ended(pids)
            for mark in (*marks, folder / "0 waits"):
                mark.unlink(missing_ok=True)

    def test_a_killed_rank_ends_the_trainer(self, hanging: tuple[subprocess.Popen[str], int]) -> None:
        process, pid = hanging
        os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert f"rank 1 of the trainer (pid {pid}) died: signal 9" in errors

    def test_the_other_ranks_end_with_a_killed_rank_0(self, hanging: tuple[subprocess.Popen[str], int]) -> None:
        process, pid = hanging
        process.kill()
        wait_until_ended([pid])

    def test_ctrl_c_ends_all_ranks(self, hanging: tuple[subprocess.Popen[str], int]) -> None:
        process, pid = hanging
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode != 0
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
        wait_until_ended([pid])

    @pytest.mark.parametrize("hanging", [hang_while_watched], indirect=True)
    def test_a_step_that_hangs_ends_the_trainer_with_the_stack_of_every_rank(
        self, hanging: tuple[subprocess.Popen[str], int], folder: Path
    ) -> None:
        process, pid = hanging
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == EXIT_CODE
        wait_until_ended([pid])
        report = read_report(folder, process.pid)
        assert report is not None
        assert report[0].startswith("the trainer hangs: a step made no progress for more than 0.1 s (trainer.hang_s)")
        ranks = report[1].split("rank 1 (pid ")
        assert len(ranks) == 2 and all("losses.py" in rank and "in __call__" in rank for rank in ranks)
