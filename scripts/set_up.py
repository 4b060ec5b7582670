"""Make .venv and install this checkout into it. Started by `scripts/setup`, which finds the Python to use.

Owns `.venv` beside pyproject.toml and nothing else: an active virtual environment is left alone, so that what `make`
uses never depends on the shell it was started from. Uses only the standard library, since nothing else is there yet.

Idempotent: a stamp in .venv holds a digest of everything that decides the outcome; when it matches, nothing is done.
The stamp is written last, so an interrupted set-up is continued by the next one.

How packages are installed is decided in `rftcore/installation`, which `rft setup` uses outside a checkout.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The package is not installed yet; the modules used here need only the standard library.
sys.path.insert(0, str(ROOT))

from rftcore.installation.installer import CONSTRAINTS, OVERRIDES, Installer, InstallError, default_engine, succeeds  # noqa: E402

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup-stamp"
INPUTS = (
    ROOT / "pyproject.toml",
    CONSTRAINTS,
    OVERRIDES,
    ROOT / "rftcore" / "installation" / "installer.py",
    ROOT / "scripts" / "setup",
    Path(__file__).resolve(),
)


def main() -> int:
    extras = os.environ.get("RFT_EXTRAS") or f"{default_engine()},dev"
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
        run([str(PYTHON), "-W", "ignore", "-m", "rftcore.installation.imports", extras])
    with step("find or install Chromium, for tests of the studio"):
        install_browser()
    STAMP.write_text(digest + "\n", encoding="utf-8")
    print(f"setup: done in {time.monotonic() - started:.0f} s")
    return 0


def install_browser() -> None:
    """Install Debian's Chromium where apt is, and this user is root. Elsewhere tests that need it are skipped, with the reason."""
    if any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")):
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print("       there is none: tests in a browser will be skipped (install the package chromium)")
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(
                f"       {' '.join(command)} failed; tests in a browser will be skipped: {done.stderr.strip()[-300:]}"
            )
            return


def stamp_digest(extras: str) -> str:
    # ROOT is part of it: an editable install and the scripts in .venv/bin name the folder they were made in.
    digest = hashlib.sha256(f"{extras} {ROOT}".encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make_venv() -> None:
    if VENV.exists() and not runs(PYTHON):
        print("       .venv has no working Python 3.11.5 to 3.13: creating it again")
        run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    elif not VENV.exists() or not (VENV / "pyvenv.cfg").is_file():
        run([sys.executable, "-m", "venv", str(VENV)])
    if not succeeds([str(PYTHON), "-m", "pip", "--version"]):
        run([str(PYTHON), "-m", "ensurepip", "--upgrade"])


def install(extras: str) -> None:
    """Install this checkout, editable, with the extras."""
    try:
        Installer(PYTHON, indent="       ").install(["--editable", f"{ROOT}[{extras}]"], extras.split(","))
    except InstallError as error:
        sys.exit(f"setup: this command failed; its own message is above:\n  {error}")


@contextmanager
def step(what: str) -> Iterator[None]:
    print(f"setup: {what} …", flush=True)
    started = time.monotonic()
    yield
    print(f"setup: {what}: {time.monotonic() - started:.1f} s", flush=True)


def runs(python: Path) -> bool:
    supported = "import sys; sys.exit(not (3, 11, 5) <= sys.version_info[:3] < (3, 14))"
    return python.exists() and succeeds([str(python), "-c", supported])


def run(command: list[str]) -> None:
    code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        sys.exit(f"setup: this command failed with exit code {code}; its own message is above:\n  {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
