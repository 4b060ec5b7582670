"""Export of experiences from a buffer and import into one: Parquet, JSON lines, Hugging Face datasets.

`export` writes whole groups: the task, rollouts including failed ones, experiences with texts, rewards, labels and arrays, and the origin
of each. `check` reads such a file and refuses what cannot be stored. `load` writes it into a run, each group once, with its
origin. See docs/decisions/0015.
"""

from rftdata.exchange.contents import Contents, check
from rftdata.exchange.export import ExportResult, export
from rftdata.exchange.import_ import ImportResult, load

__all__ = ["Contents", "ExportResult", "ImportResult", "check", "export", "load"]
