"""Compressed list of structs, for the tasks of a long run."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from operator import eq
from typing import Generic, TypeVar, overload

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
BLOCK = 256


class PackedRows(Sequence[T], Generic[T]):  # noqa: PLW1641 - as a list
    """Structs in compressed blocks; an iteration holds one block at a time."""

    def __init__(self, rows: Iterable[T], kind: type[T]) -> None:
        encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[kind])  # type: ignore[valid-type]
        self._blocks, self._count, remaining = list[bytes](), 0, iter(rows)
        while block := list(islice(remaining, BLOCK)):
            self._blocks.append(zlib.compress(encoder.encode(block), 1))
            self._count += len(block)
        self._read = lru_cache(maxsize=1)(self._unpack)

    def _unpack(self, block: int) -> list[T]:
        rows: list[T] = self._decoder.decode(zlib.decompress(self._blocks[block]))
        return rows

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[position] for position in range(self._count)[index]]
        block, place = divmod(range(self._count)[index], BLOCK)
        return self._read(block)[place]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for block in range(len(self._blocks)):
            yield from self._unpack(block)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))
