"""Migration of a board to the next root, only if the trusted one signed it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from device_agent.identity import certificates, credentials, renewal
from device_agent.identity.credentials import CA, CERTIFICATE, KEY
from edge_server.gateway import authority
from edge_server.gateway.certificate_files import split_certificates
from edge_server.gateway.enrolment.registrar import SiteInfo
from edge_server.gateway.enrolment.tokens import EnrolmentEndpoint, make_token
from edge_server.gateway.rotation.root import cross_sign
from tests.device_agent.identity.test_renewal import DUE, Joined
from tests.edge_server.gateway.enrolments import (
    NOW,
    STEPS,
    Board,
    Killed,
    authorities,
    failure,
    killed_after,
    server_context,
)

KEY_A, A, KEY_S, SITE_BY_A = authorities()
MAKE = partial(authority.make_root, "roof", datetime.fromtimestamp(NOW, UTC), 20)
KEY_B, B = MAKE()
SITE_BY_B, B_BY_A = cross_sign(KEY_B, B, SITE_BY_A), cross_sign(KEY_A, A, B)
OVERLAP, FINISHED = SITE_BY_A + A + SITE_BY_B + B_BY_A + B, SITE_BY_B + B_BY_A + B
PIN_A, PIN_B = (authority.fingerprint(one).hex() for one in (A, B))


class Moving(Joined):
    """A board that joined under root A."""

    def show(self, chain):
        """Have the gateway offer these authorities."""
        self.gateway.registrar.site = lambda: SiteInfo("roof", chain, "gateway.local", 8883)

    @property
    def known(self):
        return (self.board.used / CA).read_bytes()

    def says(self):
        """Return the root that the gateway heard this board trusts."""
        return self.gateway.ledger.roots.get("pi-03")


@pytest.fixture
def board(tmp_path):
    return Moving(tmp_path)


def test_a_board_moves_says_so_once_and_keeps_key_and_certificate(board, monkeypatch):
    before = [(board.board.used / name).read_bytes() for name in (KEY, CERTIFICATE)]
    assert not board.looks()
    assert board.membership.root == board.says() == PIN_A  # as its token named it
    board.show(OVERLAP)
    assert not board.looks()
    assert board.membership.root == board.says() == PIN_B
    assert board.known == SITE_BY_B + B
    assert [(board.board.used / name).read_bytes() for name in (KEY, CERTIFICATE)] == before
    assert len(board.shown) == 1  # the broker saw it before it was put into use
    assert board.board.is_usable()
    board.gateway.ledger.roots.clear()
    monkeypatch.setattr(certificates, "verify_cross_signed_root", None)  # nothing more to judge
    assert not board.looks()
    assert board.says() == PIN_B  # another process, which does not know that it was said


def test_whoever_comes_after_the_end_moves_too_and_renews_as_before(board):
    board.show(FINISHED)
    board.gateway.now = NOW + DUE
    assert board.looks()
    assert board.membership.root == board.says() == PIN_B
    assert board.known == SITE_BY_B + B
    assert board.board.is_usable()


def test_an_agent_of_before_renews_while_both_roots_are_in_force(board, monkeypatch):
    monkeypatch.setattr(renewal, "newest_root", lambda _shown: ("", 0))  # it did not look
    board.show(OVERLAP)
    board.gateway.now = NOW + DUE
    assert board.looks()
    assert board.membership.root == PIN_A
    assert split_certificates(board.known) == [SITE_BY_A, B_BY_A, A]
    assert not board.looks()  # it knows the gateway by these


def made_a_root(key: bytes, certificate: bytes) -> bytes:
    """Return what the holder of a CA's key can make of it: a root of the same name and key, signed by itself."""
    found, private = x509.load_pem_x509_certificate(certificate), load_pem_private_key(key, None)
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    made = x509.CertificateBuilder(found.subject, found.subject, found.public_key(), 1, begin, end)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
    return made.sign(private, SHA256()).public_bytes(Encoding.PEM)


OTHER_KEY, OTHER = MAKE()
YARD_KEY, YARD = authority.make_root("yard", datetime.fromtimestamp(NOW, UTC), 20)
BY_SITE = cross_sign(KEY_S, SITE_BY_A, B)
FALSE = {
    "nobody vouches": SITE_BY_A + A + B,
    "itself": SITE_BY_A + A + B + B,
    "for another": SITE_BY_A + A + B_BY_A + OTHER,
    "the site CA, by whose key who took over a gateway signs": SITE_BY_A + A + BY_SITE + B,
    "for the site CA, which that one made a root": A + SITE_BY_A + made_a_root(KEY_S, SITE_BY_A),
    "the site CA as a root": B + B_BY_A + A + SITE_BY_A,
    "another root": SITE_BY_A + A + cross_sign(OTHER_KEY, OTHER, B) + B,
    "for a root of another site": SITE_BY_A + A + cross_sign(KEY_A, A, YARD) + YARD,
    "a root that did not sign itself": SITE_BY_A + A + B_BY_A + cross_sign(OTHER_KEY, OTHER, B),
    "for an authority that is no root": SITE_BY_A + A + SITE_BY_A + SITE_BY_B,
}


@pytest.mark.parametrize("shown", FALSE.values(), ids=FALSE)
def test_a_root_for_which_the_own_one_does_not_vouch_is_refused(board, shown):
    before = board.membership
    board.show(shown)
    assert failure(board.looks).code == certificates.OTHER_CA
    assert board.membership.root == before.root
    assert board.shown == []
    assert board.known == SITE_BY_A + A
    board.gateway.now = NOW + DUE  # and a certificate that ends is renewed all the same
    assert failure(board.looks).code == certificates.OTHER_CA
    assert board.membership.not_after_utc_s > before.not_after_utc_s
    assert board.membership.root == PIN_A


@pytest.mark.parametrize(
    "shown",
    [b"", b"no certificate", A[:-40], OVERLAP[:-30]],
    ids=["nothing", "words", "a cut root", "two cut roots"],
)
def test_what_is_no_certificate_is_passed_over(board, shown):
    board.show(shown)
    assert not board.looks()
    assert board.membership.root == PIN_A


def test_a_false_gateway_is_asked_nothing(board, tmp_path):
    """Who has another root's certificate and the right name is not the gateway, whatever it offers."""
    key = authority.make_key()
    site_key, site = authority.make_site(OTHER_KEY, OTHER, "roof", datetime.fromtimestamp(NOW, UTC), 10)
    subject = authority.Subject("gateway", "gateway", "roof", ("127.0.0.1",))
    at = datetime.fromtimestamp(NOW, UTC)
    pair = key, authority.issue(site_key, site, authority.public_key_of(key), subject, 365, at).certificate + site
    board.context = server_context(tmp_path / "false", pair)
    board.show(SITE_BY_A + A + SITE_BY_B + B_BY_A + B)
    refused = failure(board.looks)
    assert (refused.code, "127.0.0.1" in str(refused)) == (certificates.OTHER_CA, True)
    assert board.membership.root == PIN_A


def test_a_broker_that_does_not_take_it_leaves_all_as_it_was(board):
    board.show(OVERLAP)
    board.refusal = "it hangs up"
    assert "it hangs up" in str(failure(board.looks))
    assert board.membership.root == board.says() == PIN_A
    assert board.known == SITE_BY_A + A
    board.refusal = ""
    board.looks()
    assert board.membership.root == PIN_B


def test_a_move_may_be_killed_at_every_step(board, tmp_path):
    """A set that belongs together is in use after each kill, and the next look ends the move."""
    identity = board.board.state / credentials.FOLDER
    board.looks()
    shutil.copytree(identity, tmp_path / "kept", symlinks=True)
    board.show(OVERLAP)
    for steps in range(1, STEPS):
        with killed_after(steps) as left, suppress(Killed):
            board.looks()
        assert (board.membership.root, board.known) in ((PIN_A, SITE_BY_A + A), (PIN_B, SITE_BY_B + B))
        assert board.board.is_usable()
        if left[0] > 0:
            break
        board.looks()
        assert (board.membership.root, board.known, board.says()) == (PIN_B, SITE_BY_B + B, PIN_B)
        shutil.rmtree(identity)
        shutil.copytree(tmp_path / "kept", identity, symlinks=True)
    assert 10 < steps < STEPS - 1


def test_who_joins_again_by_the_token_of_before_keeps_the_root_that_it_moved_to(board):
    token = board.gateway.token()
    board.board.joins(board.gateway, board.context, token)
    board.show(OVERLAP)
    board.looks()
    board.board.joins(board.gateway, board.context, token)
    assert (board.membership.token, board.membership.root, board.known) == (token.id, PIN_B, SITE_BY_B + B)
    assert board.says() == PIN_B


def test_a_token_of_the_next_root_joins_while_the_gateway_shows_the_copy_by_the_one_before(board, tmp_path):
    board.show(OVERLAP)
    new = Board(tmp_path / "new")
    token, kept = make_token("pi-07", EnrolmentEndpoint("127.0.0.1", 8443, bytes.fromhex(PIN_B)), 900.0, NOW)
    board.gateway.ledger.tokens[token.id] = kept
    new.joins(board.gateway, board.context, token)
    assert (new.used / CA).read_bytes() == SITE_BY_B + B
    assert board.gateway.ledger.roots == {"pi-03": PIN_A, "pi-07": PIN_B}
