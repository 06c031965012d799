"""The root is replaced under live connections, boards move to the next by themselves, and nobody joins anew."""

from __future__ import annotations

import shutil
import ssl
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from device_agent.identity import certificates, credentials, renewal
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.credentials import CA, CERTIFICATE, CURRENT, KEY, MEMBERSHIP, Membership, read_membership
from device_agent.identity.renewal import Renewal, show_certificate
from edge_server.gateway.authority import fingerprint, public_key_of
from edge_server.gateway.broker_probe import BrokerEndpoint, open_probe
from edge_server.gateway.certificate_files import newest_root, read_chain, split_certificates
from edge_server.gateway.enrolment.service import EnrolmentService, service_context
from edge_server.gateway.enrolment.site import EnrolmentSite
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.packages.store import edit_index, find_package_faults, read_index, write_index
from edge_server.gateway.revocation.revoke import revoke
from edge_server.gateway.rotation.root import RootRotation, cross_sign, devices_on_old_root, finish_root, rotate_root
from edge_server.gateway.rotation.rotate import finish_ca, rotate_ca
from edge_server.gateway.state import read_state
from shared.errors import ConfigError, Unreachable, WireError
from shared.protocol.packages import sign, verify
from shared.transport.tls import TlsSettings
from tests.edge_server.gateway.sites import live_site, make_site, now
from tests.edge_server.gateway.test_rotate import WELL, cut_at, faults_of, run, talking
from tests.edge_server.processes import called
from tests.machine import needs_mosquitto
from tests.naming import names_all, naming
from tests.shared.protocol.test_packages import MANIFEST


def trusts(site, trusted: bytes) -> bool:
    """Tell whether who has these certificates and no others believes the gateway."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(site.folder.gateway("server.crt"), site.folder.gateway("server.key"))
    client.load_verify_locations(cadata=trusted.decode())
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there, server_hostname="gateway.local"),
        server.wrap_bio(there, back, server_side=True),
    ]
    try:
        while ends:
            with suppress(ssl.SSLWantReadError):
                ends[0].do_handshake()
                return True
            ends.reverse()
    except ssl.SSLCertVerificationError:
        return False


class Files:
    """The certificates of a site of before its root's rotation, and those of after."""

    def __init__(self, site):
        self.ca = site.folder.ca
        self.a, self.by_a = self.ca("root.crt").read_bytes(), self.ca("site.crt").read_bytes()

    def next(self):
        self.b, self.by_b = self.ca("root-next.crt").read_bytes(), self.ca("site-next.crt").read_bytes()


def believers(site, files) -> set[str]:
    """Return who believes the gateway: those who have a root alone, and boards, who have the site CA too."""
    kinds = {"A": files.a, "B": files.b, "A and B": files.a + files.b}
    kinds |= {"board of A": files.by_a + files.a, "board of B": files.by_b + files.b}
    return {name for name, trusted in kinds.items() if trusts(site, trusted)}


def test_what_is_signed_again_is_the_same_but_for_the_signer(tmp_path):
    site = make_site(tmp_path)
    files, deed = Files(site), run(rotate_root(site.folder, now()))
    files.next()
    before, after = (x509.load_pem_x509_certificate(one) for one in (files.by_a, files.by_b))
    for name in ("subject", "serial_number", "not_valid_before_utc", "not_valid_after_utc"):
        assert getattr(before, name) == getattr(after, name), name
    assert before.public_key() == after.public_key()
    assert [one for one in before.extensions if one.oid != x509.AuthorityKeyIdentifier.oid] == [
        one for one in after.extensions if one.oid != x509.AuthorityKeyIdentifier.oid
    ]
    after.verify_directly_issued_by(x509.load_pem_x509_certificate(files.b))
    assert deed.pending == ()
    with pytest.raises(ConfigError, match=naming("ca/root.key", "ca/root.crt")):
        cross_sign(site.folder.ca("root-next.key").read_bytes(), files.a, files.b)


def test_who_believes_the_gateway_before_during_and_after(tmp_path):
    site = make_site(tmp_path)
    files = Files(site)
    assert trusts(site, files.a)
    run(rotate_root(site.folder, now()))
    files.next()
    assert believers(site, files) == {"A", "A and B", "board of A", "board of B"}
    assert site.folder.ca("root.crt").read_bytes() == files.a + files.b  # of the server's own file
    assert newest_root(site.folder.ca("")) == files.b  # new tokens
    assert EnrolmentSite(site.path).root_digest() == fingerprint(files.b)
    run(finish_root(site.folder, now()))
    assert believers(site, files) == {"B", "A and B", "board of A", "board of B"}
    assert site.folder.ca("root.crt").read_bytes() == files.b
    assert split_certificates(read_chain(site.folder.ca("")))[-1] == files.b
    assert files.a not in read_chain(site.folder.ca(""))
    assert not list(site.path.glob("ca/*-next.*"))
    key = site.folder.ca("root.key").read_bytes()
    assert x509.load_pem_x509_certificate(files.b).public_key() == load_pem_private_key(key, None).public_key()
    run(rotate_ca(site.folder, now()))
    assert believers(site, files) == {"B", "A and B", "board of B"}
    assert not site.folder.ca("cross.crt").exists()


def joined(site, name: str, port: int) -> Renewal:
    """Return a board that joined before, as its agent keeps its certificate valid."""
    folder, enrolment = site.path.parent / name, EnrolmentSite(site.path)
    folder.mkdir()
    identity, key = credentials.open_identity(folder), certificates.make_key()
    used, issued = credentials.open_set(identity, "joined"), enrolment.issue(public_key_of(key), name)
    shown = certificates.select_trusted_chain(enrolment.facts().chain, enrolment.root_digest())
    about = Membership(
        device=name, site="roof", token="", host="127.0.0.1", port=port, root=enrolment.root_digest().hex(),
        broker_host="127.0.0.1", broker_port=read_state(site.path).port, not_before_utc_s=now().timestamp(),
        not_after_utc_s=issued.not_after.timestamp(),
    )  # fmt: skip
    files = {KEY: key, CA: shown, CERTIFICATE: issued.certificate, MEMBERSHIP: msgspec.json.encode(about)}
    for file, content in files.items():
        credentials.write_file(used, file, content)
    credentials.activate(identity, used)
    clock = BoardClock(utc_s=lambda: 0.0, synchronised=lambda: False)
    return Renewal(folder, clock, lambda broker: show_certificate(broker, clock))


class OwnDoor(BrokerEndpoint):
    """The broker, as a board knows it: by the certificates, the pair and the trust of its set in use."""

    def tls(self, pair):
        return TlsSettings(ca=str(pair / CA), cert=str(pair / CERTIFICATE), key=str(pair / KEY))


class SeenByBoards:
    """A site's broker for boards that have folders of their own."""

    def __init__(self, site):
        self.door = OwnDoor(site.door.host, site.door.port, site.door.trusted)

    async def lets_in(self, board: Renewal) -> bool:
        """Tell whether a board connects by the set that it has in use; its session of before ends."""
        with suppress(Unreachable):
            async with open_probe(self.door, board.identity / CURRENT):
                return True
        return False


@asynccontextmanager
async def enrolling(site):
    enrolment = EnrolmentSite(site.path)
    service = EnrolmentService(enrolment.registrar(), lambda: service_context(*enrolment.pair()))
    async with service.running("127.0.0.1", 0) as port:
        yield port


def root_of(board: Renewal) -> str:
    return read_membership(board.identity / CURRENT).root


@pytest.mark.broker
@needs_mosquitto
def test_the_root_is_replaced_while_boards_talk(tmp_path, monkeypatch):
    """One moves while both are in force, one after the end, one is an agent of before; none is refused anything."""
    monkeypatch.setattr(renewal, "VERDICT_S", 0.5)

    async def scene():
        async with live_site(tmp_path) as site, enrolling(site) as port:
            quick, late, old = (joined(site, name, port) for name in ("pi-03", "pi-04", "pi-05"))
            before, seen = root_of(quick), SeenByBoards(site)
            async with talking(seen, "pi-03", quick.identity / CURRENT), talking(seen, "pi-05", old.identity / CURRENT):
                assert await rotate_root(site.folder, now()) == RootRotation(WELL, ("pi-03", "pi-04", "pi-05"))
                assert not await quick.look()
                after = fingerprint(newest_root(site.folder.ca(""))).hex()
                assert [root_of(one) for one in (quick, late, old)] == [after, before, before]
                assert devices_on_old_root(site.folder, read_state(site.path)) == ("pi-04", "pi-05")
                new = joined(site, "pi-06", port)  # by a token of the next root
                assert not await new.look()
                assert [await seen.lets_in(one) for one in (late, new)] == [True, True]
                with pytest.raises(ConfigError, match=naming("pi-04", "pi-05", "--force")):
                    await finish_root(site.folder, now())
                assert await finish_root(site.folder, now(), force=True) == RootRotation(WELL, ("pi-04", "pi-05"))
                assert [await seen.lets_in(one) for one in (late, new)] == [True, True]
                with pytest.raises(ConfigError, match=naming("pi-04", "pi-05")):
                    await rotate_ca(site.folder, now())
                assert not await late.look()
                assert root_of(late) == after
                with pytest.raises(ConfigError, match=naming("pi-05")):
                    await rotate_root(site.folder, now())
            assert [await seen.lets_in(one) for one in (quick, late, old, new)] == [True] * 4
            assert await revoke(site.folder, "pi-05", now()) == WELL
            assert not await seen.lets_in(old)
            assert (await rotate_ca(site.folder, now())).reloaded == WELL
            assert [await seen.lets_in(one) for one in (quick, late, new)] == [True] * 3
            assert site.refusals() == []

    run(scene())


@pytest.mark.parametrize("name", ["begin", "finish"])
def test_wherever_it_is_cut_check_names_a_mend_that_works(tmp_path, monkeypatch, name):
    """And at every cut boards of either root believe the gateway."""
    site, kept, cuts = make_site(tmp_path), tmp_path / "kept", 0
    files = Files(site)
    if name == "finish":
        run(rotate_root(site.folder, now()))
        files.next()
    shutil.copytree(site.path, kept)
    deeds = {"begin": lambda: rotate_root(site.folder, now()), "finish": lambda: finish_root(site.folder, now())}
    while cut_at(monkeypatch, cuts, deeds[name]):
        assert trusts(site, files.by_a + files.a), cuts
        assert name == "begin" or trusts(site, files.by_b + files.b), cuts
        for told in faults_of(site).values():
            if "rotate-root --finish" in told:
                run(finish_root(site.folder, now()))
            else:
                assert "site init" in told, (cuts, told)
                initialise(site.folder, SiteSettings(), now())
        assert faults_of(site) == {}, cuts
        with suppress(ConfigError):  # finished by now
            run(deeds[name]())
        assert faults_of(site) == {}, cuts
        left = {path.name for path in site.path.glob("ca/*-next.*")}
        assert left == ({"root-next.crt", "root-next.key", "site-next.crt"} if name == "begin" else set()), cuts
        if name == "finish":
            key = load_pem_private_key(site.folder.ca("root.key").read_bytes(), None).public_key()
            assert x509.load_pem_x509_certificate(files.b).public_key() == key, cuts
        shutil.rmtree(site.path)
        shutil.copytree(kept, site.path)
        cuts += 1
    assert faults_of(site) == {}
    assert cuts > 5


def release(site):
    pair = (site.folder.gateway(f"packages.{ending}").read_bytes() for ending in ("key", "crt"))
    return sign(MANIFEST, *pair)


def test_packages_are_taken_by_boards_of_either_root_until_the_next_site_ca(tmp_path):
    """Root on each board writes the next root down in its own time; what was signed before is not signed anew."""
    site = make_site(tmp_path)
    files = Files(site)
    with edit_index(site.folder) as index:
        write_index(site.folder, msgspec.structs.replace(index, releases=(release(site),), next_serial=9))
    run(rotate_root(site.folder, now()))
    files.next()
    run(finish_root(site.folder, now()))
    for signed in (release(site), *read_index(site.path).releases):
        for root in (files.a, files.b):
            assert verify(signed, root).site == "roof"
    missing = {about for about, _ in find_package_faults(site.path)}
    assert missing == {f"packages/{build.file}" for build in MANIFEST.builds}
    run(rotate_ca(site.folder, now()))
    with pytest.raises(WireError, match=naming("device-agent upgrade trust")) as refused:
        verify(release(site), files.a)
    assert refused.value.reason == "certificate"
    assert verify(release(site), files.b).site == "roof"


def test_what_it_wants_first(tmp_path):
    site = make_site(tmp_path)
    with pytest.raises(ConfigError, match=naming(site.path, "edge-server site rotate-root")):
        run(finish_root(site.folder, now()))
    run(rotate_ca(site.folder, now()))
    with pytest.raises(ConfigError, match=naming("edge-server site rotate-ca --finish")):
        run(rotate_root(site.folder, now()))
    run(finish_ca(site.folder))
    key = site.folder.ca("root.key")
    kept = key.read_bytes()
    key.unlink()
    with pytest.raises(ConfigError, match=naming(key)):
        run(rotate_root(site.folder, now()))
    key.write_bytes(kept)
    run(rotate_root(site.folder, now()))
    with pytest.raises(ConfigError, match=naming("edge-server site rotate-root --finish")):
        run(rotate_ca(site.folder, now()))


def test_the_key_of_the_root_before_goes_where_the_next_ones_lies_elsewhere(tmp_path):
    site = make_site(tmp_path)
    run(rotate_root(site.folder, now()))
    site.folder.ca("root-next.key").unlink()
    run(finish_root(site.folder, now()))
    assert not site.folder.ca("root.key").exists()


def test_the_command(tmp_path, capsys):
    site = make_site(tmp_path)
    site.enrol("pi-03")
    site.enrol("_peer-yard", "peer")
    folder = ("--folder", site.path)
    assert called("site", "rotate-root", "--force", *folder) == 2
    assert called("site", "rotate-root", "--finish", *folder) == 2
    assert called("site", "rotate-root", *folder) == 0
    assert names_all(capsys.readouterr().out, "pi-03", "_peer-yard", "device-agent upgrade trust")
    assert called("site", "check", *folder) == 1  # for want of a broker
    assert names_all(capsys.readouterr().out, "ca/root-next.crt", "pi-03")
    assert called("site", "rotate-root", "--finish", *folder) == 2
    assert called("site", "rotate-root", "--finish", "--force", *folder) == 0
    assert names_all(capsys.readouterr().out, "pi-03", "edge-server revoke")


@pytest.mark.broker
@needs_mosquitto
def test_a_broker_that_knows_the_root_alone_is_restarted_first(tmp_path):
    async def scene():
        site = make_site(tmp_path)
        conf = site.path / "mosquitto.conf"
        conf.write_text(conf.read_text().replace("chain.pem", "root.crt"))  # as it was made before
        await site.start()
        try:
            with pytest.raises(ConfigError, match=naming("edge-server site init")):
                await rotate_root(site.folder, now())
            assert not site.folder.ca("root-next.crt").exists()
            assert called("site", "init", "--folder", site.path) == 0
            await site.stop()
            await site.start()
            assert await rotate_root(site.folder, now()) == RootRotation(WELL)
        finally:
            await site.stop()

    run(scene())
