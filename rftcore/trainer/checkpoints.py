"""A checkpoint's folder: a Hugging Face model folder, and beside the model what an optimizer needs to go on.

    config.json, model.safetensors, tokenizer…    the folder can itself be `model.path`
    training/*.safetensors                        optimizer moments and random state, a file per rank that wrote (torch's DCP)
    training/state.json                           step, format version

Any number of ranks may read what any number wrote.

Invariant: a folder under its final name is complete and on disk (written beside it, fsynced, renamed, the parent
fsynced). What a crash leaves behind, a draft or a whole folder that was never committed, is removed by `remove_abandoned`.
No pickle: tensors are safetensors, the rest is JSON. Which checkpoints count is the database's to say, not this module's.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rftcore.trainer.sharding import Grid
from rftdata.durable_files import make_folder, sync_path
from rftdata.errors import DiskFullError, ModelError

FORMAT_VERSION = 2
_TRAINING = "training"
_STATE = "state.json"
_DRAFT = ".draft"
_FOLDER = re.compile(rf"attempt-(\d+)-step-\d+({re.escape(_DRAFT)})?")
_DISK_FULL_TEXT = os.strerror(errno.ENOSPC)


def folder_name(attempt_id: int, step: int) -> str:
    """What the folder of a checkpoint is called; no two checkpoints of a run share a name."""
    return f"attempt-{attempt_id}-step-{step:06d}"


def write_folder(folder: Path, fill: Callable[[Path], None], grid: Grid) -> None:
    """Let `fill` of all ranks write into a draft folder, then give it its name in one step. An existing folder is replaced.

    Raises:
        DiskFullError: no room; nothing is left behind.
    """
    draft = folder.with_name(folder.name + _DRAFT)
    if grid.is_first:
        make_folder(folder.parent)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
    grid.wait_for_all()
    try:
        fill(draft)
        grid.wait_for_all()
        if grid.is_first:
            for path in (*draft.rglob("*"), draft):
                sync_path(path)
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)
        # safetensors raises its own class on a full disk; the system's text is in the message.
        if _DISK_FULL_TEXT in str(error):
            raise DiskFullError(
                f"no room for the checkpoint {folder}", todo=f"free space on the file system of {folder.parent}"
            ) from error
        raise
    if grid.is_first:
        if folder.exists():
            # A folder cannot be renamed onto a full one. A crash between these lines leaves a draft only: a checkpoint
            # is written again only by an attempt that has gone back to before it, and that has not committed it yet.
            shutil.rmtree(folder)
        os.rename(draft, folder)
        sync_path(folder.parent)


def remove_abandoned(parent: Path, attempt_id: int, committed: Collection[str]) -> list[Path]:
    """Remove unused folders that earlier attempts left in `parent`; return the removed ones.

    Later attempts may have replaced this one already, and a person may keep folders there under names of their own: both stay.

    Args:
        parent: the run's folder of checkpoints.
        attempt_id: of the attempt that holds the run: earlier ones can commit nothing any more.
        committed: names of the folders that committed checkpoints need.
    """
    removed = []
    for path in sorted(parent.glob("attempt-*")):
        match = _FOLDER.fullmatch(path.name)
        if match and int(match[1]) < attempt_id and path.name not in committed:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def write_training_state(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], grid: Grid) -> None:
    """Write `training/` of a checkpoint; every rank gives its part of the tensors."""
    training = folder / _TRAINING
    writer = HuggingFaceStorageWriter(str(training), save_distributed=True)
    with _of_one_process():
        save(tensors, storage_writer=writer, no_dist=grid.mesh is None)
    if grid.is_first:
        (training / _STATE).write_text(
            json.dumps({"format_version": FORMAT_VERSION, **state}, indent=1), encoding="utf-8"
        )


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Size]]:
    """The scalars in `training/` of a checkpoint, and names and sizes of its tensors.

    Raises:
        ModelError: it is not there, is of another format, or does not read.
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
    """Fill tensors, by prefix and name, from `training/` of a checkpoint; every rank its part.

    Raises:
        ModelError: a file does not read.
    """
    wanted = {f"{prefix}/{name}": tensor for prefix, named in tensors.items() for name, tensor in named.items()}
    reader = HuggingFaceStorageReader(str(folder / _TRAINING))
    with _readable(folder), _of_one_process():
        load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def _of_one_process() -> Iterator[None]:
    """Without torch's warning that a process without a process group is one process."""
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
    """Put the tokenizer of model `source` (a folder or a Hugging Face id) into `folder`."""
    if Path(source).is_dir():
        for path in sorted(Path(source).iterdir()):
            if path.is_file() and _is_tokenizer_file(path.name):
                shutil.copy(path, folder / path.name)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _is_tokenizer_file(name: str) -> bool:
    known = ("tokenizer", "special_tokens_map", "added_tokens", "chat_template", "vocab", "merges", "spiece")
    return name.startswith(known) and not name.endswith(".safetensors")
