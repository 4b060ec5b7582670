"""Tasks in loading order, repeatedly."""

from __future__ import annotations

from rftdata.selectors.base import Ids
from rftdata.selectors.epochs import EpochSelector, Places


class Sequential(EpochSelector):
    """A task's place is its id."""

    def places(self, positions: Ids, epoch: int) -> Places:
        return [self.table.ids[positions]]
