"""What of a cubin runs: its name is a digest of that, whatever the kernel was called and wherever
it was made.

Imports nothing of this package, so that it can name binaries of other revisions, too.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Sequence

DIGITS = 16
_RUNS = re.compile(r"\.(text|nv\.constant\d+|nv\.info|nv\.shared)(\.|$)")
"""Sections that decide what a launch does; a kernel's own are called so and by its symbol."""
_NO_BITS = 8


def digest(arch: str, image: bytes, parameters: Sequence[str], resources: Sequence[int]) -> str:
    """Name a binary: 16 hexadecimal digits of a sha256 over its code, constants, parameters and
    resources.

    parameters   PTX types, in order
    resources    threads, CTAs of a cluster, registers, bytes of stack and of shared memory
    Raises ValueError if the image is no 64-bit little-endian ELF file.
    """
    total = hashlib.sha256(f"{arch} {list(parameters)} {list(resources)}".encode())
    for kind, content in sorted(sections(image)):
        total.update(f"{kind} {len(content)} ".encode() + content)
    return total.hexdigest()[:DIGITS]


def sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """Sections that decide what runs, without the symbol in their names; of those that only reserve
    space, the size."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("the image is no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names_at = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    for name_at, kind, _, _, begin, nbytes in headers:
        name = image[names + name_at : image.index(b"\0", names + name_at)].decode()
        if found := _RUNS.match(name):
            yield (
                found[1],
                nbytes.to_bytes(8, "little") if kind == _NO_BITS else image[begin : begin + nbytes],
            )
