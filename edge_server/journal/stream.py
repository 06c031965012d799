"""Stream a journal's records by type in bounded memory, hash chain verified.

Rows that occur once per task or report stay out of the index, so that an append of one costs nothing more; all others
are found by it in any journal. A journal of an earlier version has no index until it is continued: it is scanned.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import eq
from pathlib import Path
from typing import TypeAlias, TypeVar, overload

import msgspec
import xxhash

from edge_server.journal.records import AnyRecord, CostSettled, Sensed, UpdateAccepted
from edge_server.plan.removed_keys import without_removed_keys
from shared.errors import CorruptFile

TAG = "substr(body, 10, 6)"  # the beginning of a type's name in `{"type":"RoundClosed",...`
FREQUENT = (UpdateAccepted, CostSettled, Sensed)
IS_RARE = f"{TAG} NOT IN ('Update', 'CostSe', 'Sensed')"
INDEX = f"CREATE INDEX rare_records ON records ({TAG}) WHERE {IS_RARE}"
ROWS = (
    "SELECT rowid, CAST(body AS BLOB), mark, "
    "(SELECT mark FROM records AS previous WHERE previous.rowid = records.rowid - 1) FROM records WHERE "
)
NUMBERED_ROWS = f"{ROWS}rowid IN (SELECT value FROM json_each(?)) ORDER BY rowid"  # noqa: S608 - constants
CHUNK_BYTES, FIRST_ROWS, CHUNK_ROWS = 1 << 20, 8, 1024  # often, only the first matter

C = TypeVar("C")
Row: TypeAlias = tuple[int, bytes, int, int | None]
"""Number of a row, its JSON, its mark and that of the row before it; None if there is none."""
Fetch: TypeAlias = Callable[[str, tuple[int | str, ...], int, int], list[Row]]
"""Reads the first rows of a query with parameters: at most so many, and few beyond so many bytes."""

_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


@cache
def query(kinds: tuple[type[AnyRecord], ...], *, has_index: bool, newest_first: bool = False) -> str:
    """Return the query for the rows of some types, or of all, beyond a first and up to a last number."""
    span, order = "rowid > ? AND rowid <= ?", f"ORDER BY rowid {'DESC' if newest_first else 'ASC'}"
    if not kinds:
        return f"{ROWS}{span} {order}"
    tags = [f'{kind.__name__}",'[:6] for kind in kinds]
    of_kinds = f"{TAG} IN ({str(tags)[1:-1]})"
    if has_index and not set(kinds) & set(FREQUENT):
        numbers = f"SELECT rowid FROM records INDEXED BY rare_records WHERE {IS_RARE} AND {of_kinds} AND {span}"  # noqa: S608 - constants
        return f"{ROWS}rowid IN ({numbers}) {order}"
    return f"{ROWS}{of_kinds} AND {span} {order}"


def row_mark(body: bytes, before: int) -> int:
    """Return the mark of a row after a row with mark `before` (0 for the first): XXH3-64 without its last bit.

    SQLite itself detects only structural damage of its pages; its integers are signed.
    """
    return xxhash.xxh3_64_intdigest(body, seed=before) >> 1


def decode_body(body: bytes) -> AnyRecord:
    """Decode a row; a plan of an earlier version may have keys that were removed since."""
    return _decoder.decode(without_removed_keys(body) if b'"RunOpened"' in body else body)


def decode_row(row: Row) -> AnyRecord:
    """Return the record of a row.

    Raises:
        CorruptFile: The row, or the one before it, was changed or is missing.
    """
    verify_row(row)
    try:
        return decode_body(row[1])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise CorruptFile(f"record {row[0]}: {error}") from error


def verify_row(row: Row) -> None:
    """Check a row against its mark, without decoding it.

    Raises:
        CorruptFile: The row, or the one before it, was changed or is missing.
    """
    number, body, mark, before = row
    if before is None and number != 1:
        raise CorruptFile(f"record {number - 1} is missing")
    if not isinstance(body, bytes) or row_mark(body, before or 0) != mark:
        raise CorruptFile(f"record {number} or the one before it was changed")


@dataclass(frozen=True, eq=False)
class RecordStream(Sequence[AnyRecord]):  # noqa: PLW1641 - as a list
    """Records of a journal up to a fixed one; each iteration reads them again, a part at a time.

    Attributes:
        after, until: Numbers of the record before the first, and of the last.
        has_index: Whether the journal has the index of rare records.
    """

    path: Path
    fetch: Fetch
    until: int
    has_index: bool
    after: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __len__(self) -> int:
        return self.until - self.after

    @overload
    def __getitem__(self, index: int) -> AnyRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AnyRecord]: ...
    def __getitem__(self, index: int | slice) -> AnyRecord | Sequence[AnyRecord]:
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return next(iter(replace(self, after=self.after + positions)))
        if positions.step == 1:
            return replace(self, after=self.after + positions.start, until=self.after + positions.stop)
        return [self[position] for position in positions]

    def __iter__(self) -> Iterator[AnyRecord]:
        return (record for _, record in self.enumerate_records())

    def __reversed__(self) -> Iterator[AnyRecord]:
        return (record for _, record in self.enumerate_records(newest_first=True))

    def enumerate_records(self, *kinds: type[AnyRecord], newest_first: bool = False) -> Iterator[tuple[int, AnyRecord]]:
        """Yield the records of some types, or all, with their numbers from 1.

        Raises:
            CorruptFile: A row, or the one before it, was changed or is missing.
        """
        rows = self._rows(kinds, newest_first=newest_first)
        return ((row[0], self._explain(decode_row, row)) for row in rows)

    def read_numbers(self, numbers: Iterable[int]) -> list[AnyRecord]:
        """Return the records with some numbers, which ascend.

        Raises:
            CorruptFile: As `enumerate_records`.
        """
        listed = list(numbers)
        rows = self.fetch(NUMBERED_ROWS, (json.dumps(listed),), len(listed), sys.maxsize)
        return [self._explain(decode_row, row) for row in rows]

    def count_records(self, *kinds: type[AnyRecord]) -> int:
        """Return the number of records of some types, without reading them."""
        sql = f"SELECT count(*), NULL FROM ({query(kinds, has_index=self.has_index)})"  # noqa: S608 - constants
        [(count, *_)] = self.fetch(sql, (self.after, self.until), 1, 1)
        return count

    def verify(self) -> None:
        """Check the hash chain of all rows without decoding them.

        Raises:
            CorruptFile: A row was changed or is missing.
        """
        for row in self._rows(()):
            self._explain(verify_row, row)

    def _explain(self, check: Callable[[Row], C], row: Row) -> C:
        try:
            return check(row)
        except CorruptFile as error:
            raise CorruptFile(f"{self.path}: {error}") from error

    def _rows(self, kinds: tuple[type[AnyRecord], ...], *, newest_first: bool = False) -> Iterator[Row]:
        sql = query(kinds, has_index=self.has_index, newest_first=newest_first)
        after, until, most = self.after, self.until, FIRST_ROWS
        while after < until and (rows := self.fetch(sql, (after, until), most, CHUNK_BYTES)):
            yield from rows
            after, until = (after, rows[-1][0] - 1) if newest_first else (rows[-1][0], until)
            most = min(4 * most, CHUNK_ROWS)
