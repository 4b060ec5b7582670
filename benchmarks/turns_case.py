"""One shape of `rft bench turns`, in a process of its own, which is the trainer; the engine is another process on the same GPU. See `benchmarks.turns`."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import trainer_steps, weights_case
from benchmarks.trainer_shapes import SHAPES, make_batch
from benchmarks.turns_engine import GPU_MEMORY
from benchmarks.weights_receivers import WIRE_DTYPE, Place, Received, ReceiverProcess, probe_prompts, sampling
from rftcore.sync.transfer.plan import TransferPlan

if TYPE_CHECKING:
    pass

Row = dict[str, Any]

_MIB = 1 << 20
_BUCKET_MIB = 256
_TIMEOUT_S = 40.0
_NOISE = 0.05  # nats, of bfloat16
_REQUEST_TOKENS = 400
_LEVELS = (2, 2, 1, 1)


@dataclass(frozen=True)
class Case:
    """See the options of `benchmarks.turns`; `threads` are those of the machine."""

    shape: str
    turns: int
    scale: float
    threads: int
    on_gpu: bool

    @property
    def num_turns(self) -> int:
        return self.turns if SHAPES[self.shape].num_parameters < 5e8 else -(-self.turns // 3)


def is_wrong(row: Row) -> bool:
    """Whether a section failed, or a check in it is false."""
    return bool(row.get("error")) or not all(row.get("checks", {}).values())


def run_case(case: Case, folder: Path, output: Path, log: Path) -> None:
    """Run all sections; their rows go to `output`."""
    weights_case.redirect(log)
    bench = _Bench(case, folder)
    for section in _SECTIONS:
        started = time.perf_counter()
        row: Row = {"shape": case.shape, "section": section.__name__.strip("_")}
        try:
            row |= section(bench)
        except Exception as error:  # noqa: BLE001 - a failure is a row
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        row["section_seconds"] = time.perf_counter() - started
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        if "error" in row:
            break
    bench.close()
    sys.stdout.flush()
    os._exit(0)  # libraries may hang at exit


class _Bench:
    """The trainer, and its view of the engine."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folders = weights_case.Folders(folder / case.shape, folder / f"{case.shape}-blank", folder / "unused.json")
        self.blank = self.folders.blank / weights_case.BLANK
        self.file = folder / f"{case.shape}.safetensors"
        self.engine: Any = None
        self.plain: Any = None  # a receiver without an engine
        self.batch: Any = None
        self.learner: Any = None
        self.version = 0
        self.group = 0
        self.step = 0
        self.left: list[float] | None = None  # of the learner's state, when it last left the device
        self._members: list[ReceiverProcess] = []
        self._backend = ""

    @property
    def place(self) -> Place:
        return Place((0,) if self.case.on_gpu else (), max(1, self.case.threads // 2))

    def used(self) -> int | None:
        """Bytes of the GPU that are in use, by all processes."""
        if not self.case.on_gpu:
            return None
        import torch

        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def started(self, kind: Any, subject: Any) -> tuple[ReceiverProcess, float]:
        """A receiver, and the seconds of its start."""
        started = time.perf_counter()
        receiver = ReceiverProcess(multiprocessing.get_context("spawn"), kind, self.place, subject)
        receiver.answer()
        return receiver, time.perf_counter() - started

    def send(self, receivers: list[ReceiverProcess], backend: str, method: str = "take") -> Row:
        """Send the learner's weights; seconds, and whether all have them."""
        from rftcore.sync.addresses import LOOPBACK
        from rftcore.sync.transfer.group import open_store

        if receivers != self._members or backend != self._backend:
            self.learner.leave_weight_group()
            self.group += 1
            self._store = open_store(LOOPBACK, _TIMEOUT_S)
            self._members, self._backend = receivers, backend
        self.version += 1
        plan = self.plan(backend, 1 + len(receivers))
        started = time.perf_counter()
        for rank, receiver in enumerate(receivers, start=1):
            receiver.ask(method, replace(plan, first_rank=rank), self.version)
        sent = self.learner.send_weights(plan, self._store)
        send_seconds = time.perf_counter() - started
        received: list[Any] = [receiver.answer() for receiver in receivers]
        pauses = [each.pause_seconds for each in received if isinstance(each, Received) and each.pause_seconds]
        agree = all(isinstance(each, Received) and each.checksum == sent.checksum for each in received)
        if not agree:
            print(received, flush=True)
        return {
            "send": send_seconds,
            "receive": max(getattr(each, "seconds", float("inf")) for each in received),
            "pause": max(pauses, default=None),
            "agree": agree,
            "num_bytes": sent.num_bytes,
            "join": sent.join_seconds,
        }

    def plan(self, backend: str, num_ranks: int) -> TransferPlan:
        from rftcore.sync.addresses import LOOPBACK

        return TransferPlan(
            transfer_id=self.version,
            group_id=self.group,
            backend=backend,
            host=LOOPBACK,
            port=self._store.port,
            num_ranks=num_ranks,
            first_rank=0,
            tensors=self.learner.weight_tensors(),
            dtype=WIRE_DTYPE,
            bucket_bytes=_BUCKET_MIB * _MIB,
            timeout_s=_TIMEOUT_S,
        )

    def write_file(self) -> float:
        """Write the learner's weights as a run does; seconds."""
        from rftcore.sync.files.weights_file import write_atomically
        from rftcore.trainer.publish import Exports

        started = time.perf_counter()
        write_atomically(self.file, Exports(self.learner, None, WIRE_DTYPE).of_learner())
        return time.perf_counter() - started

    def train(self) -> int | None:
        """One step; the largest number of bytes that it had allocated."""
        import torch

        if self.case.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.step += 1
        self.learner.update(self.batch, self.step)
        return torch.cuda.max_memory_allocated() if self.case.on_gpu else None

    def digest(self) -> list[float]:
        """Sums of all weights and moments."""
        tensors = (tensor.detach() for tensor in self.learner.own._device_tensors())
        return [float((t.to_local() if hasattr(t, "to_local") else t).double().sum()) for t in tensors]

    def close(self) -> None:
        if self.engine is not None:
            self.engine.kill()


def _start(bench: _Bench) -> Row:
    case = bench.case
    weights_case.prepare(case.shape, bench.folders, with_engines=True)
    before = bench.used()
    bench.engine, seconds = bench.started("turns", bench.folders.blank)
    return {"before_bytes": before, "bytes": bench.used(), "seconds": seconds, "gpu_memory_utilization": GPU_MEMORY}


def _sleep(bench: _Bench) -> Row:
    levels, checks = [], {}
    for level in _LEVELS:
        awake = bench.used()
        seconds = bench.engine.call("sleep", level)
        asleep = bench.used()
        wake_seconds, has_weights = bench.engine.call("wake", False)
        load_seconds = None if has_weights else bench.engine.call("load", bench.blank, 0)
        levels.append(
            {
                "level": level,
                "sleep_seconds": seconds,
                "wake_seconds": wake_seconds,
                "load_seconds": load_seconds,
                "awake_bytes": awake,
                "asleep_bytes": asleep,
            }
        )
        checks[f"level {level} {'loses' if level == 2 else 'keeps'} weights"] = has_weights == (level == 1)
        if awake is not None and asleep is not None:
            checks[f"level {level} frees 9 tenths"] = asleep < 0.1 * awake + 0.9 * (4 << 30)
    return {"levels": levels, "checks": checks}


def _empty(bench: _Bench) -> Row:
    from safetensors.torch import save_file
    from torch import zeros

    engine, incomplete = bench.engine, bench.file.with_suffix(".incomplete")
    save_file({"lm_head.weight": zeros(2, 2)}, incomplete)
    engine.call("sleep", 2)
    engine.call("begin", 24)
    checks = {"nothing asleep": not engine.call("computes_within", 0.5)}
    engine.call("wake", False)
    checks["nothing without weights"] = not engine.call("computes_within", 0.5)
    refused = engine.call("load", incomplete, 1)
    checks["an incomplete file is refused"] = isinstance(refused, str)
    checks["nothing after it"] = not engine.call("computes_within", 0.5)
    engine.call("load", bench.blank, 1)
    ends = engine.call("end")
    checks["all requests go on with weights"] = bool(ends) and all(tokens > 0 for tokens, _, _ in ends)
    return {"refused": refused, "checks": checks}


def _turn(bench: _Bench) -> Row:
    case = bench.case
    batch = make_batch("A", SHAPES[case.shape], scale=case.scale)
    bench.batch = trainer_steps.train_batch(batch)
    free = None
    bench.engine.call("sleep", 2)
    if case.on_gpu:
        import torch

        total = torch.cuda.mem_get_info()[1]
        free = (1 - GPU_MEMORY) * total
    trainer = (("compile", False), ("num_threads", max(1, case.threads // 2)))
    steps = trainer_steps.Case(case.shape, "A", "ours", "mixed", False, 8192, trainer=trainer)
    started = time.perf_counter()
    bench.learner = trainer_steps._open_learner(steps, str(bench.folders.model))
    open_seconds = time.perf_counter() - started
    turns: list[Row] = []
    for number in range(case.num_turns):
        turns.append(_one_turn(bench, is_asleep=number == 0))
        if number == 0:
            bench.engine.call("sample", True)
    bench.engine.call("sample", False)
    later = turns[1:] or turns
    medians = {key: statistics.median(turn[key] for turn in later) for key in later[0] if key.endswith("_seconds")}
    peak = max((turn["peak_bytes"] for turn in turns if turn["peak_bytes"] is not None), default=None)
    checks = {
        "all hashes agree": all(turn["agree"] for turn in turns),
        "awake with weights": all(turn["has_weights"] for turn in turns),
        "the learner's state survives the host": all(turn["is_same"] for turn in turns[1:]),
    }
    return {
        "open_seconds": open_seconds,
        "num_turns": len(turns),
        "medians": medians,
        "first": turns[0],
        "last": turns[-1],
        "peak_bytes": peak,
        "free_beside_bytes": free,
        "fits_beside": None if peak is None or free is None else peak < free,
        "checks": checks,
    }


def _one_turn(bench: _Bench, *, is_asleep: bool = False) -> Row:
    """A turn of the trainer as in a run, whose weights go by ipc."""
    times: Row = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        found = work()
        times[f"{name}_seconds"] = time.perf_counter() - started
        return found

    whole = time.perf_counter()
    timed("sleep", lambda: None if is_asleep else bench.engine.call("sleep", 2))
    asleep_bytes = bench.used()
    timed("to_device", bench.learner.to_device)
    is_same = None if bench.left is None else bench.digest() == bench.left
    peak = timed("update", bench.train)
    timed("free", lambda: bench.learner.leave_device(False))
    timed("wake_weights", lambda: bench.engine.call("wake", True))
    sent = timed("transfer", lambda: bench.send([bench.engine], "ipc"))
    sent_bytes = bench.used()
    bench.left = bench.digest()
    moved = timed("leave_device", lambda: bench.learner.leave_device(True))
    left_bytes = bench.used()
    _, has_weights = timed("wake_cache", lambda: bench.engine.call("wake", False))
    times["turn_seconds"] = time.perf_counter() - whole  # with what the benchmark itself computes of the state
    times |= {"send_seconds": sent["send"], "receive_seconds": sent["receive"]}
    return times | {
        "peak_bytes": peak,
        "moved_bytes": moved,
        "asleep_bytes": asleep_bytes,
        "sent_bytes": sent_bytes,
        "left_bytes": left_bytes,
        "agree": sent["agree"],
        "has_weights": has_weights,
        "is_same": is_same,
    }


def _requests(bench: _Bench) -> Row:
    """A turn whose weights go by file, with requests open."""
    engine = bench.engine
    before = bench.version
    engine.call("begin", _REQUEST_TOKENS)
    engine.call("sleep", 2)
    bench.learner.to_device()
    write_seconds = bench.write_file()
    bench.learner.leave_device(True)
    engine.call("wake", False)
    bench.version += 1
    load_seconds = engine.call("load", bench.file, bench.version)
    ends = engine.call("end")
    both = [versions for _, num_spans, versions in ends if num_spans == 2]
    checks = {
        "all ended": len(ends) == 32 and all(tokens for tokens, _, _ in ends),
        "some went on": len(both) > 4,
        "versions are named": all(versions == [before, bench.version] for versions in both),
    }
    return {
        "write_seconds": write_seconds,
        "load_seconds": load_seconds,
        "num_requests": len(ends),
        "with_both_versions": len(both),
        "tokens": sum(tokens for tokens, _, _ in ends),
        "checks": checks,
    }


def _right(bench: _Bench) -> Row:
    _one_turn(bench)
    bench.learner.to_device()
    bench.write_file()
    bench.learner.leave_device(to_host=True)  # the comparison loads a second model beside the engine
    differing = bench.engine.call("differing", bench.file)
    found = bench.engine.call("probe")
    difference, stale = _difference(bench, found, bench.file), _difference(bench, found, bench.blank)
    checks = {"no tensor differs": differing == [], "log-probabilities agree": difference < _NOISE < stale}
    return {"differing": differing[:5], "difference": difference, "difference_of_zeros": stale, "checks": checks}


def _difference(bench: _Bench, found: list[tuple[int, float]], file: Path) -> float:
    """Mean difference in nats between the engine's log-probabilities and those of transformers with the weights of a file."""
    import torch
    from transformers import AutoModelForCausalLM

    from rftcore.sync.files.weights_file import iterate_weights

    device = "cuda" if bench.case.on_gpu else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(bench.folders.model, dtype=torch.bfloat16)
    model.load_state_dict(dict(iterate_weights(file)), strict=False)
    model.to(device)
    with torch.no_grad():
        logits = model(torch.tensor(np.array(probe_prompts())).to(device)).logits[:, -1].float().log_softmax(-1)
    expected = [float(row[token]) for row, (token, _) in zip(logits, found, strict=True)]
    return float(np.mean([abs(ours - theirs) for ours, (_, theirs) in zip(expected, found, strict=True)]))


def _transfer(bench: _Bench) -> Row:
    bench.engine.call("sleep", 2)
    bench.learner.to_device()
    # There is no further step, and beside an engine that is awake no room.
    for optimizer in bench.learner.own.policy.optimizers:
        optimizer.state.clear()
    bench.learner.leave_device(False)
    bench.engine.call("wake", False)
    bench.engine.call("load", bench.file, bench.version)
    rows: Row = {}
    checks = {}
    with sampling([bench.engine]):
        for backend in ("ipc", "gloo"):
            sent = [bench.send([bench.engine], backend, "receive") for _ in range(4)]
            rows[backend] = {
                key: statistics.median(each[key] for each in sent[1:]) for key in ("send", "receive", "pause")
            }
            rows[backend] |= {"first": sent[0]["receive"], "num_bytes": sent[0]["num_bytes"]}
            checks[f"hashes agree by {backend}"] = all(each["agree"] for each in sent)
        files = []
        for _ in range(3):
            written = bench.write_file()
            bench.version += 1
            files.append((written, bench.engine.call("load", bench.file, bench.version)))
        rows["file"] = {"write": statistics.median(w for w, _ in files), "load": statistics.median(r for _, r in files)}
    bench.plain, _ = bench.started("plain", 0)
    for backend in ("gloo", "ipc"):
        sent = [bench.send([bench.plain], backend, "receive") for _ in range(4)]
        rows[f"{backend} plain"] = {
            key: statistics.median(each[key] for each in sent[1:]) for key in ("send", "receive")
        }
        checks[f"hashes agree by {backend}, plain"] = all(each["agree"] for each in sent)
    return {"backends": rows, "checks": checks}


def _killed(bench: _Bench) -> Row:
    """A receiver that is killed in its group, then a sender that fails in the middle."""
    from rftcore.sync.transfer.group import GroupError

    checks = {}
    before = bench.used()
    bench.plain.kill()
    started = time.perf_counter()
    bench.version += 1
    try:
        bench.learner.send_weights(bench.plan("ipc", 2), bench._store)  # the group in which it was
    except GroupError as error:
        noticed = str(error)[:200]
    else:
        raise AssertionError("a transfer to a killed process succeeded")
    seconds = time.perf_counter() - started
    bench.learner.leave_weight_group()
    after = bench.used()
    checks["another engine gets the weights"] = bench.send([bench.engine], "ipc")["agree"]
    broken, computes = _broken(bench)
    checks["a transfer that breaks off is an error"] = isinstance(broken, str)
    checks["nothing with half of the weights"] = not computes
    bench.version += 1
    bench.engine.call("load", bench.file, bench.version)
    ends = bench.engine.call("end")
    checks["a file heals it"] = bool(ends) and all(tokens > 0 for tokens, _, _ in ends)
    checks["no tensor differs"] = bench.engine.call("differing", bench.file) == []
    return {
        "before_bytes": before,
        "after_bytes": after,
        "noticed": noticed,
        "noticed_seconds": seconds,
        "broken": broken,
        "checks": checks,
    }


def _broken(bench: _Bench) -> tuple[Any, bool]:
    """The engine's answer to a transfer that breaks off after half of the tensors, and whether it computes afterwards."""
    from rftcore.sync.addresses import LOOPBACK
    from rftcore.sync.transfer.group import open_store
    from rftcore.sync.transfer.transfer import HeldRows, TransferSender

    bench.learner.leave_weight_group()
    bench.group, bench.version, bench._members = bench.group + 1, bench.version + 1, []
    bench._store = open_store(LOOPBACK, _TIMEOUT_S)
    plan = replace(bench.plan("ipc", 2), bucket_bytes=8 * _MIB if bench.case.on_gpu else 1 << 18)
    held: list[HeldRows] = list(bench.learner.own.held_rows(plan))

    def half() -> Iterator[HeldRows]:
        yield from held[: len(held) // 2]
        raise OSError("the trainer fails")

    bench.engine.ask("take", replace(plan, first_rank=1), bench.version)
    sender = TransferSender()
    try:
        sender.send(plan, half(), bench._store)
    except OSError:
        sender.leave()
    broken = bench.engine.answer()
    bench.engine.call("begin", 24)
    return broken, bench.engine.call("computes_within", 0.5)


_SECTIONS: tuple[Callable[[_Bench], Row], ...] = (
    _start,
    _sleep,
    _empty,
    _turn,
    _requests,
    _right,
    _transfer,
    _killed,
)
