"""Settings of engines: what is passed to them, and what is refused by name before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rftcore.resolved import ResolvedRun
from rftcore.run.model_checks import refuse_indivisible_engine
from rftdata.errors import ConfigError
from tests.unit.test_config import config


def test_settings_of_other_sections_reach_the_engine() -> None:
    engine = ResolvedRun(config(explorer={"tensor_parallel_size": 2}, sync={"kv_cache": "keep"})).engine(0)
    assert (engine.tensor_parallel_size, engine.kv_cache) == (2, "keep")


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [("tensor_parallel_size", 2, "explorer.tensor_parallel_size"), ("kv_cache", "keep", "sync.kv_cache")],
)
def test_a_setting_with_a_place_of_its_own_is_refused_among_the_engines(name: str, value: object, place: str) -> None:
    resolved = ResolvedRun(config(explorer={"engine_args": {name: value}}))
    with pytest.raises(ConfigError, match=re.escape(f"set {place}")):
        resolved.engine(0)


@pytest.mark.parametrize("engine", ["transformers", "none"])
def test_only_vllm_divides_a_model(engine: str) -> None:
    with pytest.raises(ConfigError, match="does not divide a model over 2 GPUs"):
        config(explorer={"tensor_parallel_size": 2, "engine": engine})


@pytest.mark.parametrize(("heads", "kv_heads", "fitting"), [(9, 3, {1, 3, 9}), (8, 2, {1, 2, 4, 8}), (4, 4, {1, 2, 4})])
def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(
    heads: int, kv_heads: int, fitting: set[int], tmp_path: Path
) -> None:
    values = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for size in range(1, heads + 2):
        if size in fitting:
            refuse_indivisible_engine(tmp_path, size)
            continue
        with pytest.raises(ConfigError, match="does not divide") as caught:
            refuse_indivisible_engine(tmp_path, size)
        assert caught.value.allowed == ", ".join(map(str, sorted(fitting)))
