"""Models as they are opened from their files: whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rftdata.errors import ModelError


def open_whole(kind: Any, folder: Path | str, *, key: str = "model.path", new: str = "", **options: Any) -> Any:
    """Return `kind.from_pretrained(folder, **options)`.

    Args:
        kind: a class of transformers that opens models.
        key: the setting with the path, for messages.
        new: how the names of weights begin that the files may lack, such as those of a head; none by default.

    Raises:
        ModelError: the folder has no such model, or not all of its weights.
    """
    with opening(folder, key):
        model, found = kind.from_pretrained(folder, output_loading_info=True, **options)
    refuse_missing(folder, found["missing_keys"], new)
    return model


@contextmanager
def opening(folder: Path | str, key: str = "model.path") -> Iterator[None]:
    """Convert what transformers raises where it cannot open a model to a ModelError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"the model {folder} cannot be opened: {first_line}",
            allowed="a folder with config.json and safetensors, or a Hugging Face id",
            todo=f"correct {key}",
        ) from error


def refuse_missing(folder: Path | str, names: Iterable[str], new: str = "") -> None:
    """Raise a ModelError if weights are not in the files of a model: transformers draws them at random, with a warning.

    Args:
        new: see `open_whole`.
    """
    missing = sorted(name for name in names if not (new and name.startswith(new)))
    if missing:
        raise ModelError(
            f"the files of the model {folder} lack {len(missing)} of its weights", value=", ".join(missing[:3]),
            todo="copy or download the model again; its safetensors files and their index must be complete",
        )  # fmt: skip
