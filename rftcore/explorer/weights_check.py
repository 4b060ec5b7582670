"""`sync.check_weights`: compare the weights in an engine with the file of the same version, after every change."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from rftcore.engines.base import Engine
from rftcore.sync.base import LIVE_URI
from rftdata.attempts.evaluations import Evaluation
from rftdata.attempts.policies import PolicyVersion, newest_policy, publisher
from rftdata.errors import ModelError, RftError
from rftdata.run import Run
from rftdata.workers.worker import Worker

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_NAMED = 5  # tensors that an error names


class WeightsCheck:
    """Compares the weights of one engine with their files.

    Args:
        timeout_s: longest wait for the trainer to write the file of weights that it has sent.
    """

    def __init__(self, run: Run, worker: Worker, engine: Engine, timeout_s: float) -> None:
        self._run = run
        self._worker = worker
        self._engine = engine
        self._timeout_s = timeout_s

    async def compare_with_file_of(self, policy_version_id: int) -> None:
        """Compare weights that were sent into the engine with their file, once the trainer has written it.

        Raises:
            RftError: see `compare`, or the trainer wrote no file in time.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            policy = newest_policy(self._run)
            if policy is None or policy.policy_version_id != policy_version_id or self._worker.should_stop():
                logger.warning(
                    "policy version %d was not compared with its file: a newer one was published", policy_version_id
                )
                return
            if policy.uri != LIVE_URI:
                await self.compare(policy)
                return
            if not publisher(self._run, policy).alive:
                return  # the next attempt of the run publishes its weights again
            if time.monotonic() > deadline:
                raise RftError(
                    f"sync.check_weights: the trainer has not written policy version {policy_version_id} as a file within {self._timeout_s:g} s",
                    todo="raise sync.timeout_s, or set sync.check_weights: false",
                )
            await asyncio.sleep(_POLL_S)

    async def compare(self, weights: PolicyVersion | Evaluation) -> None:
        """Compare the engine's weights with their file.

        Raises:
            RftError: a tensor differs; the run must not continue with this engine.
        """
        version = weights.policy_version_id
        self._worker.set_state(f"compares policy version {version} with its file", activity="checking")
        try:
            differing = await asyncio.to_thread(self._engine.differing_weights, weights.uri, weights.checksum)
        except ModelError as error:
            if Path(weights.uri).exists():
                raise
            logger.warning(
                "policy version %d was not compared with its file, which was removed: %s", version, str(error)
            )
            return
        if differing:
            more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
            raise RftError(
                f"the weights of policy version {version} in the engine of explorer {self._worker.worker_id} are not those of its file: "
                f"{', '.join(differing[:_NAMED])}{more} differ",
                value=weights.uri,
                todo="do not train on its samples; compare with sync.method: checkpoint, and report the engine's version and settings",
            )
        self._worker.progress["checked_version"] = version
