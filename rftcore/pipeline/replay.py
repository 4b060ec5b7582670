"""Replay: the decisions of other stages on stored groups, stored beside the existing verdicts.

A replay changes nothing that a run trains on: it appends verdicts of a separate version, and groups stay where they are. If it is killed
at any point, the next replay of the version continues there. It also decides on what has arrived or was labelled since.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from operators.chain.chain import Chain
from operators.chain.drop_rules import is_short
from rftcore.pipeline.blocking_group import setting_aside_blocking_group
from rftcore.pipeline.group_decisions import decide_groups_without_people
from rftcore.pipeline.policy_endpoint import Policy
from rftcore.pipeline.role import register_stages, stage_context
from rftcore.resolved import ResolvedRun
from rftdata.buffer import Buffer
from rftdata.errors import ConfigError, QueryError
from rftdata.pipeline.budget import RunUsage
from rftdata.pipeline.queue import read_groups
from rftdata.pipeline.records import SealedBatch, Verdicts
from rftdata.pipeline.scores import EXPERIENCE_SCORES
from rftdata.pipeline.versions import commit_replay, groups_to_replay, has_sealed_groups, replaying
from rftdata.run import NO_PIPELINE, Run
from rftdata.workers.worker import Worker

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class Share:
    """What one process of a replay has done.

    Attributes:
        seconds: time in which it read, decided and stored.
    """

    host: str
    pid: int
    num_groups: int = 0
    num_experiences: int = 0
    seconds: float = 0.0

    @property
    def experiences_per_s(self) -> float:
        return self.num_experiences / self.seconds if self.seconds else 0.0


@dataclass
class Replayed:
    """The result of a replay, or of one of its batches.

    Attributes:
        num_groups, num_experiences: decided on; num_kept: experiences kept.
        num_not_made: number of tasks and groups that stages created, which a replay does not store.
        num_purged: groups that were purged while they were decided on; nothing of them is stored.
        dropped_by: stage -> experiences it dropped.
        short_by: stage -> experiences dropped only because it left fewer rollouts of their group than `min_group_size`.
        failed_by: stage -> experiences set aside because it raised on them.
        failed_scores: stage -> experiences without a score because a call failed.
        workers: the share of each process.
    """

    version: str
    num_groups: int = 0
    num_experiences: int = 0
    num_kept: int = 0
    num_not_made: int = 0
    num_purged: int = 0
    dropped_by: dict[str, int] = field(default_factory=dict)
    short_by: dict[str, int] = field(default_factory=dict)
    failed_by: dict[str, int] = field(default_factory=dict)
    failed_scores: dict[str, int] = field(default_factory=dict)
    workers: list[Share] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """Whether the stages did not fail on every experience."""
        return sum(self.failed_by.values()) < self.num_experiences

    def add(self, other: Replayed) -> None:
        """Add the result of another batch."""
        self.num_groups += other.num_groups
        self.num_experiences += other.num_experiences
        self.num_kept += other.num_kept
        self.num_not_made += other.num_not_made
        self.num_purged += other.num_purged
        for mine, theirs in (
            (self.dropped_by, other.dropped_by),
            (self.short_by, other.short_by),
            (self.failed_by, other.failed_by),
            (self.failed_scores, other.failed_scores),
        ):
            for stage, number in theirs.items():
                mine[stage] = mine.get(stage, 0) + number
        shares = {(share.host, share.pid): share for share in self.workers}
        for share in other.workers:
            before = shares.get((share.host, share.pid), Share(share.host, share.pid))
            shares[share.host, share.pid] = replace(
                before,
                num_groups=before.num_groups + share.num_groups,
                num_experiences=before.num_experiences + share.num_experiences,
                seconds=before.seconds + share.seconds,
            )
        self.workers = list(shares.values())


def replay(
    resolved: ResolvedRun, buffer: Buffer, run: Run, version: str | None, report: Callable[[Replayed], None]
) -> Replayed:
    """Decide on every sealed group of a run under another version, in this process.

    A question that was never asked, or not answered, counts as answered with `otherwise`. Staleness is that at the time when a
    group was sealed.

    Args:
        version: its name; None for `replay-` and the chain's digest. Never a name that runs train on.
        report: receives the progress after every batch.

    Raises:
        ConfigError: the name is one that a run could train on, belongs to other stages, or is invalid.
        QueryError: the run has no sealed group.
        StageError: a stage fails on everything: on a batch of several groups, or on a single group with no success before it.
        ConflictError: another process replays the version at the moment.
    """
    name = checked_name(resolved.experience_chain, run, version)
    done = Replayed(name)
    with replaying(run, name), Replayer(resolved, buffer, run, name) as replayer:
        passed = False
        for group_ids in batches(run, name, resolved.config.pipelines.batch_groups):
            # If a group alone in its batch fails, the group is the cause if the batch before it passed, otherwise the stage.
            batch_result = replayer.decide(group_ids, patient=len(group_ids) > 1 or not passed)
            passed = batch_result.has_passed
            done.add(batch_result)
            report(done)
    return done


def batches(run: Run, version: str, num_groups: int) -> Iterator[list[int]]:
    """Yield the groups that a replay has to decide on, in batches. Which groups are decided on together does not depend on who decides."""
    after = 0
    while group_ids := groups_to_replay(run, version, after, num_groups):
        yield group_ids
        after = group_ids[-1]


class Replayer:
    """Decides on batches of a replay in this process. A context manager; use `decide` within it.

    Args:
        name: name of the version.

    Raises:
        ConfigError: the version has other stages.
    """

    def __init__(self, resolved: ResolvedRun, buffer: Buffer, run: Run, name: str) -> None:
        self._chain, self._buffer, self._run, self._name = resolved.experience_chain, buffer, run, name
        self._share = Share(socket.gethostname(), os.getpid())
        with contextlib.ExitStack() as stack:
            self._worker = stack.enter_context(Worker(run, "replay"))
            self._worker.set_state(f"replays version {name}", activity="replaying")
            policy = Policy(resolved, run)
            stack.callback(policy.close)
            stack.callback(self._chain.close)
            self._chain.prepare(stage_context(resolved.config, policy, RunUsage(run), buffer))
            register_stages(buffer, self._chain, name)
            self._stack = stack.pop_all()

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def decide(self, group_ids: list[int], *, patient: bool) -> Replayed:
        """Decide on a batch and store the verdicts.

        Args:
            patient: raise if a stage fails on everything, instead of setting everything aside.

        Raises:
            StageError: with `patient`, the stage's error.
        """
        started, chain = time.monotonic(), self._chain

        def store_aside(aside: SealedBatch) -> None:
            """Store the verdict before a blocked process ends, so that the next replay continues after the blocking group."""
            commit_replay(self._run, self._worker.worker_id, self._name, aside, Verdicts(aside.failed))

        batch = read_groups(self._buffer.database, group_ids, chain.columns, as_sealed=True)
        stored_scores = EXPERIENCE_SCORES.read(
            self._buffer.database, chain.score_keys, batch.table["experience_id"].to_pylist()
        )
        with setting_aside_blocking_group(batch, store_aside):
            verdicts = decide_groups_without_people(chain, batch, stored_scores, patient=patient)
        num_purged = commit_replay(self._run, self._worker.worker_id, self._name, batch, verdicts)
        result = Replayed(self._name, num_purged=num_purged)
        _record(result, batch, verdicts)
        share = replace(self._share, num_groups=result.num_groups, num_experiences=result.num_experiences)
        result.workers = [replace(share, seconds=time.monotonic() - started)]
        return result


def checked_name(chain: Chain, run: Run, version: str | None) -> str:
    """Return the name of a replay's version. No run may train on it, and the run must have a group to decide on.

    Raises:
        ConfigError: a run trains on it, or it is not a valid name.
        QueryError: the run has no sealed group.
    """
    name = f"replay-{chain.version}" if version is None else version
    if name == NO_PIPELINE or name == run.pipeline_version or _DIGEST.fullmatch(name):
        raise ConfigError(
            "runs train on verdicts of this version, which only pipeline workers create",
            value=name,
            allowed="any other name",
            todo="choose another --version",
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "invalid name of a version",
            value=name,
            allowed="up to 64 letters, digits, points, dashes and underscores, beginning with a letter or digit",
            todo="choose another --version",
        )
    if not has_sealed_groups(run):
        raise QueryError(
            f"run {run.name!r} has no sealed group of experiences yet: there is nothing to decide on",
            todo="wait until it has, or name another with --run",
        )
    return name


def _record(done: Replayed, batch: SealedBatch, verdicts: Verdicts) -> None:
    done.num_groups += len(batch.group_ids)
    done.num_experiences += verdicts.decisions.num_rows
    done.num_not_made += len(verdicts.created)
    newest = {
        (key, scores.score_key): (scores.stage, error)
        for scores in verdicts.scores
        for key, _, error, _ in scores.rows()
    }
    for stage, error in newest.values():
        if error is not None:
            done.failed_scores[stage] = done.failed_scores.get(stage, 0) + 1
    for row in verdicts.decisions.to_pylist():
        if row["kept"]:
            done.num_kept += 1
        else:
            stage, by_stage = row["stage"], done.dropped_by
            if row["experience_id"] in verdicts.failed:
                by_stage = done.failed_by
            elif is_short(row["reason"]):
                done.short_by[stage] = done.short_by.get(stage, 0) + 1
            by_stage[stage] = by_stage.get(stage, 0) + 1


def format_stages(stages: Sequence[dict[str, Any]]) -> str:
    """Format stages with their arguments as in a configuration: `threshold {max: 12.0} > …`."""
    return " > ".join(map(_format_stage, stages))


def _format_stage(stage: dict[str, dict[str, Any]]) -> str:
    """Format one stage: `threshold {max: 12.0}`; arguments that are not set are left out."""
    ((name, spec),) = stage.items()
    # A user's stage also shows its code's digest, which differs where the arguments are the same.
    own = set(spec) == {"args", "code"}
    settings = {**(spec["args"] or {}), "code": str(spec["code"])[:12]} if own else spec
    stated = {key: value for key, value in settings.items() if value not in (None, [], {})}
    return name + (f" {{{', '.join(f'{key}: {_value(value)}' for key, value in stated.items())}}}" if stated else "")


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
