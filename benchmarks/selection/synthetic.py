"""Learner with known learning curves: thousands of tasks, one logistic policy.

All its assumptions:

- Task i succeeds with probability σ(w·x_i - b_i), an item-response model (Rasch 1960, of several dimensions): w are the abilities of the
  policy, b_i is the task's difficulty, x_i its demands. x_i has length 1; a share `transfer` of its square lies on the task's
  skill, which the tasks of a skill have in common, the rest points in a direction of the task's own.
- A rollout is one draw of success or failure by this policy, and the step is GRPO's (arXiv 2402.03300, eq. 3) on it, exactly: the policy's
  gradient is (r - p_i) x_i for a rollout of reward r, weighed by (r - mean) / std of its group and averaged over the rollouts of the
  groups trained on. It follows, without being put in, that learning is proportional to p(1 - p), that groups of equal rewards teach
  nothing, that easy tasks make the hard tasks of their skill possible, and that training on one skill slightly disturbs another.
- Put in: noise of the gradient that does not come from rewards, as 1 / √(rollouts trained on); forgetting, a share of w each step.
- Tasks have a grade, an estimate of their difficulty with an error of 2 logits (standard deviation).
- Not modelled: exploration, answers that are right for the wrong reason, policies that collapse, staleness, lengths.

Settings: `graded`, difficulties from solved to hopeless. `flat`, all tasks equally hard: no choice can help, so a selector can
only cost. `coin_flips`, as graded, but the reward of every third task is a coin's: such tasks always look ideally difficult and
teach noise. Held-out tasks are graded or flat, never coins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.selection.training import Floats, Group, Learner

NUM_LEVELS = 6
ANCHOR_ROLLOUTS = 8
GRADE_ERROR = 2.0


@dataclass(frozen=True)
class Setting:
    """Kind of tasks; difficulties are uniform between two logits."""

    easiest: float = -4.0
    hardest: float = 8.0
    coin_share: float = 0.0


SETTINGS = {"graded": Setting(), "flat": Setting(easiest=0.0, hardest=0.0), "coin_flips": Setting(coin_share=1 / 3)}


@dataclass(frozen=True)
class World:
    """Sizes and constants of the learner."""

    num_tasks: int = 4096
    num_held_out: int = 1024
    num_skills: int = 6
    num_own: int = 58
    transfer: float = 0.7
    learning_rate: float = 1.0
    noise: float = 0.5
    forgetting: float = 0.001


def sigmoid(logits: Floats) -> Floats:
    values: Floats = 1.0 / (1.0 + np.exp(-logits))
    return values


@dataclass(frozen=True)
class Tasks:
    """Demands x [tasks, dimensions], difficulties b [tasks], and which rewards are a coin's [tasks]."""

    asked: Floats
    difficulty: Floats
    coin: npt.NDArray[np.bool_]

    @classmethod
    def draw(cls, generator: np.random.Generator, world: World, setting: Setting, num: int) -> Tasks:
        skills = np.eye(world.num_skills)[generator.integers(world.num_skills, size=num)]
        own = generator.normal(size=(num, world.num_own))
        own /= np.linalg.norm(own, axis=1, keepdims=True)
        asked = np.concatenate([skills * world.transfer**0.5, own * (1 - world.transfer) ** 0.5], axis=1)
        difficulty = generator.uniform(setting.easiest, setting.hardest, size=num)
        return cls(asked, difficulty, generator.random(num) < setting.coin_share)

    def levels(self, setting: Setting) -> list[int]:
        """Return the sixth of the range of difficulty of each task."""
        span = max(setting.hardest - setting.easiest, 1e-9)
        levels = np.minimum((self.difficulty - setting.easiest) / span * NUM_LEVELS, NUM_LEVELS - 1).astype(int)
        return [int(level) for level in levels]


class SyntheticLearner(Learner):
    """Learner of the module's header. A seed determines tasks, and noise for the same choices."""

    def __init__(self, world: World, setting: Setting, seed: int) -> None:
        generator = np.random.default_rng((seed, 1))
        self.world = world
        self._train = Tasks.draw(generator, world, setting, world.num_tasks)
        self._test = Tasks.draw(generator, world, Setting(setting.easiest, setting.hardest), world.num_held_out)
        self._test_levels = np.asarray(self._test.levels(setting))
        self._generator = np.random.default_rng((seed, 2))
        self._ability = np.zeros(world.num_skills + world.num_own)
        self.task_ids = list(range(1, world.num_tasks + 1))
        self.levels = self._train.levels(setting)
        grades = self._train.difficulty + np.random.default_rng((seed, 4)).normal(
            scale=GRADE_ERROR, size=world.num_tasks
        )
        self.features = {"grade": grades.tolist(), **self._measured_by_anchors(np.random.default_rng((seed, 3)))}
        self.anchor_rollouts = 2 * ANCHOR_ROLLOUTS * world.num_tasks

    def sample(self, task_ids: Sequence[int], sizes: Sequence[int]) -> list[Group]:
        groups = []
        for task_id, size in zip(task_ids, sizes, strict=True):
            row = task_id - 1
            chance = float(self._chances(self._train, self._ability, slice(row, row + 1))[0])
            actions = (self._generator.random(size) < chance).astype(float)
            rewards = (self._generator.random(size) < 0.5).astype(float) if self._train.coin[row] else actions
            groups.append(Group(task_id, rewards, [(action, chance) for action in actions]))
        self.num_sampled += sum(sizes)
        return groups

    def update(self, groups: Sequence[Group]) -> None:
        gradient = np.zeros_like(self._ability)
        rollouts = sum(len(group.rewards) for group in groups)
        for group in groups:
            advantages = (group.rewards - group.rewards.mean()) / (group.rewards.std(ddof=1) + 1e-6)
            pushes = sum(a * (action - chance) for a, (action, chance) in zip(advantages, group.rollouts, strict=True))
            gradient += pushes / rollouts * self._train.asked[group.task_id - 1]
        gradient += self._generator.normal(scale=self.world.noise / rollouts**0.5, size=gradient.shape)
        self._ability = (1 - self.world.forgetting) * self._ability + self.world.learning_rate * gradient

    def score(self) -> tuple[float, list[float]]:
        chances = sigmoid(self._test.asked @ self._ability - self._test.difficulty)
        return float(chances.mean()), [
            float(chances[self._test_levels == level].mean()) for level in np.unique(self._test_levels)
        ]

    def _chances(self, tasks: Tasks, ability: Floats, rows: Any = slice(None)) -> Floats:
        return sigmoid(tasks.asked[rows] @ ability - tasks.difficulty[rows])

    def _measured_by_anchors(self, generator: np.random.Generator) -> dict[str, list[float]]:
        """Return pass rates of two other policies, measured with rollouts: the start of training, and a policy that is far ahead in all skills."""
        ahead = np.zeros_like(self._ability)
        ahead[: self.world.num_skills] = 5.0
        features = {}
        for name, ability in (("weak", np.zeros_like(self._ability)), ("strong", ahead)):
            chances = np.where(self._train.coin, 0.5, self._chances(self._train, ability))
            features[name] = (generator.binomial(ANCHOR_ROLLOUTS, chances) / ANCHOR_ROLLOUTS).tolist()
        return features
