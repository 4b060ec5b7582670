"""What tests of the trainer share: one thread, and a model of two layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.learning import save_model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model"), tied=True))
