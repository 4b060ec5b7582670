"""Experiences with a secret in every place that can hold text or arrays, and where it is looked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from rftdata import Buffer, Group, Rollout
from rftdata.experience import Baseline
from rftdata.maintenance import erasure
from tests.support.store_roles import own_group, tokens

SECRET = "the patient's name is Mallory"
# As bytes in a segment, and as text in a table.
MARK = np.frombuffer(SECRET.encode(), dtype=np.uint8)


def secret_group(task_key: str, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    rollouts = [
        Rollout(
            i,
            "ok",
            r,
            [
                tokens(
                    r,
                    prompt=SECRET,
                    response=f"{SECRET}!",
                    messages=[{"role": "user", "content": SECRET}],
                    arrays={"image": MARK},
                    metrics={"entropy": 0.5, "said": SECRET},
                    reward_parts={"accuracy": r},
                )
            ],
        )
        for i, r in enumerate(rewards)
    ]
    baseline = Baseline.of(Rollout(len(rewards), "failed", None, rollouts[0].sequences, error=SECRET))
    return Group(
        rollouts,
        source="import",
        taskset="mine",
        task_key=task_key,
        payload={"question": SECRET},
        baseline=replace(baseline, reward_parts={"said": SECRET}, outcome="ok"),  # type: ignore[dict-item]  # a text in place of a number
    )


def store_secret(buffer: Buffer) -> Buffer:
    """A run without stages: one group with the secret, and one without, in one segment."""
    buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer("r") as writer:
        writer.insert(secret_group("secret"), own_group(task_key="plain"))
    return buffer


def all_ids(buffer: Buffer) -> list[int]:
    found: list[int] = buffer.sql("SELECT experience_id FROM rft.experience ORDER BY 1")["experience_id"].to_pylist()
    return found


def erase_at_once(buffer: Buffer) -> None:
    with buffer.database.connection() as connection:
        connection.execute("UPDATE rft.retired_range SET retired_at = retired_at - interval '1 day'")
    erasure.erase(buffer)


def files_hold(buffer: Buffer, text: bytes) -> list[str]:
    folder = Path(str(buffer.config.segments))
    return [file.name for file in sorted(folder.iterdir()) if text in file.read_bytes()]
