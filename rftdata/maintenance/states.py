"""Check and correction of the stored parts of the states of experiences.

`rft.verdict.is_newest` and `rft.draw.times_sampled` are kept by the statements that add verdicts, draw, release draws and start attempts, so that
`rft.v_experience` need not look at every verdict and draw of each experience (docs/decisions/0037). The parts are derived from verdicts,
draws and histories.
"""

from __future__ import annotations

from rftdata.postgres.database import Database, fetch


def wrong_states(database: Database) -> list[str]:
    """Return one sentence per verdict or draw whose stored part of a state is wrong."""
    return [
        f"the state of experience {row['experience_id']} is wrong: {row['part']} {row['part_id']} "
        + (
            "is marked as the newest and is not, or the reverse"
            if row["part"] == "verdict"
            else "has a wrong number of uses"
        )
        for row in database.fetch("wrong_states")
    ]


def correct_states(database: Database) -> int:
    """Derive the stored parts of all states again and return how many were wrong; draws and verdicts wait meanwhile."""
    with database.transaction() as connection:
        fetch(connection, "lock_runs")
        return int(fetch(connection, "correct_states")[0]["num_corrected"])
