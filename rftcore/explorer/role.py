"""The explorer: plans groups, claims them, samples rollouts, seals groups, and answers evaluations.

All its work comes as rows, and it shares only the buffer and the weights with other roles. One loop stores
finished groups, loads newer weights, answers a pending evaluation, plans, claims, and waits for changes. Rollouts of
several groups run concurrently, and weights change under running rollouts (the engine recomputes them, and every token keeps
the version that sampled it). Evaluations of the present weights run beside the rollouts, and newer weights wait for them. Those of older
weights, and of an engine that sleeps at times, run alone, after the running rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rftcore.engines.base import Engine
from rftcore.explorer.drafts import Drafts
from rftcore.explorer.engine_watch import end_hanging_process, watch_engine
from rftcore.explorer.engine_weights import EngineWeights
from rftcore.explorer.evaluator import Evaluator
from rftcore.explorer.group_store import store_groups
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.run_failures import RunFailures
from rftcore.explorer.sandboxes import tiers_of_workflows
from rftcore.explorer.shared_device import EngineDevice, await_device
from rftcore.explorer.taskset_runners import (
    TasksetRunners,
    environment_limits_of,
    environments_of,
    limits_of,
    programs_of,
    scorer_of,
)
from rftcore.explorer.teacher import open_teacher
from rftcore.explorer.workflow_loop import WorkflowLoop
from rftcore.other_models.models import OtherModels
from rftcore.run.defaults import MAX_ROLLOUTS_PER_SEQUENCE, ROLLOUTS_PER_SEQUENCE
from rftcore.run.join import JoinedRun
from rftcore.sync.device_names import own_device
from rftcore.teachers.base import Teacher
from rftcore.tools.tool_boxes import ToolBoxes
from rftdata.attempts.evaluations import versions_to_evaluate
from rftdata.experience import Group
from rftdata.pipeline.budget import RunUsage
from rftdata.planning.claims import ClaimedGroup, claim_groups, release_groups
from rftdata.planning.partial import PartialAnswer, take_up
from rftdata.planning.planner import Planner
from rftdata.user_code.blocked_process import end_blocked_process, report_path
from rftdata.workers.shared_device import SharedDevice
from rftdata.workers.spans import Activity
from rftdata.workers.worker import Worker

logger = logging.getLogger(__name__)


def main(joined: JoinedRun, *, index: int = 0) -> int:
    """Explore for a run until it ends; return 0 after an orderly end.

    Args:
        index: number of this explorer among those of the run; it selects a separate sampling stream.
    """
    resolved, config = joined.resolved, joined.resolved.config
    with (
        joined.buffer,
        Worker(
            joined.run,
            "explorer",
            lease_s=config.explorer.lease_s,
            phases=joined.phases,
            on_waiting=joined.on_waiting,
        ) as worker,
    ):
        engine_class = resolved.engine_class
        device = SharedDevice(joined.run, worker.worker_id, own_device()) if config.explorer.sleep else None
        if device is not None and not await_device(device, worker):
            return 0
        worker.set_state("starts the engine", activity="starting")
        engine = engine_class(resolved.model_folder, resolved.engine(index))
        watch = watch_engine(engine, config.explorer.hang_s, end_hanging_process)
        try:
            asyncio.run(Explorer(joined, worker, engine, device).explore())
            joined.leave()
        finally:
            watch.close()
            engine.close()
            if device is not None:
                device.leave()  # the memory of the device is free now
    return 0


class Explorer:
    """One explorer process.

    Args:
        device: on the device that the explorer shares with the trainer; None if its engine never sleeps.
        missing_weights_s: seconds for which the weights of a live trainer may be missing. A trainer that ends normally removes them just
            before it releases its lease.
    """

    def __init__(
        self,
        joined: JoinedRun,
        worker: Worker,
        engine: Engine,
        device: SharedDevice | None = None,
        *,
        missing_weights_s: float = 10.0,
    ) -> None:
        resolved, config = joined.resolved, joined.resolved.config
        self.resolved, self.config = resolved, config.explorer
        self.pacing = config.pacing
        self.run = joined.run
        self.worker = worker
        self.engine = engine
        # A run on a stored selection samples only for its evaluations.
        self.only_evaluates = config.only_evaluates or config.sampling.source is not None
        self.weights = EngineWeights(
            joined, worker, engine, only_evaluates=self.only_evaluates, missing_weights_s=missing_weights_s
        )
        self.device = EngineDevice(worker, engine, self.weights, device, self._stop_time)
        source = "import" if self.config.engine == "none" else "explorer"
        self.failures = RunFailures.of(joined.run, config)
        self.outage = self.failures.outage
        self.drafts = Drafts(joined.run, engine, self.config.keep_partial_s)
        self.max_staleness = config.sampling.max_staleness
        self.usage = RunUsage(joined.run)
        self.runners = TasksetRunners.of(resolved, self._runner(source), self.usage)
        if tiers := sorted({*tiers_of_workflows(config), *self.runners.sandbox_tiers}):
            worker.progress["sandbox"] = "; ".join(tiers)
        self.workflows = WorkflowLoop(
            min(self.config.block_timeout_s, self.config.rollout_timeout_s),
            self._show_blocking,
            end_blocked_process,
            report_path(joined.run.folder, os.getpid()),
        )
        self.evaluator = self._evaluator()
        self.planner = Planner(joined.run, config.plan(source))
        self.screenings = {name: selector.screening for name, selector in resolved.selectors.items()}
        self.writer = joined.buffer.writer(joined.run)
        self.teacher: Teacher | None = None
        self.in_flight: dict[asyncio.Task[Group], ClaimedGroup] = {}  # with the claimed group of each task
        self._evaluation: asyncio.Task[bool] | None = None  # of the present weights, beside the rollouts
        self._has_claimed = False

    def _runner(self, source: str) -> RolloutRunner:
        return RolloutRunner(
            engine=self.engine,
            workflow=self.resolved.workflow,
            workflow_args=self.config.workflow_args,
            scorer=scorer_of(self.resolved, self.usage),
            timeout_s=self.config.rollout_timeout_s,
            close_s=self.config.close_timeout_s,
            limits=limits_of(self.config),
            thoughts=self.config.thoughts,
            seed=self.resolved.config.run.seed,
            source=source,
            slots=self._slots(),
            on_failure=self.failures.record,
            has_baseline=self.resolved.has_greedy_baseline,
            drafts=self.drafts,
            environments=environments_of(self.resolved),
            tools=ToolBoxes(self.resolved.config.base_dir),
            programs=programs_of(self.resolved),
            others=OtherModels(self.config.models, self.usage),
            environment_limits=environment_limits_of(self.config),
        )

    def _slots(self) -> RolloutSlots:
        num_sequences = self.resolved.engine(worker_index=0).max_num_seqs
        return RolloutSlots(
            ROLLOUTS_PER_SEQUENCE * num_sequences, self.config.max_rollouts or MAX_ROLLOUTS_PER_SEQUENCE * num_sequences
        )

    def _evaluator(self) -> Evaluator:
        return Evaluator(
            worker=self.worker,
            weights=self.weights,
            runners=self.runners.beside(self._slots()),  # answers do not wait for rollouts
            workflows=self.workflows,
            failures=self.failures,
            record_rate=self._record_rate,
            only_evaluates=self.only_evaluates,
            lease_s=self.config.lease_s,
        )

    async def explore(self) -> None:
        """Explore until the run ends or is asked to stop."""
        try:
            await self._open_teacher()
            self.weights.set_ready(True)
            while not self.worker.should_stop():
                await self._store_finished()
                if self.drafts.is_due:
                    await asyncio.to_thread(self.drafts.save)
                if not await self.device.keep():
                    await self._wait_asleep()
                    continue
                self._evaluate_beside()
                if self._evaluation is None:
                    await self.weights.take_newest()
                if await self._find_work():
                    continue
                await self._sleep()
        finally:
            await asyncio.to_thread(self.drafts.save, all_groups=True)
            for task in self.in_flight:
                task.cancel()
            if self._evaluation is not None:
                self._evaluation.cancel()
            await asyncio.gather(*self._tasks(), return_exceptions=True)
            await asyncio.to_thread(self.workflows.close)
            await asyncio.to_thread(self.runners.close)
            if self.teacher is not None:
                await self.teacher.close()
            await self.weights.leave()
            await self.device.leave()
            self.writer.close()
            release_groups(self.run, self.worker.worker_id)

    async def _find_work(self) -> bool:
        """Answer evaluations or claim groups; return whether there was anything to do."""
        self._evaluate_beside()
        if self.outage.lasts:
            # One group shows whether the outage is over. An evaluation that fails as a whole shows no more, and costs more.
            return self._claim() or await self._evaluate()
        return await self._evaluate() or self._claim()

    async def _open_teacher(self) -> None:
        if self.config.teacher is not None and not self.only_evaluates:
            self.worker.set_state("starts the teacher", activity="starting")
            self.teacher = await open_teacher(self.resolved, self.engine.tokenizer)

    def _tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that use the engine."""
        return [*self.in_flight, *([] if self._evaluation is None else [self._evaluation])]

    async def _sleep(self) -> None:
        if tasks := self._tasks():
            samples = [f"samples {len(self.in_flight)} groups"] if self.in_flight else []
            evaluates = [self.evaluator.present] if self.evaluator.present else []
            activity: Activity = "sampling" if samples else "evaluating"
            self.worker.set_state(" and ".join([*samples, *evaluates]) or "evaluates", activity=activity)
            self._record_rollouts()
            started, before = time.monotonic(), self.engine.num_generated_tokens
            await asyncio.wait(
                [*tasks, *self.weights.news(), *self.device.news()],
                timeout=0.5,
                return_when=asyncio.FIRST_COMPLETED,
            )
            self._record_rate(before, time.monotonic() - started)
            return
        self.worker.set_state("pauses" if self.outage.lasts else "waits", self._waiting_for())
        await asyncio.to_thread(self.worker.wait, 1.0)

    async def _wait_asleep(self) -> None:
        """Wait until the trainer hands over the device or sends weights, or a group is finished."""
        await asyncio.wait(
            [*self.in_flight, *self.weights.news(), *self.device.news()],
            timeout=0.5,
            return_when=asyncio.FIRST_COMPLETED,
        )

    def _waiting_for(self) -> str:
        if self.weights.trainer_step is None:
            return "the trainer to publish the first weights"
        if self.outage.lasts:
            return str(self.outage)
        if self.only_evaluates:
            return "an evaluation"
        return f"the policy after trainer step {self.weights.trainer_step + 1}, or a group to refill"

    async def _store_finished(self) -> None:
        done = {task: self.in_flight.pop(task) for task in list(self.in_flight) if task.done()}
        for claimed in done.values():
            self.drafts.end(claimed.group_id)
        errors = [error for task in done if (error := task.exception())]
        ended = [task.result() for task in done if not task.exception()]
        if self.failures.of_an_outage(ended):
            held = [claimed.group_id for claimed in self.in_flight.values()]
            await asyncio.to_thread(partial(release_groups, self.run, self.worker.worker_id, but=held))
        elif ended:
            await asyncio.to_thread(store_groups, self.writer, ended, self.failures.record)
        if errors:
            raise errors[0]
        self.failures.check_ended([(claimed.explore_step, task.result()) for task, claimed in done.items()])

    def _claim(self) -> bool:
        """Plan and claim more groups; return whether any was claimed."""
        room = self.outage.room(self._room(), len(self.in_flight))
        if self.only_evaluates or self.weights.trainer_step is None or room <= 0:
            return False
        # Otherwise explorers that are never idle, because they are behind their trainer, would answer no evaluation of older weights before the
        # run's end.
        answered = set() if self._evaluation is None else {self.engine.policy_version_id}
        if not self.outage.lasts and self.evaluator.reserve(answered):
            return False
        self.planner.plan()
        policy_step = self.weights.trainer_step
        groups = claim_groups(
            self.run,
            self.worker.worker_id,
            policy_step=policy_step,
            last_step=self.pacing.last_step(policy_step),
            count=room,
            lease_s=self.config.lease_s,
            held=[claimed.group_id for claimed in self.in_flight.values()],
        )
        if groups:
            self.outage.claimed()
        if groups and not self._has_claimed:
            # Groups on which explorers crashed too often are set aside as failed, and this explorer may have replaced the last of them.
            self.failures.check({group.explore_step for group in groups})
            self._has_claimed = True
        self._drop_superseded({group.group_id for group in groups})
        begun = take_up(
            self.run, self.worker.worker_id, groups, policy_step=policy_step, max_staleness=self.max_staleness
        )
        self._record_continued(begun)
        for group in groups:
            self.drafts.begin(group, begun.get(group.group_id, ()))
        self.in_flight |= {asyncio.create_task(self._explore(group)): group for group in groups}
        return bool(groups)

    def _room(self) -> int:
        """Return how many more groups keep the engine busy. Rollouts that wait for something else do not count, up to the largest number of all."""
        slots, size = self.runners.slots, self.resolved.config.algorithm.group_size
        most = max(self.config.claim_groups, slots.max_rollouts // size)
        return min(self.config.claim_groups + slots.num_elsewhere // size, most) - len(self.in_flight)

    def _record_continued(self, begun: Mapping[int, Sequence[PartialAnswer]]) -> None:
        num_tokens = sum(len(answer.token_ids) for answers in begun.values() for answer in answers)
        if num_tokens:
            self.worker.progress["num_continued_tokens"] = num_tokens + self.worker.progress.get(
                "num_continued_tokens", 0
            )
            logger.info("continues %d groups with %d tokens that were sampled before", len(begun), num_tokens)

    def _drop_superseded(self, group_ids: set[int]) -> None:
        """Stop sampling for claims whose leases ended, for example while the database restarted, and whose groups were claimed again."""
        for task in [task for task, claimed in self.in_flight.items() if claimed.group_id in group_ids]:
            del self.in_flight[task]
            task.cancel()

    async def _explore(self, claimed: ClaimedGroup) -> Group:
        screening = self.screenings.get(claimed.taskset)
        of_taskset = self.runners[claimed.taskset]
        group = await self.workflows.run(of_taskset.runner.group(claimed, of_taskset.decoding, screening))
        if self.teacher is not None:
            await self.teacher.score(group)
        return group

    def _stop_time(self, value: bool) -> None:
        """Suspend or resume the time limits of rollouts."""
        self.workflows.call(partial(self.runners.default.runner.clocks.set_suspended, value))

    def _show_blocking(self, what: str) -> None:
        """Show in `rft status` which line blocks the workflows; called from another thread."""
        if what:
            self.worker.progress["workflows_blocked"] = what
        else:
            self.worker.progress.pop("workflows_blocked", None)

    async def _evaluate(self) -> bool:
        """Answer every pending evaluation, whatever its weights; return whether there was one."""
        if self.weights.trainer_step is None or self._tasks():
            return False
        return await self.evaluator.answer_all()

    def _evaluate_beside(self) -> None:
        """Begin to answer the evaluations of the present weights, beside the rollouts; raise what ended the last ones."""
        if self._evaluation is not None and self._evaluation.done():
            evaluation, self._evaluation = self._evaluation, None
            evaluation.result()
        explores = not self.only_evaluates and not self.device.is_shared and self.weights.trainer_step is not None
        may_begin = explores and self._evaluation is None and not self.outage.lasts
        version = self.engine.policy_version_id
        # Without a checksum the weights may be a mixture, which loading them again would replace under the rollouts.
        if may_begin and self.weights.checksum and version in versions_to_evaluate(self.run):
            self._evaluation = asyncio.create_task(self.evaluator.answer_all(version))

    def _record_rollouts(self) -> None:
        slots = self.runners.slots
        elsewhere = f", {slots.num_elsewhere} of them not in the engine" if slots.num_elsewhere else ""
        self.worker.progress["rollouts"] = f"{slots.num_running}{elsewhere}"

    def _record_rate(self, tokens_before: int, seconds: float) -> None:
        tokens = self.engine.num_generated_tokens - tokens_before
        self.worker.progress["num_generated_tokens"] = self.engine.num_generated_tokens
        if tokens and seconds > 0:
            self.worker.progress["tokens_per_s"] = round(tokens / seconds, 1)
