"""Certificate renewal over real TLS: schedule, key in use, interruptions."""

from __future__ import annotations

import asyncio
import logging
import shutil
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from device_agent.identity import credentials
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.credentials import CERTIFICATE, KEY, Membership, read_membership
from device_agent.identity.renewal import CHECK_S, FIRST_S, RETRY_S, Renewal
from shared.errors import EnrolmentFailed
from tests.edge_server.gateway.enrolments import (
    DAY_S,
    NOW,
    STEPS,
    Board,
    Gateway,
    Killed,
    failure,
    killed_after,
    server_context,
    serving,
)

DUE = 260 * DAY_S
"""Of a year, less than a third is left then."""


class Joined:
    """A board that joined a gateway, whose clock is moved."""

    def __init__(self, folder, *, at=NOW, made=NOW, clock=None):
        self.board = Board(folder / "board", clock)
        self.gateway, self.context = Gateway(now=at, made=made), server_context(folder / "gw", made=made)
        self.board.joins(self.gateway, self.context)
        self.refusal = ""
        self.shown = []

    async def prove(self, broker):
        self.shown.append(broker)
        return self.refusal

    def looks(self) -> bool:
        """Have the board look whether it is time, at a gateway that serves for so long."""

        async def run():
            async with serving(self.gateway, self.context) as port:
                self.move_to(port)
                return await Renewal(self.board.state, self.board.clock, self.prove).look()

        return asyncio.run(run())

    def move_to(self, port):
        """Have the board's set name the port that the gateway serves on this time."""
        path = self.board.used / credentials.MEMBERSHIP
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(self.membership, port=port)))

    @property
    def membership(self) -> Membership:
        found = read_membership(self.board.used)
        assert found
        return found

    @property
    def certificate(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate((self.board.used / CERTIFICATE).read_bytes())


def test_a_certificate_is_renewed_when_a_third_is_left_and_not_before(tmp_path):
    joined = Joined(tmp_path)
    before, key = joined.certificate, (joined.board.used / KEY).read_bytes()
    joined.gateway.now = NOW + 200 * DAY_S
    assert not joined.looks()
    joined.gateway.now = NOW + DUE
    assert joined.looks()
    assert (joined.board.used / KEY).read_bytes() == key
    assert joined.certificate.public_key() == before.public_key()
    assert joined.certificate.subject == before.subject
    assert joined.membership.not_after_utc_s == joined.certificate.not_valid_after_utc.timestamp()
    assert joined.membership.not_after_utc_s > before.not_valid_after_utc.timestamp() + 200 * DAY_S
    assert joined.board.is_usable()
    identity = joined.board.state / credentials.FOLDER
    assert len([path for path in identity.iterdir() if path.is_dir() and not path.is_symlink()]) == 1
    assert not joined.looks()
    [shown] = joined.shown
    assert shown.tls.cert != str(joined.board.used / CERTIFICATE)  # the new set was shown before it was in use


def test_boards_renew_at_moments_of_their_own():
    life = Membership(
        device="", site="roof", token="", host="", port=1, root="", broker_host="", broker_port=1,
        not_before_utc_s=0.0, not_after_utc_s=300 * DAY_S,
    )  # fmt: skip
    renewal = Renewal(None, BoardClock(), None)  # type: ignore[arg-type] - neither is asked
    due = [renewal.due_utc_s(msgspec.structs.replace(life, device=f"pi-{number}")) for number in range(200)]
    assert len(set(due)) == 200
    assert 190 * DAY_S - 1 <= min(due) < 195 * DAY_S
    assert 205 * DAY_S < max(due) <= 210 * DAY_S + 1


def test_a_certificate_that_the_broker_does_not_take_is_not_used(tmp_path):
    joined = Joined(tmp_path)
    before = joined.certificate
    joined.gateway.now = NOW + DUE
    joined.refusal = "unknown CA"
    assert "unknown CA" in str(failure(joined.looks))
    assert joined.certificate == before
    assert joined.board.is_usable()
    joined.refusal = ""
    assert joined.looks()
    assert joined.certificate != before


def test_a_renewal_may_be_killed_at_every_step(tmp_path):
    """A pair that belongs together is in use after each kill, and the next look renews."""
    joined = Joined(tmp_path)
    before, identity = joined.certificate, joined.board.state / credentials.FOLDER
    shutil.copytree(identity, tmp_path / "kept", symlinks=True)
    joined.gateway.now = NOW + DUE
    for steps in range(1, STEPS):
        joined.gateway.registrar.renewals.attempts.clear()  # hours lie between looks that were killed
        with killed_after(steps) as left, suppress(Killed):
            joined.looks()
        assert joined.board.is_usable()
        if left[0] > 0:
            break
        joined.looks()
        assert joined.board.is_usable()
        assert joined.certificate != before
        shutil.rmtree(identity)
        shutil.copytree(tmp_path / "kept", identity, symlinks=True)
    assert 10 < steps < STEPS - 1


@pytest.mark.parametrize("late_days", [1, 179])
def test_after_its_end_the_same_key_renews(tmp_path, late_days):
    """A year in a drawer, and then some: no hands, as long as nobody revoked it."""
    made = NOW - 700 * DAY_S
    joined = Joined(tmp_path, at=NOW - (365 + late_days) * DAY_S, made=made, clock=unkept(NOW))
    joined.gateway.now = NOW
    assert joined.certificate.not_valid_after_utc.timestamp() < NOW
    assert joined.looks()
    assert joined.certificate.not_valid_after_utc.timestamp() > NOW


def test_later_the_operator_must_approve_it(tmp_path):
    joined = Joined(tmp_path, at=NOW - 600 * DAY_S, made=NOW - 700 * DAY_S, clock=unkept(NOW))
    joined.gateway.now = NOW
    assert failure(joined.looks).reason == "approval"
    assert joined.gateway.ledger.pending
    joined.gateway.ledger.approved.update(joined.gateway.ledger.pending)
    assert joined.looks()


def test_a_revoked_board_renews_nothing(tmp_path):
    joined = Joined(tmp_path)
    joined.gateway.revoke(load_pem_private_key((joined.board.used / KEY).read_bytes(), None))
    joined.gateway.now = NOW + DUE
    assert failure(joined.looks).reason == "revoked"
    joined.gateway.now = NOW + 366 * DAY_S
    assert failure(joined.looks).reason == "revoked"


def unkept(utc_s: float) -> BoardClock:
    return BoardClock(utc_s=lambda: utc_s, synchronised=lambda: False)


@pytest.mark.parametrize("year", [1970, 2038])
def test_a_board_with_a_wrong_clock_renews_by_the_sites_time(tmp_path, year):
    joined = Joined(tmp_path, clock=unkept(datetime(year, 1, 2, tzinfo=UTC).timestamp()))
    assert not joined.looks()
    joined.gateway.now = NOW + DUE
    assert joined.looks()
    assert not joined.looks()


@pytest.mark.parametrize("days", [-2, 2])
def test_a_gateway_two_days_off_renews(tmp_path, days):
    joined = Joined(tmp_path, at=NOW + days * DAY_S)
    joined.gateway.now += DUE
    assert joined.looks()
    assert joined.board.is_usable()


def test_a_board_that_joined_nowhere_asks_nobody(tmp_path):
    renewal = Renewal(tmp_path, unkept(NOW), None)  # type: ignore[arg-type] - it is not asked
    assert asyncio.run(renewal.look()) is False


def test_it_looks_now_and_then_and_says_once_what_is_wrong(tmp_path, virtually, caplog):
    class Failing(Renewal):
        looks: list[float]

        async def look(self) -> bool:
            self.looks.append(asyncio.get_running_loop().time())
            if len(self.looks) <= 3:
                raise EnrolmentFailed("nobody answers", code=5)
            return False

    renewal = Failing(tmp_path, unkept(NOW), None)  # type: ignore[arg-type] - it is not asked
    renewal.looks = []

    async def go():
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * 86_400):
                await renewal.run()

    with caplog.at_level(logging.WARNING):
        virtually(go())
    assert caplog.text.count("nobody answers") == 1
    first, *_ = renewal.looks
    waits = [later - at for at, later in zip(renewal.looks, renewal.looks[1:], strict=False)]
    assert FIRST_S[0] <= first <= FIRST_S[1]
    assert all(RETRY_S[0] <= wait <= RETRY_S[1] for wait in waits[:3])
    assert all(CHECK_S[0] <= wait <= CHECK_S[1] for wait in waits[3:])
    assert len(waits) > 6
