"""Environments of peers: one for each set of requirements, in the user's cache folder, installed once.

Packages come from the index that pip is configured for; `rftcore.installation` translates the settings for uv.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rftcore.installation.installer import has_own_source, pip_settings, succeeds, uv_environment

_INSTALL_S = 1800


class InstallationError(Exception):
    """A peer could not be installed; the message is the installer's."""


def cache_folder() -> Path:
    """Return the folder of all environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rftdata" / "peers"


def python_of(requirements: tuple[str, ...]) -> Path:
    """Return the interpreter of an environment with these requirements; install it if it does not exist.

    Raises:
        InstallationError: the installer failed.
    """
    name = requirements[0].partition("=")[0].lower()
    digest = hashlib.sha256(f"{requirements} {sys.version_info[:2]}".encode()).hexdigest()[:8]
    folder = cache_folder() / f"{name}-{digest}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    if stamp.exists() and python.exists():
        return python
    print(f"installing {', '.join(requirements)} into {folder}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], dict(os.environ))
    environment = uv_environment(pip_settings(Path(sys.executable)))
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python)]
    if not succeeds([sys.executable, "-m", "uv", "--version"]):
        install = [str(python), "-m", "pip", "install", "--quiet"]
    elif any(requirement.startswith("torch==") for requirement in requirements) and not has_own_source(environment):
        install += ["--torch-backend", "cpu"]
    _run([*install, *requirements], environment)
    stamp.write_text("\n".join(requirements) + "\n", encoding="utf-8")
    return python


def _run(command: list[str], environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InstallationError(f"the installation did not end within {_INSTALL_S} s") from error
    if done.returncode:
        raise InstallationError(" ".join(done.stderr.split())[-600:])
