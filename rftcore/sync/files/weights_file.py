"""Weights as one safetensors file, written completely or not at all, and checked before loading.

Invariants:
- A file gets its final name only when complete (written beside it, then renamed).
- It contains every tensor of the model's checkpoint *and* the output head (`lm_head.weight`, or GPT-NeoX's `embed_out.weight`), even for tied
  embeddings: an engine may keep a prepacked copy of the head, which would otherwise silently stay old.
- `checksum` is xxh3_64 of the file's bytes.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rftcore.sync.base import Publication
from rftdata.errors import DiskFullError, ModelError, is_disk_full
from rftdata.processes import process_lives

if TYPE_CHECKING:
    from torch import Tensor

ATTEMPT_PREFIX = "attempt-"
OUTPUT_HEAD = "lm_head.weight"
_OTHER_HEADS = ("embed_out.weight",)  # its name in checkpoints of some families
_EMBEDDING = "embed_tokens.weight"
_HEADER_LIMIT = 100_000_000  # the limit of the safetensors format


def embedding_of(names: Iterable[str]) -> str:
    """Return the name of the embedding, from which a tied output head is copied.

    Raises:
        ModelError: there is none, or more than one.
    """
    embeddings = [name for name in names if name.endswith(_EMBEDDING)]
    if len(embeddings) != 1:
        raise ModelError(
            f"the weights have no {OUTPUT_HEAD!r} and not exactly one {_EMBEDDING!r} to copy it from",
            value=embeddings,
            todo="export the model's full state",
        )
    return embeddings[0]


def write_atomically(path: Path, export: Callable[[Path], object]) -> Publication:
    """Let `export` write a file beside `path`, compute its checksum, and rename it to `path`.

    Raises:
        DiskFullError: there is no space; no file is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        export(draft)
        publication = Publication(uri=str(path), num_bytes=draft.stat().st_size, checksum=checksum_file(draft))
        os.replace(draft, path)
    except Exception as error:
        draft.unlink(missing_ok=True)
        if is_disk_full(error) or isinstance(error, DiskFullError):
            raise disk_full_error(path) from error
        raise
    return publication


def disk_full_error(path: Path) -> DiskFullError:
    """Return the error of a weights file for which there is no space."""
    return DiskFullError(
        f"no space for the weights file {path}", todo=f"free space on the file system of {path.parent}"
    )


def checksum_file(path: Path) -> str:
    """Return xxh3_64 of the file's bytes as 16 hex digits."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return xxhash.xxh3_64_hexdigest(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return xxhash.xxh3_64_hexdigest(content)


def open_weights(uri: str, checksum: str | None = None) -> Path:
    """Return the path of a publication's `uri`; verify its bytes if a checksum is given.

    Raises:
        ModelError: the file does not exist or is not the published one.
    """
    path = Path(uri.removeprefix("file://"))
    if not path.is_file():
        raise ModelError(
            f"the weights file {path} does not exist",
            todo="load a newer policy version (old files are removed), or check that both processes see this folder",
        )
    if checksum is not None:
        actual = checksum_file(path)
        if actual != checksum:
            raise ModelError(
                f"the weights file {path} is not the published one: its checksum differs",
                value=actual,
                allowed=checksum,
                todo="publish the weights again",
            )
    return path


@contextlib.contextmanager
def hold(path: Path) -> Iterator[Path]:
    """Yield a path to a weights file that stays valid, for processes of this host and user, even if the file is removed.

    The publisher may exit, or publish newer weights, while an engine loads these.

    Raises:
        ModelError: the file does not exist.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ModelError(f"the weights file {path} cannot be opened: {error.strerror}") from error
    with file:
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def iterate_weights(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and CPU tensors of a file, one at a time."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            yield name, file.get_tensor(name)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a safetensors file, from its header alone.

    Raises:
        ModelError: it is not a safetensors file.
    """
    return {name: tuple(entry["shape"]) for name, entry in _header(path).items() if name != "__metadata__"}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file.

    Raises:
        ModelError: it is not a safetensors file.
    """
    return dict(_header(path).get("__metadata__", {}))


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _HEADER_LIMIT:
                raise ValueError("header too long")
            header = json.loads(file.read(length))
        if not all("shape" in entry for name, entry in header.items() if name != "__metadata__"):
            raise ValueError("a tensor without a shape")
        return dict(header)
    except (OSError, ValueError, TypeError, struct.error) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def files_of_model(folder: Path) -> list[Path]:
    """Return the files of a model's weights, those that transformers would take; none where they have another format."""
    if (file := folder / "model.safetensors").exists():
        return [file]
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"].values() if index.exists() else ()
    return [folder / name for name in sorted({*names})]


def read_types_of_model(folder: Path) -> set[str]:
    """Return the types of the tensors in a model folder's safetensors files, as the format names them (BF16, F32); empty without such files."""
    headers = (_header(path) for path in sorted(folder.glob("*.safetensors")))
    return {entry["dtype"] for header in headers for name, entry in header.items() if name != "__metadata__"}


def read_shapes_of_model(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a model folder's safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes.update(read_shapes(path))
    return shapes


def refuse_incomplete(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Refuse weights that would leave part of the model unchanged.

    Args:
        shapes: shapes of the weights.
        expected: shapes of the model's own checkpoint; rotary tables, which are computed, may be missing.
        what: name of the weights in the message.

    Raises:
        ModelError: a tensor, or the output head, is missing or has another shape.
    """
    required = {name: shape for name, shape in expected.items() if "rotary_emb." not in name}
    wrong = [
        f"{name} {shapes.get(name, 'missing')} instead of {shape}"
        for name, shape in required.items()
        if shapes.get(name) != shape
    ]
    if not has_head(shapes):
        wrong.append(f"{OUTPUT_HEAD} missing")
    if wrong:
        raise ModelError(
            f"{what} does not fit the model in the engine: {len(wrong)} of {len(required)} tensors differ, first {wrong[0]}",
            todo="export the full state of the model that the engine was started with (lm_head.weight included)",
        )


def has_head(names: Collection[str]) -> bool:
    """Return whether an output head is among tensors, under any of its names."""
    return OUTPUT_HEAD in names or any(head in names for head in _OTHER_HEADS)


def prune(folders: Iterable[Path], keep: int, in_use: Collection[str] = ()) -> list[Path]:
    """Remove weights files, and drafts of writers that exited, from folders; return what was removed.

    The newest `keep` of all folders stay, and those whose path is in `in_use`. A reader that has a removed file open can still
    read it.
    """
    drafts = [path for folder in folders for path in folder.glob(".*.draft") if _is_abandoned(path)]
    files = sorted(
        (path for folder in folders for path in folder.glob("*.safetensors")),
        key=lambda path: (path.stat().st_mtime_ns, path.name),
    )
    old = files[:-keep] if keep > 0 else files
    removed = [*drafts, *(path for path in old if str(path) not in in_use)]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def folder_of_attempt(parent: Path, attempt_id: int) -> Path:
    """Return the attempt's own folder in `parent`, and remove those of earlier attempts. Later ones may have replaced this one and stay."""
    for path in parent.glob(f"{ATTEMPT_PREFIX}*"):
        number = path.name.removeprefix(ATTEMPT_PREFIX)
        if number.isdecimal() and int(number) < attempt_id:
            shutil.rmtree(path, ignore_errors=True)
    return parent / f"{ATTEMPT_PREFIX}{attempt_id}"


def _is_abandoned(draft: Path) -> bool:
    """Return whether the process that writes a draft has ended; its number is in the name."""
    pid = draft.name.split(".")[-2]
    return not pid.isdecimal() or not process_lives(int(pid))
