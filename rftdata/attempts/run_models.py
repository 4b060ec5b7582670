"""The models of a run: the weights that it starts from, and its critic, teacher and reward models.

A folder that is a checkpoint of the same buffer is recorded as that checkpoint, so that a reward can be traced to the run that trained
its model, and no run removes a checkpoint that another one uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rftdata.postgres.database import records
from rftdata.run import Run

ModelUse = Literal["policy", "critic", "teacher", "reward"]


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """A model of a run.

    Attributes:
        uri: its folder.
        trained_by, trainer_step: the run and the step of the checkpoint; None for a model from elsewhere.
    """

    used_as: ModelUse
    uri: str
    trained_by: str | None
    trainer_step: int | None


def record_models(run: Run, models: Sequence[tuple[ModelUse, Path]]) -> None:
    """Record the models with which a run starts or continues."""
    uris = [str(folder.resolve()) for _, folder in models]
    run.database.run("insert_run_models", run_id=run.run_id, used_as=[use for use, _ in models], uris=uris)


def models_of(run: Run) -> list[RunModel]:
    """Return the models of a run."""
    return records(RunModel, run.database.fetch("models_of_run", run_id=run.run_id))
