"""Word and character n-grams of many texts at once, as 64-bit hashes that are the same everywhere.

Words are runs of letters, digits and underscores; every byte of a letter outside ASCII belongs to a word. ASCII letters are lowered.
The texts of a batch lie one behind the other in Arrow's buffer, and NumPy processes them together rather than one by one.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Unit = Literal["word", "character"]

# Number of texts processed at once, so that their numbers fit into the processor's cache.
_AT_ONCE = 128
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SPREAD = np.uint64(0xD6E8FEB86659FD93)


def _tables() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return for each byte its lower case, and the same with 0 for bytes that are not part of a word."""
    lower = np.arange(256, dtype=np.uint8)
    lower[ord("A") : ord("Z") + 1] += 32
    word = lower.copy()
    word[:128][[not (chr(byte).isalnum() or chr(byte) == "_") for byte in range(128)]] = 0
    return lower, word


_LOWER, _WORD = _tables()


def ngrams(texts: pa.Array, n: int, unit: Unit = "word") -> tuple[Hashes, Rows]:
    """Return the hashes of all n-grams of N texts, in order, and the text (0 to N − 1) of each. Null is an empty text.

    A text of fewer than n words (or characters) has none.
    """
    parts = [_ngrams(texts.slice(start, _AT_ONCE), n, unit) for start in range(0, len(texts), _AT_ONCE)]
    if not parts:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    hashes = np.concatenate([hashes for hashes, _ in parts])
    return hashes, np.concatenate([rows + number * _AT_ONCE for number, (_, rows) in enumerate(parts)])


def _ngrams(texts: pa.Array, n: int, unit: Unit) -> tuple[Hashes, Rows]:
    hashes, counts = tokens(texts, unit)
    rows = np.repeat(np.arange(len(texts)), counts)
    return _combined(hashes, rows, n) if n > 1 else (hashes, rows)


def tokens(texts: pa.Array, unit: Unit = "word") -> tuple[Hashes, Rows]:
    """Return the hashes of the words (or characters) of N texts, in order, and their number per text."""
    data, offsets = _bytes(texts)
    if unit == "word":
        return _words(_WORD[data], offsets)
    # Bytes 10xxxxxx continue a character; the others start one.
    starts = np.flatnonzero((data & 0xC0) != 0x80)
    ends = np.r_[starts[1:], len(data)]
    return _values(_LOWER[data], starts, ends), _counts(starts, offsets)


def _bytes(texts: pa.Array) -> tuple[npt.NDArray[np.uint8], Rows]:
    """Return the concatenated texts, and the offsets where each begins and the last ends."""
    texts = pc.fill_null(pc.cast(texts, pa.large_string()), "")
    if not len(texts):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, positions, data = texts.buffers()
    offsets = np.frombuffer(positions, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    everything = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return everything[offsets[0] : offsets[-1]], offsets - offsets[0]


def _words(data: npt.NDArray[np.uint8], offsets: Rows) -> tuple[Hashes, Rows]:
    """Return the words of bytes that are 0 between words."""
    is_word = np.zeros(len(data) + 2, np.bool_)
    np.not_equal(data, 0, out=is_word[1:-1])
    # A word begins or ends where this changes, and where one text follows another without a gap.
    changes = np.flatnonzero(is_word[1:] != is_word[:-1])
    inner = np.unique(offsets[1:-1])
    inner = inner[(inner > 0) & (inner < len(data))]
    glued = inner[is_word[inner] & is_word[inner + 1]]
    starts, ends = changes[::2], changes[1::2]
    if len(glued):
        starts = np.insert(starts, np.searchsorted(starts, glued), glued)
        ends = np.insert(ends, np.searchsorted(ends, glued), glued)
    return _values(data, starts, ends), _counts(starts, offsets)


def _counts(starts: Rows, offsets: Rows) -> Rows:
    return np.diff(np.searchsorted(starts, offsets))


def _values(data: npt.NDArray[np.uint8], starts: Rows, ends: Rows) -> Hashes:
    """Hash data[start:end] eight bytes at a time, so that short words, the most frequent ones, take one step."""
    eights = np.concatenate([data, np.zeros(16 - len(data) % 8, np.uint8)]).view("<u8")
    lengths = ends - starts
    with np.errstate(over="ignore"):
        hashes = _mixed(_loaded(eights, starts, lengths) + lengths.astype(np.uint64) * _FACTOR)
        left = np.flatnonzero(lengths > 8)
        step = 8
        while len(left):
            more = _loaded(eights, starts[left] + step, lengths[left] - step)
            hashes[left] = _mixed(hashes[left] * _FACTOR + more)
            step += 8
            left = left[lengths[left] > step]
    return hashes


_UNUSED = np.array([0xFFFFFFFFFFFFFFFF >> 8 * (8 - used) if used else 0 for used in range(9)], np.uint64)


def _loaded(eights: Hashes, at: Rows, lengths: Rows) -> Hashes:
    """Load up to eight bytes from any offset as one number; bytes beyond the length are zero."""
    # Combined from two aligned numbers: with unaligned loads NumPy would copy everything first.
    place = at >> 3
    shift = ((at & 7) << 3).astype(np.uint64)
    loaded: Hashes = eights[place] >> shift
    # A shift by 64 is not defined, so shift by one and by the rest.
    loaded |= (eights[place + 1] << np.uint64(1)) << (np.uint64(63) - shift)
    loaded &= _UNUSED[np.minimum(lengths, 8)]
    return loaded


def _combined(hashes: Hashes, rows: Rows, n: int) -> tuple[Hashes, Rows]:
    num = len(hashes) - n + 1
    if num <= 0:
        return hashes[:0], rows[:0]
    with np.errstate(over="ignore"):
        combined = hashes[:num].copy()
        for step in range(1, n):
            combined *= _FACTOR
            combined += hashes[step : step + num]
        combined = _mixed(combined)
    inside = rows[:num] == rows[n - 1 :]
    return combined[inside], rows[:num][inside]


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(32))) * _SPREAD
    return values ^ (values >> np.uint64(29))


def distinct(hashes: Hashes, rows: Rows) -> tuple[Hashes, Rows]:
    """Return each n-gram of a text once, sorted by text and then by hash.

    Each hash keeps 40 bits beside the number of its text, so that sorting plain numbers suffices. Two different n-grams of a text
    of a thousand words are then mistaken for one with a probability of about 5 · 10⁻⁷.
    """
    if len(rows) and rows[-1] >= 1 << 24:
        raise ValueError("too many texts at once")
    keys = np.sort((rows.astype(np.uint64) << np.uint64(40)) | (hashes >> np.uint64(24)))
    keys = keys[np.r_[True, keys[1:] != keys[:-1]]] if len(keys) else keys
    return keys & np.uint64((1 << 40) - 1), (keys >> np.uint64(40)).astype(np.int64)
