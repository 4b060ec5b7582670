"""Drawing the best of very many tasks without drawing for each of them.

Tasks with the same features and no outcome have one posterior: they are a class of `sizes[k]` members; a task that was tried is a class of
its own. Thompson sampling draws a pass rate for every member and takes the tasks whose draws score best. Only the best matter, and these
can be drawn at once, with exactly the distribution that drawing for every member would give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rftdata.selectors.base import Floats, Ids

_FEW = 4096
"""Members that are drawn one by one: nothing is gained."""
_SAMPLE = 256
"""Classes looked at to find the radius."""


def nearest_draws(
    rng: np.random.Generator, alpha: Floats, beta: Floats, sizes: Ids, target: float, count: int, radius: float | None = None
) -> tuple[Floats, Ids]:  # fmt: skip
    """Of one Beta draw per member, the distances to the target that can be among the `count` least.

    By thinning: of a class with density f, each member's draw lies within the ball of radius d around the target and has the value x there
    with density f(x). The same comes from letting each member propose with probability q = w · h (w the width of the ball, h no
    less than the largest density in it), uniformly, and accepting with probability f(x) / h. The number of proposals is binomial, so a
    class of a million members takes as long as one of a hundred, and few of a million classes propose at all. No distribution function is
    needed, and the radius may be any: where too few draws lie within it, the other members are drawn one by one.

    Args:
        alpha, beta: [K] posteriors of the classes.
        sizes: [K] members, 1 or more.
        radius: of the ball; by default one that should hold enough.

    Returns:
        distances [M], class of each [M].
    """
    if radius is None and sizes.sum() <= max(_FEW, 8 * count):
        members = np.repeat(np.arange(len(sizes)), sizes)
        return np.abs(target - rng.beta(alpha[members], beta[members])), members
    near, of_near, ball = _near_draws(rng, alpha, beta, sizes, target, count, radius)
    whole = np.flatnonzero(~ball.usable)
    whole = np.repeat(whole, sizes[whole])
    distances, found = [np.abs(target - rng.beta(alpha[whole], beta[whole])), near], [whole, of_near]
    if sum(int((d <= ball.radius).sum()) for d in distances) < count:
        rest = np.where(ball.usable, sizes - np.bincount(of_near, minlength=len(sizes)), 0)
        members = np.repeat(np.arange(len(sizes)), rest)
        distances.append(np.abs(target - _outside(rng, alpha[members], beta[members], ball)))
        found.append(members)
    return np.concatenate(distances), np.concatenate(found)


@dataclass(frozen=True)
class _Ball:
    """Pass rates within `radius` of the target; `usable`: [K], where proposing and accepting works."""

    radius: float
    low: float
    high: float
    usable: npt.NDArray[np.bool_]


def _near_draws(
    rng: np.random.Generator, alpha: Floats, beta: Floats, sizes: Ids, target: float, count: int, radius: float | None
) -> tuple[Floats, Ids, _Ball]:
    """Distances of all draws of usable classes within a ball, the class of each, and the ball."""
    if radius is None:
        radius = _radius(alpha, beta, sizes, target, count)
    low, high = max(target - radius, 0.0), min(target + radius, 1.0)
    # D(u) = log gamma(u + 1) - u log u + u is concave and 0 at 0, so D(u + v) <= D(u) + D(v): no density is above alpha + beta - 1. That is
    # good enough for one draw; for a class the largest density within the ball is worth its price.
    bound = alpha + beta - 1
    classes = np.flatnonzero(sizes > 1)
    bound[classes] = _largest_density(alpha[classes], beta[classes], low, high)
    bound *= 1 + 1e-9  # for rounding: it must not lie below the density
    chance = bound * (high - low)
    # Posteriors of 1 may have been rounded to a little less, which that margin covers.
    usable = (chance < 1) & (alpha > 1 - 1e-12) & (beta > 1 - 1e-12)
    alone = np.flatnonzero(usable & (sizes == 1) & (rng.random(len(sizes)) < chance))
    classes = classes[usable[classes]]
    proposers = np.concatenate([alone, np.repeat(classes, rng.binomial(sizes[classes], chance[classes]))])
    x = low + (high - low) * rng.random(len(proposers))
    a, b = alpha[proposers], beta[proposers]
    accepted = rng.random(len(x)) * bound[proposers] < np.exp(log_density(x, a, b, log_beta(a, b)))
    return np.abs(target - x[accepted]), proposers[accepted], _Ball(radius, low, high, usable)


def log_density(x: Floats, alpha: Floats, beta: Floats, norm: Floats) -> Floats:
    """Of the Beta distribution, within (0, 1); `norm` is `log_beta`."""
    with np.errstate(divide="ignore"):
        # 0 · log 0 is 0 here: at the ends the density of Beta(1, b) and Beta(a, 1) is finite.
        left = np.where(alpha == 1, 0.0, (alpha - 1) * np.log(np.maximum(x, 1e-300)))
        right = np.where(beta == 1, 0.0, (beta - 1) * np.log(np.maximum(1 - x, 1e-300)))
    density: Floats = left + right - norm
    return density


def log_beta(alpha: Floats, beta: Floats) -> Floats:
    """Logarithm of the Beta function, [K]."""
    pairs = zip(alpha.tolist(), beta.tolist())
    return np.array([math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b) for a, b in pairs], dtype=np.float64)


def _largest_density(alpha: Floats, beta: Floats, low: float, high: float) -> Floats:
    """A number between the largest density from low to high and 1.2 times that."""
    mode = np.where(alpha + beta > 2, (alpha - 1) / np.maximum(alpha + beta - 2, 1e-300), 0.5)
    largest: Floats = np.exp(log_density(np.clip(mode, low, high), alpha, beta, _log_beta_below(alpha, beta)))
    return largest


def _log_beta_below(alpha: Floats, beta: Floats) -> Floats:
    """No more than `log_beta`, and 1/6 less at most where both are 1 or more, by Stirling's series.

    log gamma(x) lies between S(x) = (x - 1/2) log x - x + log(2 pi) / 2 and S(x) + 1 / (12 x).
    """
    both = alpha + beta
    stirling = (alpha - 0.5) * np.log(alpha) + (beta - 0.5) * np.log(beta) - (both - 0.5) * np.log(both)
    below: Floats = stirling + 0.5 * math.log(2 * math.pi) - 1 / (12 * both)
    return below


def noisy_draws(
    rng: np.random.Generator, alpha: Floats, beta: Floats, sizes: Ids, target: float, temperature: float, count: int, *, thompson: bool,
) -> tuple[Floats, Ids]:  # fmt: skip
    """Of one key per member, score / temperature + Gumbel noise, those that can be among the `count` largest.

    The largest keys are draws without replacement in proportion to exp(score / temperature). Scores, -|target - pass rate|, are 0 at
    most. So members are taken in the order of their noise, the largest first (its order statistics follow from sums of exponentials),
    until even with the best score the noise would not reach the `count`-th key.

    Returns:
        keys [M], class of each [M].
    """
    rates = alpha / (alpha + beta)
    # The most that the score of a member can be.
    bound = np.zeros(len(sizes)) if thompson else -np.abs(target - rates) / temperature
    begin, reached = np.zeros(len(sizes), dtype=np.int64), np.zeros(len(sizes))
    end = np.minimum(sizes, 8 + np.ceil(4.0 * count * sizes / max(int(sizes.sum()), 1)).astype(np.int64))
    keys, members = np.zeros(0), np.zeros(0, dtype=np.int64)
    unsure = np.arange(len(sizes))
    while len(unsure):
        noise, of_class, reached[unsure] = _largest_noise(
            rng, unsure, sizes[unsure], begin[unsure], end[unsure], reached[unsure]
        )
        drawn = rng.beta(alpha[of_class], beta[of_class]) if thompson else rates[of_class]
        keys = np.concatenate([keys, noise - np.abs(target - drawn) / temperature])
        members = np.concatenate([members, of_class])
        least = -np.partition(-keys, count - 1)[count - 1] if len(keys) >= count else -np.inf
        unsure = unsure[(end[unsure] < sizes[unsure]) & (bound[unsure] - np.log(reached[unsure]) > least)]
        begin[unsure] = end[unsure]
        end[unsure] = np.minimum(sizes[unsure], 2 * end[unsure])
    return keys, members


def _largest_noise(
    rng: np.random.Generator, classes: Ids, sizes: Ids, begin: Ids, end: Ids, reached: Floats
) -> tuple[Floats, Ids, Floats]:
    """Gumbel noise of the members of rank begin to end in each class, descending; the class of each; where each class got.

    The j-th least of n exponentials is the one before plus an exponential over n - j + 1 (Rényi); minus its logarithm is Gumbel noise.
    """
    counts = end - begin
    members = np.repeat(classes, counts)
    starts = np.cumsum(counts) - counts
    ranks = np.arange(len(members)) - np.repeat(starts, counts) + np.repeat(begin, counts)
    steps = rng.standard_exponential(len(members)) / (np.repeat(sizes, counts) - ranks)
    sums = np.concatenate([[0.0], np.cumsum(steps)])
    values = sums[1:] - np.repeat(sums[starts] - reached, counts)
    last = sums[starts + counts] - sums[starts] + reached
    return -np.log(values), members, last


def _outside(rng: np.random.Generator, alpha: Floats, beta: Floats, ball: _Ball) -> Floats:
    """One draw each, given that it does not lie within the ball."""
    draws = rng.beta(alpha, beta)
    while (inside := np.flatnonzero((draws >= ball.low) & (draws <= ball.high))).size:
        draws[inside] = rng.beta(alpha[inside], beta[inside])
    return draws


def _radius(alpha: Floats, beta: Floats, sizes: Ids, target: float, count: int) -> float:
    """A radius within which about twice `count` draws should lie: by the trapezoidal rule, over the largest classes and a sample of the others."""
    if len(sizes) > 2 * _SAMPLE:
        by_size = np.argpartition(-sizes, _SAMPLE)
        step = -(-(len(sizes) - _SAMPLE) // _SAMPLE)
        picked = np.concatenate([by_size[:_SAMPLE], by_size[_SAMPLE::step]])
        weights = sizes[picked] * np.repeat([1.0, step], [_SAMPLE, len(picked) - _SAMPLE])
        alpha, beta = alpha[picked], beta[picked]
    else:
        weights = sizes.astype(np.float64)
    norm = _log_beta_below(alpha, beta)
    widest = max(target, 1 - target)
    radii = np.geomspace(widest * 1e-7, widest, 48)
    density = np.zeros((len(alpha), len(radii)))
    for x in (target - radii, target + radii):
        inside = (x > 0) & (x < 1)
        density[:, inside] += np.exp(log_density(x[None, inside], alpha[:, None], beta[:, None], norm[:, None]))
    per_radius = weights @ density
    steps = np.diff(radii, prepend=0.0)
    expected = np.cumsum(steps * (per_radius + np.concatenate([per_radius[:1], per_radius[:-1]])) / 2)
    enough = np.flatnonzero(expected >= 2.5 * count + 20)
    return float(radii[enough[0]]) if len(enough) else widest
