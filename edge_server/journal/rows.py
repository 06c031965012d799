"""Records as marked rows: a mark covers its row and the mark before it, so that no row changes or goes unnoticed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec
import xxhash

from edge_server.journal.records import AnyRecord
from shared.errors import CorruptFile

TABLE = "CREATE TABLE records (seq INTEGER PRIMARY KEY, body TEXT NOT NULL, mark INTEGER)"
SCHEMA = TABLE.replace("TABLE", "TABLE IF NOT EXISTS")
FOUND = "SELECT CAST(sql AS BLOB) FROM sqlite_master WHERE name = 'records'"
INSERT = "INSERT INTO records (body, mark) VALUES (CAST(? AS TEXT), ?)"
SELECT = "SELECT CAST(body AS BLOB), mark FROM records WHERE rowid >= ? ORDER BY rowid"
LAST = "SELECT mark FROM records ORDER BY rowid DESC LIMIT 1"

Row: TypeAlias = tuple[bytes, int]

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


def encode(record: AnyRecord) -> bytes:
    """Return a record as a line of JSON."""
    return _encoder.encode(record)


def mark(body: bytes, before: int) -> int:
    """Return the mark of a row whose predecessor has the mark `before`, 0 for the first: XXH3-64 without its last bit.

    SQLite itself finds damage of its pages' structure only, and its integers have a sign.
    """
    return xxhash.xxh3_64_intdigest(body, seed=before) >> 1


def marked(records: Iterable[AnyRecord], before: int) -> Iterator[Row]:
    """Yield the rows of records that follow a row with the mark `before`."""
    for record in records:
        body = encode(record)
        before = mark(body, before)
        yield body, before


def decode(rows: Iterable[Row], before: int = 0) -> list[AnyRecord]:
    """Return the records of rows that follow a row with the mark `before`.

    Raises:
        CorruptFile: A row is not as it was written, or one is missing.
    """
    records = []
    for body, marked in rows:
        try:
            records.append(_decoder.decode(body))
            before = mark(body, before)
        except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:  # TypeError: it is no text
            raise CorruptFile(f"record {len(records) + 1}: {error}") from error
        if marked != before:
            raise CorruptFile(f"record {len(records)} or the one before it is not as it was written")
    return records


def good(rows: Iterable[Row]) -> list[AnyRecord]:
    """Return the records up to the first row that is not as it was written."""
    records: list[AnyRecord] = []
    before = 0
    for row in rows:
        try:
            records += decode([row], before)
        except CorruptFile:
            break
        before = row[1]
    return records
