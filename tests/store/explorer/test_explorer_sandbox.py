"""Rewards that run a model's code, in an explorer on a real buffer."""

from __future__ import annotations

from rftcore.engines.base import Decoding, Generation
from rftcore.reporting.report import build_report
from rftcore.sandbox.tiers import tier_name
from rftdata.attempts.attempt import Attempt
from tests.support.explored_run import OneAtATime, Run
from tests.support.sandboxes import strongest_level_here


class Programmer(OneAtATime):
    """Writes a right function, a wrong one and one that ends its process, in turn."""

    answers = ("def f(x): return x + 1", "def f(x): return x", "import os\nos._exit(0)")

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        text = f"```python\n{self.answers[self.asked % 3]}\n```"
        self.asked += 1
        ids = self.tokenizer.encode(text)
        return Generation(ids, [-0.5] * len(ids), text, "stop", [(0, self.policy_version_id)])


def test_unit_tests_grade_rollouts_and_the_run_stores_what_confined_them(run: Run, attempt: Attempt) -> None:
    level = strongest_level_here()
    run.buffer.sql('UPDATE rft.task SET payload = payload || \'{"metadata": {"tests": "assert f(1) == 2"}}\'')
    run.publish(attempt, 0, "a")
    rewards = "SELECT reward, count(*) AS n FROM rft.experience WHERE run_id = %s GROUP BY 1 ORDER BY 1"
    run.explore(
        Programmer(),
        until=lambda: sum(row["n"] for row in run.rows(rewards)) >= 6,
        changes={"algorithm": {"name": "grpo", "group_size": 3}},
        reward={"name": "unit_tests", "sandbox": {"wall_s": 30}},
    )
    assert run.rows(rewards) == [{"reward": 0, "n": 4}, {"reward": 1, "n": 2}]
    assert build_report(run.buffer, run.run).sandboxes == [tier_name(level)]
