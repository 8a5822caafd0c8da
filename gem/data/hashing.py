"""From ids to table rows: a fixed hash, the same on every machine and in every version.

An id becomes 64 bits: an integer is itself, a string is the BLAKE2b digest of its UTF-8 bytes, and
so is a table's seed of its name. The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014) mixes id + seed, and the upper 32 bits scale to
the table's rows by multiplication (Lemire, "Fast random integer generation in an interval", 2019).
Features that share a table share its seed: the same id meets the same row.
"""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.schema import MAX_ROWS

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(32)


def table_seed(table: str) -> int:
    """The 64-bit seed of a table, from its name."""
    return int.from_bytes(_digest(table), "little")


def hash_ids(ids: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """Spreads integer ids over `0 .. rows - 1`.

    Args:
        ids: integers of any width, read as int64 (a uint64 by its bits).
        rows: 1 .. 2**32.
        seed: `table_seed` of the table.

    Returns:
        int64, the shape of `ids`.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"rows={rows}; a hashed table has 1 to {MAX_ROWS} rows")
    mixed = ids.astype(np.int64).view(np.uint64)
    mixed += np.uint64(seed)
    for shift, factor in zip(_SHIFTS[:2], _MIX, strict=True):
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> _SHIFTS[2]
    mixed >>= _HALF
    mixed *= np.uint64(rows)
    mixed >>= _HALF
    return mixed.view(np.int64)


def hash_strings(strings: pa.Array) -> np.ndarray:
    """64 bits of each string, as int64; a null gives 0.

    Args:
        strings: an array of (large) strings, or their dictionary encoding.
    """
    if not pa.types.is_dictionary(strings.type):
        strings = pc.dictionary_encode(strings)
    words = strings.dictionary.to_pylist()
    hashes = np.frombuffer(b"".join(_digest(word or "") for word in words), dtype="<i8")
    codes = strings.indices
    valid = ~np.asarray(codes.is_null())
    result = np.zeros(len(codes), dtype=np.int64)
    result[valid] = hashes[codes.drop_null().to_numpy(zero_copy_only=False)]
    return result


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
