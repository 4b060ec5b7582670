"""BOTS: tasks whose estimated pass rate is near a target, with a Beta posterior per task (arXiv 2510.26374).

Evidence about a task comes from its own outcomes and from those of others. With J the tasks of a batch, r their pass rates, and two reference
models whose pass rates w (the weaker) and s (the stronger) are features of every task, the position of the policy between the two is

    C = (mean r_J - mean w_J) / (mean s_J - mean w_J + 1e-6),  an exponential moving average with factor 0.9 over batches,

so every task i is estimated to pass with p_i = clip(w_i + C (s_i - w_i), 0, 1); for i in J that is r_i. With S and F the successes and
failures in the batch and m the rollouts of a group, the posteriors of all tasks become

    alpha <- (1 - f) alpha + f + (1 - k) S + k m p
    beta  <- (1 - f) beta  + f + (1 - k) F + k m (1 - p)

f is `forgetting` (the paper's lambda) and k `implicit` (rho). The selector chooses the tasks whose pass rate, drawn from the posterior
(Thompson sampling) or its mean, is nearest to `target_pass_rate`; with a `temperature`, in proportion to exp(-distance / temperature).

Outcomes do not always arrive in whole batches of B, the groups of a trainer step. The evidence of n groups about their own tasks counts at once,
with (1 - f) to the power n / B. Their evidence about other tasks waits for B groups, because C of a few groups is the quotient of two differences
near zero. With n = B this is the paper's update. If more groups arrive together, 0.9 is taken to the power n / B and the evidence k m p of
tasks not in J is multiplied by n / B.

A correction counts as if the outcome had been so from the start: it is forgotten as far as that outcome has been. A person's outcome
counts in full.

Every task has its own posterior, in two arrays, and a choice draws from all of them: 0.1 s for a million tasks. Learning touches only the
tasks of the batch (`Posteriors`), because a new process learns all outcomes of the run again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rftdata.errors import ConfigError
from rftdata.selectors.arguments import feature_list, flag, number
from rftdata.selectors.base import Floats, Ids, Observation, TaskIds
from rftdata.selectors.table import DrawnSelector

_SMOOTHING = 0.9
_LEAST = 1e-3
"""Smallest alpha and beta, since a person may remove more evidence than there was."""
_SURPRISE = 0.25
_LEAST_LEFT = 1e-100


class Difficulty(DrawnSelector):
    """Beta posteriors by position in the table of tasks.

    Args:
        features: keys of the pass rates of the weaker and of the stronger reference model; without them there is no implicit evidence.
        target_pass_rate: pass rate of the tasks to choose.
        forgetting: share of the evidence that a trainer step forgets.
        implicit: weight of implicit evidence; by default 0.1 with features, else 0.
        temperature: 0 chooses the nearest.
        thompson: draw pass rates from the posterior instead of using its mean.
        pseudo_trials: number of rollouts that implicit evidence counts for; by default that of the batch's groups.
        adaptive_implicit: halve `implicit` after a batch whose pass rates the reference models predicted badly (by 0.25 on average).
    """

    def __init__(
        self,
        task_ids: TaskIds,
        seed: int,
        *,
        features: Sequence[str] = (),
        target_pass_rate: float = 0.5,
        forgetting: float = 0.1,
        implicit: float | None = None,
        temperature: float = 0.0,
        thompson: bool = True,
        pseudo_trials: float | None = None,
        adaptive_implicit: bool = False,
    ) -> None:
        super().__init__(task_ids, seed)
        self.feature_keys = feature_list("difficulty", features, (0, 2))
        implicit = (0.1 if self.feature_keys else 0.0) if implicit is None else implicit
        for name, value in {
            "target_pass_rate": target_pass_rate,
            "forgetting": forgetting,
            "implicit": implicit,
        }.items():
            number("difficulty", name, value, 0, 1)
        number("difficulty", "temperature", temperature, 0, math.inf)
        for name, yes in {"thompson": thompson, "adaptive_implicit": adaptive_implicit}.items():
            flag("difficulty", name, yes)
        if pseudo_trials is not None:
            number("difficulty", "pseudo_trials", pseudo_trials, 0, math.inf)
        if implicit > 0 and not self.feature_keys:
            raise ConfigError(
                "the selector 'difficulty' infers pass rates from those of two reference models, but has no features",
                value=implicit,
                todo="name both in features, or leave implicit out",
            )
        self._target, self._forgetting, self._implicit = target_pass_rate, forgetting, implicit
        self._temperature, self._thompson = temperature, thompson
        self._pseudo_trials, self._adaptive = pseudo_trials, adaptive_implicit
        self._anchor: float | None = None  # C
        self._batch: list[tuple[int, float, float]] = []  # positions, successes and trials of up to B groups
        self._forgotten = 0.0  # logarithm of the remaining share of evidence from before the first update
        self._forgotten_at: dict[int, float] = {}
        self._chosen_rate = 0.0
        self._posteriors = Posteriors(len(self.table))
        self._tried = np.zeros(len(self.table), dtype=np.bool_)

    def set_features(self, features: Mapping[str, Floats]) -> None:
        super().set_features(features)
        self._weaker, self._stronger = (features[key] for key in self.feature_keys)
        self._posteriors.refer_to(self._weaker, self._stronger)

    def select(self, count: int) -> list[int]:
        chosen = super().select(count)
        if chosen:
            self._chosen_rate = float(self.pass_rates(self.table.positions(chosen)).mean())
        return chosen

    def observe(self, observations: Sequence[Observation]) -> None:
        places = self.table.positions(o.task_id for o in observations).tolist()
        known = [(o, position) for o, position in zip(observations, places) if position >= 0]
        self._tried[[position for _, position in known]] = True
        tried = [(o, position) for o, position in known if o.kind == "explicit" and o.trials > 0]
        if tried:
            self._update([o for o, _ in tried], np.array([position for _, position in tried]))
        if observations:
            self._forgotten_at[observations[0].seq] = self._forgotten
        for o, position in known:
            if o.kind != "explicit":
                self._add(o, position)

    def pass_rates(self, positions: Ids) -> Floats:
        """Return the posterior means of the tasks at these positions."""
        alpha, beta = self._posteriors.at(positions)
        rates: Floats = alpha / (alpha + beta)
        return rates

    def posteriors(self, task_ids: Iterable[int]) -> tuple[Floats, Floats]:
        """Return alpha and beta of these tasks."""
        return self._posteriors.at(self.table.positions(task_ids))

    def metrics(self) -> dict[str, float]:
        found = {"tried": float(self._tried.sum()), "chosen_pass_rate": self._chosen_rate}
        if self.feature_keys:
            found |= {"implicit": self._implicit, "between_references": self._anchor or 0.0}
        return found

    # Learning

    def _update(self, tried: Sequence[Observation], tasks_J: Ids) -> None:
        """Learn outcomes that arrived together; `tasks_J` has the position of each."""
        share = self._share(len(tried))
        tasks, successes, trials = _by_task(tasks_J, [o.successes for o in tried], [o.trials for o in tried])
        self._posteriors.forget((1 - self._forgetting) ** share)
        explicit = 1 - self._implicit
        self._posteriors.add(tasks, explicit * successes, explicit * (trials - successes))
        self._forgotten += share * math.log(max(1 - self._forgetting, 1e-300))
        if self._implicit > 0:
            rates = np.clip(successes / trials, 0.0, 1.0)
            weight = self._implicit * self._pseudo_of([o.trials for o in tried])
            self._posteriors.add(tasks, weight * rates, weight * (1 - rates))
            self._batch += [(task, o.successes, o.trials) for task, o in zip(tasks_J.tolist(), tried)]
            if self._share(len(self._batch)) >= 1:
                self._infer(*map(np.array, zip(*self._batch)))
                self._batch = []

    def _share(self, num_groups: int) -> float:
        """Return which fraction of an update these groups are."""
        return num_groups / self.groups_per_step if self.groups_per_step else 1.0

    def _pseudo_of(self, trials: Sequence[float] | Floats) -> float:
        return self._pseudo_trials if self._pseudo_trials is not None else float(np.mean(trials))

    def _infer(self, tasks_J: Ids, successes_J: Floats, trials_J: Floats) -> None:
        """Update all other tasks by a batch's position between the reference models."""
        share = self._share(len(tasks_J))
        tasks, successes, trials = _by_task(tasks_J, successes_J, trials_J)
        rates = np.clip(successes / trials, 0.0, 1.0)
        low, high = self._weaker[tasks].mean(), self._stronger[tasks].mean()
        stands = float((rates.mean() - low) / (high - low + 1e-6))
        kept = _SMOOTHING**share
        self._anchor = stands if self._anchor is None else kept * self._anchor + (1 - kept) * stands
        weight = share * self._implicit * self._pseudo_of(trials_J)
        thought = self._posteriors.add_to_others(tasks, weight, self._anchor)
        if self._adaptive and float(np.abs(thought - rates).mean()) >= _SURPRISE:
            self._implicit /= 2

    def _add(self, o: Observation, position: int) -> None:
        weight = 1.0
        if o.kind == "correction":
            weight = math.exp(self._forgotten - self._forgotten_at.get(o.corrects or o.seq, self._forgotten))
        self._posteriors.change(position, weight * o.successes, weight * (o.trials - o.successes))

    # Choosing

    def _choose(self, rng: np.random.Generator, size: int) -> Ids:
        keys = -np.abs(self._target - self._rates(rng))
        if self._temperature > 0:
            # The largest score / temperature + Gumbel noise are draws without replacement in proportion to exp(score / temperature).
            keys = keys / self._temperature - np.log(rng.standard_exponential(len(keys)))
        keys[~self.table.open] = -np.inf
        return _largest(rng, keys, size)

    def _rates(self, rng: np.random.Generator) -> Floats:
        """Return a pass rate for each task: its posterior's mean, or a draw from the posterior."""
        passed, failed = self._posteriors.at(slice(None))
        if self._thompson:
            # Beta draws as quotients of Gamma draws: NumPy's own take twice as long at Beta(1, 1), the initial posterior.
            passed, failed = rng.standard_gamma(passed), rng.standard_gamma(failed)
        # Both draws are 0 only if a person removed nearly all the evidence.
        rates: Floats = passed / np.maximum(passed + failed, 1e-300)
        return rates


class Posteriors:
    """alpha and beta of every task, from which all tasks forget at once and to which a batch adds for all tasks at once.

    Both cost what they cost for one task: with what is left of old evidence kept as one factor, `alpha = 1 + left (own + a w + b (s - w))` and
    `beta = 1 + left (own' + a (1 - w) - b (s - w))`, where w and s are the pass rates of the reference models and the numbers a and b hold what
    batches said of all tasks. Only where a pass rate between the two is beyond 0 or 1, and is clipped, the arrays are added to.

    Args:
        num_tasks: each begins at Beta(1, 1).
    """

    def __init__(self, num_tasks: int) -> None:
        self._own_alpha, self._own_beta = np.zeros(num_tasks), np.zeros(num_tasks)
        self._left = 1.0
        self._a = self._b = 0.0

    def refer_to(self, weaker: Floats, stronger: Floats) -> None:
        """Take the pass rates of the two reference models, [num_tasks] each."""
        self._weaker, self._between = weaker, stronger - weaker
        # The places between the models at which no task's pass rate is clipped.
        self._unclipped = -math.inf, math.inf
        if ((weaker < 0) | (weaker > 1)).any():
            self._unclipped = math.inf, -math.inf
        elif (differ := self._between != 0).any():
            at_0, at_1 = -weaker[differ] / self._between[differ], (1 - weaker[differ]) / self._between[differ]
            self._unclipped = float(np.minimum(at_0, at_1).max()), float(np.maximum(at_0, at_1).min())

    def at(self, positions: Ids | slice) -> tuple[Floats, Floats]:
        """alpha and beta of the tasks at these positions."""
        alpha, beta = self._own_alpha[positions], self._own_beta[positions]
        if self._a or self._b:
            of_all = self._a * self._weaker[positions] + self._b * self._between[positions]
            alpha, beta = alpha + of_all, beta + (self._a - of_all)
        return 1 + self._left * alpha, 1 + self._left * beta

    def forget(self, kept: float) -> None:
        """Keep this share of all evidence."""
        self._left *= kept
        if self._left < _LEAST_LEFT:  # before it is too small to divide by
            for own in (self._own_alpha, self._own_beta):
                own *= self._left
            self._a, self._b, self._left = self._a * self._left, self._b * self._left, 1.0

    def add(self, tasks: Ids, successes: Floats, failures: Floats) -> None:
        """Evidence of tasks at different positions."""
        self._own_alpha[tasks] += successes / self._left
        self._own_beta[tasks] += failures / self._left

    def add_to_others(self, tasks: Ids, weight: float, place: float) -> Floats:
        """Evidence of so much weight for all tasks but those at these positions, from a place between the reference models.

        Returns:
            The pass rates that it implies for the tasks at these positions.
        """
        thought: Floats = np.clip(self._weaker[tasks] + place * self._between[tasks], 0.0, 1.0)
        if self._unclipped[0] <= place <= self._unclipped[1]:
            self._a += weight / self._left
            self._b += weight * place / self._left
        else:
            of_all = np.clip(self._weaker + place * self._between, 0.0, 1.0)
            self._own_alpha += weight / self._left * of_all
            self._own_beta += weight / self._left * (1 - of_all)
        self.add(tasks, -weight * thought, -weight * (1 - thought))
        return thought

    def change(self, position: int, successes: float, failures: float) -> None:
        """Evidence of one task, which may be negative; what is left is no less than `_LEAST`."""
        alpha, beta = self.at(np.array([position]))
        changed = np.maximum(alpha + successes, _LEAST) - alpha, np.maximum(beta + failures, _LEAST) - beta
        self.add(np.array([position]), *changed)


def _by_task(
    positions: Ids, successes: Sequence[float] | Floats, trials: Sequence[float] | Floats
) -> tuple[Ids, Floats, Floats]:
    """Return the distinct positions, with the sums of their successes and of their trials."""
    different, which = np.unique(positions, return_inverse=True)
    sums = [np.bincount(which, weights=column).astype(np.float64) for column in (successes, trials)]
    return different, sums[0], sums[1]


def _largest(rng: np.random.Generator, keys: Floats, count: int) -> Ids:
    """Return the indices of the `count` largest keys; equal ones in random order."""
    least = -np.partition(-keys, count - 1)[count - 1]
    above = np.flatnonzero(keys > least)
    return np.concatenate([above, rng.choice(np.flatnonzero(keys == least), count - len(above), replace=False)])
