"""The weights of an explorer's engine: their version, and how the next version reaches the engine, from a file or from the trainer.

`checksum` is that of the weights in the engine, whatever version they were published as. It is None while the weights may be a mixture of two
versions, so that the next file is loaded in any case.
"""

from __future__ import annotations

import asyncio
import socket
import time
from datetime import datetime
from pathlib import Path

from rftcore.engines.base import Engine
from rftcore.explorer.weights_check import WeightsCheck
from rftcore.run.join import JoinedRun
from rftcore.sync.base import LIVE_URI
from rftcore.sync.transfer.explorer_side import LiveReceiver
from rftdata.attempts.evaluations import Evaluation
from rftdata.attempts.policies import FOLDER, PolicyVersion, newest_policy, publisher
from rftdata.errors import ModelError
from rftdata.workers.worker import Worker


class EngineWeights:
    """Loads and receives the weights of one engine.

    Args:
        only_evaluates: the run samples only for its evaluations, which name their own weights.
        missing_weights_s: seconds for which the weights of a live trainer may be missing.

    Attributes:
        trainer_step: the step that produced the newest version taken by `take_newest`; None before the first.
        checksum: see the module header.
    """

    def __init__(
        self, joined: JoinedRun, worker: Worker, engine: Engine, *, only_evaluates: bool, missing_weights_s: float
    ) -> None:
        self._run = joined.run
        self._worker = worker
        self._engine = engine
        self._only_evaluates = only_evaluates
        self._missing_weights_s = missing_weights_s
        # Policy version, when it was first found missing, and its trainer's lease then.
        self._missing: tuple[int, float, datetime] | None = None
        self._news: asyncio.Task[None] | None = None
        self.trainer_step: int | None = None
        self.checksum: str | None = None
        self._are_lost = False
        sync = joined.resolved.config.sync
        self._kv_cache = {"kv_cache": "kept"} if sync.kv_cache == "keep" else {}
        self._check = WeightsCheck(self._run, worker, engine, sync.timeout_s) if sync.check_weights else None
        self._live: LiveReceiver | None = None
        self._listens = False
        if sync.method in ("nccl", "auto"):
            reception = None if only_evaluates else engine.reception
            self._listens = reception is not None and (sync.method == "nccl" or reception.device != "cpu")
            self._live = LiveReceiver(
                self._run,
                worker.worker_id,
                sync,
                reception,
                engine.receive_weights,
                engine.refuse_unfit,
            )

    def set_ready(self, ready: bool) -> None:
        """Report whether the engine could take weights now."""
        if self._live is not None:
            self._live.set_ready(ready and self._listens)

    def news(self) -> list[asyncio.Task[None]]:
        """Return a task that ends when the trainer offers weights, or after 0.5 s; nothing if it never offers any."""
        if self._live is None or not self._listens:
            return []
        if self._news is None or self._news.done():
            self._news = asyncio.create_task(asyncio.to_thread(self._live.wait, 0.5))
        return [self._news]

    def lose(self) -> None:
        """Record that the engine has lost its weights, so that they are loaded again, whatever their version."""
        self.checksum, self._are_lost = None, True

    async def take_sent(self) -> None:
        """Take the newest version into a sleeping engine, if the trainer is sending it right now."""
        policy = None if self._live is None or not self._listens else newest_policy(self._run)
        if self._live is None or policy is None or policy.uri != LIVE_URI or not self._live.is_offered(policy):
            return
        await asyncio.to_thread(self._engine.wake, True)
        self.lose()
        await self.take_newest()

    async def take_newest(self) -> None:
        """Take the newest version of the run, unless the engine already has it."""
        if self._only_evaluates and self.trainer_step is not None:
            return
        policy = newest_policy(self._run)
        if policy is None:
            return
        version = policy.policy_version_id
        if policy.method == FOLDER:  # with which the engine began
            self.checksum = policy.checksum
            await asyncio.to_thread(self._engine.set_policy_version, version)
        try:
            # The engine may already have the newest, loaded for an evaluation.
            if version != self._engine.policy_version_id or self._are_lost:
                if policy.checksum == self.checksum and not self._are_lost:
                    await asyncio.to_thread(self._engine.set_policy_version, version)
                elif policy.uri == LIVE_URI:
                    if not await self._take_live(policy):
                        return
                    if self._check is not None:
                        await self._check.compare_with_file_of(version)
                else:
                    await self.load(policy)
                self._are_lost = False
        except ModelError as error:
            if Path(policy.uri).exists():
                raise
            self._tolerate_missing(policy, error)
            return
        self._missing = None
        self.trainer_step = policy.trainer_step
        self._worker.progress |= {"policy_version_id": version, "policy_step": self.trainer_step}

    def are_those_of(self, evaluation: Evaluation) -> bool:
        """Return whether the engine has the weights of an evaluation. Those that were sent to it have another checksum than their file."""
        has_version = self._engine.policy_version_id == evaluation.policy_version_id
        return self.checksum is not None and (has_version or self.checksum == evaluation.checksum)

    async def load(self, weights: PolicyVersion | Evaluation) -> None:
        """Load a file into the engine.

        Raises:
            ModelError: it is missing, or differs from the published one.
        """
        version = weights.policy_version_id
        self._worker.set_state(f"loads policy version {version}", activity="transferring")
        seconds = await asyncio.to_thread(self._engine.load_weights, weights.uri, version, weights.checksum)
        self.checksum, self._are_lost = weights.checksum, False
        self._worker.progress |= {"load_weights_s": round(seconds, 3), **self._kv_cache}
        if self._check is not None:
            await self._check.compare(weights)

    async def leave(self) -> None:
        """Report that the engine takes no more weights."""
        if self._news is not None:
            await self._news
        if self._live is not None:
            self._live.leave()

    async def _take_live(self, policy: PolicyVersion) -> bool:
        """Take weights that the trainer sends; return False if they are not in the engine afterwards."""
        if self._live is None:
            return False
        if self._news is not None:
            await self._news  # it uses the same connection
        self._worker.set_state(f"takes policy version {policy.policy_version_id}", activity="transferring")
        outcome = await asyncio.to_thread(self._live.take, policy, self._worker.should_stop)
        if outcome.was_sent:
            self.checksum = outcome.checksum
            self._worker.progress |= {"load_weights_s": round(outcome.pause_seconds, 3), **self._kv_cache}
        return outcome.checksum is not None

    def _tolerate_missing(self, policy: PolicyVersion, error: ModelError) -> None:
        """Tolerate missing weights whose publisher has replaced them, removed them on leaving, or crashed. If they never appear on this host, raise.

        Raises:
            ModelError: they are still the newest, and the trainer that published them runs: it has renewed its lease since they were found missing.
        """
        version, newest = policy.policy_version_id, newest_policy(self._run)
        if newest is None or newest.policy_version_id != version:
            return
        now, trainer = time.monotonic(), publisher(self._run, policy)
        if self._missing is None or self._missing[0] != version:
            self._missing = (version, now, trainer.lease_until)
        _, since, lease_then = self._missing
        if trainer.alive and trainer.lease_until > lease_then and now - since > self._missing_weights_s:
            raise ModelError(
                f"the weights file {policy.uri} of policy version {version} does not exist on this host "
                f"({socket.gethostname()}); the trainer on {trainer.host} published it by sync.method {policy.method!r}",
                allowed="memory works for explorers on the trainer's host, checkpoint for those with access to its buffer folder",
                todo="set sync.method (with nccl: sync.file_method) to checkpoint with the buffer on a shared filesystem, or explore on the"
                " trainer's host",
            ) from error
