"""Bring the files of wheels into a folder, from a folder or an index: each whole, and resumed where it was cut off.

An index is one that pip can use (PEP 503, PEP 691): a page a project with the addresses of its files.
"""

from __future__ import annotations

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
from shared.runtime import backports
from shared.runtime.support.table import Wheel
from shared.runtime.text_table import printable_text

Say = Callable[[str], None]

BLOCK_BYTES = 1 << 20
TIMEOUT_S, ATTEMPTS = 60.0, 5
MOST_WAIT_S = 60.0
"""For a gateway that says that it has too many readers."""
NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME: a board without a clock sets itself up too; chain and name are checked."""
MAX_PAGE_BYTES = 64 << 20
MOST_BYTES = 4 << 30
"""Of a wheel whose size is not known."""
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
PART = ".part"
ABSENT = (http.client.NOT_FOUND, http.client.FORBIDDEN, http.client.GONE)
"""Answers of an index without the project; object stores, PyTorch's index among them, answer 403."""
MOST_WORDS = 400
AWAY = "connect this system to the internet, or bring the files that --list names in a folder and name it by --from"


def bring(wheels: Sequence[Wheel], into: Path, sources: Sequence[str], say: Say, ca: str = "") -> None:
    """Bring wheels into a folder; those that are there already, whole, stay.

    Args:
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
    if not path.is_file() or (wheel.bytes and path.stat().st_size != wheel.bytes):
        return False
    with path.open("rb") as file:
        return backports.file_digest(file, "sha256").hexdigest() == wheel.sha256


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
            say(f"{wheel.file}, {f'{wheel.bytes / 1e6:.1f} MB' if wheel.bytes else 'of a size that the index tells'}")
            _download(url, wheel, place, ca)
            return
    asked = ", ".join(sources) or "no source was named"
    raise ConfigError(f"{wheel.file} is in none of them: {asked}; name its folder by --from, or an index by --index")


def find_url(index: str, wheel: Wheel, ca: str = "") -> str:
    """Return the address of a wheel's file at an index; empty where it has no such file.

    Args:
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
        if error.code in ABSENT:
            return ""
        raise Unreachable(f"{page}: {_words(error)}; {AWAY}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{page}: {_words(error)}; {AWAY}") from error
    found = find_on_page(text, wheel.file)
    try:
        return urllib.parse.urljoin(base, found) if found else ""
    except ValueError as error:
        raise Unreachable(f"{page}: it names no address of {wheel.file} ({_words(error)})") from error


def find_on_page(text: str, file: str) -> str:
    """Return the address of a file on a project's page, JSON or HTML; empty where the page names none."""
    if text.lstrip().startswith("{"):
        try:
            files = json.loads(text)["files"]
            return next((str(one["url"]) for one in files if one["filename"] == file), "")
        except (ValueError, KeyError, TypeError, RecursionError):
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
    had, size, left, cause = _size(part), wheel.bytes or MOST_BYTES, ATTEMPTS, ""
    if not wheel.bytes and is_whole(part, wheel):
        left = 0  # an earlier process was cut off just then
    while left and had < size:
        left, wait_s = left - 1, 0.0
        try:
            size = _go_on(url, wheel, part, ca)
        except urllib.error.HTTPError as error:
            cause, wait_s = _words(error), _asked_to_wait_s(error)
        except (OSError, http.client.HTTPException) as error:
            cause = _words(error)
        before, had = had, _size(part)
        left = ATTEMPTS if had > before else left  # a gateway with many boards gives each its turn
        if wait_s and left:
            threading.Event().wait(wait_s)  # a command, without an event loop
    if had < size and not is_whole(part, wheel):
        told = f"{had} of {size} bytes came and are kept: the same command goes on"
        told = told if size < MOST_BYTES else told.replace(f" of {size}", "")
        raise Unreachable(f"{printable_text(url)}: {cause or 'it ended too soon'}; {told}")
    if not is_whole(part, wheel):
        part.unlink()
        what = f"what came is not {wheel.file}: its SHA-256 or size is another; nothing was installed"
        raise ConfigError(f"{printable_text(url)}: {what}")
    part.replace(place)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _words(error: Exception) -> str:
    """Return what is wrong, of which a stranger may have said a part."""
    return printable_text(str(error))[:MOST_WORDS]


def _asked_to_wait_s(error: urllib.error.HTTPError) -> float:
    """Return the seconds after which a gateway that has too many readers may be asked again."""
    told = error.headers.get("Retry-After", "") if error.headers else ""
    return min(float(told), MOST_WAIT_S) if told.isdecimal() else 0.0


def _go_on(url: str, wheel: Wheel, part: Path, ca: str) -> int:
    """Read what is missing of a file; return its size, by the wheel or else by the answer."""
    had = _size(part)
    with _open(url, {"Range": f"bytes={had}-"} if had else {}, ca) as answer:
        is_rest = getattr(answer, "status", http.client.OK) == http.client.PARTIAL_CONTENT
        told = answer.headers.get("Content-Length", "")
        size = wheel.bytes or (int(told) + had * is_rest if told.isdecimal() else MOST_BYTES)
        with part.open("ab" if is_rest else "wb") as file:
            while (block := answer.read(BLOCK_BYTES)) and file.tell() <= size:
                file.write(block)
            return size if size < MOST_BYTES else file.tell()


def _open(url: str, headers: dict[str, str], ca: str) -> http.client.HTTPResponse:
    """Ask for what is behind an address.

    Raises:
        ConfigError: It is none, or the file of certificates is none.
        OSError: Nobody answers, or not so; http.client.HTTPException too.
    """
    told, context = printable_text(url), _trusting(ca)
    if not url.startswith(("https://", "http://")):
        raise ConfigError(f"{told}: no address of an index; it begins with https://, and --from names a folder")
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - told just above
        answer: http.client.HTTPResponse = urllib.request.urlopen(  # noqa: S310 - as above
            request, timeout=TIMEOUT_S, context=context
        )
    except (ValueError, http.client.InvalidURL) as error:  # a host without its bracket, a port of words, a blank
        raise ConfigError(f"{told}: no address of an index ({_words(error)})") from error
    return answer


def _trusting(ca: str) -> ssl.SSLContext:
    """Return how an index is known; what comes is compared with its digest in any case.

    Raises:
        ConfigError: The file holds no certificate.
    """
    try:
        made = ssl.create_default_context(cafile=ca or None)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(f"--ca {ca}: {error}; name the file of the site's root certificate") from error
    made.verify_flags |= NO_CHECK_TIME
    return made
