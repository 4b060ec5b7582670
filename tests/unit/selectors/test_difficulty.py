"""BOTS: two updates by hand, the recurrence in parts and whole, choices against plain draws, corrections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdata.errors import ConfigError
from rftdata.selectors import Observation, build_selector
from rftdata.selectors.difficulty import Difficulty, Posteriors

FEATURES = ["weak", "strong"]


def bots(num_tasks: int, weak: Any = None, strong: Any = None, seed: int = 0, **args: Any) -> Difficulty:
    args = args if weak is None else {"features": FEATURES, **args}
    selector = build_selector("difficulty", args, range(1, num_tasks + 1), seed)
    assert isinstance(selector, Difficulty)
    if weak is not None:
        selector.set_features({"weak": np.asanyarray(weak, float), "strong": np.asanyarray(strong, float)})
    return selector


def posterior(selector: Difficulty, *task_ids: int) -> list[float]:
    return [value for column in selector.posteriors(task_ids) for value in column.tolist()]


def outcome(task_id: int, successes: float, trials: float = 10, seq: int = 1, group: int = 0) -> Observation:
    return Observation(task_id, successes, trials, kind="explicit", group=group, seq=seq)


def test_two_updates_by_hand() -> None:
    """lambda = rho = 0.2, m = 10. First C = (0.6 - 0.3) / (0.7 - 0.3) = 0.75, then 0.9 · 0.75 + 0.1 · 1 = 0.775."""
    selector = bots(3, [0.2, 0.4, 0.0], [0.6, 0.8, 0.5], forgetting=0.2, implicit=0.2)
    selector.observe([outcome(1, 4), outcome(2, 8)])
    alpha, beta = selector.posteriors([1, 2, 3])
    assert alpha == pytest.approx([0.8 + 0.2 + 0.8 * 4 + 2 * 0.4, 1 + 0.8 * 8 + 2 * 0.8, 1 + 2 * 0.375], abs=1e-4)
    assert beta == pytest.approx([1 + 0.8 * 6 + 2 * 0.6, 1 + 0.8 * 2 + 2 * 0.2, 1 + 2 * 0.625], abs=1e-4)
    assert [*alpha, *beta] == pytest.approx([5, 9, 1.75, 7, 3, 2.25], abs=1e-4)
    selector.observe([outcome(3, 5, seq=2)])
    alpha, beta = selector.posteriors([1, 2, 3])
    assert alpha == pytest.approx(
        [0.8 * 5 + 0.2 + 2 * 0.51, 0.8 * 9 + 0.2 + 2 * 0.71, 0.8 * 1.75 + 0.2 + 0.8 * 5 + 1], abs=1e-4
    )
    assert [*alpha, *beta] == pytest.approx([5.22, 8.82, 6.6, 6.78, 3.18, 7.0], abs=1e-4)


def test_without_references_only_outcomes_count() -> None:
    selector = bots(3, forgetting=0.5)
    selector.observe([outcome(2, 3, 4)])
    selector.observe([outcome(3, 1, 4, seq=2)])
    alpha, beta = selector.posteriors([1, 2, 3])
    assert alpha.tolist() == [1, 0.5 * 4 + 0.5, 2] and beta.tolist() == [1, 0.5 * 2 + 0.5, 4]


def test_outcomes_in_parts_of_a_step_forget_as_much_as_the_whole() -> None:
    whole, parts = bots(9, forgetting=0.3), bots(9, forgetting=0.3)
    for selector in (whole, parts):
        selector.observe([outcome(9, 8, 8)])
        selector.groups_per_step = 4
    whole.observe([outcome(i, 2, 4, seq=2) for i in range(1, 5)])
    for i in range(1, 5):
        parts.observe([outcome(i, 2, 4, seq=1 + i)])
    assert posterior(parts, 9) == pytest.approx(posterior(whole, 9))
    assert posterior(whole, 9) == pytest.approx([0.7 * 9 + 0.3, 1])


class Plain:
    """The paper's recurrence, for every task at every step."""

    def __init__(self, weak: Any, strong: Any, decay: float, rho: float) -> None:
        self.weak, self.strong, self.decay, self.rho = weak, strong, decay, rho
        self.alpha, self.beta = np.ones(len(weak)), np.ones(len(weak))
        self.c: float | None = None

    def update(self, places: Sequence[int], successes: Any, trials: float) -> None:
        rates = successes / trials
        low, high = self.weak[places].mean(), self.strong[places].mean()
        c = (rates.mean() - low) / (high - low + 1e-6)
        self.c = c if self.c is None else 0.9 * self.c + 0.1 * c
        p = np.clip(self.weak + self.c * (self.strong - self.weak), 0, 1)
        p[places] = rates
        s, f = np.zeros(len(p)), np.zeros(len(p))
        s[places], f[places] = successes, trials - successes
        self.alpha = (1 - self.decay) * self.alpha + self.decay + (1 - self.rho) * s + self.rho * trials * p
        self.beta = (1 - self.decay) * self.beta + self.decay + (1 - self.rho) * f + self.rho * trials * (1 - p)


@pytest.mark.parametrize("kinds", [3, 400])
def test_posteriors_are_those_of_the_plain_recurrence(kinds: int) -> None:
    rng = np.random.default_rng(5)
    of_kind = rng.integers(0, kinds, 500)
    weak = np.sort(rng.random(kinds))[of_kind] * 0.5
    strong = weak + 0.4
    selector, plain = bots(500, weak, strong, forgetting=0.15, implicit=0.3), Plain(weak, strong, 0.15, 0.3)
    for step in range(1, 30):
        chosen = selector.select(16)
        successes = rng.integers(0, 9, 16).astype(float)
        selector.observe([outcome(i, s, 8, step) for i, s in zip(chosen, successes, strict=True)])
        plain.update([i - 1 for i in chosen], successes, 8)
    alpha, beta = selector.posteriors(range(1, 501))
    np.testing.assert_allclose(alpha, plain.alpha, rtol=1e-12)
    np.testing.assert_allclose(beta, plain.beta, rtol=1e-12)


places = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)
steps = st.one_of(
    st.tuples(st.just("forget"), st.sampled_from([0.0, 1e-60, 0.5, 0.9, 1.0])),
    st.tuples(st.just("add"), places, st.floats(0, 8), st.floats(0, 8)),
    st.tuples(st.just("add to others"), places, st.floats(0, 4), st.floats(-0.5, 1.5)),
    st.tuples(st.just("change"), st.integers(0, 5), st.floats(-8, 8), st.floats(-8, 8)),
)


@given(
    steps=st.lists(steps, max_size=30), weak=st.lists(st.floats(0, 1), min_size=6, max_size=6), seed=st.integers(0, 9)
)
def test_posteriors_are_those_of_arrays_that_every_step_goes_through(
    steps: list[Any], weak: list[float], seed: int
) -> None:
    weaker, stronger = np.array(weak), np.random.default_rng(seed).random(6)
    found, alpha, beta = Posteriors(6), np.ones(6), np.ones(6)
    found.refer_to(weaker, stronger)
    for kind, *step in steps:
        if kind == "forget":
            (kept,) = step
            found.forget(kept)
            alpha, beta = kept * alpha + 1 - kept, kept * beta + 1 - kept
        elif kind == "add":
            tasks, successes, failures = step
            found.add(np.array(tasks), np.full(len(tasks), successes), np.full(len(tasks), failures))
            alpha[tasks] += successes
            beta[tasks] += failures
        elif kind == "add to others":
            tasks, weight, place = step
            thought = np.clip(weaker + place * (stronger - weaker), 0, 1)
            assert found.add_to_others(np.array(tasks), weight, place).tolist() == thought[tasks].tolist()
            others = np.setdiff1d(np.arange(6), tasks)
            alpha[others] += weight * thought[others]
            beta[others] += weight * (1 - thought[others])
        else:
            place, successes, failures = step
            found.change(place, successes, failures)
            alpha[place] = max(alpha[place] + successes, 1e-3)
            beta[place] = max(beta[place] + failures, 1e-3)
        # To the rounding of evidence that came and went: a person may take away all there was.
        np.testing.assert_allclose(np.stack(found.at(slice(None))), [alpha, beta], rtol=1e-9, atol=1e-11)


class Counted(npt.NDArray[Any]):
    """An array that counts the elements which operations on it, and on arrays made from it, go through."""

    num_elements = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        inputs, targets = ([np.asarray(array) for array in arrays] for arrays in (inputs, out))
        Counted.num_elements += max(array.size for array in (*inputs, *targets))
        if targets:
            options["out"] = tuple(targets)
        found = getattr(ufunc, method)(*inputs, **options)
        return out[0] if out else np.asarray(found).view(Counted)

    def __getitem__(self, places: Any) -> Any:
        found = super().__getitem__(places)
        Counted.num_elements += np.size(found)
        return found

    def __setitem__(self, places: Any, values: Any) -> None:
        Counted.num_elements += np.asarray(self)[places].size
        super().__setitem__(places, values)


@pytest.mark.parametrize("referred", [False, True])
def test_learning_does_not_go_through_all_tasks(referred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process learns every plan of the run again: 3,000 of them, in a few passes over the tasks (old evidence is scaled now and then)."""
    num_tasks, zeros = 1_000_000, np.zeros
    monkeypatch.setattr(np, "zeros", lambda *args, **options: zeros(*args, **options).view(Counted))
    references = [np.full(num_tasks, rate).view(Counted) for rate in (0.2, 0.7)]
    selector = bots(num_tasks, *(references if referred else []))
    monkeypatch.undo()
    selector.groups_per_step = 8
    Counted.num_elements = 0
    selector.pass_rates(np.arange(num_tasks))
    assert Counted.num_elements > num_tasks, "it counts"
    Counted.num_elements = 0
    for seq in range(1, 3001):
        selector.observe([outcome(8 * seq + i, 4, 8, seq) for i in range(8)])
    assert 3000 * 8 <= Counted.num_elements < 10 * num_tasks


@pytest.mark.parametrize("size", [1, 3, 5, 16])
def test_outcomes_in_parts_are_the_same_evidence_about_other_tasks_as_their_batch(size: int) -> None:
    """C is that of the recurrence; posteriors differ by what is forgotten within a batch only."""
    rng = np.random.default_rng(6)
    weak = rng.integers(0, 9, 300) / 16
    strong = weak + rng.integers(0, 8, 300) / 16  # often equal: C of one group alone would be anything
    selector, plain = bots(300, weak, strong, forgetting=0.1, implicit=0.3), Plain(weak, strong, 0.1, 0.3)
    selector.groups_per_step = 16
    seq = 0
    for _ in range(12):
        chosen = selector.select(16)
        successes = rng.binomial(8, weak[np.array(chosen) - 1] * 0.7 + 0.1).astype(float)
        found = list(zip(chosen, successes, strict=True))
        for start in range(0, 16, size):
            seq += 1
            selector.observe([outcome(i, s, 8, seq) for i, s in found[start : start + size]])
        plain.update([i - 1 for i in chosen], successes, 8)
        assert selector.metrics()["between_references"] == pytest.approx(plain.c, rel=1e-12)
    alpha, beta = selector.posteriors(range(1, 301))
    assert np.abs(alpha / (alpha + beta) - plain.alpha / (plain.alpha + plain.beta)).max() < 0.03


def test_one_group_of_a_task_that_both_references_find_equally_hard_states_nothing_of_others() -> None:
    weak, strong = np.full(100, 0.2), np.full(100, 0.8)
    weak[0] = strong[0] = 0.5
    selector = bots(100, weak, strong)
    selector.groups_per_step = 32
    selector.observe([outcome(i, 4, 8) for i in range(2, 34)])
    assert selector.metrics()["between_references"] == pytest.approx(0.5, abs=1e-4)
    selector.observe([outcome(1, 6, 8, 2)])
    assert selector.metrics()["between_references"] == pytest.approx(0.5, abs=1e-4)
    assert posterior(selector, 1)[0] > 6  # its own outcome counts at once


def test_the_weight_of_references_is_decided_on_by_whole_batches() -> None:
    selector = bots(64, [0.2] * 64, [0.8] * 64, implicit=0.4, adaptive_implicit=True)
    selector.groups_per_step = 32
    for seq in range(1, 65):
        selector.observe([outcome(seq, 8 if seq % 2 else 0, 8, seq)])  # each alone surprises, their mean does not
    assert selector.metrics()["implicit"] == 0.1


def _alike(ours: list[float], plain: list[float]) -> None:
    """Two samples with one mean, as far as four standard errors say."""
    error = np.sqrt(np.var(ours) / len(ours) + np.var(plain) / len(plain))
    assert abs(np.mean(ours) - np.mean(plain)) <= 4 * error + 1e-9


def given(alpha: Any, beta: Any, sizes: Any, **args: Any) -> tuple[Difficulty, Any, Any, Any]:
    """A selector whose tasks have the posteriors of these kinds, as a person set them; alpha, beta and kind of each task."""
    of_kind = np.repeat(np.arange(len(sizes)), sizes)
    alpha, beta = np.asarray(alpha)[of_kind], np.asarray(beta)[of_kind]
    selector = bots(len(of_kind), **args)
    selector.observe(
        [
            Observation(i, a - 1, a + b - 2, kind="manual", group=None, seq=1)
            for i, (a, b) in enumerate(zip(alpha.tolist(), beta.tolist(), strict=True), 1)
        ]
    )
    return selector, alpha, beta, of_kind


def _of_choices(found: list[Any], keys: Any, kinds: Any, num_kinds: int) -> None:
    """Add some of the chosen tasks' keys, best first, and how many tasks are of each kind."""
    found.append([*keys, *np.bincount(np.minimum(kinds, num_kinds - 1), minlength=num_kinds)])


def test_the_nearest_draws_are_distributed_as_those_of_all_members() -> None:
    """The third kind is narrow, and 400 tasks have posteriors of their own."""
    rng = np.random.default_rng(1)
    selector, alpha, beta, of_kind = given(
        [3.0, 1.0, 40.0, *(1 + rng.random(400) * 12)],
        [2.0, 1.0, 60.0, *(1 + rng.random(400) * 12)],
        [4000, 30, 500] + [1] * 400,
        target_pass_rate=0.4,
    )
    ours: list[list[float]] = []
    plain: list[list[float]] = []
    for _ in range(600):
        chosen = np.array(selector.select(10)) - 1
        _of_choices(ours, sorted(selector.pass_rates(chosen))[::4], of_kind[chosen], 4)
        best = np.argsort(np.abs(0.4 - rng.beta(alpha, beta)))[:10]
        _of_choices(plain, sorted(alpha[best] / (alpha[best] + beta[best]))[::4], of_kind[best], 4)
    for a, b in zip(np.transpose(ours), np.transpose(plain), strict=True):
        _alike(list(a), list(b))
        _alike(list(a**2), list(b**2))


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (3.0, 2.0), (40.0, 60.0), (0.3, 7.0)])
def test_drawn_pass_rates_follow_the_posterior(alpha: float, beta: float) -> None:
    """Quantiles of the draws, against those of the Beta distribution's own draws."""
    rng = np.random.default_rng(4)
    selector, *_ = given([alpha], [beta], [40_000])
    drawn = selector._rates(rng)
    wanted = rng.beta(alpha, beta, 40_000)
    for cut in np.quantile(wanted, [0.01, 0.1, 0.5, 0.9, 0.99]):
        _alike(list(drawn <= cut), list(wanted <= cut))
    _alike(list(drawn), list(wanted))


@pytest.mark.parametrize("thompson", [True, False])
@pytest.mark.parametrize("temperature", [0.03, 0.5])
def test_draws_with_a_temperature_are_distributed_as_those_of_all_members(thompson: bool, temperature: float) -> None:
    rng = np.random.default_rng(2)
    selector, alpha, beta, of_kind = given(
        [3.0, 1.0, 9.0],
        [2.0, 1.0, 3.0],
        [300, 30, 200],
        target_pass_rate=0.4,
        temperature=temperature,
        thompson=thompson,
    )
    ours: list[list[float]] = []
    plain: list[list[float]] = []
    for _ in range(600):
        chosen = np.array(selector.select(10)) - 1
        _of_choices(ours, [], of_kind[chosen], 3)
        rates = rng.beta(alpha, beta) if thompson else alpha / (alpha + beta)
        keys = -np.abs(0.4 - rates) / temperature + rng.gumbel(size=len(alpha))
        _of_choices(plain, [], of_kind[np.argsort(-keys)[:10]], 3)
    for a, b in zip(np.transpose(ours), np.transpose(plain), strict=True):
        _alike(list(a), list(b))
        _alike(list(a**2), list(b**2))


def test_chosen_tasks_are_distributed_as_by_one_draw_per_task() -> None:
    weak = np.repeat([0.0, 0.3, 0.6], 2000)
    history = [[outcome(i, (i * 7) % 9, 8, seq) for i in range(seq, 6000, 41)] for seq in range(1, 4)]
    tried = np.array([o.task_id for batch in history for o in batch])
    rng = np.random.default_rng(3)
    ours, plain = [], []
    selector = bots(6000, weak, weak + 0.3)
    for batch in history:
        selector.observe(batch)
    alpha, beta = selector.posteriors(range(1, 6001))
    for _ in range(500):
        chosen = np.array(selector.select(12))
        assert len(set(chosen.tolist())) == 12
        best = np.argsort(np.abs(0.5 - rng.beta(alpha, beta)))[:12] + 1
        for found, ids in ((ours, chosen), (plain, best)):
            found.append([*np.bincount((ids - 1) // 2000, minlength=3), float(np.isin(ids, tried).sum())])
    for a, b in zip(np.transpose(ours), np.transpose(plain), strict=True):
        _alike(list(a), list(b))


def test_tasks_with_one_posterior_are_equally_likely() -> None:
    counts = np.zeros(20)
    for seed in range(2000):
        counts[np.array(bots(20, seed=seed).select(3)) - 1] += 1
    assert abs(counts - 300).max() < 4 * np.sqrt(300)


def test_the_mean_without_thompson_sampling_takes_the_nearest() -> None:
    selector = bots(6, thompson=False)
    selector.observe([outcome(1, 10), outcome(2, 5), outcome(3, 4), outcome(4, 0), outcome(5, 8), outcome(6, 1)])
    assert set(selector.select(3)) == {2, 3, 5}


def test_every_task_comes_before_one_comes_twice() -> None:
    selector = bots(7)
    chosen = selector.select(17)
    assert sorted(chosen[:7]) == sorted(chosen[7:14]) == list(range(1, 8)) and len(set(chosen[14:])) == 3


def test_a_correction_counts_as_if_the_outcome_had_been_so() -> None:
    wrong, right = bots(5, forgetting=0.2), bots(5, forgetting=0.2)
    wrong.observe([outcome(1, 8, 8), outcome(2, 3, 8)])
    right.observe([outcome(1, 2, 8), outcome(2, 3, 8)])
    for selector in (wrong, right):
        selector.observe([outcome(3, 4, 8, seq=2), outcome(1, 1, 8, seq=2)])
    wrong.observe([Observation(1, -6, 0, kind="correction", group=0, seq=3, corrects=1)])
    assert posterior(wrong, 1, 2, 3) == pytest.approx(posterior(right, 1, 2, 3))
    for selector in (wrong, right):
        selector.observe([outcome(4, 4, 8, seq=4)])
    assert posterior(wrong, 1, 2, 3) == pytest.approx(posterior(right, 1, 2, 3))


def test_what_a_person_states_counts_in_full() -> None:
    selector = bots(3)
    selector.observe([Observation(2, 0, 16, kind="manual", group=None, seq=1)])
    assert posterior(selector, 2) == [1, 17]
    selector.observe([Observation(2, 0, -100, kind="manual", group=None, seq=2)])
    assert min(posterior(selector, 2)) > 0


def test_the_weight_of_references_that_predict_badly_is_halved() -> None:
    selector = bots(4, [0.1] * 4, [0.3] * 4, implicit=0.4, adaptive_implicit=True)
    selector.observe([outcome(1, 9), outcome(2, 1)])  # 0.5 expected of both: wrong by 0.4
    assert selector.metrics()["implicit"] == 0.2


def test_a_restart_continues_the_same() -> None:
    rng = np.random.default_rng(7)
    weak = rng.integers(0, 5, 300) / 10
    through = bots(300, weak, weak + 0.5, temperature=0.1)
    history: list[list[Observation]] = []
    for step in range(1, 12):
        if step == 6:
            state = json.loads(json.dumps(through.state_dict()))
            again = bots(300, weak, weak + 0.5, temperature=0.1)
            for batch in history:
                again.observe(batch)
            again.load_state_dict(state)
        chosen = through.select(8)
        if step >= 6:
            assert again.select(8) == chosen
        batch = [outcome(i, float(rng.integers(0, 9)), 8, step, g) for g, i in enumerate(chosen)]
        history.append(batch)
        through.observe(batch)
        if step >= 6:
            again.observe(batch)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"target_pass_rat": 0.5}, "did you mean 'target_pass_rate'"),
        ({"target_pass_rate": 2}, "0 to 1"),
        ({"features": ["weak"]}, "a list of 0 or 2 keys"),
        ({"implicit": 0.2}, "has no features"),
        ({"features": FEATURES, "pseudo_trials": float("inf")}, "pseudo_trials"),
        ({"thompson": "no"}, "true or false"),
    ],
)
def test_wrong_arguments_are_clear_errors(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_selector("difficulty", args, range(4), 0)
