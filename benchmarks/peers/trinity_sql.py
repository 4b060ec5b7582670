"""Trinity-RFT's SQL storage; see `trinity`."""

from benchmarks.peers.trinity import TrinitySql as STORE

__all__ = ["STORE"]
