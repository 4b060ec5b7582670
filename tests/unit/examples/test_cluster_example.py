"""Each role of examples/cluster gets the GPUs that the files are named for, on one machine and on several."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftcore.config.run import load_config
from rftcore.run.placement import Machine, asked_gpus, place
from rftdata.errors import ConfigError

CLUSTER = Path(__file__).resolve().parents[3] / "examples" / "cluster"
GPUS = {"1_and_1": [1, 1], "3_and_1": [1, 1, 1, 1], "6_and_2": [1, 1, 1, 1, 1, 1, 2], "2x2_and_4": [2, 2, 4]}
APART = ["sync.file_method=checkpoint"]


@pytest.mark.parametrize("name", GPUS)
def test_one_machine_has_every_role(name: str) -> None:
    config = load_config(CLUSTER / f"{name}.yaml")
    assert asked_gpus(config) == sum(GPUS[name])
    placement = place(config, [Machine("one", sum(GPUS[name]))])
    assert [bundle.num_gpus for bundle in placement.bundles] == GPUS[name]
    assert all(len(bundle.roles) == 1 for bundle in placement.bundles)
    assert placement.bundles[-1].roles == ("trainer",)


@pytest.mark.parametrize(
    ("name", "machines"),
    [("1_and_1", [1, 1]), ("3_and_1", [2, 2]), ("3_and_1", [1, 1, 1, 1]), ("6_and_2", [4, 4]), ("2x2_and_4", [4, 4])],
)
def test_several_machines_have_every_role(name: str, machines: list[int]) -> None:
    config = load_config(CLUSTER / f"{name}.yaml", APART)
    placement = place(config, [Machine(str(number), count) for number, count in enumerate(machines)])
    taken = [0] * len(machines)
    for bundle in placement.bundles:
        assert len(bundle.roles) == 1
        taken[bundle.machine] += bundle.num_gpus
    assert taken == machines


def test_the_ranks_of_the_trainer_are_not_divided_over_machines() -> None:
    config = load_config(CLUSTER / "2x2_and_4.yaml", APART)
    with pytest.raises(ConfigError, match="no machine has room for the trainer"):
        place(config, [Machine(str(number), 2) for number in range(4)])


def test_files_in_memory_keep_the_roles_on_one_machine() -> None:
    config = load_config(CLUSTER / "1_and_1.yaml")
    assert {bundle.machine for bundle in place(config, [Machine("one", 1), Machine("two", 2)]).bundles} == {1}
