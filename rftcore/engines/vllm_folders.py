"""Temporary folders from which vLLM reads weights that we keep as files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rftcore.sync.files.adapters_file import adapters_config


@contextmanager
def adapters_folder(path: Path) -> Iterator[str]:
    """Yield a folder in peft's format with the adapters of a file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "adapter_config.json").write_text(json.dumps(adapters_config(path)), encoding="utf-8")
        (Path(folder) / "adapter_model.safetensors").symlink_to(path)
        yield folder


@contextmanager
def model_folder(model: Path, path: Path) -> Iterator[str]:
    """Yield a model's folder with the weights of a file in place of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for file in model.glob("*.json"):
            if not file.name.endswith(".index.json"):
                (Path(folder) / file.name).symlink_to(file.resolve())
        (Path(folder) / "model.safetensors").symlink_to(path)
        yield folder
