"""What confines a model's code in the workflow of a run: in its environment, or in tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftcore.config.run import RunConfig
from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.kinds import open_sandbox
from rftdata.config_errors import parse_section


def tiers_of_workflows(config: RunConfig) -> set[str]:
    """Return the tiers of the sandboxes that workflows of ours open in each rollout.

    Raises:
        ConfigError, PluginError: a sandbox cannot be opened on this machine.
    """
    tiers = set()
    explorers = [config.explorer, *(config.explorer_of(each) for each in config.tasksets)]
    for section in (each for one in explorers for each in _sections(one.workflow, one.workflow_args)):
        sandbox = open_sandbox(parse_section(SandboxConfig, section, within="explorer.workflow_args"), config.base_dir)
        tiers.add(sandbox.tier)
        sandbox.close()
    return tiers


def _sections(workflow: str, args: Mapping[str, Any]) -> list[Any]:
    """Return the sections `sandbox` of an environment and of tools."""
    if workflow in ("environment", "multi_agent"):
        return (
            [(args.get("environment_args") or {}).get("sandbox") or {}] if args.get("environment") == "sandbox" else []
        )
    if workflow == "tools":
        tools = args.get("tools") or ()
        return [entry["sandbox"] or {} for entry in tools if isinstance(entry, Mapping) and "sandbox" in entry]
    return []
