"""CRC-32 of parts put together: several threads sum a file, and the sum is that of one.

Python's zlib sums about 1 GB/s a thread, and a checkpoint of an 8B model with fp32 masters is 115 GB. A CRC is the remainder of
a polynomial over two elements: that of two parts, one behind the other, is the first one times x to the bits of the second one,
plus the second one's. Source: zlib's `crc32_combine` (Mark Adler), https://github.com/madler/zlib.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

POLYNOMIAL = 0xEDB88320  # of CRC-32, the highest power in the lowest bit
ONE = 1 << 31  # the polynomial 1
RANGE_BYTES = 256 * 2**20  # of a file that one thread reads
_READ_BYTES = 16 * 2**20


def combined(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two parts, one behind the other, from those of each; `second_bytes` is the length of the second."""
    return _times(_power_of_bytes(second_bytes), first) ^ second


def file_sums(paths: Sequence[Path], threads: int) -> list[int]:
    """CRC-32 of files, each read once; several ranges at a time."""
    ranges = [
        (number, start) for number, path in enumerate(paths) for start in range(0, max(path.stat().st_size, 1), RANGE_BYTES)
    ]
    sums = [0] * len(paths)
    with ThreadPoolExecutor(threads, "megaspan-sum") as pool:
        found = pool.map(lambda each: _range_sum(paths[each[0]], each[1]), ranges)
        for (number, _), (crc, length) in zip(ranges, found, strict=True):
            sums[number] = combined(sums[number], crc, length)
    return sums


def _range_sum(path: Path, start: int) -> tuple[int, int]:
    crc, done = 0, 0
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while done < RANGE_BYTES and (chunk := file.read(min(_READ_BYTES, RANGE_BYTES - done))):
            crc, done = zlib.crc32(chunk, crc), done + len(chunk)
    return crc, done


@lru_cache(maxsize=256)
def _power_of_bytes(count: int) -> int:
    """x to the power of 8 · count; pieces of a save have few lengths."""
    result, square = ONE, ONE >> 8
    while count:
        if count & 1:
            result = _times(square, result)
        square = _times(square, square)
        count >>= 1
    return result


def _times(one: int, other: int) -> int:
    """The product of two polynomials, modulo `POLYNOMIAL`."""
    product, bit = 0, ONE
    while one:
        if one & bit:
            product ^= other
            one ^= bit
        bit >>= 1
        other = (other >> 1) ^ POLYNOMIAL if other & 1 else other >> 1
    return product
