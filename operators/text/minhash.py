"""MinHash signatures with banding, by which similar sets are found without comparing all pairs.

Every n-gram of a text falls into one of K bins by its hash, and a bin keeps its least value (one-permutation MinHash: Li, Owen and Zhang 2012,
arXiv 1208.1259). An empty bin takes the value of the next full one plus an offset for its distance (Shrivastava and Li 2014, arXiv 1406.4784).
Two texts with Jaccard similarity J agree in a bin with probability J. With B bands of R bins, they share a whole band with probability
1 − (1 − J^R)^B.

Written for whole batches in NumPy: MinHash libraries hash n-gram by n-gram in Python, which costs more than everything else here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from operators.text.ngrams import Hashes, Rows

NUM_BINS = 128
_RECALL = 0.99


def signatures(hashes: Hashes, rows: Rows, num_texts: int) -> npt.NDArray[np.uint64]:
    """Return N × 128 bins.

    Args:
        hashes, rows: 40-bit hashes of n-grams and the text of each, as returned by `operators.text.ngrams.distinct`: ascending within
            each text. The signature of a text without n-grams agrees only with that of another such text.
    """
    empty = np.uint64(2**64 - 1)
    bins = np.full(num_texts * NUM_BINS, empty)
    place = rows * NUM_BINS + (hashes % np.uint64(NUM_BINS)).astype(np.int64)
    # Of several values for a bin the last one stays, so assign them in descending order.
    bins[place[::-1]] = hashes[::-1]
    return _densified(bins.reshape(num_texts, NUM_BINS), empty)


def _densified(bins: npt.NDArray[np.uint64], empty: np.uint64) -> npt.NDArray[np.uint64]:
    full = bins != empty
    # Two rounds, so that the last bins can take values of the first.
    places = np.where(np.tile(full, 2), np.arange(2 * NUM_BINS), 4 * NUM_BINS)
    following = np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1][:, :NUM_BINS]
    distance = following - np.arange(NUM_BINS)
    borrowed = np.take_along_axis(bins, np.where(following < 2 * NUM_BINS, following, 0) % NUM_BINS, axis=1)
    filled: npt.NDArray[np.uint64] = borrowed + distance.astype(np.uint64) * np.uint64(1 << 41)
    filled[~full.any(axis=1)] = empty
    return filled


def band_size(threshold: float) -> int:
    """Return the largest R (dividing 128) with which two texts at the threshold share a band with a probability of 0.99."""
    for size in (32, 16, 8, 4, 2):
        if 1 - (1 - threshold**size) ** (NUM_BINS // size) >= _RECALL:
            return size
    return 1


def bands(signature: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.uint64]:
    """Return N × (128 / size) numbers; texts that are equal in one of them are candidates."""
    parts = signature.reshape(len(signature), NUM_BINS // size, size)
    numbers = np.zeros(parts.shape[:2], np.uint64)
    with np.errstate(over="ignore"):
        for step in range(size):
            numbers = (numbers ^ parts[:, :, step]) * np.uint64(0x9E3779B97F4A7C15)
            numbers ^= numbers >> np.uint64(31)
        # The same values in another band are another candidate.
        return numbers + np.arange(numbers.shape[1], dtype=np.uint64)
