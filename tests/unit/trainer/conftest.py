"""Fixtures of the trainer's tests: one thread, and a model of two layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rftcore.algorithms import build_algorithm
from tests.support.learning import config, make_batch, make_learner, save_model


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums have the same order on machines with any number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model"), tied=True))


@pytest.fixture(scope="session")
def moved_path(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first model after two steps of imitation of another batch."""
    with one_thread():
        learner = make_learner(model_path, config(learning_rate=0.01), build_algorithm("sft"), 0)
        for step in (1, 2):
            learner.update(make_batch(6), step)
    folder = tmp_path_factory.mktemp("moved")
    learner.save_pretrained(folder)
    return str(folder)
