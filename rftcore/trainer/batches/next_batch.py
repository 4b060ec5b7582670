"""The next batch, drawn and prepared while the present one is trained on.

- A batch drawn ahead is a full one. It is checked when its step begins: if a label, a verdict or a purge has changed what a draw would
  give, it is released and drawn again. So a label that was committed before a step begins is trained on.
- Where groups that become ready later could be preferred to those that are ready now, or cannot be ready before the present step is
  published, nothing is drawn ahead (`draws_ahead`).
- What fails ahead of time is not an error yet. The step draws again when it begins, and meets the error if it persists.
- A batch that was drawn ahead and not trained on is released. After a crash the next attempt undoes its draws, as it does with every draw
  after its checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rftcore.algorithms.algorithm import Algorithm
from rftcore.config.run import RunConfig
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.batch import Batch
from rftdata.errors import BufferUnavailableError, RftError
from rftdata.run import Run

_POLL_S = 0.25
_CHECK_S = 0.25


@dataclass(frozen=True)
class PreparedBatch:
    """The batch of a step.

    Attributes:
        drawn: its rows.
        train: what the learner takes; None if there are no experiences.
    """

    drawn: Batch
    train: TrainBatch | None


def draws_ahead(config: RunConfig, run: Run, step: int) -> bool:
    """Return whether the batch of a step may be drawn while the step before it is trained."""
    if run.source_kind is not None:
        return True  # the rows of a stored selection follow from the steps before
    if not config.sampling.is_fifo:
        return False
    if run.mode == "train" or not config.sampling.fresh_share():
        return True
    # The step trains on groups of explorer steps up to `step - 1`. The policy stands at `step - 2` while the step before is trained. With enough
    # over-sampling a whole batch is left of earlier steps.
    return config.sampling.over_sampling >= 1 or config.pacing.last_step(step - 2) >= step - 1


class NextBatch:
    """Draws the batches of one attempt; a context, which releases what is not trained on.

    Its end waits for a draw that is under way, since nothing else would release the rows before the next attempt. Only an unavailable
    database is not waited for again.

    Args:
        num_groups: of a batch, or rows of a stored selection.

    Attributes:
        attempt: whose batches they are.
    """

    def __init__(self, attempt: Attempt, algorithm: Algorithm, num_groups: int) -> None:
        self.attempt = attempt
        self._algorithm = algorithm
        self._num_groups = num_groups
        self._ahead: _AheadDraw | None = None

    def draw_ahead(self, step: int) -> None:
        """Begin to draw and prepare a batch in a thread of its own."""
        assert self._ahead is None
        self._ahead = _AheadDraw(step, self._try_ahead)
        self._ahead.start()

    def draw(
        self, step: int, *, stop: Callable[[], bool], waiting: Callable[[str | None], None]
    ) -> PreparedBatch | None:
        """Return the batch of a step that begins now, as all committed labels have it; None if `stop` ended the wait.

        Args:
            stop, waiting: see `Attempt.draw`. `waiting` is also called before the first try; not for a batch that is there.

        Raises:
            RftError: see `Attempt.draw` and `train_batch`.
        """
        if self._ahead is not None:
            while not self._ahead.leave(_CHECK_S):
                if stop():
                    return None
            ahead, self._ahead = self._ahead, None
            found = self._current(ahead)
            if found is not None:
                return found
        waiting(None)
        batch = self.attempt.draw(step, self._num_groups, ARRAYS, stop=stop, waiting=waiting)
        return None if batch is None else self._prepared(batch)

    def __enter__(self) -> NextBatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        if isinstance(error, BufferUnavailableError):  # it has already been waited for
            ahead.leave(0.0)
            return
        ahead.leave()
        try:
            if ahead.may_have_drawn:
                self.attempt.release_step(ahead.step)
        except RftError:
            if error is None:  # otherwise it would hide the first error
                raise

    def _try_ahead(self, step: int) -> PreparedBatch | None:
        batch = self.attempt.draw_ahead(step, self._num_groups, ARRAYS)
        return None if batch is None else self._prepared(batch)

    def _prepared(self, batch: Batch) -> PreparedBatch:
        return PreparedBatch(batch, train_batch(batch, self._algorithm) if len(batch) else None)

    def _current(self, ahead: _AheadDraw) -> PreparedBatch | None:
        """Return what was drawn ahead, if it is still what a draw would give; otherwise nothing is drawn for the step."""
        if ahead.error is not None and not isinstance(ahead.error, RftError):
            raise ahead.error
        if ahead.found is not None and self.attempt.is_current(ahead.found.drawn):
            return ahead.found
        if ahead.may_have_drawn:
            self.attempt.release_step(ahead.step)
        return None


class _AheadDraw:
    """One draw in a thread, tried again until it succeeds or the step begins.

    Attributes:
        found, error: the outcome, once `leave` has returned true.
    """

    def __init__(self, step: int, try_draw: Callable[[int], PreparedBatch | None]) -> None:
        self.step = step
        self.found: PreparedBatch | None = None
        self.error: BaseException | None = None
        self._try_draw = try_draw
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._work, name="next batch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def may_have_drawn(self) -> bool:
        return self.found is not None or self.error is not None

    def leave(self, timeout_s: float | None = None) -> bool:
        """Begin no further try, and wait for the one that runs; return whether it has ended.

        Args:
            timeout_s: None waits until it has ended: at the latest once `ride_out` has given up the database.
        """
        self._left.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            while not self._left.is_set() and self.found is None:
                self.found = self._try_draw(self.step)
                if self.found is None:
                    self._left.wait(_POLL_S)
        except BaseException as error:  # noqa: BLE001 - the step that needs the batch raises it, or draws again
            self.error = error
