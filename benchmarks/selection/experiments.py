"""Four experiments, the selectors with their arguments, and one run of one of them with one seed.

Targets and budgets were fixed in pilot runs: of the synthetic learner with `shuffle` on seed 100, of the real model with the uniform selectors
and `easy_to_hard`, partly on seed 0. No other selector had run by then. The gap to close is a round share that uniform choice reaches well
before its curve flattens; the budget is about three times the rollouts that this takes.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.selection import synthetic, training
from benchmarks.selection.training import Learner, Plan, train
from rftdata import selectors
from rftdata.selectors import SELECTORS, build_selector


@dataclass(frozen=True)
class Compared:
    """Selector of the comparison.

    Attributes:
        selector: name in a configuration.
        args: arguments in a configuration, for all experiments; others have their defaults.
        uses_anchors: whether it reads pass rates of two other models, whose rollouts are counted separately.
    """

    selector: str
    args: dict[str, Any] = field(default_factory=dict)
    uses_anchors: bool = False


COMPARED: dict[str, Compared] = {
    "shuffle": Compared("shuffle"),
    "sequential": Compared("sequential"),
    "random": Compared("random"),
    "easy_to_hard": Compared("easy_to_hard", {"features": ["-grade"]}),
    "difficulty": Compared("difficulty", {"features": ["weak", "strong"]}, uses_anchors=True),
    "difficulty_alone": Compared("difficulty"),
    "speed": Compared("speed"),
    "greso": Compared("greso"),
    "plr": Compared("plr"),
}


@dataclass(frozen=True)
class Experiment:
    """Learner and the sizes of its runs; `options` are the learner's."""

    what: str
    plan: Plan
    options: dict[str, Any]
    level_names: tuple[str, ...]


def _synthetic(setting: str, what: str, gap: float, budget: int) -> Experiment:
    plan = Plan(batch_groups=32, group_size=8, max_refill=64, budget=budget, evaluate_every=2, gap=gap)
    span = synthetic.SETTINGS[setting]
    width = (span.hardest - span.easiest) / synthetic.NUM_LEVELS
    names = tuple(f"difficulty from {span.easiest + i * width:g}" for i in range(synthetic.NUM_LEVELS if width else 1))
    return Experiment(what, plan, {"setting": setting, "world": asdict(synthetic.World())}, names)


EXPERIMENTS: dict[str, Experiment] = {
    "synthetic_graded": _synthetic("graded", "4,096 tasks from solved to hopeless", 0.6, 200_000),
    "synthetic_flat": _synthetic("flat", "4,096 tasks, all equally hard: nothing to choose", 0.8, 50_000),
    "synthetic_coin_flips": _synthetic(
        "coin_flips", "as graded, but the reward of every third task is a coin's", 0.4, 200_000
    ),
    "sorting": Experiment(
        "a Llama of 0.75 million parameters sorts 3 to 12 digits",
        Plan(batch_groups=16, group_size=8, max_refill=32, budget=30_000, evaluate_every=2, gap=0.25),
        {},
        tuple(f"{length} digits" for length in (3, 4, 5, 6, 8, 12)),
    ),
}


def quick(experiment: Experiment) -> Experiment:
    """Return the experiment with sizes that take seconds, for tests of the benchmark."""
    plan = replace(experiment.plan, batch_groups=4, max_refill=8, budget=600, evaluate_every=2)
    if "setting" in experiment.options:
        world = experiment.options["world"] | {"num_tasks": 256, "num_held_out": 64}
        return replace(experiment, plan=plan, options=experiment.options | {"world": world})
    course = {"tasks_per_level": 8, "held_out_per_level": 8, "warm_up_steps": 12, "strong_steps": 4}
    return replace(experiment, plan=replace(plan, budget=200), options={"course": course})


@dataclass(frozen=True)
class Job:
    """One run with a selector of `COMPARED`. `folder` keeps results and the files that all selectors of a seed use."""

    name: str
    experiment: Experiment
    selector: str
    seed: int
    folder: Path

    @property
    def file(self) -> Path:
        """File of the result, whose name changes with the experiment, the selector and their code."""
        cls = SELECTORS.load(COMPARED[self.selector].selector)
        mine = {inspect.getsourcefile(c) or "" for c in cls.__mro__ if c.__module__ not in ("abc", "builtins")}
        shared = {str(path) for path in Path(selectors.__file__).parent.glob("*.py")}
        sources = sorted(mine | shared)
        sources += [training.__file__, str(Path(__file__).with_name(f"{_module(self.name)}.py"))]
        digest = hashlib.sha256(repr((self.experiment, COMPARED[self.selector])).encode())
        for source in sources:
            digest.update(Path(source).read_bytes())
        return self.folder / "runs" / f"{self.name}-{self.selector}-{self.seed}-{digest.hexdigest()[:12]}.json"


def _module(experiment: str) -> str:
    return experiment.partition("_")[0]


def prepare(job: Job) -> dict[str, Any]:
    """Make the files that all selectors of a seed use; return scores at the start."""
    return _PREPARED[_module(job.name)](job)


def run(job: Job) -> dict[str, Any]:
    """Return the run's record, from its file if that exists."""
    file = job.file
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    learner = _LEARNERS[_module(job.name)](job)
    compared = COMPARED[job.selector]
    selector = build_selector(compared.selector, compared.args, learner.task_ids, job.seed)
    if selector.feature_keys:
        selector.set_features({key: np.array(learner.features[key]) for key in selector.feature_keys})
    record = train(selector, learner, job.experiment.plan)
    record["rollouts_made"] = learner.num_sampled
    record["anchor_rollouts"] = learner.anchor_rollouts if compared.uses_anchors else 0
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record), encoding="utf-8")
    return record


def _synthetic_learner(job: Job) -> Learner:
    options = job.experiment.options
    return synthetic.SyntheticLearner(
        synthetic.World(**options["world"]), synthetic.SETTINGS[options["setting"]], job.seed
    )


def _sorting_course(job: Job) -> Any:
    from benchmarks.selection import sorting

    return sorting.Course(**job.experiment.options.get("course", {}))


def _sorting_folder(job: Job) -> Path:
    digest = hashlib.sha256(repr(_sorting_course(job)).encode()).hexdigest()[:8]
    return job.folder / f"sorting-{job.seed}-{digest}"


def _sorting_learner(job: Job) -> Learner:
    from benchmarks.selection import sorting

    return sorting.SortingLearner(_sorting_folder(job), _sorting_course(job), job.seed)


def _prepare_synthetic(job: Job) -> dict[str, Any]:
    learner = _synthetic_learner(job)
    score, by_level = learner.score()
    return {"start": {"score": score, "by_level": by_level}}


def _prepare_sorting(job: Job) -> dict[str, Any]:
    from benchmarks.selection import sorting

    return dict(sorting.prepare(_sorting_folder(job), _sorting_course(job), job.seed)["models"])


_LEARNERS: dict[str, Callable[[Job], Learner]] = {"synthetic": _synthetic_learner, "sorting": _sorting_learner}
_PREPARED: dict[str, Callable[[Job], dict[str, Any]]] = {"synthetic": _prepare_synthetic, "sorting": _prepare_sorting}
