"""Certificate authorities: key usage of certificates, refused names."""

from __future__ import annotations

import base64
import re
import subprocess  # noqa: TID251 - asks openssl, which judges certificates for the broker too
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from hypothesis import example, given
from hypothesis import strategies as st

from edge_server.gateway import authority
from edge_server.gateway.authority import BACKDATED, Subject
from shared.errors import ConfigError, WireError
from tests.naming import naming

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
PI = Subject("pi-03", "device", "roof")
GATEWAY = Subject("gateway", "gateway", "roof", ("gateway.local", "192.168.1.10", "fe80::1"))


@pytest.fixture(scope="module")
def root():
    return authority.make_root("roof", NOW, 20)


@pytest.fixture(scope="module")
def site(root):
    return authority.make_site(*root, "roof", NOW, 10)


def public():
    return authority.public_key_of(authority.make_key())


def request(name="pi-03", key=None, digest=None):
    """Return a request as a board makes it, and its public key as SubjectPublicKeyInfo."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, digest or hashes.SHA256())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    spki = key.public_key().public_bytes(serialization.Encoding.DER, form)
    return made.public_bytes(serialization.Encoding.PEM), spki


def load(pem):
    return x509.load_pem_x509_certificate(pem)


@pytest.fixture
def verify(tmp_path, root, site):
    """Return a function that asks openssl about a certificate: the empty string, or what it has against it."""

    def ask(certificate, *options, roots=None, between=None):
        files = {"root": roots or root[1], "site": between or site[1], "one": certificate}
        for name, data in files.items():
            (tmp_path / f"{name}.pem").write_bytes(data)
        command = ["openssl", "verify", "-x509_strict", "-attime", str(int(NOW.timestamp())), "-CAfile", "root.pem"]
        command += ["-untrusted", "site.pem", *options, "one.pem"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603
        return "" if done.returncode == 0 else done.stderr or "refused"

    return ask


def test_a_chain_is_good_for_its_purpose_alone(site, verify):
    """A device's certificate does not pass for the gateway's, nor the gateway's for a client's."""
    device = authority.issue(*site, public(), PI, 365, NOW).certificate
    gateway = authority.issue(*site, public(), GATEWAY, 365, NOW).certificate
    assert verify(device, "-purpose", "sslclient") == ""
    assert "purpose" in verify(device, "-purpose", "sslserver")
    assert verify(gateway, "-purpose", "sslserver", "-verify_hostname", "gateway.local") == ""
    assert verify(gateway, "-purpose", "sslserver", "-verify_ip", "192.168.1.10") == ""
    assert verify(gateway, "-purpose", "sslserver", "-verify_ip", "fe80::1") == ""
    assert "mismatch" in verify(gateway, "-purpose", "sslserver", "-verify_hostname", "evil.local")
    assert "purpose" in verify(gateway, "-purpose", "sslclient")


def test_another_root_or_a_device_that_signs_proves_nothing(root, site, verify):
    device = authority.issue(*site, public(), PI, 365, NOW).certificate
    assert verify(device, roots=authority.make_root("roof", NOW, 20)[1])
    key = authority.make_key()
    signer = authority.issue(*site, authority.public_key_of(key), PI, 365, NOW).certificate
    forged = authority.issue(key, signer, public(), Subject("pi-04", "device", "roof"), 9, NOW).certificate
    assert verify(forged, between=site[1] + signer)
    below = authority.make_site(*site, "roof", NOW, 1)  # a site CA signs no further one
    inner = authority.issue(*below, public(), PI, 9, NOW).certificate
    assert verify(inner, between=site[1] + below[1])


def test_a_certificate_says_who_it_is_for_and_nothing_that_was_asked(site):
    csr, spki = request("edge-server")
    issued = authority.issue(*site, authority.read_request(csr), PI, 30, NOW)
    made = load(issued.certificate)
    assert made.subject.rfc4514_string() == "CN=pi-03,OU=device,O=roof"
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    assert made.public_key().public_bytes(serialization.Encoding.DER, form) == spki
    assert (made.serial_number, made.not_valid_after_utc) == (issued.serial, issued.not_after)
    assert issued.not_after == NOW + timedelta(days=30)
    with pytest.raises(x509.ExtensionNotFound):
        made.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_all_is_valid_since_its_authority_and_no_longer_than_it(root, site):
    assert load(root[1]).not_valid_before_utc == NOW - BACKDATED
    later = NOW + timedelta(days=365)
    renewed = load(authority.issue(*site, public(), PI, 365, later).certificate)
    assert renewed.not_valid_before_utc == load(site[1]).not_valid_before_utc == NOW - BACKDATED
    assert renewed.not_valid_after_utc == later + timedelta(days=365)
    longest = authority.issue(*site, public(), PI, 1e9, NOW)
    assert longest.not_after == load(site[1]).not_valid_after_utc
    second = authority.make_site(*root, "roof", later, 50)  # the root ends before
    assert load(second[1]).not_valid_after_utc == load(root[1]).not_valid_after_utc
    assert load(second[1]).subject != load(site[1]).subject


@pytest.mark.parametrize("off", [-BACKDATED - timedelta(seconds=1), timedelta(days=3700), -timedelta(days=20000)])
def test_a_clock_outside_of_the_authority_is_named(root, site, off):
    for then, sign in (
        (NOW + off, lambda then: authority.issue(*site, public(), PI, 30, then)),
        (NOW + 3 * off, lambda then: authority.make_site(*root, "roof", then, 1)),
    ):
        with pytest.raises(ConfigError, match=naming(f"{then:%Y-%m-%d}")):
            sign(then)


def test_serial_numbers_are_of_one_certificate_each(site):
    serials = {authority.issue(*site, public(), PI, 30, NOW).serial for _ in range(200)}
    assert len(serials) == 200
    assert all(0 < serial < 1 << 159 for serial in serials)  # RFC 5280: positive, 20 octets at most


@pytest.mark.parametrize("revoked", [(), (5,), (7, 5, 7, 1 << 150)])
def test_a_list_of_revoked_certificates_never_runs_out(site, revoked):
    made = x509.load_pem_x509_crl(authority.revocations(*site, revoked))
    ca = load(site[1])
    assert made.is_signature_valid(ca.public_key())
    assert (made.last_update_utc, made.next_update_utc) == (ca.not_valid_before_utc, ca.not_valid_after_utc)
    assert [one.serial_number for one in made] == sorted(set(revoked))


def test_openssl_refuses_what_the_list_names(site, verify, tmp_path):
    issued = authority.issue(*site, public(), PI, 30, NOW)
    for serials, refused in (((), False), ((issued.serial,), True)):
        (tmp_path / "crl.pem").write_bytes(authority.revocations(*site, serials))
        told = verify(issued.certificate, "-crl_check", "-CRLfile", "crl.pem")
        assert ("revoked" in told) is refused
        assert bool(told) is refused


ANY_TEXT = st.text(max_size=80) | st.text("abz019-._+#/$ %AZ\n\x00\u00e9", max_size=40)


@given(ANY_TEXT)
@example("pi-03\n")
@example("\u0660")  # a digit, of Arabic
@example("a" * 33)
@example("+")
@example("#")
@example("a/b")
@example("$SYS")
@example("%u")
@example("_peer-barn")
@example("pi.side")
@example("-rf")
def test_no_other_name_is_a_devices(name):
    simple = bool(re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}\Z", name, re.ASCII)) and name == name.strip()
    assert authority.is_device_name(name) is (simple and name not in ("edge-server", "probe", "gateway"))


@pytest.mark.parametrize(
    "subject",
    [
        Subject("Pi-03", "device", "roof"),
        Subject("edge-server", "device", "roof"),
        Subject("probe", "device", "roof"),
        Subject("gateway", "device", "roof"),
        Subject("_peer-barn", "device", "roof"),
        Subject("barn", "peer", "roof"),
        Subject("_peer-", "peer", "roof"),
        Subject("_peer-a/b", "peer", "roof"),
        Subject("pi-03", "server", "roof"),
        Subject("pi-03", "probe", "roof"),
        Subject("pi-03", "gateway", "roof", ("gateway.local",)),
        Subject("pi-03", "admin", "roof"),
        Subject("pi-03", "device", "ro/of"),
        Subject("pi-03", "device", "roof", ("gateway.local",)),
        Subject("gateway", "gateway", "roof"),
        Subject("gateway", "gateway", "roof", ("a b",)),
        Subject("gateway", "gateway", "roof", ("*.local",)),
        Subject("gateway", "gateway", "roof", ("",)),
    ],
)
def test_a_name_that_is_not_its_roles_gets_no_certificate(site, subject):
    with pytest.raises(ConfigError):
        authority.issue(*site, public(), subject, 30, NOW)


def test_each_role_has_its_name(site):
    for subject in (PI, GATEWAY, Subject("edge-server", "server", "roof"), Subject("_peer-barn", "peer", "roof")):
        assert authority.issue(*site, public(), subject, 30, NOW).serial


def test_a_request_is_signed_by_its_own_key():
    csr, spki = request()
    assert authority.read_request(csr) == spki
    data = bytearray(x509.load_pem_x509_csr(csr).public_bytes(serialization.Encoding.DER))
    data[-1] ^= 1
    pem = b"-----BEGIN CERTIFICATE REQUEST-----\n" + base64.b64encode(data) + b"\n-----END CERTIFICATE REQUEST-----\n"
    with pytest.raises(WireError):
        authority.read_request(pem)


def test_keys_of_other_kinds_are_refused():
    for key in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())):
        csr, spki = request(key=key)
        with pytest.raises(WireError):
            authority.read_request(csr)
        with pytest.raises(WireError):
            authority.issue(*authority_pair(), spki, PI, 30, NOW)


def authority_pair():
    return authority.make_site(*authority.make_root("roof", NOW, 2), "roof", NOW, 1)


CSR = request()[0]


@given(st.binary(max_size=5000) | st.tuples(st.integers(0, len(CSR) - 1), st.integers(1, 255)))
@example(b"")
@example(CSR + b"x" * 5000)
def test_damaged_requests_are_refused_and_nothing_else_happens(data):
    if isinstance(data, tuple):
        at, flip = data
        damaged = bytearray(CSR)
        damaged[at] ^= flip
        data = bytes(damaged)
    with suppress(WireError):
        assert authority.read_request(data) == authority.read_request(CSR)  # a byte that means nothing was changed


def test_files_that_do_not_belong_together_are_named(root, site):
    for key, cert in ((root[0], site[1]), (b"", site[1]), (site[0], b"no certificate"), (site[1], site[0])):
        with pytest.raises(ConfigError):
            authority.issue(key, cert, public(), PI, 30, NOW)


def test_years_that_no_clock_reads_are_refused(root):
    for years in (0, -1, 101, float("nan"), float("inf")):
        with pytest.raises(ConfigError):
            authority.make_root("roof", NOW, years)
    for days in (0, -1, float("nan")):
        with pytest.raises(ConfigError):
            authority.issue(*authority_pair(), public(), PI, days, NOW)


def test_the_fingerprint_is_the_digest_of_the_der(root, tmp_path):
    (tmp_path / "root.pem").write_bytes(root[1])
    command = ["openssl", "x509", "-in", "root.pem", "-noout", "-fingerprint", "-sha256"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout  # noqa: S603
    assert told.strip().rpartition("=")[2].replace(":", "").lower() == authority.fingerprint(root[1]).hex()
