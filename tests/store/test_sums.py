"""Sums of parts against zlib's sum of the whole."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from megaspan.store import sums
from megaspan.store.sums import combined, file_sums


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_two_parts_have_the_sum_of_the_whole(first, second):
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_part_may_be_longer_than_any_memory():
    """A mebibyte of zeros, doubled twenty times: the sum of a tebibyte, and the same by way of other halves."""
    crc, length = zlib.crc32(bytes(2**20)), 2**20
    for _ in range(20):
        crc, length = combined(crc, crc, length), 2 * length
    half = zlib.crc32(bytes(2**19))
    other, length = combined(half, half, 2**19), 2**20
    while length < 2**40:
        other, length = combined(other, other, length), 2 * length
    assert crc == other


def test_files_are_summed_in_ranges(tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "RANGE_BYTES", 7)
    monkeypatch.setattr(sums, "_READ_BYTES", 3)
    contents = [b"", b"a", b"1234567", bytes(range(100))]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert file_sums(paths, 3) == [zlib.crc32(content) for content in contents]
