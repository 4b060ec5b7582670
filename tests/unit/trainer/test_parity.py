"""A run whose engines sample from other weights than the trainer's stops at the first batch that shows the difference."""

from __future__ import annotations

import math

import pytest

from rftcore.trainer.parity import WeightParity
from rftdata.errors import RftError


@pytest.mark.parametrize("difference", [0.31, 2.0, math.nan])
def test_engines_with_other_weights_stop_the_run(difference: float) -> None:
    with pytest.raises(RftError, match=r"in step 3 the log-probabilities .*sync\.max_logprob_diff"):
        WeightParity(0.3).check(3, [0, 0], {"logprob_diff": difference}, 0, 0)


def test_only_a_batch_from_the_newest_weights_is_compared() -> None:
    parity = WeightParity(0.3)
    parity.check(1, [0, 1], {"logprob_diff": 9.0}, 0, 0)
    parity.check(2, [0, None], {"logprob_diff": 9.0}, 0, 0)
    parity.check(3, [0, 0], {"loss": 1.0}, 0, 0)
    with pytest.raises(RftError):
        parity.check(4, [0, 0], {"logprob_diff": 9.0}, 0, 0)


def test_a_batch_from_weights_in_a_file_does_not_count_as_sent() -> None:
    parity = WeightParity(0.3)
    parity.check(1, [0, 0], {"logprob_diff": 0.0}, 1, 1)
    with pytest.raises(RftError):
        parity.check(2, [0, 0], {"logprob_diff": 9.0}, 1, 1)


def test_the_first_batch_from_sent_weights_is_compared_where_explorers_run_ahead() -> None:
    parity = WeightParity(0.3, lag=1)
    parity.check(2, [1, 1], {"logprob_diff": 0.0}, 1, 1)
    parity.check(3, [2, 1], {"logprob_diff": 0.0}, 1, 1)
    with pytest.raises(RftError, match="up to 1 step before"):
        parity.check(3, [1, 0], {"logprob_diff": 9.0}, 1, 1)


def test_an_attempt_is_compared_once() -> None:
    parity = WeightParity(0.3)
    parity.check(1, [0, 0], {"logprob_diff": 0.04}, 0, 0)
    parity.check(2, [0, 0], {"logprob_diff": 9.0}, 0, 0)


def test_a_run_whose_steps_were_all_skipped_since_weights_were_sent_is_not_finished() -> None:
    parity = WeightParity(0.3)
    parity.check(1, [], {}, None, None)
    parity.conclude()
    parity.check(2, [], {}, 1, 1)
    parity.check(3, [], {}, 1, 1)
    with pytest.raises(RftError, match="all 2 steps since weights were sent into them were skipped"):
        parity.conclude()
    parity.check(4, [2, 2], {"logprob_diff": 0.04}, 1, 2)
    with pytest.raises(RftError, match="all 2 steps"):
        parity.conclude()
    parity.check(5, [0, 0], {"logprob_diff": 0.04}, 1, 1)
    assert parity.conclude() is None


def test_the_outcome_says_that_no_batch_could_tell() -> None:
    parity = WeightParity(0.3)
    parity.check(1, [0, None], {"logprob_diff": 0.04}, None, None)
    assert parity.conclude() is None, "no weights were sent"
    parity.check(2, [0, None], {"logprob_diff": 0.04}, 1, 1)
    assert parity.conclude() == "no batch could tell whether the engines sample from the trainer's weights"
    parity.check(3, [0, 0], {"logprob_diff": 0.04}, 1, 1)
    assert parity.conclude() is None


def test_a_batch_from_weights_that_are_also_a_file_does_not_settle_it() -> None:
    """An evaluation loads the file into the engine, which corrects weights that the transfer has damaged."""
    parity = WeightParity(0.3)
    parity.check(1, [0, 0], {"logprob_diff": 0.0}, 0, None)
    parity.check(2, [], {}, 0, 1)
    with pytest.raises(RftError, match="all 1 steps"):
        parity.conclude()
    with pytest.raises(RftError, match="in step 3"):
        parity.check(3, [0, 0], {"logprob_diff": 9.0}, 0, 1)
