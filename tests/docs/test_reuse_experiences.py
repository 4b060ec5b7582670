"""The page on reuse: its settings draw, its queries run, and it shows every setting there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rftdata import Buffer
from rftdata.training.sampling import (
    LaneConfig,
    Order,
    PriorityConfig,
    RateLimitConfig,
    SamplingConfig,
    checked_formula,
)
from tests.store.test_sampling import draw, stored

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "reuse-experiences.md").read_text(encoding="utf-8")
SECTIONS: list[dict[str, Any]] = [
    yaml.safe_load(block)["sampling"] for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
]
# A stored selection is drawn as it was made: the tutorial shows it.
ELSEWHERE = {"source", "epochs"}


@pytest.mark.parametrize("section", SECTIONS, ids=[str(i) for i in range(len(SECTIONS))])
def test_the_settings_draw(buffer: Buffer, section: dict[str, Any]) -> None:
    config = SamplingConfig.model_validate(section)
    assert (checked_formula(buffer.database, config.priority.formula) is None) == (config.priority.formula is None)
    roles = stored(buffer, 4, source="human", **section)
    with roles.attempt() as attempt:
        drawn = draw(attempt, 1, 1).num_groups
    # Nothing of those tasksets is stored; the others take what people demonstrated.
    assert drawn == (0 if any(lane.taskset for lane in config.mixture) or config.stratify else 1)


def test_every_setting_is_shown() -> None:
    used = set(re.findall(r"\b(\w+):", PAGE))
    for section in (SamplingConfig, LaneConfig, PriorityConfig, RateLimitConfig):
        assert set(section.model_fields) - ELSEWHERE <= used, section
    shown = {section.get("order", "fifo") for section in SECTIONS}
    assert shown == set(get_args(Order))


def test_the_queries_run(buffer: Buffer) -> None:
    roles = stored(buffer, 3, max_times_sampled=2)
    with roles.attempt() as attempt:
        for step in (1, 2):
            draw(attempt, step, 1)
    uses, batches = (
        buffer.sql(query).to_pylist()
        for query in re.search(r"```sql\n(.*?)```", PAGE, re.DOTALL)[1].split(";")[:2]  # type: ignore[index]
    )
    assert [row["uses"] for row in uses] == [2]
    assert [(row["trainer_step"], row["source"], row["count"]) for row in batches] == [
        (1, "import", 2),
        (2, "import", 2),
    ]
