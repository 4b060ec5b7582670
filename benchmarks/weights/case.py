"""One case of `rft bench weights` in a process of its own: trainer ranks send their weights into engines, several times.

The trainer is the real learner with its ranks (`LearnerGroup`). Its float32 weights are cast to the engines' type on the wire. The plan reaches the
receivers through a pipe; in a run it goes through rows of the database, which takes some milliseconds more.

An engine starts with weights of zeros, so that its answers show whether it computes with the weights that were sent. It gets zeros again before the
last transfer, which is not timed.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.processes import append_line, redirect
from benchmarks.harness.shapes import SHAPES, write_model
from benchmarks.weights.receivers import (
    WIRE_DTYPE,
    Kind,
    Place,
    Received,
    ReceiverProcess,
    agrees,
    ask_all,
    sampling,
    write_reference,
)
from rftcore.sync.tensors import WireTensor
from rftcore.sync.transfer.plan import TransferPlan

if TYPE_CHECKING:
    from rftcore.trainer.processes.learner_group import LearnerGroup

Line = dict[str, Any]

TIMEOUT_S = 120.0
BLANK = "blank.safetensors"
_MIB = 1 << 20
_ITEM_BYTES = 2  # of WIRE_DTYPE


@dataclass(frozen=True)
class Case:
    """Weights, ranks and receivers of one process.

    Attributes:
        ranks: ranks of the trainer.
        tensor_parallel: processes of each engine.
        following: timed transfers after the first.
        threads: CPU threads of the machine, divided among all processes.
    """

    shape: str
    ranks: int
    engines: int
    tensor_parallel: int
    receivers: Kind
    following: int = 5
    bucket_mib: int = 256
    threads: int = 1
    on_gpu: bool = False

    @property
    def num_receivers(self) -> int:
        """Number of processes that receive."""
        return self.engines * self.tensor_parallel

    @property
    def num_devices(self) -> int:
        return self.ranks + self.num_receivers

    def place(self, number: int) -> Place:
        """Return where an engine or a plain receiver runs."""
        width = self.tensor_parallel if self.receivers == "engines" else 1
        first = self.ranks + number * width
        gpus = tuple(range(first, first + width)) if self.on_gpu else ()
        return Place(gpus, max(1, self.threads // self.num_devices), width)


@dataclass(frozen=True)
class Folders:
    """Files of a shape.

    Attributes:
        model: model of the trainer, with random weights.
        blank: model of the engines, with zeros.
        reference: answers of an engine on `model`; see `write_reference`.
    """

    model: Path
    blank: Path
    reference: Path


def run_case(case: Case, folders: Folders, output: Path, log: Path) -> None:
    """Run a case; its lines go to `output`, one per transfer, then its end."""
    redirect(log)
    end: Line = {"status": "ok", "error": None}
    try:
        for line in _measured(case, folders):
            append_line(output, line)
    except Exception as error:  # noqa: BLE001 - a failure is a row of the table
        traceback.print_exc()
        end = {"status": "failed", "error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    append_line(output, end)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries may hang at exit; receivers end with this process


def _measured(case: Case, folders: Folders) -> list[Line]:
    context = multiprocessing.get_context("spawn")
    kind = case.receivers
    # A process is a whole engine, or one rank of a plain receiver.
    numbers = range(case.engines if kind == "engines" else case.num_receivers)
    subjects: list[Any] = [folders.blank if kind == "engines" else n % case.tensor_parallel for n in numbers]
    receivers = [ReceiverProcess(context, kind, case.place(n), subject) for n, subject in enumerate(subjects)]
    learner = _open_learner(case, folders.model)
    transfers = _Transfers(case, learner, receivers, [receiver.answer() for receiver in receivers])
    lines: list[Line] = []
    if kind == "plain":
        lines = [transfers.run() for _ in range(1 + case.following)]
    else:
        expected = [tuple(each) for each in json.loads(folders.reference.read_text())]

        def is_fresh() -> bool:
            return all(agrees(found, expected) for found in ask_all(receivers, "probe"))

        stale = [not is_fresh()]
        with sampling(receivers):
            lines = [transfers.run() for _ in range(1 + case.following)]
        fresh = [is_fresh()]
        ask_all(receivers, "load_file", folders.blank / BLANK, 0)
        stale.append(not is_fresh())
        hashes_agree = transfers.run()["hashes_agree"]
        fresh.append(is_fresh())
        # Without a difference between zeros and weights, agreement would show nothing.
        lines[-1] |= {"probes_differ": all(stale), "weights_agree": all(fresh) and hashes_agree}
    ask_all(receivers, "close")
    transfers.close()
    learner.close()
    return lines


class _Transfers:
    """Trainer of a case, which sends."""

    def __init__(
        self, case: Case, learner: LearnerGroup, receivers: list[ReceiverProcess], receptions: list[Any]
    ) -> None:
        from rftcore.sync.addresses import LOOPBACK
        from rftcore.sync.device_names import choose_backend
        from rftcore.sync.transfer.group import open_store

        self._case, self._learner, self._receivers = case, learner, receivers
        self._backend, self._reason = choose_backend(learner.weight_devices(), [each.device for each in receptions])
        self._store = open_store(LOOPBACK, TIMEOUT_S)
        self._tensors: tuple[WireTensor, ...] = learner.weight_tensors()
        self._num_sent = 0

    def run(self) -> Line:
        """Send once; return the times."""
        self._num_sent += 1
        started = time.perf_counter()
        for number, receiver in enumerate(self._receivers):
            receiver.ask("receive", self._plan(number), self._num_sent)
        own = self._plan(0)
        sent = self._learner.send_weights(own, self._store)
        trainer_seconds = time.perf_counter() - started
        received: list[Received] = [receiver.answer() for receiver in self._receivers]
        pauses = [each.pause_seconds for each in received if each.pause_seconds is not None]
        return {
            "seconds": max(each.seconds for each in received),
            "join_seconds": sent.join_seconds,
            "send_seconds": sent.seconds,
            "trainer_seconds": trainer_seconds,
            "pause_seconds": max(pauses, default=None),
            "num_bytes": sent.num_bytes,
            "num_tensors": len(self._tensors),
            "dtype": own.dtype,
            "backend": self._backend,
            "backend_reason": self._reason,
            "hashes_agree": all(each.checksum == sent.checksum for each in received),
        }

    def close(self) -> None:
        self._learner.leave_weight_group()

    def _plan(self, number: int) -> TransferPlan:
        from rftcore.sync.addresses import LOOPBACK

        tensor_parallel = self._case.tensor_parallel
        engine = number if self._case.receivers == "engines" else number // tensor_parallel
        return TransferPlan(
            transfer_id=self._num_sent,
            group_id=1,
            backend=self._backend,
            host=LOOPBACK,
            port=self._store.port,
            num_ranks=self._case.num_devices,
            first_rank=self._case.ranks + engine * tensor_parallel,
            tensors=self._tensors,
            dtype=WIRE_DTYPE,
            bucket_bytes=self._case.bucket_mib * _MIB,
            timeout_s=TIMEOUT_S,
        )


def _open_learner(case: Case, model: Path) -> LearnerGroup:
    from rftcore.config.trainer import TrainerConfig
    from rftcore.trainer.learner_arguments import LearnerArguments
    from rftcore.trainer.processes.learner_group import LearnerGroup
    from rftcore.trainer.processes.rank_arguments import RankArguments

    config = TrainerConfig(
        num_gpus=case.ranks, num_threads=max(1, case.threads * case.ranks // case.num_devices), compile=False
    )
    learner = LearnerArguments(model_path=str(model), config=config, seed=0)
    arguments = RankArguments(learner=learner, algorithm="dapo", algorithm_settings={})
    return LearnerGroup(arguments, arguments.build_algorithm())


def prepare(shape_name: str, folders: Folders, with_engines: bool) -> None:
    """Write the model of a shape with random weights, and with zeros if engines start on it. Files that exist are kept."""
    from rftcore.sync.files.weights_file import OUTPUT_HEAD, read_shapes_of_model
    from tests.support.models import make_character_tokenizer

    shape = SHAPES[shape_name]
    write_model(shape, folders.model)
    make_character_tokenizer().save_pretrained(folders.model)
    if with_engines and not folders.blank.exists():
        folders.blank.mkdir()
        for file in folders.model.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, folders.blank)
        shapes = read_shapes_of_model(folders.model) | {OUTPUT_HEAD: (shape.vocab_size, shape.hidden_size)}
        _write_zeros(folders.blank / BLANK, shapes)


def _write_zeros(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of zeros as a header and a hole, which needs no space."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + _ITEM_BYTES * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def write_reference_of(case: Case, folders: Folders, log: Path) -> None:
    """Write the reference of a case, by an engine that runs where the first engine of the case will run."""
    redirect(log)
    write_reference(folders.model, case.place(0), folders.reference)
