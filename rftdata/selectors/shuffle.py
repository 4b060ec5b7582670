"""Every task once per epoch, in a new random order each time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rftdata.selectors.base import Ids
from rftdata.selectors.epochs import EpochSelector, Places


def split_mix(entropy: tuple[int, ...], task_ids: Ids) -> npt.NDArray[np.uint64]:
    """Return the number that SplitMix64 with the seed `entropy` gives at each id; different for different ids.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), figure 15: a bijection of 64-bit numbers.
    """
    start = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    z = start + task_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


class Shuffle(EpochSelector):
    """A task's place is a hash of seed, epoch and id."""

    def places(self, positions: Ids, epoch: int) -> Places:
        return [split_mix((self.seed, epoch), self.table.ids[positions])]
