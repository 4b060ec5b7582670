"""The page on reuse: its settings draw, its queries run, and it shows every setting there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rftdata import Buffer
from rftdata.attempts import stored_selection
from rftdata.attempts.sampling import (
    LaneConfig,
    Order,
    PriorityConfig,
    RateLimitConfig,
    SamplingConfig,
    checked_formula,
)
from tests.store.attempts.test_sampling import draw, stored

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "reuse-experiences.md").read_text(encoding="utf-8")
_SHOWN: list[dict[str, Any]] = [
    yaml.safe_load(block)["sampling"] for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
]
SECTIONS = [section for section in _SHOWN if "source" not in section]
STORED = [section for section in _SHOWN if "source" in section]


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
        assert set(section.model_fields) <= used, section
    shown = {section.get("order", "fifo") for section in SECTIONS}
    assert shown == set(get_args(Order))


def test_the_selections_of_earlier_runs_are_drawn_as_often_as_they_say(buffer: Buffer) -> None:
    stored(buffer, 4)
    assert [section.get("order", "fifo") for section in STORED] == ["fifo", "prioritized"]
    for number, section in enumerate(STORED):
        config = SamplingConfig.model_validate(section)
        assert config.source is not None
        selected = stored_selection.select(
            buffer.database,
            config.source.sql.replace("'first'", "'roles'"),
            priority_exponent=config.priority.exponent if config.order == "prioritized" else None,
            epochs=config.epochs,
        )
        run = buffer.create_run(
            name=f"again-{number}",
            config={},
            seed=1,
            steps=9,
            pipeline_version="none",
            mode="train",
            selected=selected,
        )
        with buffer.attempt(run, sampling=config) as attempt:
            assert [draw(attempt, step, 2).num_groups for step in range(1, 6)] == [2, 2, 2, 2, 0]


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
