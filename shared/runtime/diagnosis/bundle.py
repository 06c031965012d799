"""Support bundle: versions, logs and findings of a machine, without secrets or identities."""

from __future__ import annotations

import asyncio
import io
import os
import platform
import re
import ssl
import stat
import sys
import tarfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.runtime import backports
from shared.runtime.diagnosis.redaction import redact
from shared.runtime.durable import replace_file

PRIVATE = 0o600
LIBRARIES = (
    "fieldfleet",
    "cryptography",
    "httptools",
    "msgspec",
    "numpy",
    "onnxruntime",
    "paho-mqtt",
    "psutil",
    "torch",
)
MOST_LINES, MOST_BYTES = 1000, 1 << 20
"""Limits of a log, counted from its end."""
MOST_FILES = 2000
JOURNAL_TIMEOUT_S = 30.0

PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}(?:.{0,8192}?-----END [A-Z0-9 ]{0,40}-----|.{0,8192})", re.DOTALL)
TOKEN = re.compile(r"\bff1,[^\s'\"]+")
LOGIN = re.compile(r"(://)[^/@\s]+@")
LABEL = r"(?:pass(?:word|wd|phrase)?|secret|credential)s?"
LABELLED_SECRET = re.compile(rf"({LABEL}[\"']?\s*[:=]\s*)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',}}]+)", re.IGNORECASE)
IS_LABEL = re.compile(LABEL, re.IGNORECASE)
SHORTEST = 4
"""Shorter secrets are not searched for literally: they would match everywhere."""


def without_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """Redact keys, tokens, passwords, addresses, serial numbers and this machine's name.

    Args:
        secrets: Known secrets, searched for literally.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "(secret)") if len(secret) >= SHORTEST else text
    for pattern, put in ((PEM, "(PEM)"), (TOKEN, "(token)"), (LOGIN, r"\1"), (LABELLED_SECRET, r"\1-")):
        text = pattern.sub(put, text)
    name = os.uname().nodename
    return redact(text, {name, name.partition(".")[0]})


def read_secret_lines(files: Iterable[Path]) -> set[str]:
    """Read the lines of secret files, to redact them elsewhere; unreadable files are skipped."""
    lines = set[str]()
    for path in files:
        with suppress(OSError, UnicodeDecodeError):
            lines |= {line.strip() for line in path.read_text().splitlines() if not line.startswith("-----")}
    return lines


def _redact_values(value: object, secrets: Collection[str]) -> object:
    """Redact all texts of a JSON value."""
    if isinstance(value, str):
        return without_secrets(value, secrets)
    if isinstance(value, list):
        return [_redact_values(item, secrets) for item in value]
    if isinstance(value, dict):
        return {
            key: "-" if IS_LABEL.fullmatch(str(key)) else _redact_values(item, secrets) for key, item in value.items()
        }
    return value


def running_versions() -> dict[str, str]:
    """Return the versions of system, interpreter and libraries."""
    versions = {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": sys.version.split()[0],
        "openssl": ssl.OPENSSL_VERSION,
    }
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def last_lines(path: Path) -> str:
    """Return the end of a log.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_BYTES))
            lines = file.read(MOST_BYTES).decode(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a log that this user may read") from error
    return "\n".join(lines[-MOST_LINES:]) + "\n"


async def read_journal(unit: str) -> str:
    """Return the end of a systemd unit's journal, or the reason why there is none."""
    command = ("journalctl", f"--unit={unit}", f"--lines={MOST_LINES}", "--no-pager", "--output=short-iso")
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
    except OSError as error:
        return f"no journal: {error.strerror}\n"
    try:
        async with backports.timeout(JOURNAL_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"no journal: no answer within {JOURNAL_TIMEOUT_S:g} s\n"
    return output.decode(errors="replace")


def list_files(folder: Path) -> str:
    """List modes, sizes and names of all files below a folder, without contents."""
    return "".join(f"{line}\n" for line in _format_entries(folder))


def _format_entries(folder: Path) -> Iterator[str]:
    for number, path in enumerate(sorted(folder.rglob("*"))):
        if number == MOST_FILES:
            yield "and more"
            return
        try:
            about = path.lstat()
        except OSError as error:
            yield f"{path.relative_to(folder)}: {error.strerror}"
            continue
        yield f"{stat.filemode(about.st_mode)} {about.st_size:12d} {path.relative_to(folder)}"


def write_bundle(path: Path, files: Mapping[str, object], secrets: Collection[str] = ()) -> None:
    """Write texts, and other values as JSON, into one private tar.gz, without secrets.

    Args:
        path: Bundle to create; must not exist.
        secrets: Known secrets, see `read_secret_lines`.

    Raises:
        ConfigError: It exists, or cannot be written.
        Unwritable: The disk is full, read-only or failing.
    """
    if path.exists():
        raise ConfigError(f"{path} exists; name another file by --out")
    packed, top = io.BytesIO(), path.name.partition(".")[0]
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in sorted(files.items()):
            data = _as_text(content, secrets).encode()
            entry = tarfile.TarInfo(f"{top}/{name}")
            entry.size, entry.mode = len(data), PRIVATE
            archive.addfile(entry, io.BytesIO(data))
    try:
        replace_file(path, packed.getvalue(), mode=PRIVATE)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that this user may write") from error


def _as_text(content: object, secrets: Collection[str]) -> str:
    if isinstance(content, str):
        return without_secrets(content, secrets)
    cleaned = _redact_values(msgspec.to_builtins(content), secrets)
    return msgspec.json.format(msgspec.json.encode(cleaned), indent=1).decode() + "\n"
