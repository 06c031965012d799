"""What a gateway says of the agent's packages: read within bounds, and believed of its own site's signer alone."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from math import inf

import msgspec
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edge_server.gateway.authority import Subject, issue, make_key, make_root, make_site, public_key_of
from shared.errors import ConfigError, FieldFleetError, WireError
from shared.protocol.packages import (
    AGENT,
    FORMAT,
    MOST_SIGNED,
    PREFIX,
    Build,
    PackageManifest,
    SignedManifest,
    canonical_bytes,
    decode_manifest,
    decode_signed_manifest,
    encode_signed_manifest,
    find_build,
    sign,
    verify,
)
from tests.naming import naming

NOW = datetime(2026, 11, 23, tzinfo=UTC)
PI = Build(file="fieldfleet-agent_0.4.0_arm64.deb", arch="arm64", python="3.11", sha256="ab" * 32, size=3_800_000)
PC = Build(file="fieldfleet-agent_0.4.0_amd64.deb", arch="amd64", python="3.11", sha256="cd" * 32, size=3_900_000)
MANIFEST = PackageManifest(
    name=AGENT,
    version="0.4.0",
    serial=3,
    site="roof",
    created="2026-11-23T21:00:00Z",
    builds=(PI, PC),
    formats={"releases": 2, "journal": 1},
)
replace = msgspec.structs.replace


class Site:
    """A site's authorities, and pairs of theirs."""

    def __init__(self, name="roof"):
        self.name = name
        root_key, self.root = make_root(name, NOW, 30)
        self.key, self.ca = make_site(root_key, self.root, name, NOW, 15)

    def pair(self, role="packages", name="_packages", site="", addresses=()):
        key = make_key()
        subject = Subject(name, role, site or self.name, addresses)
        return key, issue(self.key, self.ca, public_key_of(key), subject, inf, NOW).certificate + self.ca


@pytest.fixture(scope="module")
def roof():
    return Site()


@pytest.fixture(scope="module")
def pair(roof):
    return roof.pair()


@pytest.fixture(scope="module")
def signed(pair):
    return sign(MANIFEST, *pair)


def test_what_was_signed_is_believed_and_comes_back_as_it_was(roof, signed):
    again = decode_signed_manifest(encode_signed_manifest(signed))
    assert again == signed
    assert verify(again, roof.root) == replace(MANIFEST, builds=(PC, PI))


def test_one_manifest_is_always_the_same_bytes():
    swapped = replace(MANIFEST, builds=(PC, PI), formats={"journal": 1, "releases": 2})
    assert canonical_bytes(swapped) == canonical_bytes(MANIFEST)
    assert decode_manifest(canonical_bytes(MANIFEST)) == replace(MANIFEST, builds=(PC, PI))


def test_no_byte_of_it_may_be_another(roof, signed):
    """Every bit of the manifest and of the signature is covered: one that is turned over is refused."""
    for place in range(len(signed.manifest)):
        data = bytearray(signed.manifest)
        data[place] ^= 1 << place % 8
        with pytest.raises(WireError) as refused:
            verify(replace(signed, manifest=bytes(data)), roof.root)
        assert refused.value.reason == "signature"
    for place in range(len(signed.signature)):
        data = bytearray(signed.signature)
        data[place] ^= 1 << place % 8
        with pytest.raises(WireError) as refused:
            verify(replace(signed, signature=bytes(data)), roof.root)
        assert refused.value.reason == "signature"


def test_damaged_files_are_refused_and_nothing_else(roof, signed):
    """Ten thousand files in which bytes were changed, cut and doubled: read as signed, or refused by our errors."""
    chance = random.Random(22)
    whole = encode_signed_manifest(signed)
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(data))
            cut = data[place : place + chance.randint(0, 40)]
            data[place : place + chance.choice((0, 1, 20))] = chance.choice((b"", cut, chance.randbytes(2)))
        try:
            found = verify(decode_signed_manifest(bytes(data)), roof.root)
        except FieldFleetError:
            continue
        assert canonical_bytes(found) == signed.manifest


@pytest.mark.parametrize(
    ("role", "name", "addresses"),
    [("device", "pi-03", ()), ("server", "edge-server", ()), ("gateway", "gateway", ("gateway.local",))],
)
def test_nobody_else_of_the_site_signs_packages(roof, role, name, addresses):
    with pytest.raises(WireError, match=naming(name)) as refused:
        verify(sign(MANIFEST, *roof.pair(role, name, addresses=addresses)), roof.root)
    assert refused.value.reason == "certificate"


def test_no_device_can_be_given_the_signers_name_or_unit(roof):
    for role, name in (("device", "_packages"), ("packages", "pi-03"), ("peer", "_packages")):
        with pytest.raises(ConfigError):
            roof.pair(role, name)


def test_another_site_is_not_believed(roof, signed):
    other = Site()  # of the same name
    with pytest.raises(WireError, match="upgrade trust"):
        verify(signed, other.root)
    mixed = sign(MANIFEST, *other.pair())
    with pytest.raises(WireError):
        verify(replace(mixed, certificates=mixed.certificates + roof.ca.decode()), roof.root)
    assert verify(signed, other.root + roof.root)  # while a root is replaced, both are trusted
    with pytest.raises(WireError) as refused:
        verify(sign(replace(MANIFEST, site="yard"), *roof.pair()), roof.root)
    assert refused.value.reason == "site"


def test_a_ca_signs_no_packages_itself(roof):
    """Neither the CA, nor who signs packages in its place: a signer's certificate makes no other signer."""
    with pytest.raises(WireError):
        verify(sign(MANIFEST, roof.key, roof.ca + roof.ca), roof.root)
    key, certificates = roof.pair()
    leaf = certificates.split(roof.ca)[0]
    with pytest.raises(WireError):
        verify(sign(MANIFEST, key, leaf), roof.root)  # nobody vouches for it
    with pytest.raises(WireError):
        verify(sign(MANIFEST, key, leaf + leaf), roof.root)


def test_a_signature_for_something_else_is_none(roof, signed, pair):
    private = serialization.load_pem_private_key(pair[0], None)
    for said in (signed.manifest, PREFIX[:-1] + signed.manifest):
        with pytest.raises(WireError) as refused:
            verify(replace(signed, signature=private.sign(said, ec.ECDSA(hashes.SHA256()))), roof.root)
        assert refused.value.reason == "signature"


def test_without_a_root_nothing_is_believed(signed):
    for roots in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        with pytest.raises(ConfigError, match="root"):
            verify(signed, roots)


def test_a_key_of_another_certificate_signs_nothing(roof, pair):
    with pytest.raises(ConfigError, match="site init"):
        sign(MANIFEST, make_key(), pair[1])
    with pytest.raises(ConfigError, match="site init"):
        sign(MANIFEST, b"none", pair[1])


def test_a_newer_form_says_so_and_what_to_do(pair, roof):
    newer = sign(replace(MANIFEST, format=FORMAT + 1), *pair)
    with pytest.raises(ConfigError, match=naming(FORMAT + 1, "apt install")):
        verify(newer, roof.root)


def test_what_a_newer_gateway_adds_is_passed_over():
    data = canonical_bytes(MANIFEST)[:-1] + b',"news":[1]}'
    assert decode_manifest(data) == replace(MANIFEST, builds=(PC, PI))


BAD_FIELDS = [
    {"name": "another"},
    {"version": "../0.4"},
    {"version": ""},
    {"version": "current"},
    {"serial": 0},
    {"site": "a/b"},
    {"created": "today\n"},
    {"builds": ()},
    {"builds": (PI, PI)},
    {"builds": (PI, msgspec.structs.replace(PC, file=PI.file))},
    {"formats": {"../x": 1}},
    {"formats": {"journal": -1}},
    {"formats": {f"n{number}": 1 for number in range(65)}},
]


@pytest.mark.parametrize("change", BAD_FIELDS, ids=str)
def test_what_cannot_be_a_version_is_none(change):
    known = {name: getattr(MANIFEST, name) for name in MANIFEST.__struct_fields__}
    with pytest.raises(ValueError, match=r"[a-z]"):
        PackageManifest(**{**known, **change})
    with pytest.raises(WireError) as refused:
        decode_manifest(msgspec.json.encode({**known, **change}))
    assert refused.value.reason == "malformed"


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../x.deb"},
        {"file": "/etc/x.deb"},
        {"file": "x.sh"},
        {"file": ".x.deb"},
        {"arch": "mips"},
        {"python": "2.7"},
        {"sha256": "AB" * 32},
        {"size": 0},
        {"size": 1 << 31},
    ],
    ids=str,
)
def test_what_cannot_be_a_package_is_none(change):
    known = {name: getattr(PI, name) for name in PI.__struct_fields__}
    body = {**msgspec.json.decode(canonical_bytes(MANIFEST)), "builds": [{**known, **change}]}
    with pytest.raises(WireError):
        decode_manifest(msgspec.json.encode(body))


def test_bytes_without_bounds_are_not_read():
    with pytest.raises(WireError):
        decode_signed_manifest(b" " * (MOST_SIGNED + 1))
    with pytest.raises(WireError):
        decode_manifest(b" " * (MOST_SIGNED + 1))
    with pytest.raises(WireError):
        decode_signed_manifest(b"[" * 100_000)


def test_each_board_finds_its_package_or_hears_what_there_is():
    assert find_build(MANIFEST, "arm64", "3.11") == PI
    with pytest.raises(ConfigError, match=naming("amd64", "3.11", "arm64", "3.13", "packages add")):
        find_build(replace(MANIFEST, builds=(PC,)), "arm64", "3.13")


def test_certificates_without_end_are_not_followed(roof, pair):
    many = pair[1] + roof.ca * 300
    with pytest.raises(WireError):
        verify(SignedManifest(manifest=b"{}", signature=b"", certificates=many.decode()), roof.root)
