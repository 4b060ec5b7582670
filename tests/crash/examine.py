"""Checks that a buffer contains everything that was acknowledged to its processes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import rftdata
from rftdata import Buffer
from rftdata.maintenance.states import wrong_states
from rftdata.maintenance.verification import verify
from tests.crash.games import reward_of
from tests.crash.plugins import logprobs_of
from tests.crash.witness import TRAINED, digest, digest_of_logprobs, notes
from tests.support.models import make_character_tokenizer

Digests = tuple[str, str]
_PER_READ = 2000
MAX_STALENESS = 3  # as in config.yaml


@dataclass
class Findings:
    """The errors found, and how much was examined.

    Attributes:
        continued_tokens: that one process sampled and another continued.
        old_weights: engines that sampled from, or stayed on, other weights than they should have had.
        lives: processes that got to their first claim, the slowest first: `seconds` it took, `parts` of them (`stopwatch`), `by` whom.
    """

    lost: list[str] = field(default_factory=list)
    trained_twice: list[str] = field(default_factory=list)
    mislabelled: list[str] = field(default_factory=list)
    old_weights: list[str] = field(default_factory=list)
    experiences: int = 0
    of_several_turns: int = 0
    steps: int = 0
    attempts: int = 0
    labels: int = 0
    annotations: int = 0
    transfers: int = 0
    continued_tokens: int = 0
    lives: list[dict[str, Any]] = field(default_factory=list)

    @property
    def nothing(self) -> bool:
        return not (self.lost or self.trained_twice or self.mislabelled or self.old_weights)


def examine(folder: Path, *, has_scribe: bool = True) -> Findings:
    """Everything that the processes of a run noted, against the buffer they left.

    Args:
        has_scribe: whether the engine was `plugins.Scribe`, whose texts are all different and prove their log-probabilities.
    """
    findings = Findings()
    noted: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for note in notes(folder / "witness"):
        noted[note["kind"]].append(note)
    with rftdata.open(str(folder / "buffer"), create=False) as buffer:
        findings.lost += [*verify(buffer), *wrong_states(buffer.database)]
        digests = _rows_belong_together(buffer, findings, has_scribe=has_scribe)
        _stored_is_there(buffer, noted["stored"], digests, findings, has_scribe=has_scribe)
        _labels_count(buffer, noted, findings)
        _annotations_stand_once(buffer, noted, findings)
        _draws_are_as_seen(buffer, noted["drawn"], digests, findings)
        _nothing_waits_for_ever(buffer, findings)
        _checkpoints_hold_what_was_drawn(buffer, noted["checkpoint"], findings)
        _weights_are_as_sent(noted["sent"], noted["applied"], findings)
        _weights_are_those_of_their_version(buffer, folder / "witness", noted, findings)
        _draws_are_fresh(buffer, findings)
        findings.of_several_turns = _one(buffer, "SELECT count(*) FROM rft.experience WHERE num_turns > 1")
        findings.attempts = _one(buffer, "SELECT count(*) FROM rft.run_attempt")
        findings.steps = _one(buffer, "SELECT coalesce(max(trainer_step), 0) FROM rft.v_train_step")
    findings.lives = sorted(noted["first claim"], key=lambda life: -life["seconds"])
    findings.labels = len(noted["labelled"])
    findings.annotations = len(noted["annotated"])
    findings.continued_tokens = sum(note["tokens"] for note in noted["took up"])
    return findings


def _weights_are_as_sent(sent: list[dict[str, Any]], applied: list[dict[str, Any]], findings: Findings) -> None:
    """A trainer that was killed at the end of a transfer could not note what it had sent."""
    checksums = {note["transfer"]: note["checksum"] for note in sent}
    for note in applied:
        if checksums.get(note["transfer"], note["checksum"]) != note["checksum"]:
            findings.mislabelled.append(f"{note['by']} has other weights than transfer {note['transfer']} sent")
    findings.transfers = len(applied)


def _weights_are_those_of_their_version(
    buffer: Buffer, witness: Path, noted: dict[str, list[dict[str, Any]]], findings: Findings
) -> None:
    """Every token is of a version that its engine had acknowledged before, with weights, by their checksum, that were sent or written as that version.

    An explorer that continues the answers of another one stores tokens of that one's engine, which must have acknowledged their versions.
    """
    known: dict[int, set[str | None]] = defaultdict(set)
    for row in buffer.sql("SELECT policy_version_id, checksum FROM rft.policy_version").to_pylist():
        known[row["policy_version_id"]].add(row["checksum"])
    # What was sent, and, of a sender that was killed before it noted that, what arrived: see `_weights_are_as_sent`.
    for note in (*noted["applied"], *noted["loaded"]):
        known[note["version"]].add(note["checksum"])
    had: dict[str, set[int]] = defaultdict(set)
    continued: dict[str, set[int]] = defaultdict(set)
    for note in notes(witness):
        by = note["by"]
        match note["kind"]:
            case "engine has":
                had[by].add(note["version"])
                if note["checksum"] not in known[note["version"]]:
                    findings.old_weights.append(f"{by} has weights {note['checksum']} as version {note['version']}")
            case "took up":  # what others had sampled and kept
                continued[by].update(note["versions"])
            case "stored" if unknown := set(note["versions"]) - had[by] - continued[by]:
                findings.old_weights.append(f"{by} sampled as version {sorted(unknown)}, which it had not acknowledged")
    sampled_before = set().union(*continued.values()) - set().union(*had.values())
    findings.old_weights += [f"version {version} was continued, and no engine had it" for version in sampled_before]


def _draws_are_fresh(buffer: Buffer, findings: Findings) -> None:
    """No draw is of a policy older than the run's bound; a draw of step s may be of policies from step s - 1 - bound on."""
    late = buffer.sql(
        "SELECT d.experience_id, d.trainer_step, p.trainer_step AS policy_step FROM rft.draw d JOIN rft.experience e USING (experience_id)"
        " JOIN rft.policy_version p ON p.policy_version_id = e.policy_version_min WHERE d.trainer_step - 1 - p.trainer_step > %s",
        [MAX_STALENESS],
    )
    findings.old_weights += [
        f"experience {row['experience_id']} of policy step {row['policy_step']} was drawn for step {row['trainer_step']}"
        for row in late.to_pylist()
    ]


def _one(buffer: Buffer, query: str) -> int:
    return int(buffer.sql(query).column(0)[0].as_py())


def _rows_belong_together(buffer: Buffer, findings: Findings, *, has_scribe: bool) -> dict[int, Digests]:
    """Text, reward and arrays of every experience; the digests of their tokens and log-probabilities."""
    decode = make_character_tokenizer().decode
    digests: dict[int, Digests] = {}
    last = 0
    while True:
        rows = buffer.sql(
            "SELECT experience_id, prompt, response, reward_sampled, num_prompt_tokens FROM rft.experience"
            " LEFT JOIN rft.group_prompt USING (group_id, prompt_digest) WHERE experience_id > %s ORDER BY experience_id LIMIT %s",
            [last, _PER_READ],
        ).to_pylist()
        if not rows:
            break
        last = rows[-1]["experience_id"]
        arrays = buffer.read_arrays([row["experience_id"] for row in rows], ["token_ids", "behavior_logprobs"])
        for row, token_ids, logprobs in zip(
            rows, arrays["token_ids"].to_pylist(), arrays["behavior_logprobs"].to_pylist(), strict=True
        ):
            response = token_ids[row["num_prompt_tokens"] :]
            sampled = np.float32(logprobs[-len(response) :])
            # The policy sampled the answers, and not what stands between them.
            expected = np.where(np.isnan(sampled), sampled, logprobs_of(response))
            answers = re.split(r"\nu:.*\na:", row["response"])
            num_between = sum(map(len, re.findall(r"\nu:.*\na:", row["response"])))
            if has_scribe and (
                decode(response) != row["response"]
                or not np.array_equal(expected, sampled, equal_nan=True)
                or int(np.isnan(sampled).sum()) != num_between
            ):
                findings.mislabelled.append(f"experience {row['experience_id']} has the arrays of another")
            if decode(token_ids[: row["num_prompt_tokens"]]) != row["prompt"]:
                findings.mislabelled.append(f"experience {row['experience_id']} has the prompt of another")
            if row["reward_sampled"] not in (None, sum(map(reward_of, answers))):  # None: the rollout failed
                findings.mislabelled.append(f"experience {row['experience_id']} has the reward of another")
            digests[row["experience_id"]] = digest(token_ids), digest_of_logprobs(sampled)
    findings.experiences = len(digests)
    return digests


def _stored_is_there(
    buffer: Buffer,
    stored: list[dict[str, Any]],
    digests: dict[int, Digests],
    findings: Findings,
    *,
    has_scribe: bool,
) -> None:
    found: dict[int, list[list[str]]] = defaultdict(list)
    rows = buffer.sql("SELECT e.group_id, e.experience_id, e.response FROM rft.experience e ORDER BY e.experience_id")
    for row in rows.to_pylist():
        found[row["group_id"]].append([row["response"], *digests[row["experience_id"]]])
    for note in stored:
        for group_id, sequences in note["groups"]:
            if found.get(group_id) != sequences:
                findings.lost.append(f"group {group_id}, acknowledged to {note['by']}, is not there as it was written")
    if not has_scribe:
        return
    texts = Counter(response for group in found.values() for response, *_ in group)
    findings.trained_twice += [f"the response {text} is stored {n} times" for text, n in texts.items() if n > 1]


def _labels_count(buffer: Buffer, noted: dict[str, list[dict[str, Any]]], findings: Findings) -> None:
    """The newest acknowledged label of an experience stands, or one that was asked for after it and never answered."""
    asked = [*noted["labels"], *noted["labelled"]]
    if not asked:
        return
    acknowledged = {(note["by"], note["experience_id"], note["reward"]) for note in noted["labelled"]}
    allowed: dict[int, set[float]] = defaultdict(set)
    for note in noted["labels"]:
        allowed[note["experience_id"]].add(note["reward"])
    now = buffer.sql(
        "SELECT e.experience_id, e.reward, e.reward_sampled,"
        " (SELECT array_agg(l.new_value::text::float8 ORDER BY l.label_id) FROM rft.label l"
        "  WHERE l.experience_id = e.experience_id) AS history"
        " FROM rft.experience e WHERE e.experience_id = ANY (%s)",
        [sorted(allowed)],
    ).to_pylist()
    for row in now:
        history = row["history"] or []
        if row["reward"] != (history[-1] if history else row["reward_sampled"]):
            findings.lost.append(f"experience {row['experience_id']} does not have the reward of its newest label")
        if not set(history) <= allowed[row["experience_id"]]:
            findings.mislabelled.append(f"experience {row['experience_id']} has a label that no labeller gave it")
        for _, _, reward in (a for a in acknowledged if a[1] == row["experience_id"]):
            # A label that changes nothing leaves no row.
            if reward not in history and reward != row["reward_sampled"]:
                findings.lost.append(f"a label of experience {row['experience_id']} is not in its history")


def _annotations_stand_once(buffer: Buffer, noted: dict[str, list[dict[str, Any]]], findings: Findings) -> None:
    """Each acknowledged annotation is stored once, in the order of its acknowledgement, and the newest of each experience stands alone; nothing is
    stored that was not asked for. No group has a verdict that is older than an annotation that its chain reads, unless it waits for another."""
    asked = {note["key"]: (note["experience_id"], note["good"]) for note in noted["annotates"]}
    if not asked:
        return
    rows = buffer.sql(
        "SELECT annotation_id, key, target_id, value = 'true' AS good, supersedes FROM rft.annotation WHERE kind = 'good' ORDER BY annotation_id"
    ).to_pylist()
    stored = Counter(row["key"] for row in rows)
    findings.lost += [
        f"annotation {note['key']} was acknowledged and is not stored"
        for note in noted["annotated"]
        if not stored[note["key"]]
    ]
    findings.mislabelled += [f"annotation {key} is stored {times} times" for key, times in stored.items() if times > 1]
    for row in rows:
        if asked.get(row["key"]) != (row["target_id"], row["good"]):
            findings.mislabelled.append(f"annotation {row['annotation_id']} is not what was asked for")
    newest: dict[int, int] = {}
    for row in rows:
        if row["supersedes"] != newest.get(row["target_id"]):
            findings.mislabelled.append(f"annotation {row['annotation_id']} does not supersede the one before it")
        newest[row["target_id"]] = row["annotation_id"]
    standing = buffer.sql("SELECT annotation_id FROM rft.v_annotation WHERE kind = 'good' ORDER BY 1")
    if standing["annotation_id"].to_pylist() != sorted(newest.values()):
        findings.lost.append("what stands is not the newest annotation of each experience")
    stale = buffer.sql(
        "SELECT g.group_id FROM rft.rollout_group g JOIN rft.run r USING (run_id)"
        " WHERE g.status = 'ready' AND g.trainable"
        " AND NOT EXISTS (SELECT FROM rft.experience e JOIN rft.draw d USING (experience_id) WHERE e.group_id = g.group_id)"
        " AND rft.newest_read_annotation(g.group_id, r.pipeline_version)"
        " > (SELECT max(v.label_cut) FROM rft.verdict v WHERE v.group_id = g.group_id AND v.newest_of = g.decided_by)"
    )
    findings.lost += [f"group {key} was not decided again after an annotation" for key in stale["group_id"].to_pylist()]


def _draws_are_as_seen(
    buffer: Buffer, drawn: list[dict[str, Any]], digests: dict[int, Digests], findings: Findings
) -> None:
    stored: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for row in buffer.sql(
        "SELECT attempt_id, trainer_step, experience_id, reward_used FROM rft.draw ORDER BY attempt_id, trainer_step, slot"
    ).to_pylist():
        stored[row["attempt_id"], row["trainer_step"]].append((row["experience_id"], row["reward_used"]))
    for note in drawn:
        place = f"step {note['step']} of attempt {note['attempt']}"
        if stored[note["attempt"], note["step"]] != [(i, reward) for i, reward, *_ in note["rows"]]:
            findings.lost.append(f"{place}: the draws are not those that the trainer saw")
        findings.mislabelled += [
            f"{place}: experience {i} came with the tokens or log-probabilities of another"
            for i, _, *seen in note["rows"]
            if digests.get(i) != tuple(seen)
        ]
    twice = buffer.sql(
        "SELECT d.experience_id, count(*) AS times FROM rft.run r JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id"
        " JOIN rft.draw d ON d.attempt_id = h.attempt_id AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)"
        " GROUP BY d.experience_id HAVING count(*) > 1"
    )
    findings.trained_twice += [
        f"experience {row['experience_id']} is drawn {row['times']} times" for row in twice.to_pylist()
    ]


def _nothing_waits_for_ever(buffer: Buffer, findings: Findings) -> None:
    """Every whole group is drawn on the present history, closed with a reason, or in one worklist."""
    forgotten = buffer.sql(
        "SELECT g.group_id, g.status::text AS status FROM rft.rollout_group g JOIN rft.run r USING (run_id)"
        " WHERE g.status IN ('sealed', 'ready') AND g.trainable"
        " AND NOT EXISTS (SELECT FROM rft.worklist w WHERE w.item_kind = 'group' AND w.item_id = g.group_id"
        "   AND (w.available OR w.claimed_by IS NOT NULL)"
        "   AND w.run_id = g.run_id AND w.consumer = CASE g.status WHEN 'sealed' THEN 'pipeline' ELSE 'trainer' END::rft.consumer)"
        " AND NOT EXISTS (SELECT FROM rft.v_attempt_history h JOIN rft.draw d ON d.attempt_id = h.attempt_id"
        "   AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)"
        "   WHERE h.history_id = r.current_attempt_id AND d.item_id = g.group_id)"
    )
    findings.lost += [f"the {row['status']} group {row['group_id']} is in no worklist" for row in forgotten.to_pylist()]


def _checkpoints_hold_what_was_drawn(buffer: Buffer, committed: list[dict[str, Any]], findings: Findings) -> None:
    """Compare what a checkpoint's weights were trained on, according to its own file, with the draws of its history."""
    known = set(buffer.sql("SELECT checkpoint_id FROM rft.checkpoint")["checkpoint_id"].to_pylist())
    findings.lost += [
        f"checkpoint {note['checkpoint_id']}, acknowledged, is not there"
        for note in committed
        if note["checkpoint_id"] not in known
    ]
    kept = buffer.sql(
        "SELECT checkpoint_id, attempt_id, trainer_step, uri FROM rft.checkpoint WHERE deleted_at IS NULL"
    )
    for row in kept.to_pylist():
        path = Path(row["uri"]) / TRAINED
        if not path.exists():
            findings.lost.append(f"checkpoint {row['checkpoint_id']} has no files")
            continue
        trained = np.load(path).tolist()
        place = f"checkpoint {row['checkpoint_id']} (step {row['trainer_step']})"
        findings.trained_twice += [
            f"{place}: experience {i} was trained {n} times" for i, n in Counter(trained).items() if n > 1
        ]
        drawn = buffer.sql(
            "SELECT d.experience_id FROM rft.v_attempt_history h JOIN rft.draw d ON d.attempt_id = h.attempt_id"
            " AND (h.last_step IS NULL OR d.trainer_step <= h.last_step)"
            " WHERE h.history_id = %s AND d.trainer_step <= %s ORDER BY d.trainer_step, d.slot",
            [row["attempt_id"], row["trainer_step"]],
        )["experience_id"].to_pylist()
        if trained != drawn:
            findings.lost.append(f"{place}: was trained on {len(trained)} experiences, its history drew {len(drawn)}")
