"""The process of a run that only evaluates, in the trainer's place: it publishes the model, asks for the evaluations, and waits for the answers.

It computes nothing. The explorers' engines begin with the model's folder, so no weights are copied. The published version has the checksum of
the weights, so that every answer can be traced to them. A resumed run publishes the same weights again, and keeps what is answered.
"""

from __future__ import annotations

from rftcore.config.run import RunConfig
from rftcore.model_folder import weights_checksum
from rftcore.run.join import JoinedRun
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.evaluations import (
    adopt_evaluations,
    failed_evaluations,
    num_open_evaluations,
    plan_evaluations,
)
from rftdata.attempts.policies import FOLDER
from rftdata.errors import RftError
from rftdata.reports.results import RunResults
from rftdata.workers.worker import Worker


def main(joined: JoinedRun) -> int:
    """Ask for the evaluations of a run and wait for them; return 0 when they are answered, or when it was asked to stop.

    Raises:
        RftError: an evaluation failed.
    """
    with (
        joined.buffer as buffer,
        Worker(joined.run, "trainer", phases=joined.phases, on_waiting=joined.on_waiting) as worker,
        buffer.attempt(joined.run) as attempt,
    ):
        worker.set_state("reads the weights for their checksum", activity="starting")
        folder = joined.resolved.model_folder.resolve()
        checksum, num_bytes = weights_checksum(folder)
        version = attempt.publish(0, method=FOLDER, uri=str(folder), num_bytes=num_bytes, checksum=checksum)
        adopt_evaluations(attempt, version, checksum)
        _plan(attempt, joined.resolved.config, version, str(folder), checksum)
        if _wait(worker, attempt):
            attempt.finish(_outcome(attempt))
        joined.leave()
    return 0


def _plan(attempt: Attempt, config: RunConfig, version: int, uri: str, checksum: str) -> None:
    for purpose, tasksets in (("validation", config.eval.tasks), ("test", config.eval.test)):
        plan_evaluations(
            attempt,
            policy_version_id=version,
            trainer_step=0,
            purpose=purpose,
            tasksets=[taskset.name for taskset in tasksets],
            decodings=config.eval.decodings,
            uri=uri,
            checksum=checksum,
            num_answers=config.eval.num_answers,
        )


def _wait(worker: Worker, attempt: Attempt) -> bool:
    """Wait until no evaluation is open; return False when the run was asked to stop."""
    while num_open := num_open_evaluations(attempt.run):
        worker.set_state("waits", f"the explorers to answer {num_open} evaluation{'' if num_open == 1 else 's'}")
        if worker.is_asked_to_stop():
            return False
        attempt.wait(1.0)
    return True


def _outcome(attempt: Attempt) -> str:
    """Return a sentence about the scores.

    Raises:
        RftError: an evaluation failed.
    """
    failed = failed_evaluations(attempt.run)
    if failed:
        first = failed[0]
        raise RftError(
            f"{len(failed)} evaluation{'' if len(failed) == 1 else 's'} failed; the first, of {first.taskset} ({first.decoding}): {first.error}",
            todo="correct the cause and resume the run, which asks for the missing answers alone",
        )
    results = RunResults(attempt.run).evaluations()
    return "evaluated: " + ", ".join(f"{one.taskset} ({one.decoding}) {one.mean:.3f}" for one in results)
