"""Load everything that a configuration names, except its models."""

from __future__ import annotations

from rftcore.checks.group_rewards import check_group_rewards
from rftcore.engines import ENGINES
from rftcore.findings import Findings
from rftcore.monitor import MONITORS
from rftcore.resolved import ResolvedRun
from rftcore.workflows import check_workflow_args
from rftdata.config import TasksetConfig
from rftdata.errors import ConfigError


def check_plugins(resolved: ResolvedRun, findings: Findings) -> None:
    """Load rewards, workflow, selectors, engine, monitors, trainer backend, stages and algorithm, and try their arguments."""
    config = resolved.config
    check_task_plugins(resolved, findings)
    check_selectors(resolved, findings)
    # Registered engines and monitors may import large packages, so only the roles that use them load them.
    if config.explorer.engine not in ENGINES.names():
        findings.passes(lambda: resolved.engine_class)
    if not {*config.monitor} <= {*MONITORS.names()}:
        for name in config.monitor:
            findings.passes(MONITORS.load, name, config.base_dir)
    findings.passes(config.trainer.check_backend, config.base_dir)
    findings.passes(resolved.engine, worker_index=0)
    findings.passes(lambda: resolved.experience_chain)
    findings.passes(lambda: resolved.algorithm)
    findings.passes(check_group_rewards, resolved)


def check_task_plugins(resolved: ResolvedRun, findings: Findings) -> None:
    """Load what tasks are loaded with: rewards and workflow, which need columns of them, and the stages of pipelines.task."""
    for whose, view in resolved.views(resolved.config.tasksets):
        findings.passes_of(whose, getattr, view, "rewards")
        findings.passes_of(whose, _check_workflow, view)
    findings.passes(lambda: resolved.task_chain)


def _check_workflow(resolved: ResolvedRun) -> None:
    explorer = resolved.config.explorer
    check_workflow_args(explorer.workflow, resolved.workflow, 3, explorer.workflow_args)
    if check_args := getattr(resolved.workflow, "check_args", None):
        check_args(resolved.config.base_dir, **explorer.workflow_args)


def check_selectors(resolved: ResolvedRun, findings: Findings) -> None:
    """Load the selector of each taskset, and try its arguments."""
    for taskset in resolved.config.tasks:
        findings.passes(_check_screening, resolved, taskset)


def _check_screening(resolved: ResolvedRun, taskset: TasksetConfig) -> None:
    """Refuse a selector that screens groups by as many rollouts as they have.

    Raises:
        PluginError, ConfigError: the selector does not exist, cannot be loaded or does not fit.
    """
    config = resolved.config
    screening = resolved.selectors[taskset.name].screening
    size = taskset.group_size or config.algorithm.group_size
    if screening is not None and screening.rollouts >= size:
        raise ConfigError(
            f"the selector {(taskset.selector or config.selector).type!r} screens groups of the taskset {taskset.name!r} by their first rollouts, "
            "but they have no further rollouts",
            value=screening.rollouts,
            allowed=f"1 to {size - 1}, below the group's size",
            todo="lower screen_rollouts, or raise group_size",
        )
