"""BOTS: tasks whose pass rate is believed to be near a target, by a Beta posterior per task (arXiv 2510.26374).

Evidence of a task comes from its own outcomes and from those of others. With J the tasks of a batch, r their pass rates, and two reference
models whose pass rates w (the weaker) and s (the stronger) are features of every task, the policy stands at

    C = (mean r_J - mean w_J) / (mean s_J - mean w_J + 1e-6),  an exponential moving average with factor 0.9 over batches,

between the two, so every task i is thought to pass with p_i = clip(w_i + C (s_i - w_i), 0, 1); for i in J that is r_i. The posteriors
of all tasks then become, with S and F the successes and failures in the batch and m the rollouts of a group,

    alpha <- (1 - f) alpha + f + (1 - k) S + k m p
    beta  <- (1 - f) beta  + f + (1 - k) F + k m (1 - p)

f is `forgetting` (the paper's lambda) and k `implicit` (rho). Chosen are the tasks whose pass rate, drawn from the posterior (Thompson
sampling) or its mean, lies nearest to `target_pass_rate`; with a `temperature`, in proportion to exp(-distance / temperature).

Outcomes do not always come in whole batches of B, the groups of a trainer step. What n groups say of their own tasks counts at once, and (1 - f)
is taken to the power n / B. What they say of other tasks waits until B groups are there: C of a few groups is the quotient of two differences near
zero. With n = B this is the paper's update; 0.9 and the evidence k m p of tasks not in J are taken to the power or share n / B where more came
together.

A correction counts as if the outcome had been so from the start: it has been forgotten as far as that has. What a person says
counts in full.

Tasks with equal features that nobody tried have one posterior, so the work is in the number of such classes and of tasks tried, not in
the number of tasks (see nearest.py). Where features are nearly all different, that is every task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rftdata.errors import ConfigError
from rftdata.selectors.base import Floats, Ids, Observation, Selector, TaskIds
from rftdata.selectors.checks import feature_list, flag, number
from rftdata.selectors.nearest import nearest_draws, noisy_draws
from rftdata.selectors.table import TaskTable, draw_distinct, in_rounds

_SMOOTHING = 0.9
_LEAST = 1e-3
"""Smallest alpha and beta: what a person takes away may be more than there was."""
_SURPRISE = 0.25


class Difficulty(Selector):
    """Posteriors of classes and of the tasks tried, as rows of arrays: the classes first.

    Args:
        features: keys of the weaker and of the stronger reference model's pass rate; without them there is no implicit evidence.
        target_pass_rate: of the tasks to choose.
        forgetting: share of the evidence that a trainer step forgets.
        implicit: weight of implicit evidence; 0.1 by default where there are features.
        temperature: 0 takes the nearest.
        thompson: draw pass rates from the posterior instead of taking its mean.
        pseudo_trials: rollouts that implicit evidence counts for; those of the batch's groups by default.
        adaptive_implicit: halve `implicit` after a batch whose pass rates the reference models predicted badly (by 0.25 on average).
    """

    def __init__(
        self, task_ids: TaskIds, seed: int, *, features: Sequence[str] = (), target_pass_rate: float = 0.5, forgetting: float = 0.1,
        implicit: float | None = None, temperature: float = 0.0, thompson: bool = True, pseudo_trials: float | None = None,
        adaptive_implicit: bool = False,
    ) -> None:  # fmt: skip
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
                "the selector 'difficulty' infers pass rates from those of two reference models, and has no features", value=implicit,
                todo="name both in features, or leave implicit out",
            )  # fmt: skip
        self._target, self._forgetting, self._implicit = target_pass_rate, forgetting, implicit
        self._temperature, self._thompson = temperature, thompson
        self._pseudo_trials, self._adaptive = pseudo_trials, adaptive_implicit
        self._anchor: float | None = None  # C
        self._batch: list[tuple[int, float, float]] = []  # rows, successes and trials until B groups are there
        self._draws = 0
        self._forgotten = 0.0  # logarithm of what is left of evidence from before the first update
        self._forgotten_at: dict[int, float] = {}
        self._chosen_rate = 0.0
        self.table = TaskTable(task_ids)
        self._make_classes(np.zeros((2, 0)))

    def set_features(self, features: Mapping[str, Floats]) -> None:
        super().set_features(features)
        self._make_classes(np.stack([features[key] for key in self.feature_keys]))

    def select(self, count: int) -> list[int]:
        rng = np.random.default_rng((self.seed, self._draws))
        self._draws += 1
        chosen = [self._choose(rng, size) for size in in_rounds(count, self.table.num_open)]
        if not chosen:
            return []
        positions = np.concatenate(chosen)
        self._chosen_rate = float(self.pass_rates(positions).mean())
        chosen_ids: list[int] = self.table.ids[positions].tolist()
        return chosen_ids

    def observe(self, observations: Sequence[Observation]) -> None:
        places = self.table.positions(o.task_id for o in observations).tolist()
        known = [(o, self._row_of(position)) for o, position in zip(observations, places) if position >= 0]
        tried = [(o, row) for o, row in known if o.kind == "explicit" and o.trials > 0]
        if tried:
            self._update([o for o, _ in tried], np.array([row for _, row in tried]))
        if observations:
            self._forgotten_at[observations[0].seq] = self._forgotten
        for o, row in known:
            if o.kind != "explicit":
                self._add(o, row)

    def pass_rates(self, positions: Ids) -> Floats:
        """Mean of the posterior of the tasks at these positions."""
        rows = self._row[positions]
        rates: Floats = self._alpha[rows] / (self._alpha[rows] + self._beta[rows])
        return rates

    def posteriors(self, task_ids: Iterable[int]) -> tuple[Floats, Floats]:
        """alpha and beta of these tasks."""
        rows = self._row[self.table.positions(task_ids)]
        return self._alpha[rows], self._beta[rows]

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self._draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._draws = state["draws"]

    def metrics(self) -> dict[str, float]:
        found = {"tried": float(self._num_rows - self._num_classes), "chosen_pass_rate": self._chosen_rate}
        if self.feature_keys:
            found |= {"implicit": self._implicit, "between_references": self._anchor or 0.0}
        return found

    def retire(self, task_ids: Sequence[int]) -> bool:
        places = self.table.positions(task_ids)
        self._leave_class(np.unique(places[places >= 0]))
        self.table.retire(task_ids)
        return True

    # Rows

    def _make_classes(self, features: Floats) -> None:
        """One row for each different pair of features, [2, N]; without features one for all."""
        self._members: Ids | None = None
        if features.shape[1]:
            weaker, of_weaker = np.unique(features[0], return_inverse=True)
            stronger, of_stronger = np.unique(features[1], return_inverse=True)
            # One number per pair: sorting numbers is fast, sorting pairs of a million tasks takes seconds.
            found, self._row = np.unique(of_weaker * len(stronger) + of_stronger, return_inverse=True)
            pairs = np.stack([weaker[found // len(stronger)], stronger[found % len(stronger)]])
            # The members of each class, in the order of their ids.
            self._members = np.argsort(self._row, kind="stable")
        else:
            pairs, self._row = np.zeros((2, 1)), np.zeros(len(self.table), dtype=np.int64)
        self._num_classes: int = pairs.shape[1]
        self._num_rows = self._num_classes
        self._sizes = np.bincount(self._row, minlength=self._num_classes)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)]).astype(np.int64)
        room = self._num_rows + 64
        self._weaker, self._stronger = np.zeros(room), np.zeros(room)
        self._weaker[: self._num_rows], self._stronger[: self._num_rows] = pairs
        self._alpha, self._beta = np.ones(room), np.ones(room)
        self._position = np.full(room, -1, dtype=np.int64)  # of the task that a row stands for
        self._in_class = np.ones(len(self.table), dtype=np.bool_)

    def _row_of(self, position: int) -> int:
        """The row of a task's own, made where it still had its class's."""
        row = int(self._row[position])
        if row >= self._num_classes:
            return row
        self._leave_class(np.array([position]))
        own: int = self._num_rows
        if own == len(self._alpha):
            for name in ("_weaker", "_stronger", "_alpha", "_beta", "_position"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.ones_like(column)]))
        for column in (self._weaker, self._stronger, self._alpha, self._beta):
            column[own] = column[row]
        self._position[own] = position
        self._row[position] = own
        self._num_rows += 1
        return own

    def _leave_class(self, positions: Ids) -> None:
        positions = positions[self._in_class[positions]]
        self._in_class[positions] = False
        np.subtract.at(self._sizes, self._row[positions], 1)

    # Learning

    def _update(self, tried: Sequence[Observation], rows_J: Ids) -> None:
        """Outcomes that came together; `rows_J` has the row of each."""
        share = self._share(len(tried))
        rows, successes, trials = _by_row(rows_J, [o.successes for o in tried], [o.trials for o in tried])
        alpha, beta = self._alpha[: self._num_rows], self._beta[: self._num_rows]
        kept = (1 - self._forgetting) ** share
        for evidence in (alpha, beta):
            evidence *= kept
            evidence += 1 - kept
        alpha[rows] += (1 - self._implicit) * successes
        beta[rows] += (1 - self._implicit) * (trials - successes)
        self._forgotten += share * math.log(max(1 - self._forgetting, 1e-300))
        if self._implicit > 0:
            rates = np.clip(successes / trials, 0.0, 1.0)
            weight = self._implicit * self._pseudo_of([o.trials for o in tried])
            alpha[rows] += weight * rates
            beta[rows] += weight * (1 - rates)
            self._batch += [(row, o.successes, o.trials) for row, o in zip(rows_J.tolist(), tried)]
            if self._share(len(self._batch)) >= 1:
                self._infer(*map(np.array, zip(*self._batch)))
                self._batch = []

    def _share(self, num_groups: int) -> float:
        """How much of an update so many groups are."""
        return num_groups / self.groups_per_step if self.groups_per_step else 1.0

    def _pseudo_of(self, trials: Sequence[float] | Floats) -> float:
        return self._pseudo_trials if self._pseudo_trials is not None else float(np.mean(trials))

    def _infer(self, rows_J: Ids, successes_J: Floats, trials_J: Floats) -> None:
        """What a batch says of all other tasks, from where it stands between the reference models."""
        share = self._share(len(rows_J))
        rows, successes, trials = _by_row(rows_J, successes_J, trials_J)
        rates = np.clip(successes / trials, 0.0, 1.0)
        weaker, stronger = self._weaker[: self._num_rows], self._stronger[: self._num_rows]
        low, high = weaker[rows].mean(), stronger[rows].mean()
        stands = float((rates.mean() - low) / (high - low + 1e-6))
        kept = _SMOOTHING**share
        self._anchor = stands if self._anchor is None else kept * self._anchor + (1 - kept) * stands
        thought = np.clip(weaker + self._anchor * (stronger - weaker), 0.0, 1.0)
        weight = np.full(self._num_rows, share * self._implicit * self._pseudo_of(trials_J))
        weight[rows] = 0.0  # their own outcomes have spoken
        self._alpha[: self._num_rows] += weight * thought
        self._beta[: self._num_rows] += weight * (1 - thought)
        if self._adaptive and float(np.abs(thought[rows] - rates).mean()) >= _SURPRISE:
            self._implicit /= 2

    def _add(self, o: Observation, row: int) -> None:
        weight = 1.0
        if o.kind == "correction":
            weight = math.exp(self._forgotten - self._forgotten_at.get(o.corrects or o.seq, self._forgotten))
        self._alpha[row] = max(self._alpha[row] + weight * o.successes, _LEAST)
        self._beta[row] = max(self._beta[row] + weight * (o.trials - o.successes), _LEAST)

    # Choosing

    def _choose(self, rng: np.random.Generator, size: int) -> Ids:
        """Positions of `size` different tasks."""
        own = np.arange(self._num_classes, self._num_rows)
        own = own[self.table.open[self._position[own]]]
        classes = np.flatnonzero(self._sizes)
        rows = np.concatenate([own, classes])
        a, b = self._alpha[rows], self._beta[rows]
        members = np.concatenate([np.ones(len(own), dtype=np.int64), self._sizes[classes]])
        if self._temperature > 0:
            keys, which = noisy_draws(
                rng, a, b, members, self._target, self._temperature, size, thompson=self._thompson
            )
        elif self._thompson:
            distances, which = nearest_draws(rng, a, b, members, self._target, size)
            keys = -distances
        else:
            which = np.repeat(np.arange(len(rows)), np.minimum(members, size))
            keys = -np.abs(self._target - a / (a + b))[which]
        best = which[_largest(rng, keys, size)]
        mine, others = own[best[best < len(own)]], best[best >= len(own)] - len(own)
        return np.concatenate([self._position[mine], self._members_of(rng, classes, others)])

    def _members_of(self, rng: np.random.Generator, classes: Ids, which: Ids) -> Ids:
        """Different members at random of classes, as many of each as it is named in `which`."""
        chosen = [np.zeros(0, dtype=np.int64)]
        for index, count in zip(*np.unique(which, return_counts=True)):
            begin, end = self._starts[classes[index]], self._starts[classes[index] + 1]
            segment = None if self._members is None else self._members[begin:end]
            chosen.append(draw_distinct(rng, segment, self._in_class, int(count)))
        return np.concatenate(chosen)


def _by_row(
    rows: Ids, successes: Sequence[float] | Floats, trials: Sequence[float] | Floats
) -> tuple[Ids, Floats, Floats]:
    """Different rows, with the sums of their successes and of their trials."""
    different, which = np.unique(rows, return_inverse=True)
    sums = [np.bincount(which, weights=column).astype(np.float64) for column in (successes, trials)]
    return different, sums[0], sums[1]


def _largest(rng: np.random.Generator, keys: Floats, count: int) -> Ids:
    """Places of the `count` largest; equal ones at random."""
    if len(keys) <= count:
        return np.arange(len(keys))
    least = -np.partition(-keys, count - 1)[count - 1]
    above = np.flatnonzero(keys > least)
    return np.concatenate([above, rng.choice(np.flatnonzero(keys == least), count - len(above), replace=False)])
