"""Moving experiences out of a buffer and into one: Parquet, JSON lines, Hugging Face datasets.

`export` writes what a group is made of: task, rollouts (failed ones too), experiences with texts, rewards, labels and arrays, and where
each came from. `check` reads such a file and refuses what cannot be stored; `load` writes it into a run, once per group, with its
origin. See docs/decisions/0015.
"""

from rftdata.exchange.export import Exported, export
from rftdata.exchange.import_ import Contents, Imported, check, load

__all__ = ["Contents", "Exported", "Imported", "check", "export", "load"]
