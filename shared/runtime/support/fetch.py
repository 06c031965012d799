"""Bring the files of wheels into a folder, from a folder or an index: each whole, and resumed where it was cut off.

An index is one that pip can use (PEP 503, PEP 691): a page a project with the addresses of its files.
"""

from __future__ import annotations

import hashlib
import html
import http.client
import json
import re
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.errors import ConfigError, Unreachable
from shared.runtime.support.table import Wheel

Say = Callable[[str], None]

BLOCK_BYTES = 1 << 20
TIMEOUT_S, ATTEMPTS = 60.0, 5
MOST_WAIT_S = 60.0
"""For a gateway that says that it has too many readers."""
NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME: a board without a clock sets itself up too; chain and name are checked."""
MAX_PAGE_BYTES = 64 << 20
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
PART = ".part"


def bring(wheels: Sequence[Wheel], into: Path, sources: Sequence[str], say: Say, ca: str = "") -> None:
    """Bring wheels into a folder; those that are there already, whole, stay.

    Args:
        wheels: Which.
        into: The folder.
        sources: Folders, and addresses of indexes, in the order in which they are asked.
        say: Is told of each file that comes.
        ca: File of the certificates that indexes must be signed by, such as a site's root; empty for the system's.

    Raises:
        ConfigError: No source has a file of that name and hash.
        Unreachable: An index does not answer.
    """
    into.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        place = into / wheel.file
        if not is_whole(place, wheel):
            _bring_one(wheel, place, sources, say, ca)


def is_whole(path: Path, wheel: Wheel) -> bool:
    """Return whether a file is the wheel, by its hash."""
    if not path.is_file() or path.stat().st_size != wheel.bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256


def _bring_one(wheel: Wheel, place: Path, sources: Sequence[str], say: Say, ca: str) -> None:
    for source in sources:
        if "://" not in source:
            found = Path(source) / wheel.file
            if found.is_file():
                if not is_whole(found, wheel):
                    raise ConfigError(f"{found} is not the file of that name: its SHA-256 is another; fetch it anew")
                place.unlink(missing_ok=True)
                place.symlink_to(found.resolve())
                return
        elif url := find_url(source, wheel, ca):
            say(f"{wheel.file}, {wheel.bytes / 1e6:.1f} MB")
            _download(url, wheel, place, ca)
            return
    asked = ", ".join(sources) or "no source was named"
    raise ConfigError(f"{wheel.file} is in none of them: {asked}; name its folder by --from, or an index by --index")


def find_url(index: str, wheel: Wheel, ca: str = "") -> str:
    """Return the address of a wheel's file at an index; empty where it has no such file.

    Args:
        index: Its address.
        wheel: Which.
        ca: As `bring`.

    Raises:
        Unreachable: The index does not answer.
    """
    name = re.sub(r"[-_.]+", "-", wheel.name).lower()
    page = f"{index.rstrip('/')}/{name}/"
    try:
        with _open(page, {"Accept": ACCEPT}, ca) as answer:
            text = answer.read(MAX_PAGE_BYTES).decode(errors="replace")
            base = answer.geturl()
    except urllib.error.HTTPError as error:
        if error.code == http.client.NOT_FOUND:
            return ""
        raise Unreachable(f"{page}: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{page}: {error}") from error
    found = find_on_page(text, wheel.file)
    return urllib.parse.urljoin(base, found) if found else ""


def find_on_page(text: str, file: str) -> str:
    """Return the address of a file on a project's page, JSON or HTML; empty where the page names none."""
    if text.lstrip().startswith("{"):
        try:
            files = json.loads(text)["files"]
            return next((str(one["url"]) for one in files if one["filename"] == file), "")
        except (ValueError, KeyError, TypeError):
            return ""
    for found in re.finditer(r"""\shref\s*=\s*["']([^"']+)["']""", text, re.IGNORECASE):
        url = html.unescape(found[1]).partition("#")[0]
        if urllib.parse.unquote(url.rpartition("/")[2]) == file:
            return url
    return ""


def _download(url: str, wheel: Wheel, place: Path, ca: str) -> None:
    """Download a file, each attempt from where the last one ended, also that of an earlier process.

    Raises:
        ConfigError: What came is not the wheel.
        Unreachable: It did not come whole.
    """
    part = place.with_name(place.name + PART)
    cause: Exception = TimeoutError("no attempt")
    for attempt in range(ATTEMPTS):
        try:
            _go_on(url, wheel, part, ca)
        except urllib.error.HTTPError as error:
            cause = error
            if attempt + 1 < ATTEMPTS:
                threading.Event().wait(_asked_to_wait_s(error))  # a command, without an event loop
        except (OSError, http.client.HTTPException) as error:
            cause = error
        if part.exists() and part.stat().st_size >= wheel.bytes:
            break
    else:
        had = part.stat().st_size if part.exists() else 0
        raise Unreachable(f"{url}: {cause}; {had} of {wheel.bytes} bytes came and are kept: the same command goes on")
    if not is_whole(part, wheel):
        part.unlink()
        raise ConfigError(
            f"{url}: what came is not {wheel.file}: its SHA-256 or size is another; nothing was installed"
        )
    part.replace(place)


def _asked_to_wait_s(error: urllib.error.HTTPError) -> float:
    """Return the seconds after which a gateway that has too many readers may be asked again."""
    told = error.headers.get("Retry-After", "") if error.headers else ""
    return min(float(told), MOST_WAIT_S) if told.isdecimal() else 0.0


def _go_on(url: str, wheel: Wheel, part: Path, ca: str) -> None:
    had = part.stat().st_size if part.exists() else 0
    with _open(url, {"Range": f"bytes={had}-"} if had else {}, ca) as answer:
        is_rest = getattr(answer, "status", http.client.OK) == http.client.PARTIAL_CONTENT
        with part.open("ab" if is_rest else "wb") as file:
            while (block := answer.read(BLOCK_BYTES)) and file.tell() <= wheel.bytes:
                file.write(block)


def _open(url: str, headers: dict[str, str], ca: str) -> http.client.HTTPResponse:
    if not url.startswith(("https://", "http://", "file://")):
        raise ConfigError(f"{url}: no address of an index; it begins with https://")
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - told just above
    answer: http.client.HTTPResponse = urllib.request.urlopen(  # noqa: S310 - as above
        request, timeout=TIMEOUT_S, context=_trusting(ca)
    )
    return answer


def _trusting(ca: str) -> ssl.SSLContext | None:
    """Return how an index is known; what comes is compared with its digest in any case.

    Raises:
        ConfigError: The file holds no certificate.
    """
    if not ca:
        return None
    try:
        made = ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(f"--ca {ca}: {error}; name the file of the site's root certificate") from error
    made.verify_flags |= NO_CHECK_TIME
    return made
