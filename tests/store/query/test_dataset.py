"""Stored experiences as a dataset: every row once, whatever the number of ranks and workers, with the arrays as they were written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import rftdata
from rftcore.dataset import ExperienceDataset, huggingface_dataset
from rftdata.maintenance.archive import archive

NUM_GROUPS, GROUP_SIZE = 60, 8
COLUMNS = ["experience_id", "response", "reward", "token_ids", "behavior_logprobs"]


@pytest.fixture(params=["stored", "archived"])
def filled(buffer: rftdata.Buffer, request: pytest.FixtureRequest) -> rftdata.Buffer:
    """Experiences whose tokens and response tell their reward."""
    run = buffer.create_run(name="stored", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.writer(run) as writer:
        for key in range(NUM_GROUPS):
            rollouts = []
            for index in range(GROUP_SIZE):
                number = key * GROUP_SIZE + index
                sequence = rftdata.Sequence(
                    "?",
                    str(number),
                    np.arange(number % 5 + 2),
                    1,
                    "stop",
                    reward=float(number),
                    behavior_logprobs=[-1.0] * (number % 5 + 1),
                )
                rollouts.append(rftdata.Rollout(index, "ok", float(number), [sequence]))
            writer.submit(rftdata.Group(rollouts, source="human", taskset="t", task_key=str(key)))
    if request.param == "archived":
        run.end("finished", "done")
        archive(buffer, "stored", author="ada")
    return buffer


def check(examples: list[dict[str, Any]], least: float = 0.0) -> None:
    """Every experience once, and the values of a row belong together."""
    rewards = sorted(example["reward"] for example in examples)
    assert rewards == [float(number) for number in range(NUM_GROUPS * GROUP_SIZE) if number >= least]
    for example in examples:
        number = int(example["response"])
        assert example["reward"] == number
        assert list(example["token_ids"]) == list(range(number % 5 + 2))
        assert list(example["behavior_logprobs"]) == [0.0] + [-1.0] * (number % 5 + 1)


def test_workers_and_ranks_of_torch_read_every_row_once(filled: rftdata.Buffer) -> None:
    examples: list[dict[str, Any]] = []
    for rank in range(2):
        dataset = ExperienceDataset(filled.config, COLUMNS, "reward >= 100", rank=rank, world_size=2)
        found = list(DataLoader(dataset, batch_size=None, num_workers=2))
        assert found and found[0]["token_ids"].dtype == torch.int32
        examples += found
    check(examples, 100.0)


def test_shards_of_datasets_have_every_row_once(filled: rftdata.Buffer) -> None:
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    whole = huggingface_dataset(filled.config, COLUMNS, run="stored", num_shards=4)
    check(list(whole))
    examples: list[dict[str, Any]] = []
    for rank in range(2):
        share = split(whole, rank, 2)
        examples += list(DataLoader(share, batch_size=None, num_workers=2))
    check(examples)
