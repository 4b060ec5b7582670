"""A checkpoint's folder: a Hugging Face model folder, and beside the model the state of the optimizer.

    config.json, model.safetensors, tokenizer…    the folder can itself be `model.path`
    training/*.safetensors                        optimizer moments and random state, a file per rank that wrote (torch's DCP)
    training/state.json                           step, format version

Any number of ranks can read what any number wrote.

Invariant: a folder under its final name is complete and on disk (written beside it, fsynced, renamed, the parent
fsynced). `remove_abandoned` removes what a crash leaves behind: a draft, or a whole folder that was never committed.
No pickle: tensors are safetensors, the rest is JSON. The database records which checkpoints are committed.

A checkpoint is written while training continues: `CheckpointWriter` runs in a thread, on a copy that was made in the host's memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rftcore.call_thread import CallThread
from rftcore.trainer.network.sharding import Grid
from rftdata.errors import DiskFullError, ModelError, RftError, is_disk_full
from rftdata.files.durable import make_folder, sync_path

FORMAT_VERSION = 2
_TRAINING = "training"
_STATE = "state.json"
_DRAFT = ".draft"
_FOLDER = re.compile(rf"attempt-(\d+)-step-\d+({re.escape(_DRAFT)})?")
_LEAVE_S = 1.0


def folder_name(attempt_id: int, step: int) -> str:
    """Return the name of a checkpoint's folder; no two checkpoints of a run share a name."""
    return f"attempt-{attempt_id}-step-{step:06d}"


class CheckpointWriter:
    """Writes one folder at a time, in a thread. The writers of all ranks begin and end each folder together.

    Args:
        grid: the ranks; the writer uses a process group beside that of training.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid.beside()
        self._thread: CallThread | None = None

    @property
    def has_written(self) -> bool:
        """Whether a folder was begun, and `end` would not wait."""
        return self._thread is not None and self._thread.has_ended

    def begin(self, folder: Path, fill: Callable[[Path, Grid], None]) -> None:
        """Begin to write a folder, after the end of the one before.

        Args:
            fill: writes into a draft of the folder; must not read what training changes.
        """
        self.end()
        self._thread = CallThread("checkpoint")
        self._thread.start(partial(_write_folder, folder, fill, self._grid))

    def end(self) -> None:
        """Wait until the folder that was begun is on disk under its name.

        Raises:
            DiskFullError: no room; no draft is left.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.result()
            finally:
                thread.leave(_LEAVE_S)

    def leave(self) -> None:
        """Leave an unfinished folder as a draft."""
        if self._thread is not None:
            self._thread.leave(_LEAVE_S)


def _write_folder(folder: Path, fill: Callable[[Path, Grid], None], grid: Grid) -> None:
    """Let `fill` of all ranks write into a draft folder, then rename it in one step. An existing folder is replaced."""
    draft = folder.with_name(folder.name + _DRAFT)
    if not grid.is_first:
        grid.wait_for_all()
        fill(draft, grid)  # ends when all ranks have written
        return
    try:
        make_folder(folder.parent)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        grid.wait_for_all()
        fill(draft, grid)
        for path in (*draft.rglob("*"), draft):
            sync_path(path)
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)
        if is_disk_full(error):
            raise DiskFullError(
                f"no room for the checkpoint {folder}", todo=f"free space on the file system of {folder.parent}"
            ) from error
        raise
    if folder.exists():
        # A folder cannot be renamed onto a full one. A crash between these lines leaves a draft only: a checkpoint
        # is written again only by an attempt that has gone back to before it, and that has not committed it yet.
        shutil.rmtree(folder)
    os.rename(draft, folder)
    sync_path(folder.parent)


def remove_abandoned(parent: Path, attempt_id: int, committed: Collection[str]) -> list[Path]:
    """Remove unused folders that earlier attempts left in `parent`; return the removed ones.

    Folders of later attempts, which may have replaced this one already, and folders with other names, which a person may keep there, stay.

    Args:
        parent: the run's folder of checkpoints.
        attempt_id: the attempt that holds the run; earlier ones can commit nothing any more.
        committed: names of the folders that committed checkpoints need.
    """
    removed = []
    for path in sorted(parent.glob("attempt-*")):
        match = _FOLDER.fullmatch(path.name)
        if match and int(match[1]) < attempt_id and path.name not in committed:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def write_training_state(folder: Path, tensors: dict[str, Tensor], state: str, grid: Grid) -> None:
    """Write `training/` of a checkpoint; every rank writes its part of the tensors, and returns when all have written.

    Args:
        tensors: in the host's memory.
        state: from `encoded_state`.

    Raises:
        RftError: a rank could not write its part.
    """
    training = folder / _TRAINING
    try:
        with _of_one_process() if grid.mesh is None else nullcontext():
            save(
                tensors,
                storage_writer=_Writer(str(training), save_distributed=True),
                process_group=grid.group,
                no_dist=grid.mesh is None,
            )
    except CheckpointException as error:  # not an Exception; the same in all ranks
        if not grid.is_first:
            return
        rank, (cause, _) = min(error.failures.items())
        raise RftError(
            f"rank {rank} cannot write its part of the checkpoint: {type(cause).__name__}: {cause}"
        ) from error
    if grid.is_first:
        (training / _STATE).write_text(state, encoding="utf-8")


def encoded_state(state: dict[str, Any]) -> str:
    """Encode the scalars of a checkpoint for `read_state`."""
    return json.dumps({"format_version": FORMAT_VERSION, **state}, indent=1)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's generators, by their names in a checkpoint."""
    state = {"random/cpu": torch.get_rng_state()}
    return state if device.type != "cuda" else state | {"random/cuda": torch.cuda.get_rng_state(device)}


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned, without the prefix; the state of another kind of device is left out."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


class HostMemory:
    """Memory of the host for the copies of checkpoints, which are written one after the other.

    It is kept for the next checkpoint: to get new memory from the system takes longer than to copy. A copy for which `KEPT_BYTES` leave no room gets new
    memory.

    Args:
        device: that is copied from.
    """

    KEPT_BYTES = 2**33

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}
        self._num_kept_bytes = 0

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy that is complete after `wait`; the next one of this name overwrites it.

        Args:
            tensor: on this rank alone, not sharded.
        """
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            more = tensor.nbytes - (0 if kept is None else kept.nbytes)
            if self._num_kept_bytes + more > self.KEPT_BYTES:
                return tensor.to("cpu", copy=True)
            self._num_kept_bytes += more
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
            self._kept[name] = kept
        return kept.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def staged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in the host's memory; the copy of a sharded tensor is this rank's shard, and still a `DTensor`."""
    # A new one each time: torch 2.11's fails with a KeyError when it is used for a second state.
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    copies = cast(dict[str, Tensor], stager.stage(tensors))
    stager.close()
    return copies


class _Writer(HuggingFaceStorageWriter):
    """Replaces torch's writer, which builds a file in memory while it holds the interpreter's lock and so would stop training."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors, places = dict[str, Tensor](), dict[str, Any]()
        for item in plan.items:
            assert item.tensor_data is not None
            tensors[item.index.fqn] = cast(Tensor, planner.resolve_data(item)).detach().contiguous()
            places[item.index.fqn] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
        if tensors:
            path = Path(self.path) / f"part-{plan.storage_data['shard_index']:05d}.safetensors"
            save_file(tensors, path, metadata={CUSTOM_METADATA_KEY: json.dumps(places)})
        results: Future[list[WriteResult]] = Future()
        results.set_result([])  # only an index needs them, and a folder of parts has none
        return results


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Size]]:
    """Return the scalars in `training/` of a checkpoint, and names and sizes of its tensors.

    Raises:
        ModelError: the folder is missing, has another format, or cannot be read.
    """
    training = folder / _TRAINING
    with _readable(folder):
        state = json.loads((training / _STATE).read_text(encoding="utf-8"))
        if state["format_version"] != FORMAT_VERSION:
            raise ModelError(
                f"the checkpoint {folder} has another format",
                value=state["format_version"],
                allowed=str(FORMAT_VERSION),
                todo="resume it with the release that wrote it, or use the folder as model.path",
            )
        metadata = HuggingFaceStorageReader(str(training)).read_metadata().state_dict_metadata
        return state, {
            name: tensor.size for name, tensor in metadata.items() if isinstance(tensor, TensorStorageMetadata)
        }


def read_tensors(folder: Path, tensors: dict[str, dict[str, Tensor]]) -> None:
    """Fill tensors, by prefix and name, from `training/` of a checkpoint; every rank reads its part.

    Raises:
        ModelError: a file cannot be read.
    """
    wanted = {f"{prefix}/{name}": tensor for prefix, named in tensors.items() for name, tensor in named.items()}
    reader = HuggingFaceStorageReader(str(folder / _TRAINING))
    with _readable(folder), _of_one_process():
        load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def _of_one_process() -> Iterator[None]:
    """Silence torch's warning that a process without a process group is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError, CheckpointException) as error:
        raise ModelError(
            f"the checkpoint {folder} cannot be read: {type(error).__name__}: {error}",
            todo="resume from another checkpoint, or check that this machine sees the folder",
        ) from error


def copy_tokenizer(source: str, folder: Path) -> None:
    """Copy the tokenizer of model `source` (a folder or a Hugging Face id) into `folder`."""
    if Path(source).is_dir():
        for path in sorted(Path(source).iterdir()):
            if path.is_file() and _is_tokenizer_file(path.name):
                shutil.copy(path, folder / path.name)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _is_tokenizer_file(name: str) -> bool:
    beginnings = ("tokenizer", "special_tokens_map", "added_tokens", "chat_template", "vocab", "merges", "spiece")
    return name.startswith(beginnings) and not name.endswith(".safetensors")


def sizes_under(prefix: str, sizes: dict[str, torch.Size]) -> dict[str, torch.Size]:
    """Return the sizes of the tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(f"{prefix}/"): size for name, size in sizes.items() if name.startswith(f"{prefix}/")}
