"""Presets that no other package implements, against loops in NumPy that follow the papers: loss and gradient of random batches.

Each function returns the loss of every token before weighting and its derivative by the token's log-probability. It shares no code with
the parts: groups, rollouts and sums are dictionaries here.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.base import Signals
from rftcore.algorithms.masks.clip_v import expected_discriminator
from tests.support.algorithms import outputs_of, step_batch

Floats = npt.NDArray[np.float64]
Losses = tuple[Floats, Floats]
VOCABULARY = 7


@dataclass(frozen=True)
class Case:
    """Sequences with group, rollout and turn, and per token the log-probabilities of three policies."""

    group: list[int]
    rollout: list[int]
    turn: list[int]
    rewards: list[float]
    step_rewards: list[float]
    state: list[int]
    baseline: list[float]
    tokens: list[int]
    token_rewards: Floats
    logprobs: Floats
    behavior: Floats
    reference: Floats
    old_NV: Floats
    chosen: npt.NDArray[np.int64]

    @property
    def sequence(self) -> list[int]:
        return [b for b, num in enumerate(self.tokens) for _ in range(num)]

    @property
    def old(self) -> Floats:
        return self.old_NV[np.arange(len(self.chosen)), self.chosen]

    def ratio(self, anchor: Floats) -> Floats:
        return np.exp(self.logprobs - anchor)


def make_case(seed: int, *, turns: bool) -> Case:
    random = np.random.default_rng(seed)
    places = [(g, r, t) for g in range(3) for r in range(4) for t in range(int(random.integers(1, 4)) if turns else 1)]
    num = len(places)
    tokens = random.integers(1, 6, num).tolist()
    logits = random.normal(0.0, 2.0, (sum(tokens), VOCABULARY))
    old_NV = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    chosen = random.integers(0, VOCABULARY, sum(tokens))
    old = old_NV[np.arange(len(chosen)), chosen]
    rewards = random.choice([-1.0, 0.0, 0.5, 1.0], num)
    rewards[:4] = 0.5  # a group of equal rewards, if it has one turn per rollout
    noise = random.normal(0.0, 0.3, (3, len(old)))
    return Case(
        group=[g for g, _, _ in places],
        rollout=[r for _, r, _ in places],
        turn=[t for _, _, t in places],
        rewards=rewards.tolist(),
        step_rewards=random.choice([0.0, 0.3, 1.0], num).tolist(),
        state=random.integers(0, 3, num).tolist(),
        baseline=[float(g) / 4 for g, _, _ in places],
        tokens=tokens,
        token_rewards=random.normal(0.0, 0.1, len(old)),
        logprobs=old + noise[0],
        behavior=old + noise[1],
        reference=old + noise[2],
        old_NV=old_NV,
        chosen=chosen,
    )


def by_key(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return found


def centred(case: Case, *, scale: bool = False, shift: float = 0.0) -> Floats:
    """r - mean of the group (+ shift), over std with G - 1, per token; batches of one turn per rollout."""
    found = np.zeros(len(case.group))
    for members in by_key(case.group).values():
        own = np.array([case.rewards[b] for b in members])
        found[members] = own - own.mean() - shift
        if scale:
            found[members] = 0.0 if own.std(ddof=1) == 0 else found[members] / (own.std(ddof=1) + 1e-6)
    return found[case.sequence]


def clipped(case: Case, advantage: Floats, anchor: Floats) -> Losses:
    """PPO: -min(ρA, clip(ρ, 0.8, 1.2) A), which has no gradient where the clip decides."""
    ratio = case.ratio(anchor)
    inside, outside = ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage
    return -np.minimum(inside, outside), np.where(inside <= outside, -inside, 0.0)


def opmd(case: Case) -> Losses:
    advantage = centred(case)
    return -advantage * case.logprobs / 2.0, -advantage / 2.0


def asymre(case: Case) -> Losses:
    advantage = centred(case, shift=-0.1)
    return -advantage * case.logprobs, -advantage


def rec(case: Case) -> Losses:
    advantage, ratio = centred(case), case.ratio(case.behavior)
    kept = np.where(advantage > 0, ratio <= 1.2, ratio >= 0.8)
    return -ratio * kept * advantage * case.logprobs, -ratio * kept * advantage


def topr(case: Case) -> Losses:
    rewards = np.array(case.rewards)[case.sequence]
    whole = np.array([math.prod(case.ratio(case.behavior)[np.array(case.sequence) == b]) for b in case.sequence])
    taper = np.where(rewards > 0, 1.0, np.clip(whole, 0.0, 1.0))
    return -taper * rewards * case.logprobs, -taper * rewards


def opo(case: Case) -> Losses:
    advantage = np.zeros(len(case.group))
    for members in by_key(case.group).values():
        baseline = sum(case.tokens[b] * case.rewards[b] for b in members) / sum(case.tokens[b] for b in members)
        if len({case.rewards[b] for b in members}) > 1:
            advantage[members] = [case.rewards[b] - baseline for b in members]
    return clipped(case, advantage[case.sequence], case.behavior)


def gpg(case: Case) -> Losses:
    of_group = by_key(case.group).values()
    differing = sum(len(members) for members in of_group if len({case.rewards[b] for b in members}) > 1)
    advantage = centred(case) * len(case.group) / differing
    return -advantage * case.logprobs, -advantage


def pass_at_k(case: Case) -> Losses:
    advantage = np.zeros(len(case.group))
    for members in by_key(case.group).values():
        for b in members:
            others = [*itertools.combinations([case.rewards[c] for c in members if c != b], 2)]
            advantage[b] = np.mean([max(case.rewards[b], *two) - max(two) for two in others])
    return clipped(case, advantage[case.sequence], case.behavior)


def dppo(case: Case) -> Losses:
    advantage, ratio = centred(case), case.ratio(case.behavior)
    moved = np.exp(case.logprobs) - np.exp(case.behavior)
    kept = np.where(advantage > 0, moved <= 0.02, moved >= -0.03)
    weight = np.minimum(ratio, 1.3) * kept * advantage
    return -weight * case.logprobs, -weight


def covariance(case: Case) -> Floats:
    advantage = centred(case, scale=True)
    found: Floats = (advantage - advantage.mean()) * (case.old - case.old.mean())
    return found


def clip_cov(case: Case) -> Losses:
    advantage, ratio, cov = centred(case, scale=True), case.ratio(case.old), covariance(case)
    assert 0 < ((cov > 0.1) & (cov < 2.0)).sum() < len(cov)
    kept = (cov <= 0.1) | (cov >= 2.0)
    inside, outside = ratio * advantage, np.clip(ratio, 0.0, 2.0) * advantage
    return -np.minimum(inside, outside) * kept, np.where(inside <= outside, -inside, 0.0) * kept


def kl_cov(case: Case) -> Losses:
    advantage, ratio, cov = centred(case, scale=True), case.ratio(case.old), covariance(case)
    largest = np.argsort(-cov)[: int(0.25 * len(cov))]
    penalised = np.isin(np.arange(len(cov)), largest) * 0.7
    return -ratio * advantage + penalised * np.abs(np.log(ratio)), -ratio * advantage + penalised * np.sign(
        np.log(ratio)
    )


def sppo(case: Case) -> Losses:
    advantage, ratio = centred(case), case.ratio(case.behavior)
    near = (ratio >= 1 / 1.3) & (ratio <= 1.3)
    return -advantage * np.log(ratio) * near, -advantage * near


def sapo(case: Case) -> Losses:
    advantage, ratio = centred(case, scale=True), case.ratio(case.behavior)
    tau = np.where(advantage > 0, 1.0, 1.05)
    gate = 1.0 / (1.0 + np.exp(-tau * (ratio - 1.0)))
    return -4.0 / tau * gate * advantage, -4.0 * gate * (1.0 - gate) * ratio * advantage


def m2po(case: Case) -> Losses:
    advantage, ratio = centred(case, scale=True), case.ratio(case.behavior)
    moments = (case.old - case.behavior) ** 2
    kept = list(range(len(moments)))
    while kept and np.mean(moments[kept]) >= 0.04:
        kept.remove(max(kept, key=lambda n: moments[n]))
    loss = -ratio * advantage * np.isin(np.arange(len(moments)), kept)
    return loss, loss


def m2po_one_sided(case: Case) -> Losses:
    advantage, ratio = centred(case, scale=True), case.ratio(case.behavior)
    moved = case.old - case.behavior
    reached = [n for n in range(len(moved)) if advantage[n] * moved[n] > 0]
    limits = [0.0, *(abs(moved[n]) for n in reached)]
    tau = max(t for t in limits if np.mean([min(abs(moved[n]), t) ** 2 for n in reached]) < 0.04)
    dropped = [n for n in reached if abs(moved[n]) > tau + 1e-6]
    assert 0 < len(dropped) < len(reached)
    loss = -ratio * advantage * ~np.isin(np.arange(len(moved)), dropped)
    return loss, loss


def entropy_masked(case: Case, excess: Floats, limit: float, most: int) -> Losses:
    advantage = centred(case, scale=True)
    worst = [n for n in np.argsort(-excess) if advantage[n] < 0 and excess[n] > limit]
    kept = ~np.isin(np.arange(len(excess)), worst[:most])
    loss, slope = clipped(case, advantage, case.old)
    return loss * kept, slope * kept


def discriminators(case: Case) -> tuple[Floats, Floats]:
    """S of the chosen tokens, and of every token of the vocabulary."""
    p_NV = np.exp(case.old_NV)
    entropy = -(p_NV * case.old_NV).sum(axis=1)
    all_NV = p_NV * (entropy[:, None] + case.old_NV)
    return all_NV[np.arange(len(case.chosen)), case.chosen], all_NV


def clip_b(case: Case) -> Losses:
    own, _ = discriminators(case)
    return entropy_masked(case, own.mean() - own, 0.5 * own.std(ddof=1), len(own))


def clip_v(case: Case) -> Losses:
    own, all_NV = discriminators(case)
    excess = (np.exp(case.old_NV) * all_NV).sum(axis=1) - own
    return entropy_masked(case, excess, 0.3 * excess.std(ddof=1), int(0.1 * len(own)))


def rae(case: Case) -> Losses:
    advantage = np.array(case.rewards) - np.array(case.baseline)
    return clipped(case, advantage[case.sequence], case.behavior)


def remax(case: Case) -> Losses:
    advantage = np.zeros(len(case.sequence))
    for b in range(len(case.group)):
        places = [n for n, sequence in enumerate(case.sequence) if sequence == b]
        for n in places:
            to_go = sum(case.token_rewards[m] for m in places if m >= n)
            advantage[n] = case.rewards[b] + to_go - case.baseline[b]
    return -advantage * case.logprobs, -advantage


def whitened_returns(case: Case, outcome: Sequence[float], kl: float) -> Floats:
    """Rewards to go of single turns, minus kl · (log π_old - log π_reference) at each token, then over the batch to mean 0, std 1."""
    returns = np.zeros(len(case.sequence))
    for b in range(len(case.group)):
        running = outcome[b]
        for n in reversed([n for n, sequence in enumerate(case.sequence) if sequence == b]):
            running += case.token_rewards[n] - kl * (case.behavior[n] - case.reference[n])
            returns[n] = running
    found: Floats = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    return found


def reinforce_plus_plus(case: Case) -> Losses:
    return clipped(case, whitened_returns(case, case.rewards, 0.001), case.behavior)


def reinforce_plus_plus_baseline(case: Case) -> Losses:
    means = {g: np.mean([case.rewards[b] for b in members]) for g, members in by_key(case.group).items()}
    outcome = [float(reward - means[g]) for reward, g in zip(case.rewards, case.group, strict=True)]
    loss, slope = clipped(case, whitened_returns(case, outcome, 0.0), case.behavior)
    distance = case.logprobs - case.reference
    return loss + 0.001 * 0.5 * distance**2, slope + 0.001 * distance


def step_wise_grpo(case: Case) -> Losses:
    last = {key: members[-1] for key, members in by_key([*zip(case.group, case.rollout, strict=True)]).items()}
    sums = np.bincount(case.sequence, weights=case.token_rewards)
    totals = {
        key: case.rewards[b] + sum(sums[c] for c in range(len(case.group)) if (case.group[c], case.rollout[c]) == key)
        for key, b in last.items()
    }
    advantage = np.zeros(len(case.group))
    for b, (g, r) in enumerate(zip(case.group, case.rollout, strict=True)):
        own = [totals[key] for key in totals if key[0] == g]  # type: ignore[index]
        advantage[b] = (totals[g, r] - np.mean(own)) / (np.std(own, ddof=1) + 1e-6)
    return clipped(case, advantage[case.sequence], case.behavior)


def gigpo(case: Case) -> Losses:
    rewards = np.array(case.step_rewards) + np.bincount(case.sequence, weights=case.token_rewards)
    rollouts = by_key([*zip(case.group, case.rollout, strict=True)])
    returns, episode = np.zeros(len(rewards)), np.zeros(len(rewards))
    for (g, _), members in rollouts.items():  # type: ignore[misc]
        for place, b in enumerate(members):
            returns[b] = sum(0.95**later * rewards[c] for later, c in enumerate(members[place:]))
        totals = [rewards[others].sum() for (group, _), others in rollouts.items() if group == g]  # type: ignore[misc]
        episode[members] = (rewards[members].sum() - np.mean(totals)) / (np.std(totals, ddof=1) + 1e-6)
    step = np.zeros(len(rewards))
    for members in by_key([*zip(case.group, case.state, strict=True)]).values():
        if len(members) > 1:
            step[members] = (returns[members] - returns[members].mean()) / (returns[members].std(ddof=1) + 1e-6)
    return clipped(case, (episode + step)[case.sequence], case.behavior)


def otb(case: Case) -> Losses:
    p_NV = np.exp(case.old_NV)
    energy = ((np.eye(VOCABULARY)[case.chosen] - p_NV) ** 2).sum(axis=1)  # the gradient of log π by the logits
    tokens = by_key([(case.group[b], case.rollout[b]) for b in case.sequence])
    last = {(g, r): b for b, (g, r) in enumerate(zip(case.group, case.rollout, strict=True))}
    returns = {
        key: case.rewards[last[key]] + np.cumsum(case.token_rewards[own][::-1])[::-1] for key, own in tokens.items()
    }  # type: ignore[index]
    weight = {key: np.cumsum(energy[own]) for key, own in tokens.items()}
    advantage = np.zeros(len(case.sequence))
    for key, own in tokens.items():
        others = [other for other in tokens if other[0] == key[0]]  # type: ignore[index]
        for t, n in enumerate(own):
            alive = [other for other in others if len(tokens[other]) > t]
            baseline = sum(weight[o][t] * returns[o][t] for o in alive) / sum(weight[o][t] for o in alive)
            advantage[n] = returns[key][t] - baseline if len(alive) > 1 else 0.0
    return clipped(case, advantage, case.old)


TURNS = (step_wise_grpo, gigpo, otb)
TOKEN_REWARDS = (remax, reinforce_plus_plus, reinforce_plus_plus_baseline, *TURNS)
CHANGES: dict[Callable[[Case], Losses], dict[str, Any]] = {
    pass_at_k: {"advantage": {"k": 3}},
    kl_cov: {"mask": {"share": 0.25}, "loss": {"coef": 0.7}},
    dppo: {"loss": {"high": 0.02, "low": 0.03, "limit": 1.3}, "aggregation": "token-mean"},
    clip_cov: {"mask": {"share": 1.0, "low": 0.1, "high": 2.0}},
    clip_b: {"mask": {"mu": 0.5}},
    clip_v: {"mask": {"mu": 0.3, "max_share": 0.1}},
}
PRESETS = (
    opo,
    gpg,
    pass_at_k,
    dppo,
    clip_cov,
    kl_cov,
    opmd,
    asymre,
    rec,
    topr,
    sppo,
    sapo,
    m2po,
    m2po_one_sided,
    clip_b,
    clip_v,
    remax,
    rae,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    *TURNS,
)


@pytest.mark.parametrize("expected", PRESETS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_the_formulas(expected: Callable[[Case], Losses], seed: int) -> None:
    case = make_case(seed, turns=expected in TURNS)
    loss_N, slope_N = expected(case)
    weight_N = np.full(len(case.sequence), 1.0 / len(case.sequence))
    if expected in (sapo, gpg):  # the mean over sequences of their means
        weight_N = np.array([1.0 / case.tokens[b] / len(case.group) for b in case.sequence])

    algorithm = build_algorithm(expected.__name__, CHANGES.get(expected))
    batch = step_batch(
        case.rewards,
        case.group,
        case.rollout,
        turns=case.turn,
        tokens=case.tokens,
        behavior=case.behavior.tolist(),
        baseline_rewards_B=torch.tensor(case.baseline),
        role_baselines_B=torch.tensor(case.baseline),
        step_rewards_BA=torch.tensor(case.step_rewards),
        state_BA=torch.tensor(case.state),
        token_rewards_N=torch.from_numpy(case.token_rewards).float() if expected in TOKEN_REWARDS else None,
    )
    old_NV = torch.from_numpy(case.old_NV)
    signals = Signals(
        old_N=torch.from_numpy(case.old).float() if "old" in algorithm.signals else None,
        reference_N=torch.from_numpy(case.reference).float(),
        entropy_N=-(old_NV.exp() * old_NV).sum(dim=1),
        discriminator_N=expected_discriminator(old_NV),
        collision_N=old_NV.exp().square().sum(dim=1),
    )
    logprobs_N = torch.from_numpy(case.logprobs).float().requires_grad_()
    index_N = torch.arange(len(case.sequence))
    plan = algorithm.plan(batch, signals)
    loss, _ = algorithm.objective(plan, outputs_of(plan, index_N, logprobs_N))
    (gradient,) = torch.autograd.grad(loss, logprobs_N)
    assert loss.item() == pytest.approx((loss_N * weight_N).sum(), rel=2e-4, abs=2e-5)
    assert gradient.tolist() == pytest.approx((slope_N * weight_N).tolist(), rel=1e-3, abs=1e-5)
    assert np.abs(slope_N).max() > 0.01, "the case says something"


def shares(case: Case, members: set[int]) -> Floats:
    """1 / b of each sequence of a rollout with b in the update."""
    found = np.zeros(len(case.group))
    for of_rollout in by_key(list(zip(case.group, case.rollout, strict=True))).values():
        own = [b for b in of_rollout if b in members]
        found[own] = 1.0 / max(1, len(own))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "kto"])
def test_each_rollout_counts_once_whatever_number_of_branches_it_has(name: str, seed: int) -> None:
    """Rollouts of 1 to 3 sequences; the whole batch, and the groups 1 and 2 of it as one of several optimizer updates."""
    case = make_case(seed, turns=True)
    batch = step_batch(case.rewards, case.group, case.rollout, turns=case.turn, tokens=case.tokens)
    sequence_N, tokens = np.array(case.sequence), np.array(case.tokens)
    settings = {"loss": {"beta": 1.0, "threshold": -9.0}} if name == "kto" else {"aggregation": name}
    if name.endswith("norm"):
        settings = {"aggregation": {"name": name, "length": 9}}
    algorithm = build_algorithm("kto" if name == "kto" else "sft", settings)
    log_ratio_N = case.logprobs - case.reference
    signals = Signals(reference_N=torch.from_numpy(case.reference).float(), mismatched_kl=torch.tensor(0.0))
    plan = algorithm.plan(batch, signals)
    for groups in ({0, 1, 2}, {1, 2}):
        members = {b for b, group in enumerate(case.group) if group in groups}
        share_B = shares(case, members)
        if name == "kto":  # 1 - sigmoid of each sequence's log-ratio
            loss_B = 1.0 / (1.0 + np.exp(np.bincount(sequence_N, weights=log_ratio_N)))
        else:
            loss_B = np.bincount(sequence_N, weights=-case.logprobs)
            loss_B /= {"seq-mean-token-mean": tokens, "seq-mean-token-sum": 1, "seq-mean-token-sum-norm": 9}[name]
        members_B = torch.tensor([b in members for b in range(len(case.group))])
        update = algorithm.restrict(plan, members_B)
        loss = 0.0
        for part in (0, 1):  # two micro-batches, which divide the branches of a rollout
            index_N = torch.from_numpy(np.flatnonzero(np.isin(sequence_N, [b for b in members if b % 2 == part])))
            logprobs_N = torch.from_numpy(case.logprobs).float()[index_N]
            loss += algorithm.objective(update, outputs_of(update, index_N, logprobs_N))[0].item()
        assert loss == pytest.approx((share_B * loss_B).sum() / share_B.sum(), rel=1e-5)
