"""`WeightParity`: whether the engines sample from the trainer's weights, checked in every attempt up to the first batch that can tell.

Hashes show that the right bytes arrived, not that the engine computes with them: a layer may have kept prepacked weights, or another model may have the same
tensors. If every experience of a batch was sampled from weights that were sent into a live engine, and the trainer has not changed them since, both must
give its tokens the same log-probabilities, except for rounding. Where explorers run ahead (sync.offset), no batch is sampled from the trainer's
newest weights; batches are then compared whose weights are up to so many steps older. These few updates change little, compared with
the difference to another model. A version that was also written as a file, such as for an evaluation, may have been loaded from there since. Its batches are
compared, but do not settle the question. After a batch that settles it, none is compared, because a wrong engine is wrong from the start.
If no batch could tell, for instance because each contained stored experiences, the outcome of the run reports it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rftcore.config.run import RunConfig
from rftdata.errors import RftError

logger = logging.getLogger(__name__)


def weight_parity(config: RunConfig) -> WeightParity | None:
    """Return the comparison for a run; None if its engines record log-probabilities of another distribution than the model's, after top-p or top-k."""
    is_whole = config.explorer.top_p == 1 and config.explorer.top_k == 0
    return WeightParity(config.sync.max_logprob_diff, config.sync.offset) if is_whole else None


class WeightParity:
    """The comparison in one attempt.

    Args:
        limit: largest mean difference, nats.
        lag: largest number of trainer steps by which a batch's weights may be older than the newest.
    """

    def __init__(self, limit: float, lag: int = 0) -> None:
        self._limit = limit
        self._lag = lag
        self._is_settled = False
        self._was_live = False
        # Steps since an engine first had weights that were sent. A batch from older weights only does not count as trained.
        self._num_skipped, self._num_trained = 0, 0

    def check(
        self,
        step: int,
        staleness: Sequence[int | None],
        metrics: Mapping[str, float],
        first_sent_step: int | None,
        live_since: int | None,
    ) -> None:
        """Compare the log-probabilities of a batch, if it can tell and none could before.

        Args:
            step: of the batch.
            staleness: of its experiences; None for those that no policy sampled. Empty if the step was skipped.
            metrics: of its update.
            first_sent_step, live_since: those of `LivePublisher`.

        Raises:
            RftError: the difference is beyond the limit; the run must not continue with these engines.
        """
        self._was_live |= live_since is not None
        if not staleness:
            self._num_skipped += self._was_live
            return
        lags = [steps for steps in staleness if steps is not None]
        is_older = bool(lags) and live_since is not None and step - 1 - min(lags) < live_since
        self._num_trained += self._was_live and not is_older
        difference = metrics.get("logprob_diff")
        if self._is_settled or difference is None or first_sent_step is None or not lags or len(lags) < len(staleness):
            return
        oldest = step - 1 - max(lags)
        if max(lags) > self._lag or oldest < first_sent_step:
            return
        if not difference <= self._limit:
            raise RftError(
                f"the engines do not sample from the trainer's weights: in step {step} the log-probabilities that they recorded differ from the "
                f"trainer's by {difference:.3f} nats per token, although all were sampled from "
                + (
                    f"its weights of up to {max(lags)} step{'s' * (max(lags) > 1)} before"
                    if max(lags)
                    else "its newest weights"
                ),
                allowed=f"up to {self._limit:g} (sync.max_logprob_diff)",
                todo="compare with sync.method: checkpoint; if that differs as much, check explorer.engine_args (dtype, quantisation) against"
                " trainer.autocast, and raise the limit only if they explain it",
            )
        if live_since is not None and oldest >= live_since:
            self._is_settled = True
            logger.info("engines and trainer agree: %.4f nats per token in step %d", difference, step)

    def conclude(self) -> str | None:
        """Return a sentence for the outcome of the run if no batch could tell; None if one could, or if no weights were sent.

        A run is refused if every step since an engine first had weights that were sent was skipped. Engines with wrong weights give answers
        without reward, and groups whose rewards do not differ are dropped, so such an engine may leave no batch to compare.

        Raises:
            RftError: every step was skipped.
        """
        if self._num_skipped and not self._num_trained:
            raise RftError(
                f"whether the engines sample from the trainer's weights is unknown: all {self._num_skipped} steps since weights were sent into them"
                " were skipped, because no experience was left. Engines with wrong weights are a possible reason",
                todo="look at the answers (`rft query`), and start the run again with sync.check_weights: true or with sync.method: checkpoint",
            )
        if self._num_trained and not self._is_settled:
            return "no batch could tell whether the engines sample from the trainer's weights"
        return None
