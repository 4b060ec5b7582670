"""The states of experiences: what is stored of them agrees with verdicts, draws and histories, and `rft doctor` corrects it if it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rftcore.cli import run_command
from rftdata import Buffer, labels
from rftdata.maintenance.states import correct_states, wrong_states
from tests.support.store_roles import Roles, keep_all, own_group

# The states from all verdicts and draws of each experience, one by one.
DERIVED = """
SELECT e.experience_id,
       CASE WHEN d.times > 0 THEN 'drawn' WHEN g.status = 'sealed' THEN 'awaits verdict' WHEN NOT v.kept THEN 'dropped'
            WHEN NOT g.trainable THEN 'closed' ELSE 'ready' END AS state, d.times AS times_sampled, v.verdict_id
FROM rft.experience e JOIN rft.run r USING (run_id) JOIN rft.rollout_group g USING (group_id)
LEFT JOIN LATERAL (
    SELECT * FROM rft.verdict v WHERE v.experience_id = e.experience_id AND v.pipeline_version = r.pipeline_version
    ORDER BY verdict_id DESC LIMIT 1) v ON true
CROSS JOIN LATERAL (
    SELECT count(*) AS times FROM rft.draw d JOIN rft.v_attempt_history h ON h.history_id = r.current_attempt_id AND h.attempt_id = d.attempt_id
        AND (h.last_step IS NULL OR d.trainer_step <= h.last_step) WHERE d.experience_id = e.experience_id) d
ORDER BY 1
"""
STORED = """
SELECT x.experience_id, x.state, x.times_sampled, v.verdict_id
FROM rft.v_experience x JOIN rft.run r USING (run_id)
LEFT JOIN rft.verdict v ON v.experience_id = x.experience_id AND v.pipeline_version = r.pipeline_version AND v.is_newest
ORDER BY 1
"""


def states(buffer: Buffer) -> dict[str, int]:
    """The number of experiences in each state, after a comparison of all with what they are derived from."""
    stored = buffer.sql(STORED).to_pylist()
    assert stored == buffer.sql(DERIVED).to_pylist()
    assert wrong_states(buffer.database) == []
    found: dict[str, int] = {}
    for row in stored:
        found[row["state"]] = found.get(row["state"], 0) + 1
    return found


def worked(buffer: Buffer, **sampling: Any) -> Roles:
    """A run with four groups of two, one of which is dropped."""
    roles = Roles(buffer, steps=8, sampling=sampling)
    roles.insert(*(own_group(task_key=str(number)) for number in range(4)))
    assert states(buffer) == {"awaits verdict": 8}
    roles.decide(keep=lambda row: row["group_id"] != 1)
    return roles


@pytest.mark.parametrize("sampling", [{}, {"max_times_sampled": 3, "order": "newest"}], ids=["once", "thrice"])
def test_states_follow_verdicts_draws_labels_releases_and_new_attempts(
    buffer: Buffer, sampling: dict[str, Any]
) -> None:
    roles = worked(buffer, **sampling)
    assert states(buffer) == {"dropped": 2, "ready": 6}
    with roles.attempt() as attempt:
        first = attempt.draw(1, 1)
        assert first is not None and states(buffer) == {"dropped": 2, "drawn": 2, "ready": 4}
        attempt.commit_checkpoint(1, "/checkpoints/1")
        assert attempt.draw(2, 2) is not None
        before = states(buffer)
        attempt.release_step(2)
        assert states(buffer) == {"dropped": 2, "drawn": 2, "ready": 4}
        assert attempt.draw(2, 2) is not None
        assert states(buffer) == before
    # A dropped group is decided again after a label, and kept.
    labels.set_rewards(buffer, {1: 0.25}, author="ada")
    assert states(buffer)["awaits verdict"] >= 2
    roles.decide(keep=keep_all)
    assert "dropped" not in states(buffer)
    with roles.attempt() as attempt:
        assert attempt.start_step == 1
        assert states(buffer)["drawn"] == 2
        assert attempt.draw(2, 2) is not None
        states(buffer)


def test_a_group_that_is_drawn_again_counts_its_draws_and_those_before_do_not(buffer: Buffer) -> None:
    roles = worked(buffer, max_times_sampled=3)
    with roles.attempt() as attempt:
        for step in (1, 2):
            assert attempt.draw(step, 3) is not None
            attempt.commit_checkpoint(step, f"/checkpoints/{step}")
            assert buffer.sql("SELECT DISTINCT times_sampled AS n FROM rft.v_experience ORDER BY 1")[
                "n"
            ].to_pylist() == [0, step]
        assert attempt.draw(3, 3) is not None
        states(buffer)
        attempt.release_step(3)
        states(buffer)
    assert buffer.sql("SELECT count(*) AS n FROM rft.draw WHERE times_sampled IS NOT NULL")["n"].to_pylist() == [6]
    buffer.rewind(roles.run, 1)
    with roles.attempt():
        assert states(buffer) == {"dropped": 2, "drawn": 6}
        assert buffer.sql("SELECT DISTINCT times_sampled AS n FROM rft.v_experience ORDER BY 1")["n"].to_pylist() == [
            0,
            1,
        ]


def test_doctor_finds_and_repairs_wrong_states(
    buffer: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    roles = worked(buffer)
    with roles.attempt() as attempt:
        assert attempt.draw(1, 1) is not None
    labels.set_rewards(buffer, {3: 0.25, 1: 0.25}, author="ada")
    roles.decide(keep=keep_all)
    expected = states(buffer)
    buffer.sql("UPDATE rft.verdict SET is_newest = false")
    buffer.sql(
        "UPDATE rft.verdict SET is_newest = true WHERE verdict_id IN (SELECT min(verdict_id) FROM rft.verdict GROUP BY experience_id)"
    )
    buffer.sql("UPDATE rft.draw SET times_sampled = CASE WHEN slot = 0 THEN 7 END")
    wrong = len(wrong_states(buffer.database))
    assert wrong >= 4

    def doctor(*options: str) -> tuple[int, dict[str, Any]]:
        code = run_command(["doctor", "--json", "--buffer", buffer.config.uri, *options])
        return code, json.loads(capsys.readouterr().out)

    code, found = doctor()
    bad = [finding["text"] for finding in found["findings"] if not finding["ok"]]
    assert code == 1 and any(
        "the state of experience 1 is wrong: verdict" in text and "--repair" in text for text in bad
    )
    assert any("the state of experience" in text and "draw 1 has a wrong number of uses" in text for text in bad)
    code, found = doctor("--repair")
    assert any(f"{wrong} stored parts" in finding["text"] for finding in found["findings"])
    assert states(buffer) == expected
    assert correct_states(buffer.database) == 0
