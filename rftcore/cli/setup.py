"""`rft setup`: installs or repairs what training needs, in the environment that `rft` runs in."""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftdata.errors import EnvironmentMismatchError

if TYPE_CHECKING:
    from rftcore.installation.installer import Installer


class Engine(StrEnum):
    """Extras that install the training stack with a rollout engine."""

    CPU = "cpu"
    CUDA = "cuda"


def setup(
    engine: Annotated[
        Engine | None,
        typer.Argument(help="The build of torch and vLLM; by default cuda if an NVIDIA GPU is found, else cpu."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be installed and removed.")] = False,
) -> None:
    """Install or repair the packages for training: torch, vLLM, transformers, Ray, Data-Juicer.

    Installs the extra `cpu` or `cuda` of this package into the environment of `rft`, at the versions that were tested
    together, and removes packages that break them (torchvision, torchaudio and torchcodec beside a CPU build of torch). Does nothing
    if everything is installed. Needs a package index; uses uv, or pip if uv cannot be installed. See `rft docs install`.
    """
    from rftcore.installation.installer import Installer, InstallError, default_engine

    extra = engine.value if engine else default_engine()
    print(f"rft setup {extra}: {sys.prefix} (Python {sys.version.split()[0]})", flush=True)
    installer = Installer(Path(sys.executable), indent="  ")
    try:
        changed = _install(installer, extra, dry_run=dry_run)
        changed = _remove_broken(installer, dry_run=dry_run) or changed
    except InstallError as error:
        raise EnvironmentMismatchError(
            f"the installer failed, its own message is above: {error}",
            todo="correct what it names (a package index must be reachable; `rft docs install` lists the relevant settings of pip and uv)"
            " and run `rft setup` again",
        ) from error
    if dry_run:
        nothing = (
            "nothing was installed but uv, which resolved the packages"
            if installer.has_installed_uv
            else "nothing was changed"
        )
        print(f"{nothing} (--dry-run)" if changed else f"nothing to do: {extra} is installed completely")
        return
    if changed:
        _check_imports(extra)
    print(f"{'done' if changed else 'nothing to do'}: {extra} is installed completely; next: rft doctor")


def _install(installer: Installer, extra: str, *, dry_run: bool) -> bool:
    """Install the missing packages of the extra; return whether there were any changes to make.

    Raises:
        InstallError: the installer failed.
    """
    from rftcore.installation.packages import conflicting_distributions
    from rftcore.installation.requirements import requirements_of, unmet_requirements

    unmet, conflicting = unmet_requirements(extra), conflicting_distributions(extra)
    missing = [one.requirement for one in unmet if one.installed is None]
    if missing:
        print(f"  to install: {', '.join(missing)}", flush=True)
    for one in unmet:
        if one.installed is not None:
            print(f"  to replace: {one}", flush=True)
    if conflicting:
        print(f"  to remove: {', '.join(conflicting)}", flush=True)
    if not unmet and not conflicting:
        return False
    requirements = [f"{one.name}{one.specifier}" for one in requirements_of(extra)]
    if conflicting or dry_run:
        # Resolved before anything is removed, so that the environment stays unchanged if an index does not answer.
        installer.install(requirements, [extra], dry_run=True)
    if not dry_run:
        if conflicting:
            installer.uninstall(conflicting)
        installer.install(requirements, [extra])
    return True


def _remove_broken(installer: Installer, *, dry_run: bool) -> bool:
    """Remove companions of torch that cannot be imported beside it; return whether there were any.

    Raises:
        InstallError: the installer failed.
    """
    from rftcore.installation.packages import broken_companions

    broken = broken_companions()
    if broken:
        print(f"  to remove, because importing fails beside this torch: {', '.join(broken)}", flush=True)
        if not dry_run:
            installer.uninstall(broken)
    return bool(broken)


def _check_imports(extra: str) -> None:
    """Import the packages that are known to be incompatible with each other, in a new process.

    Raises:
        EnvironmentMismatchError: a package cannot be imported.
    """
    command = [sys.executable, "-W", "ignore", "-m", "rftcore.installation.imports", extra]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise EnvironmentMismatchError(
            f"the packages are installed but cannot be imported together: {' '.join(done.stderr.split())[-600:]}",
            todo=f"install into a new environment, or report this with the output of {sys.executable} -m pip list",
        )
    print(f"  imported together: {done.stdout.strip()}", flush=True)
