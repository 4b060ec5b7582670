"""Live progress of a run, read from the buffer only: any process on any machine can show it.

`Progress.snapshot()` asks the database; the views (`rftcore.launch.views`) draw snapshots.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rftdata.buffer import Buffer

Snapshot = dict[str, Any]

# Steps whose rewards may still change: groups in flight and refills of earlier steps.
_OPEN_STEPS = 16


class Progress:
    """Reads one run's progress.

    Args:
        buffer: open buffer.
        run_id: the run.
    """

    def __init__(self, buffer: Buffer, run_id: int) -> None:
        self._database = buffer.database
        self._run_id = run_id
        self._rewards: dict[int, dict[str, Any]] = {}
        self._failures: dict[tuple[int, str], dict[str, Any]] = {}

    def snapshot(self) -> Snapshot:
        """Where the run stands now; plain values, ready for JSON but for the times.

        Keys: run, run_id, status, outcome, step, planned_steps, num_skipped, seconds, remaining_seconds, mean_reward,
        pass_rate, reward_step (newest explorer step with rewards; the two means are its), rewards (per explorer step),
        tokens_per_s, policy_step (of the engines; the oldest where they differ), published_step, queue, refills,
        closed_groups, failures (failed rollouts and their commonest error, or None), metrics (of the newest step), evaluations,
        evaluations_open, open_reviews (rows that wait for a person), workers.
        """
        run = self._rows("progress_run")[0]
        steps = self._rows("progress_steps", limit=8)
        workers = self._rows("progress_workers")
        explorers = [w["progress"] for w in workers if w["role"] == "explorer" and w["liveness"] == "alive"]
        rates = [p["tokens_per_s"] for p in explorers if p.get("tokens_per_s") is not None]
        policies = [p["policy_step"] for p in explorers if p.get("policy_step") is not None]
        published = self._rows("progress_policy")
        groups = self._rows("progress_groups")[0]
        self._read_rewards()
        newest = max(self._rewards, default=None)
        return {
            "run": run["name"], "run_id": run["run_id"], "status": run["status"], "outcome": run["outcome"],
            "step": run["step"], "planned_steps": run["planned_steps"], "num_skipped": run["num_skipped"],
            "seconds": self._rows("run_seconds")[0]["seconds"],
            "remaining_seconds": _remaining(run["planned_steps"] - run["step"], steps),
            "mean_reward": None if newest is None else self._rewards[newest]["mean_reward"],
            "pass_rate": None if newest is None else self._rewards[newest]["pass_rate"],
            "reward_step": newest,
            "rewards": [row["mean_reward"] for _, row in sorted(self._rewards.items())],
            "tokens_per_s": sum(rates) if rates else None,
            "policy_step": min(policies, default=None),
            "published_step": published[0]["trainer_step"] if published else None,
            "queue": self._rows("progress_queue")[0],
            "refills": groups["refilled"], "closed_groups": groups["closed"],
            "failures": self._commonest_failure(),
            "metrics": steps[0]["metrics"] if steps else {},
            "evaluations": self._rows("progress_evaluations"),
            "evaluations_open": self._rows("progress_evaluations_open")[0]["num"],
            "open_reviews": self._rows("num_open_reviews")[0]["n"],
            "workers": workers,
        }  # fmt: skip

    def _read_rewards(self) -> None:
        from_step = max(self._rewards, default=0) - _OPEN_STEPS
        for row in self._rows("progress_rewards", from_step=from_step):
            if row["mean_reward"] is not None:
                self._rewards[row["explore_step"]] = row
        for row in self._rows("progress_failures", from_step=from_step):
            self._failures[row["explore_step"], row["kind"]] = row

    def _commonest_failure(self) -> dict[str, Any] | None:
        counts: Counter[str] = Counter()
        for (_, kind), row in self._failures.items():
            counts[kind] += row["num"]
        if not counts:
            return None
        [(commonest, num)] = counts.most_common(1)
        error = next(row["error"] for (_, kind), row in self._failures.items() if kind == commonest)
        return {"num_rollouts": counts.total(), "num_commonest": num, "commonest": error}

    def _rows(self, name: str, **parameters: Any) -> list[dict[str, Any]]:
        return self._database.fetch(name, run_id=self._run_id, **parameters)


def _remaining(left: int, steps: list[dict[str, Any]]) -> float | None:
    """Seconds to go at the pace of the newest steps."""
    if left <= 0 or len(steps) < 2:
        return None
    taken: float = (steps[0]["finished_at"] - steps[-1]["finished_at"]).total_seconds()
    return left * taken / (len(steps) - 1)
