"""Ways in which a file is damaged."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Final

from tests.archive import samples

__all__ = ["WAYS", "variants"]

_PAGE: Final = 256

Way = Callable[[bytes, random.Random], bytes]


def flip(content: bytes, chance: random.Random) -> bytes:
    """One bit, or a few."""
    changed = bytearray(content)
    for place in chance.sample(range(8 * len(content)), chance.choice([1, 1, 2, 17])):
        changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def behead(content: bytes, chance: random.Random) -> bytes:
    return content[chance.randrange(1, len(content)) :]


def append(content: bytes, chance: random.Random) -> bytes:
    more = chance.choice([b"\0", b"\n", chance.randbytes(chance.randrange(1, 70000)), content, content[-chance.randrange(1, 500) :]])
    return content + more


def prepend(content: bytes, chance: random.Random) -> bytes:
    return chance.choice([b"\0", b"PK", chance.randbytes(64), content]) + content


def insert(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + chance.randbytes(chance.choice([1, 4, 64])) + content[place:]


def remove(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + content[place + chance.choice([1, 4, 64]) :]


def zero(content: bytes, chance: random.Random) -> bytes:
    """A page that was never written."""
    begin = chance.randrange(0, len(content), _PAGE)
    size = min(_PAGE, len(content) - begin)
    return content[:begin] + bytes(size) + content[begin + size :]


def swap_data(content: bytes, chance: random.Random) -> bytes:
    """Two records' data, each in the other's place; of those of one length nothing else changes."""
    (first, first_end), (second, second_end) = sorted(chance.sample([span for span in samples.frame(content) if span[0] < span[1]], 2))
    between = content[first_end:second]
    return content[:first] + content[second:second_end] + between + content[first:first_end] + content[second_end:]


def swap_names(content: bytes, chance: random.Random) -> bytes:
    """Two names in the table of contents, or also in the headers."""
    begin = content.index(b"PK\x01\x02") if chance.random() < 0.5 else 0
    one, other = chance.sample([b"archive/data/0", b"archive/data/1", b"archive/data/2"], 2)
    tail = content[begin:].replace(one, b"?" * 14).replace(other, one).replace(b"?" * 14, other)
    return content[:begin] + tail


def other_checksums(content: bytes, chance: random.Random) -> bytes:
    """Another structure, with its checksum made right in the table of contents, but not the digest of that."""
    begin, end = samples.frame(content)[0]
    hostile = b"cos\nsystem\n(S'true'\ntR.".ljust(end - begin, b".")[: end - begin]
    place = content.index(b"PK\x01\x02") + 16
    changed = content[:begin] + hostile + content[end:]
    return changed[:place] + struct.pack("<L", zlib.crc32(hostile)) + changed[place + 4 :]


def other_manifest(content: bytes, chance: random.Random) -> bytes:
    """A manifest of the same length that says something else, with or without its checksum made right."""
    text = samples.record().to_json().encode()
    other = text.replace(b'"step": 100', b'"step": %03d' % chance.randrange(100))
    changed = content.replace(text, other)
    right = chance.random() < 0.5
    return changed.replace(struct.pack("<L", zlib.crc32(text)), struct.pack("<L", zlib.crc32(other))) if right else changed


def other_digits(content: bytes, chance: random.Random) -> bytes:
    place = len(content) - chance.randrange(1, 65)
    return content[:place] + chance.choice([b"0", b"f", b"A", b" ", b"\xff"]) + content[place + 1 :]


def capital_digits(content: bytes, chance: random.Random) -> bytes:
    return content[:-64] + content[-64:].upper()


WAYS: Final[tuple[Way, ...]] = (
    flip,
    cut,
    behead,
    append,
    prepend,
    insert,
    remove,
    zero,
    swap_data,
    swap_names,
    other_checksums,
    other_manifest,
    other_digits,
    capital_digits,
)


def variants(content: bytes, *, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """So many damaged variants of a file, each with the way in which it is."""
    chance = random.Random(seed)
    made = 0
    while made < count:
        way = flip if made % 2 else WAYS[made // 2 % len(WAYS)]
        changed = way(content, chance)
        if changed != content:  # A page of zeros may have been one before.
            made += 1
            yield way.__name__, changed
