"""Who gets a certificate, and who does not."""

import base64
import logging

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from edge_server.gateway.enrolment.rate_limit import BURST, MOST_SOURCES, PER_S, RateLimit
from edge_server.gateway.enrolment.registrar import LATE_S, Request
from shared.protocol.enrolment import JoinAnswer, Refusal, RenewAnswer
from tests.edge_server.gateway.enrolments import Gateway, new_key, public_of, request_of

DAY_S = 86_400.0
DER = Encoding.DER
KEYS = [new_key() for _ in range(3)]


def reason(answer) -> str:
    assert 400 <= answer.status < 500
    return msgspec.json.decode(answer.body, type=Refusal).reason


def certificate(answer) -> x509.Certificate:
    assert answer.status == 200
    told = msgspec.json.decode(answer.body, type=RenewAnswer)
    return x509.load_pem_x509_certificate(told.certificate.encode())


def test_a_board_gets_the_name_of_its_token_and_not_the_one_it_asks_for():
    gateway = Gateway()
    token = gateway.token("pi-03")
    request = request_of(KEYS[0], "edge-server").decode()
    answer = gateway.post("/join", {"token": token.id, "secret": token.secret, "request": request})
    found = certificate(answer)
    told = msgspec.json.decode(answer.body, type=JoinAnswer)
    assert (told.device, told.site, told.broker_host, told.broker_port) == ("pi-03", "roof", "gateway.local", 8883)
    names = [
        found.subject.get_attributes_for_oid(oid)[0].value
        for oid in (NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME)
    ]
    assert names == ["pi-03", "device"]
    assert found.public_key() == KEYS[0].public_key()
    assert token.secret.encode() not in msgspec.json.encode(gateway.ledger)


def test_a_join_that_was_interrupted_is_repeated_by_the_same_key_alone(caplog):
    gateway = Gateway()
    token = gateway.token()
    first = gateway.join(token, KEYS[0])
    assert gateway.join(token, KEYS[0]) == first  # no second certificate
    with caplog.at_level(logging.ERROR):
        assert reason(gateway.join(token, KEYS[1])) == "used"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    [alarm] = gateway.ledger.tokens[token.id].alarms
    assert alarm.source == "192.0.2.7"
    assert gateway.issued == [(public_of(KEYS[0]), "pi-03")]
    assert gateway.join(token, KEYS[0]) == first  # the thief changed nothing


def test_a_closed_token_gives_nothing_to_anybody():
    gateway = Gateway()
    token = gateway.token()
    gateway.join(token, KEYS[0])
    said = {"token": token.id, "secret": token.secret}
    assert gateway.post("/joined", said).status == 200
    assert gateway.post("/joined", said).status == 200  # the answer may have been lost
    assert reason(gateway.join(token, KEYS[0])) == "used"
    assert not gateway.ledger.tokens[token.id].alarms  # by its own board is no alarm
    assert reason(gateway.join(token, KEYS[1])) == "used"
    assert len(gateway.ledger.tokens[token.id].alarms) == 1
    assert len(gateway.issued) == 1


def test_a_token_that_nobody_used_is_not_closed():
    gateway = Gateway()
    token = gateway.token()
    assert reason(gateway.post("/joined", {"token": token.id, "secret": token.secret})) == "unknown"
    assert gateway.join(token, KEYS[0]).status == 200


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"secret": "A" * 22}, "unknown"),
        ({"secret": ""}, "unknown"),
        ({"token": "aaaaaa"}, "unknown"),
        ({"request": "no request"}, "request"),
        ({"device": "pi-04"}, "device"),
        ({"more": 1}, "malformed"),
        ({"token": 7}, "malformed"),
    ],
)
def test_a_join_that_is_wrong_gets_nothing_and_binds_nothing(changed, expected):
    gateway = Gateway()
    token = gateway.token()
    assert reason(gateway.join(token, KEYS[0], changed)) == expected
    assert gateway.issued == []
    assert gateway.join(token, KEYS[1], {"device": "pi-03"}).status == 200


def test_a_request_that_another_key_signed_is_refused():
    gateway = Gateway()
    token = gateway.token()
    pem = request_of(KEYS[0])
    der = bytearray(x509.load_pem_x509_csr(pem).public_bytes(DER))
    der[-1] ^= 1
    body = (
        b"-----BEGIN CERTIFICATE REQUEST-----\n"
        + base64.encodebytes(bytes(der))
        + b"-----END CERTIFICATE REQUEST-----\n"
    )
    assert reason(gateway.join(token, KEYS[0], {"request": body.decode()})) == "request"
    assert gateway.issued == []


def test_time_and_the_operator_end_a_token():
    gateway = Gateway()
    late, withdrawn = gateway.token(ttl_s=900), gateway.token()
    gateway.now += 899
    assert gateway.join(late, KEYS[0]).status == 200
    gateway.now += 1
    assert reason(gateway.join(late, KEYS[0])) == "expired"
    gateway.ledger.tokens[withdrawn.id] = msgspec.structs.replace(gateway.ledger.tokens[withdrawn.id], revoked=True)
    assert reason(gateway.join(withdrawn, KEYS[0])) == "revoked"


def test_one_address_is_slowed_down_and_others_are_not():
    gateway = Gateway()
    token = gateway.token()
    for _ in range(int(BURST)):
        assert reason(gateway.join(token, KEYS[0], {"secret": "A" * 22})) == "unknown"
    refused = gateway.join(token, KEYS[0])
    assert (refused.status, reason(refused), refused.retry_s) == (429, "busy", 1 / PER_S)
    assert gateway.post("/joined", {}, source="192.0.2.8").status == 400
    gateway.now += 1 / PER_S
    assert gateway.join(token, KEYS[0]).status == 200


def test_the_rate_limit_forgets_rather_than_grows():
    now = 0.0
    limit = RateLimit(lambda: now)
    for index in range(3 * MOST_SOURCES):
        assert limit.wait_s(f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}") == 0
    assert len(limit.attempts) == MOST_SOURCES
    for index in range(int(BURST)):
        assert limit.wait_s(f"2001:db8::{index}") == 0
    assert limit.wait_s("2001:db8::ffff") > 0  # the same network
    assert limit.wait_s("2001:db8:0:1::1") == 0


def test_a_certificate_is_renewed_for_its_own_key_alone():
    gateway = Gateway()
    found = certificate(gateway.join(gateway.token(), KEYS[0]))
    peer = found.public_bytes(DER)
    gateway.now += 250 * DAY_S
    again = certificate(gateway.post("/renew", {"request": request_of(KEYS[0]).decode()}, peer=peer))
    assert again.public_key() == found.public_key()
    assert again.subject == found.subject
    assert again.not_valid_after_utc > found.not_valid_after_utc
    for peered, key in ((peer, KEYS[1]), (b"", KEYS[0])):
        assert reason(gateway.post("/renew", {"request": request_of(key).decode()}, peer=peered)) == "request"
    gateway.revoke(KEYS[0])
    assert reason(gateway.post("/renew", {"request": request_of(KEYS[0]).decode()}, peer=peer)) == "revoked"


def test_after_its_end_the_same_key_renews_for_half_a_year_then_the_operator_must():
    gateway = Gateway()
    found = certificate(gateway.join(gateway.token(), KEYS[0]))
    body = {"request": request_of(KEYS[0]).decode()}
    assert reason(gateway.post("/renew-expired", {"request": request_of(KEYS[1]).decode()})) == "unknown"
    gateway.now = found.not_valid_after_utc.timestamp() + LATE_S + DAY_S
    assert reason(gateway.post("/renew-expired", body)) == "approval"
    [key] = gateway.ledger.pending.values()
    gateway.ledger.approved["pi-03"] = key
    assert certificate(gateway.post("/renew-expired", body)).public_key() == found.public_key()
    assert gateway.ledger.pending == gateway.ledger.approved == {}
    gateway.revoke(KEYS[0])
    assert reason(gateway.post("/renew-expired", body)) == "revoked"


def test_what_is_no_request_of_the_protocol_is_not_found():
    gateway = Gateway()
    assert gateway.registrar.answer(Request("GET", "/ca.pem")).body.count(b"BEGIN CERTIFICATE") == 2
    for method, path in (("GET", "/join"), ("POST", "/ca.pem"), ("DELETE", "/join"), ("GET", "/../ca/site.key")):
        assert gateway.registrar.answer(Request(method, path)).status == 404
