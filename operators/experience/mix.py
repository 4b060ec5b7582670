"""Keep groups so that tasksets (or sources) have the wanted shares of a batch.

    - mix: {shares: {gsm8k: 3, sums: 1}}
    - mix: {by: source, shares: {explorer: 0.8, human: 0.2}, others: keep}

As many groups as possible stay. With n_k groups of kind k and shares s_k, scaled to sum to 1 over the kinds present, T = min(n_k / s_k), and
round(s_k · T) groups of kind k stay, at least one. A hash of group_id and the seed selects them. The shares apply to each batch; to
change the mixture that is generated, set weights of tasksets.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from operators.base import Operator, StageConfig, StageOutcome
from operators.groups import Groups, Ints, fewest_first, hashed


class Mix(Operator, revision=1):
    """Drops whole groups of overrepresented kinds; `others` decides on kinds without a share."""

    class Config(StageConfig):
        """The kinds and their shares."""

        shares: dict[str, float] = Field(min_length=1, description="Kind -> its share; only their proportions matter.")
        by: Literal["taskset", "source"] = Field("taskset", description="The column with the kind of a group.")
        others: Literal["drop", "keep"] = Field("drop", description="Whether kinds without a share stay.")
        seed: int = Field(0, ge=0, description="Another seed keeps other groups.")

        @model_validator(mode="after")
        def _positive(self) -> Mix.Config:
            wrong = [kind for kind, share in self.shares.items() if not 0 < share < float("inf")]
            if wrong:
                raise ValueError(f"the share of {wrong[0]!r} is {self.shares[wrong[0]]:g}, not a positive number")
            return self

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.reads = frozenset({"group_id", self.config.by})

    def apply(self, table: pa.Table) -> StageOutcome:
        if not table.num_rows:
            return StageOutcome.keep_all(0)
        groups = Groups.of(table)
        _, first = np.unique(groups.group_N, return_index=True)
        # A group has one task and one source.
        kinds = table[self.config.by].combine_chunks()
        coded = kinds.take(pa.array(first)).dictionary_encode()
        names = coded.dictionary.to_pylist()
        kind_G = pc.fill_null(coded.indices, -1).to_numpy().astype(np.int64)
        limit_K = self._limits(names, np.bincount(kind_G[kind_G >= 0], minlength=len(names)))
        # The last entry is for groups without a kind, whose number is −1.
        limit_K = np.r_[limit_K, np.iinfo(np.int64).max if self.config.others == "keep" else 0]
        group_ids = table["group_id"].to_numpy()[first]
        kept_G = fewest_first(hashed(group_ids, self.config.seed), kind_G) < limit_K[kind_G]
        kind = pc.fill_null(kinds, "null")
        listed = pc.is_in(kind, value_set=pa.array(self.config.shares, pa.string()))
        surplus = pc.binary_join_element_wise(f"the batch has more of {self.config.by}", kind, "than its share", " ")
        foreign = pc.binary_join_element_wise(f"{self.config.by}", kind, "has no share", " ")
        return StageOutcome.keep_where(pa.array(kept_G[groups.group_N]), pc.if_else(listed, surplus, foreign))

    def _limits(self, names: list[str], counts: Ints) -> Ints:
        """Return how many groups of each kind stay."""
        shares = np.array([self.config.shares.get(name, np.nan) for name in names])
        total = np.nanmin(counts / shares) if np.isfinite(shares).any() else 0.0
        wanted = np.maximum(np.round(np.nan_to_num(shares) * total), 1).astype(np.int64)
        others = np.iinfo(np.int64).max if self.config.others == "keep" else 0
        return np.where(np.isnan(shares), others, wanted)
