"""Copy or download wheel files from folders and package indexes, verified and resumable.

An index is one that pip can use (PEP 503, PEP 691): a page per project with the addresses of its files.
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
from shared.runtime.file_digest import file_sha256
from shared.runtime.support.table import Wheel
from shared.runtime.text_table import printable_text

Say = Callable[[str], None]

BLOCK_BYTES = 1 << 20
TIMEOUT_S, ATTEMPTS = 60.0, 5
MOST_WAIT_S = 60.0
"""Longest wait for a gateway that is busy (Retry-After)."""
NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME, for boards without a clock; chain and name are still verified."""
MAX_PAGE_BYTES = 64 << 20
MOST_BYTES = 4 << 30
"""Size limit of a wheel whose size is not known."""
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
PART = ".part"
ABSENT = (http.client.NOT_FOUND, http.client.FORBIDDEN, http.client.GONE)
"""Answers of an index without the project; object stores such as PyTorch's index answer 403."""
MOST_WORDS = 400
OFFLINE_REMEDY = (
    "connect this system to the internet, or bring the files that --list names in a folder and name it by --from"
)


def download_wheels(wheels: Sequence[Wheel], into: Path, sources: Sequence[str], say: Say, ca: str = "") -> None:
    """Download wheels into a folder, skipping complete ones.

    Args:
        sources: Folders and addresses of indexes, in order of preference.
        say: Receives a message for each file.
        ca: File of the certificates that indexes must be signed by, such as a site's root; empty for the system's.

    Raises:
        ConfigError: No source has a file of that name and hash.
        Unreachable: An index does not answer.
    """
    into.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        place = into / wheel.file
        if not matches_wheel(place, wheel):
            _fetch_wheel(wheel, place, sources, say, ca)


def matches_wheel(path: Path, wheel: Wheel) -> bool:
    """Check a file against a wheel's size and hash."""
    if not path.is_file() or (wheel.bytes and path.stat().st_size != wheel.bytes):
        return False
    return file_sha256(path) == wheel.sha256


def _fetch_wheel(wheel: Wheel, place: Path, sources: Sequence[str], say: Say, ca: str) -> None:
    for source in sources:
        if "://" not in source:
            local = Path(source) / wheel.file
            if local.is_file():
                if not matches_wheel(local, wheel):
                    raise ConfigError(f"{local} is not {wheel.file}: its SHA-256 differs; download it again")
                place.unlink(missing_ok=True)
                place.symlink_to(local.resolve())
                return
        elif url := find_url(source, wheel, ca):
            say(f"{wheel.file}, {f'{wheel.bytes / 1e6:.1f} MB' if wheel.bytes else 'size unknown'}")
            download(url, wheel, place, ca)
            return
    places = ", ".join(sources) or "no source was named"
    raise ConfigError(f"{wheel.file} was not found in: {places}; name its folder by --from, or an index by --index")


def find_url(index: str, wheel: Wheel, ca: str = "") -> str:
    """Find the address of a wheel's file at an index; empty where it has no such file.

    Raises:
        Unreachable: The index does not answer.
    """
    name = re.sub(r"[-_.]+", "-", wheel.name).lower()
    page = f"{index.rstrip('/')}/{name}/"
    try:
        with _open_url(page, {"Accept": ACCEPT}, ca) as answer:
            text = answer.read(MAX_PAGE_BYTES).decode(errors="replace")
            base = answer.geturl()
    except urllib.error.HTTPError as error:
        if error.code in ABSENT:
            return ""
        raise Unreachable(f"{page}: {_describe_error(error)}; {OFFLINE_REMEDY}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{page}: {_describe_error(error)}; {OFFLINE_REMEDY}") from error
    href = find_on_page(text, wheel.file)
    try:
        return urllib.parse.urljoin(base, href) if href else ""
    except ValueError as error:
        raise Unreachable(f"{page}: the address of {wheel.file} is invalid ({_describe_error(error)})") from error


def find_on_page(text: str, file: str) -> str:
    """Find the address of a file on a project's page, JSON or HTML; empty where it has none."""
    if text.lstrip().startswith("{"):
        try:
            files = json.loads(text)["files"]
            return next((str(entry["url"]) for entry in files if entry["filename"] == file), "")
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""
    for match in re.finditer(r"""\shref\s*=\s*["']([^"']+)["']""", text, re.IGNORECASE):
        url = html.unescape(match[1]).partition("#")[0]
        if urllib.parse.unquote(url.rpartition("/")[2]) == file:
            return url
    return ""


def download(url: str, wheel: Wheel, place: Path, ca: str, pair: Sequence[str] = ()) -> None:
    """Download a file, resuming after each failure, also that of an earlier process.

    Args:
        ca: File of the certificates that the host must be signed by; empty for the system's.
        pair: Files of this board's certificate and key, for a host that asks for them.

    Raises:
        ConfigError: The result is not the wheel.
        Unreachable: The download is incomplete.
    """
    part = place.with_name(place.name + PART)
    had, size, attempts, cause = _size(part), wheel.bytes or MOST_BYTES, ATTEMPTS, ""
    if not wheel.bytes and matches_wheel(part, wheel):
        attempts = 0  # an earlier process was killed just before the rename
    while attempts and had < size:
        attempts, wait_s = attempts - 1, 0.0
        try:
            size = _resume_download(url, wheel, part, ca, pair)
        except urllib.error.HTTPError as error:
            cause, wait_s = _describe_error(error), _retry_after_s(error)
        except (OSError, http.client.HTTPException) as error:
            cause = _describe_error(error)
        before, had = had, _size(part)
        attempts = ATTEMPTS if had > before else attempts  # a busy gateway serves many boards in turn
        if wait_s and attempts:
            threading.Event().wait(wait_s)  # no event loop in this command
    if had < size and not matches_wheel(part, wheel):
        progress = f"{had} of {size} bytes came and are kept; repeat the command to resume"
        progress = progress if size < MOST_BYTES else progress.replace(f" of {size}", "")
        raise Unreachable(f"{printable_text(url)}: {cause or 'it ended too soon'}; {progress}")
    if not matches_wheel(part, wheel):
        part.unlink()
        what = f"the download is not {wheel.file}: its SHA-256 or size differs; nothing was installed"
        raise ConfigError(f"{printable_text(url)}: {what}")
    part.replace(place)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _describe_error(error: Exception) -> str:
    """Describe an error for the terminal; parts may come from a remote host."""
    return printable_text(str(error))[:MOST_WORDS]


def _retry_after_s(error: urllib.error.HTTPError) -> float:
    """Return the seconds to wait before retrying a busy gateway, by its Retry-After header."""
    value = error.headers.get("Retry-After", "") if error.headers else ""
    return min(float(value), MOST_WAIT_S) if value.isdecimal() else 0.0


def _resume_download(url: str, wheel: Wheel, part: Path, ca: str, pair: Sequence[str]) -> int:
    """Download the missing part of a file; return its full size, by the wheel or else by the answer."""
    had = _size(part)
    with _open_url(url, {"Range": f"bytes={had}-"} if had else {}, ca, pair) as answer:
        is_rest = getattr(answer, "status", http.client.OK) == http.client.PARTIAL_CONTENT
        length = answer.headers.get("Content-Length", "")
        size = wheel.bytes or (int(length) + had * is_rest if length.isdecimal() else MOST_BYTES)
        with part.open("ab" if is_rest else "wb") as file:
            while (block := answer.read(BLOCK_BYTES)) and file.tell() <= size:
                file.write(block)
            return size if size < MOST_BYTES else file.tell()


def read_url(url: str, most: int, ca: str, pair: Sequence[str] = ()) -> bytes | None:
    """Read a small file; None if the host does not have it.

    Args:
        most: Maximum size in bytes.
        ca: As of `download`, like `pair`.

    Raises:
        Unreachable: The host does not answer, or with more.
    """
    try:
        with _open_url(url, {}, ca, pair) as answer:
            data = answer.read(most + 1)
    except urllib.error.HTTPError as error:
        if error.code in ABSENT:
            return None
        raise Unreachable(f"{printable_text(url)}: {_describe_error(error)}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{printable_text(url)}: {_describe_error(error)}") from error
    if len(data) > most:
        raise Unreachable(f"{printable_text(url)}: more than {most} bytes")
    return data


def _open_url(url: str, headers: dict[str, str], ca: str, pair: Sequence[str] = ()) -> http.client.HTTPResponse:
    """Open a URL.

    Raises:
        ConfigError: The address or the file of certificates is invalid.
        OSError: The host does not answer, or with an error; http.client.HTTPException too.
    """
    address, context = printable_text(url), _tls_context(ca, pair)
    if not url.startswith(("https://", "http://")):
        raise ConfigError(f"{address}: not an index address; it begins with https://, and --from names a folder")
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the scheme is checked above
        answer: http.client.HTTPResponse = urllib.request.urlopen(  # noqa: S310 - as above
            request, timeout=TIMEOUT_S, context=context
        )
    except (ValueError, http.client.InvalidURL) as error:  # a host without its bracket, a bad port, a blank
        raise ConfigError(f"{address}: not an index address ({_describe_error(error)})") from error
    return answer


def _tls_context(ca: str, pair: Sequence[str]) -> ssl.SSLContext:
    """Build the TLS context for an index; downloads are verified by hash in any case.

    Raises:
        ConfigError: The file holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if pair:
            context.load_cert_chain(*pair)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(f"--ca {ca}: {error}; name the file of the site's root certificate") from error
    context.verify_flags |= NO_CHECK_TIME
    return context
