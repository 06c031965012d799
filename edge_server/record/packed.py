"""Compressed list of structs, for the tasks of a long run."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
BLOCK = 256


class PackedRows(Sequence[T], Generic[T]):  # noqa: PLW1641 - as a list
    """Structs in compressed blocks; an iteration holds one block at a time, an index reads all of them."""

    def __init__(self, kind: type[T]) -> None:
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[kind])  # type: ignore[valid-type]
        self._blocks, self._last, self._count = list[bytes](), list[T](), 0

    def extend(self, rows: Iterable[T]) -> None:
        """Append rows."""
        for row in rows:
            self._last.append(row)
            self._count += 1
            if len(self._last) == BLOCK:
                self._blocks.append(zlib.compress(self._encoder.encode(self._last), 1))
                self._last = []

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for block in self._blocks:
            yield from self._decoder.decode(zlib.decompress(block))
        yield from self._last

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)
