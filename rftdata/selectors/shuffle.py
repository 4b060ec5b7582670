"""Every task once per epoch, in an order drawn anew for each epoch."""

from __future__ import annotations

import numpy as np

from rftdata.selectors.epochs import EpochSelector, Ids, Places


class Shuffle(EpochSelector):
    """A task's place is the number that SplitMix64, begun at (seed, epoch), gives at its id.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), figure 15. It is a bijection, so no two
    tasks have one place.
    """

    def places(self, task_ids: Ids, epoch: int) -> Places:
        start = np.random.SeedSequence((self.seed, epoch)).generate_state(1, np.uint64)
        z = start + task_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        places: Places = z ^ (z >> np.uint64(31))
        return places
