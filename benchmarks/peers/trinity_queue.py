"""Trinity-RFT's queue; see `trinity`."""

from benchmarks.peers.trinity import TrinityQueue as STORE

__all__ = ["STORE"]
