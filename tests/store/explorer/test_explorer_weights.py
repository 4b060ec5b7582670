"""The weights of an explorer: when it loads which, and what it does while they are missing."""

from __future__ import annotations

import socket

import pytest

from rftdata.attempts.attempt import Attempt
from rftdata.errors import ModelError
from tests.support.explored_run import Gated, OneAtATime, Run


def test_an_explorer_to_which_an_evaluation_brought_the_newest_weights_explores_with_them(
    run: Run, attempt: Attempt
) -> None:
    """They were published, and the evaluation asked for, while it answered another."""
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    engine = Gated()
    published: list[int] = []

    def goes_on() -> bool:
        if engine.asked and not published:
            published.append(run.publish(attempt, 1, "b"))
            run.ask(attempt, published[0], "b", step=1)
            engine.is_open = True
        newest = (
            "SELECT count(*) AS n FROM rft.rollout_group WHERE run_id = %s AND explore_step = 1 AND status <> 'planned'"
        )
        return bool(published) and run.all_answered() and run.rows(newest) != [{"n": 0}]

    run.explore(engine, until=goes_on, changes={"sync": {"offset": 0}})
    assert engine.loaded == ["a", "b"]


def test_weights_that_are_published_again_are_not_loaded_again(run: Run, attempt: Attempt) -> None:
    run.publish(attempt, 0, "a")
    versions = [0]
    engine = OneAtATime()

    def renamed() -> bool:
        if engine.loaded and len(versions) == 1:
            versions.append(run.publish(attempt, 1, "a"))
        return engine.policy_version_id == versions[-1] > 0

    run.explore(engine, until=renamed)
    assert engine.loaded == ["a"]


def test_weights_of_a_live_trainer_that_never_appear_end_the_explorer_and_name_the_method(run: Run) -> None:
    with run.buffer.attempt(run.run, lease_s=1.5) as attempt:
        run.publish(attempt, 0, "elsewhere", exists=False)
        with pytest.raises(ModelError, match=r"sync\.method 'memory'") as caught:
            run.explore(OneAtATime(), until=lambda: False, missing_weights_s=0.5)
    assert socket.gethostname() in str(caught.value)


class Looks(OneAtATime):
    num_looks = 0

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        self.num_looks += 1
        return super().load_weights(uri, policy_version_id, checksum)


def test_weights_that_a_trainer_removed_on_leaving_are_waited_for(run: Run) -> None:
    """Those of a live trainer would be an error at the second look, since they may be missing for no time at all."""
    with run.buffer.attempt(run.run) as attempt:
        run.publish(attempt, 0, "gone", exists=False)
    run.explore(engine := Looks(), until=lambda: engine.num_looks >= 3, missing_weights_s=0.0)


def test_weights_lost_with_a_killed_trainer_are_waited_for_while_its_lease_is_valid(run: Run) -> None:
    # A lease that is not renewed during the test, as that of a killed process is not.
    with run.buffer.attempt(run.run, lease_s=1e6) as attempt:
        run.publish(attempt, 0, "gone", exists=False)
        run.explore(engine := Looks(), until=lambda: engine.num_looks >= 3, missing_weights_s=0.0)
