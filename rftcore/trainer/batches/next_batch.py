"""The next batch, drawn and prepared while the current one is trained on.

- A batch drawn ahead is a full one. It is checked when its step begins: if a label, a verdict or a purge has changed what a draw would
  give, it is released and drawn again. So a label that was committed before a step begins is trained on.
- Nothing is drawn ahead where groups that become ready later could be preferred to those that are ready now, or cannot be ready before the
  current step is published (`draws_ahead`).
- An error ahead of time is not raised. The step draws again when it begins, and raises the error if it persists.
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
        train: the batch for the learner; None if there are no experiences.
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
    """Draws the batches of one attempt. It is a context manager, whose end releases a batch that was drawn and not trained on.

    The end waits for a draw that is under way, since nothing else would release the rows before the next attempt. It does not wait again
    for an unavailable database.

    Args:
        num_groups: of a batch, or rows of a stored selection.

    Attributes:
        attempt: the attempt that draws.
    """

    def __init__(self, attempt: Attempt, algorithm: Algorithm, num_groups: int) -> None:
        self.attempt = attempt
        self._algorithm = algorithm
        self._num_groups = num_groups
        self._ahead: _AheadDraw | None = None

    def draw_ahead(self, step: int) -> None:
        """Begin to draw and prepare a batch in a separate thread."""
        assert self._ahead is None
        self._ahead = _AheadDraw(step, self._try_ahead)
        self._ahead.start()

    def draw(
        self, step: int, *, stop: Callable[[], bool], waiting: Callable[[str | None], None]
    ) -> PreparedBatch | None:
        """Return the batch of a step that begins now, with all labels committed until now; None if `stop` ended the wait.

        Args:
            stop, waiting: see `Attempt.draw`.

        Raises:
            RftError: see `Attempt.draw` and `train_batch`.
        """
        if self._ahead is not None:
            while not self._ahead.leave(_CHECK_S):
                if stop():
                    return None
            ahead, self._ahead = self._ahead, None
            prepared = self._current(ahead)
            if prepared is not None:
                return prepared
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
        """Return the batch drawn ahead if a draw would still give the same; otherwise release it and return None."""
        if ahead.error is not None and not isinstance(ahead.error, RftError):
            raise ahead.error
        if ahead.batch is not None and self.attempt.is_current(ahead.batch.drawn):
            return ahead.batch
        if ahead.may_have_drawn:
            self.attempt.release_step(ahead.step)
        return None


class _AheadDraw:
    """One draw in a thread, tried again until it succeeds or the step begins.

    Attributes:
        batch, error: the outcome, once `leave` has returned true.
    """

    def __init__(self, step: int, try_draw: Callable[[int], PreparedBatch | None]) -> None:
        self.step = step
        self.batch: PreparedBatch | None = None
        self.error: BaseException | None = None
        self._try_draw = try_draw
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._work, name="next batch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def may_have_drawn(self) -> bool:
        return self.batch is not None or self.error is not None

    def leave(self, timeout_s: float | None = None) -> bool:
        """Begin no further try, and wait for the running one; return whether it has ended.

        Args:
            timeout_s: None waits until it has ended: at the latest once `ride_out` has given up the database.
        """
        self._left.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            while not self._left.is_set() and self.batch is None:
                self.batch = self._try_draw(self.step)
                if self.batch is None:
                    self._left.wait(_POLL_S)
        except BaseException as error:  # noqa: BLE001 - the step that needs the batch raises it, or draws again
            self.error = error
