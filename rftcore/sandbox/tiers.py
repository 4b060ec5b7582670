"""The tiers of local sandboxes, and the strongest that this machine offers. Each is tried: a program that tries to leave it must fail."""

from __future__ import annotations

import functools
import os

from rftcore.sandbox.interpreter import Interpreter
from rftcore.sandbox.probe import probe
from rftdata.errors import ConfigError
from rftdata.processes import pid_space

_HELD = "RFT_SANDBOX_HELD"
_NAMES = {
    "cgroup": "namespaces and a control group",
    "namespaces": "namespaces",
    "landlock": "Landlock, without namespaces",
    "none": "none (unsafe_local)",
}


def tier_name(level: str) -> str:
    """Return the name of a tier, for people."""
    return _NAMES[level]


def strongest_level(interpreter: Interpreter, *, unsafe_local: bool) -> str:
    """Return the level of the strongest tier that holds.

    Raises:
        ConfigError: none holds, and `unsafe_local` is not set.
    """
    refusals = {}
    for level in ("cgroup", "namespaces", "landlock"):
        found = refusal(level, interpreter)
        if found is None:
            return level
        refusals[level] = found
    if unsafe_local:
        return "none"
    reasons = "; ".join(f"{tier_name(level)}: {reason}" for level, reason in refusals.items())
    raise ConfigError(
        f"this machine offers no sandbox for a model's code ({reasons})",
        todo="allow user namespaces, run as root, name a sandbox of your own in sandbox: {type: …}, or accept the risk with sandbox: {unsafe_local: true}",
    )


@functools.lru_cache(maxsize=32)
def refusal(level: str, interpreter: Interpreter) -> str | None:
    """Return why a level does not hold on this machine; None if it does. Processes that this one starts need not try it again."""
    tried = "|".join((pid_space(), str(os.geteuid()), level, interpreter.path))
    held = os.environ.get(_HELD, "").splitlines()
    if tried in held:
        return None
    found = probe(level, interpreter)
    if found is not None:  # a busy machine may be the reason
        found = probe(level, interpreter)
    if found is None:
        os.environ[_HELD] = "\n".join([*held, tried])
    return found
