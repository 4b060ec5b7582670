"""The state of a run in words: its processes, failed rollouts, dropped rows and equal rewards, for a terminal and for a page."""

from __future__ import annotations

from typing import Any

from operators import OPERATORS
from rftdata.reports.progress import Dropped, EqualRewards, Failures, WorkerState
from rftdata.workers.worker import describe_state


def describe_equal_rewards(equal: EqualRewards) -> str:
    """Describe a run in which no rewards differ, and what helps."""
    rewards = f"{equal.lowest:g} in all" if equal.lowest == equal.highest else f"{equal.lowest:g} to {equal.highest:g}"
    return (
        f"all {equal.num_groups} groups so far have equal rewards in each group ({rewards}) and train nothing: look at answers and rewards with "
        "`rft try CONFIG`; correct the reward, take tasks that the model solves at times (selector.type: difficulty), or raise algorithm.group_size"
    )


def describe_drops(dropped: Dropped) -> str:
    """Describe what a stage drops, and what helps."""
    name = dropped.stage.partition("#")[0]  # a chain may have a stage twice
    # Only of built-in stages: a display does not run a user's files.
    remedy = getattr(OPERATORS.load(name), "remedy", None) if name in OPERATORS.builtins else None
    what = f"{dropped.share:.0%} of the newest rows are dropped by {dropped.stage} ({dropped.reason})"
    return what + (f": {remedy}" if remedy else "")


def workers_to_show(workers: list[WorkerState]) -> list[WorkerState]:
    """Return live workers, and for each role without one the last that ended with an error or fell silent.

    A failed replay is left out: it reported its error to the person who started it, and the run does not need it.
    """
    alive = [w for w in workers if w.liveness == "alive"]
    roles = {w.role for w in alive} | {"replay"}
    ended = {w.role: w for w in workers if w.role not in roles and (w.error or w.liveness in ("lost", "gone"))}
    return [*alive, *ended.values()]


def doing(worker: WorkerState) -> str:
    if worker.liveness == "gone":
        return f"its process has ended while it was {worker.state}"
    if worker.liveness == "lost":
        return f"silent since it was {worker.state}"
    if worker.error:
        sentence, *_ = str(worker.error).splitlines()  # a stack may follow
        return f"ended: {sentence}"
    return describe_state(str(worker.state), worker.waiting_for)


def worker_progress(progress: dict[str, Any]) -> str:
    parts = []
    if progress.get("policy_step") is not None:
        parts.append(f"policy of step {progress['policy_step']}")
    if progress.get("tokens_per_s") is not None:
        parts.append(f"{progress['tokens_per_s']:,.0f} tokens/s")
    shown_elsewhere = {"policy_step", "policy_version_id", "tokens_per_s", "num_generated_tokens"}
    for key, value in progress.items():
        if key not in shown_elsewhere and isinstance(value, int | float | str):
            parts.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(parts)


def describe_failures(failures: Failures | None) -> str:
    if failures is None:
        return ""
    total, num = failures.num_rollouts, failures.num_commonest
    share = "all" if num == total else f"{num} of them"
    which = f"{total:,} rollouts failed, {share} with" if total > 1 else "1 rollout failed with"
    return f"{which} {' '.join(failures.commonest.split())[:200]}"
