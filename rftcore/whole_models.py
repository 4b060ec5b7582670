"""Opening of models from their files, whole or not at all."""

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
        new: prefix of the names of weights that the files may lack, such as those of a new head; none by default.

    Raises:
        ModelError: the folder has no such model, or not all of its weights.
    """
    with opening(folder, key):
        model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    refuse_missing(folder, info["missing_keys"], new)
    return model


@contextmanager
def opening(folder: Path | str, key: str = "model.path") -> Iterator[None]:
    """Convert errors of transformers about a model that it cannot open to a ModelError; refuse a model with two values of a weight."""
    from safetensors import SafetensorError

    try:
        _refuse_doubled(Path(folder))
        yield
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"the model {folder} cannot be opened: {first_line}",
            allowed="a folder with config.json and safetensors, or a Hugging Face id",
            todo=f"correct {key}",
        ) from error


def _refuse_doubled(folder: Path) -> None:
    """Raise a ModelError if two files have different values of one weight: transformers uses those that it reads last, whatever the index says."""
    from rftcore.sync.files.weights_file import files_of_model, read_shapes

    files = [file for file in files_of_model(folder) if file.exists()]
    seen: dict[str, Path] = {}
    for file in files if len(files) > 1 else ():
        for name in read_shapes(file):
            if name in seen and not _have_same_values(name, seen[name], file):
                raise ModelError(
                    f"two files of the model {folder} have different values of one weight",
                    value=f"{name} in {seen[name].name} and {file.name}",
                    todo="copy or download the model again",
                )
            seen[name] = file


def _have_same_values(name: str, one: Path, other: Path) -> bool:
    import torch
    from safetensors import safe_open

    with safe_open(one, "pt") as first, safe_open(other, "pt") as second:
        return torch.equal(first.get_tensor(name), second.get_tensor(name))


def refuse_missing(folder: Path | str, names: Iterable[str], new: str = "") -> None:
    """Raise a ModelError if weights are not in the files of a model: transformers draws them at random, with a warning.

    Args:
        new: see `open_whole`.
    """
    missing = sorted(name for name in names if not (new and name.startswith(new)))
    if missing:
        raise ModelError(
            f"the files of the model {folder} lack {len(missing)} of its weights",
            value=", ".join(missing[:3]),
            todo="copy or download the model again; its safetensors files and their index must be complete",
        )
