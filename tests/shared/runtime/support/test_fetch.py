"""Wheel downloads: complete and verified, from folders and interrupted HTTP."""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from shared.errors import ConfigError, Unreachable
from shared.runtime.support.fetch import ATTEMPTS, download_wheels, find_on_page, find_url
from shared.runtime.support.table import Wheel
from tests.naming import naming

FILE = "torch_lite-2.10.0+cpu-cp311-cp311-manylinux_2_28_aarch64.whl"
CONTENT = bytes(range(256)) * 4096


def wheel_of(content: bytes = CONTENT, file: str = FILE) -> Wheel:
    digest = hashlib.sha256(content).hexdigest()
    return Wheel(file=file, bytes=len(content), unpacked=1, sha256=digest)


class Index(ThreadingHTTPServer):
    """An index of one project, which ends each answer after some bytes."""

    def __init__(self, form: str, content: bytes = CONTENT, cut: int | None = None, *, ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.form, self.content, self.cut, self.ranges = form, content, cut, ranges
        self.asked: list[tuple[str, str]] = []
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
        self.thread.join(60)

    def page(self) -> bytes:
        place = "../../files/" + FILE.replace("+", "%2B") + "#sha256=0"
        if self.form == "json":
            return json.dumps(
                {"files": [{"filename": "x-1.whl", "url": "/x"}, {"filename": FILE, "url": place}]}
            ).encode()
        return f'<html><a href="/x-1.whl#sha256=1">x</a>\n<A data-y=">" HREF="{place}">{FILE}</A></html>'.encode()


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        server: Index = self.server
        span = self.headers.get("Range", "")
        server.asked.append((self.path, span))
        if self.path == "/simple/torch-lite/":
            return self.tell(200, server.page())
        if not self.path.startswith("/files/torch_lite-2.10.0%2Bcpu"):
            return self.tell(404, b"")
        start = int(span.removeprefix("bytes=").removesuffix("-")) if span and server.ranges else 0
        return self.tell(206 if start else 200, server.content[start:], cut=server.cut)

    def tell(self, status, body, cut=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut])
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture(params=["json", "html"])
def form(request):
    return request.param


def test_a_wheel_comes_from_an_index(tmp_path, form):
    said = []
    with Index(form) as index:
        download_wheels([wheel_of()], tmp_path / "wheels", [str(tmp_path / "none"), index.url], said.append)
    assert (tmp_path / "wheels" / FILE).read_bytes() == CONTENT
    assert said == [f"{FILE}, 1.0 MB"]


def test_a_download_goes_on_where_it_was_cut_off(tmp_path, form):
    """As often as it takes, while something comes each time, and after an earlier process: no byte comes twice."""
    (tmp_path / f"{FILE}.part").write_bytes(CONTENT[:1000])
    with Index(form, cut=100_000) as index:
        download_wheels([wheel_of()], tmp_path, [index.url], lambda _line: None)
    spans = [span for path, span in index.asked if path.startswith("/files")]
    assert spans == [f"bytes={one}-" for one in range(1000, len(CONTENT), 100_000)]
    assert len(spans) > 2 * ATTEMPTS
    assert (tmp_path / FILE).read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("cut", [None, 100_000])
def test_a_wheel_of_unknown_size_comes_whole(tmp_path, cut):
    """NVIDIA's index tells no sizes: the answer's own counts, and the digest decides."""
    unknown = msgspec.structs.replace(wheel_of(), bytes=0)
    with Index("html", cut=cut) as index:
        download_wheels([unknown], tmp_path, [index.url], lambda _line: None)
        assert (tmp_path / FILE).read_bytes() == CONTENT
        (tmp_path / FILE).rename(tmp_path / f"{FILE}.part")
        asked = len(index.asked)
        download_wheels([unknown], tmp_path, [index.url], lambda _line: None)
        assert len(index.asked) == asked + 1, "an earlier process was cut off just before the end"
    assert (tmp_path / FILE).read_bytes() == CONTENT


def test_another_content_of_unknown_size_is_refused(tmp_path):
    unknown = msgspec.structs.replace(wheel_of(), bytes=0)
    with Index("html", CONTENT[:-1]) as index, pytest.raises(ConfigError, match=naming(FILE, "SHA-256")):
        download_wheels([unknown], tmp_path, [index.url], lambda _line: None)
    assert not list(tmp_path.iterdir())


def test_a_board_whose_clock_stands_in_1970_downloads(tmp_path, monkeypatch):
    """To it, every certificate begins in the future; what comes is compared with a digest that is known here."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    begins = datetime(2090, 1, 1, tzinfo=UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, begins, begins + timedelta(days=9))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "pair.pem").write_bytes(pem + made.public_bytes(Encoding.PEM))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "pair.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair.pem")
    with Index("json") as index:
        index.socket = context.wrap_socket(index.socket, server_side=True)
        url = index.url.replace("http://127.0.0.1", "https://localhost")
        download_wheels([wheel_of()], tmp_path / "wheels", [url], lambda _line: None)
        with pytest.raises(Unreachable, match="certificate"):
            download_wheels(
                [wheel_of()], tmp_path / "others", [url.replace("localhost", "127.0.0.1")], lambda _line: None
            )
    assert (tmp_path / "wheels" / FILE).read_bytes() == CONTENT


def test_of_a_download_that_stands_still_what_came_is_kept(tmp_path):
    (tmp_path / f"{FILE}.part").write_bytes(CONTENT[:1000])
    with (
        Index("json", cut=0) as index,
        pytest.raises(Unreachable, match=naming(1000, len(CONTENT))),
    ):
        download_wheels([wheel_of()], tmp_path, [index.url], lambda _line: None)
    assert len(index.asked) == 1 + ATTEMPTS
    assert (tmp_path / f"{FILE}.part").read_bytes() == CONTENT[:1000]


@pytest.mark.parametrize(
    "address",
    [
        "file:///srv/wheels",
        "ftp://127.0.0.1/simple",
        "http://[127.0.0.1/simple",
        "http://127.0.0.1:eighty/simple",
        "http://a b/simple",
        "http://127.0.0.1/sim ple",
        f"http://{'a' * 70}.example/simple",
        "http://127.0.0.1/\x1b[2J",
        "http://",
    ],
)
def test_what_is_no_address_of_an_index_is_told_so(address):
    with pytest.raises(ConfigError) as caught:
        find_url(address, wheel_of())
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("place", "named"), [("http://[::1/x.whl", FILE), ("file:///etc/passwd", "/etc/passwd")])
def test_a_page_that_names_no_address_is_told_so(tmp_path, monkeypatch, place, named):
    page = json.dumps({"files": [{"filename": FILE, "url": place}]}).encode()
    monkeypatch.setattr(Index, "page", lambda self: page)
    with Index("json") as index, pytest.raises((ConfigError, Unreachable), match=naming(named)):
        download_wheels([wheel_of()], tmp_path, [index.url], lambda _line: None)
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_is_too_deep_names_nothing():
    assert find_on_page('{"files":' + '{"a":' * 100_000, FILE) == ""


def test_a_server_without_ranges_begins_anew(tmp_path):
    (tmp_path / f"{FILE}.part").write_bytes(b"what came before")
    with Index("json", ranges=False) as index:
        download_wheels([wheel_of()], tmp_path, [index.url], lambda _line: None)
    assert (tmp_path / FILE).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT + b"more"], ids=["changed", "longer"])
def test_another_content_is_refused_and_forgotten(tmp_path, content):
    with Index("json", content) as index, pytest.raises(ConfigError, match=naming(FILE, "SHA-256")):
        download_wheels([wheel_of()], tmp_path, [index.url], lambda _line: None)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_whole_is_not_asked_for(tmp_path):
    (tmp_path / FILE).write_bytes(CONTENT)
    download_wheels([wheel_of()], tmp_path, [], lambda _line: None)


def test_a_folder_serves_without_a_network(tmp_path):
    (tmp_path / "stick").mkdir()
    (tmp_path / "stick" / FILE).write_bytes(CONTENT)
    download_wheels([wheel_of()], tmp_path / "wheels", [str(tmp_path / "stick")], lambda _line: None)
    assert (tmp_path / "wheels" / FILE).read_bytes() == CONTENT


def test_a_damaged_file_of_a_folder_is_named(tmp_path):
    (tmp_path / FILE).write_bytes(CONTENT[:-1])
    with pytest.raises(ConfigError, match=naming(tmp_path / FILE, "SHA-256")):
        download_wheels([wheel_of()], tmp_path / "wheels", [str(tmp_path)], lambda _line: None)


def test_a_wheel_that_nobody_has_is_named_with_a_way_out(tmp_path):
    with (
        Index("json") as index,
        pytest.raises(ConfigError, match=naming("other-1-py3-none-any.whl", tmp_path, "--from")),
    ):
        download_wheels(
            [wheel_of(file="other-1-py3-none-any.whl")], tmp_path, [str(tmp_path), index.url], lambda _line: None
        )


def test_an_index_that_is_away_is_no_missing_file(tmp_path):
    with Index("json") as index:
        gone = index.url
    with pytest.raises(Unreachable, match="torch-lite"):
        find_url(gone, wheel_of())


def test_only_addresses_of_indexes_are_opened():
    with pytest.raises(ConfigError, match=naming("ftp://example/x/torch-lite/", "https://")):
        find_url("ftp://example/x", wheel_of())


@pytest.mark.parametrize("text", ["{", "{}", '{"files": 3}', '{"files": [{}]}', '{"files": [7]}', "<a href=>", ""])
def test_a_page_that_is_none_holds_nothing(text):
    assert find_on_page(text, FILE) == ""
