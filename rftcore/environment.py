"""Installed packages that break each other, found before they do.

vLLM's CPU build asks for torchvision, torchaudio and torchcodec, and the package index serves their CUDA builds. Beside a CPU build
of torch they cannot be imported, and their mere presence breaks transformers, peft and trl.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

from rftdata.errors import EnvironmentMismatchError

_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def check_torchvision() -> None:
    """Refuse companions of torch that do not work with the torch installed.

    They are imported in a process of their own, and only when present, so a sound installation pays nothing.

    Raises:
        EnvironmentMismatchError: names them, and the one command that mends it.
    """
    present = [name for name in _COMPANIONS if importlib.util.find_spec(name) is not None]
    broken = [name for name in present if not _imports(name)]
    if broken:
        raise EnvironmentMismatchError(
            f"{', '.join(broken)} does not match torch {_version('torch')}: importing it fails, and transformers and peft fail with it",
            value=", ".join(f"{name} {_version(name)}" for name in broken),
            allowed="builds made for this torch, or none",
            todo=f"run: {sys.executable} -m pip uninstall -y {' '.join(broken)}",
        )


def _imports(name: str) -> bool:
    result = subprocess.run(
        [sys.executable, "-c", f"import {name}"], capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    return result.returncode == 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
