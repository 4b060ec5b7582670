"""Drop rows whose number is out of bounds, with the broken bound as the reason."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from operators.base import StageOutcome


def outside(
    values: pa.Array, name: str, low: float | None, high: float | None, *, keep_unknown: bool = False
) -> StageOutcome:
    """Drop rows with a value below `low` or above `high`; drop null and NaN, too, unless `keep_unknown`.

    Args:
        values: N numbers.
        name: name of the value, for the reason.
        low, high: inclusive bounds; None for no bound.
    """
    values = pc.cast(values, pa.float64())
    unknown = pc.is_null(values, nan_is_null=True)
    reasons = pa.nulls(len(values), pa.string())
    value_texts = None
    for bound, word, compare in ((high, "> max", pc.greater), (low, "< min", pc.less)):
        broken = None if bound is None else pc.fill_null(compare(values, bound), False)
        if broken is not None and pc.any(broken).as_py():
            value_texts = (
                pc.binary_join_element_wise(name, pc.fill_null(pc.cast(values, pa.string()), ""), " ")
                if value_texts is None
                else value_texts
            )
            reasons = pc.if_else(broken, pc.binary_join_element_wise(value_texts, f"{word} {bound:g}", " "), reasons)
    if keep_unknown or not pc.any(unknown).as_py():
        return StageOutcome(reasons)
    what = pc.if_else(pc.is_null(values), f"{name} is null", f"{name} is NaN")
    return StageOutcome(pc.if_else(unknown, what, reasons))


def check_bounds(low: float | None, high: float | None) -> None:
    """Refuse bounds that are absent or contradictory."""
    if low is None and high is None:
        raise ValueError("give min, max or both")
    if low is not None and high is not None and low > high:
        raise ValueError(f"min {low:g} is above max {high:g}, so no row could stay")
