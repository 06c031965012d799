"""Certificate database: constant cost at twenty thousand entries, safe under kills."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from contextlib import closing, suppress

import msgspec
import pytest

from edge_server.gateway.enrolment import accounts as accounts_module
from edge_server.gateway.enrolment.accounts import FILE, Accounts, SignedCertificate, SiteAccount, write_accounts
from edge_server.gateway.enrolment.site import EnrolmentSite
from edge_server.gateway.revocation.denied import read_denied
from edge_server.gateway.revocation.revoke import revoke
from edge_server.gateway.state import read_state, revoked_serials, with_account, write_state
from shared.errors import ConfigError
from tests.edge_server.gateway.enrolments import NOW, new_key, public_of
from tests.edge_server.gateway.sites import make_site, now
from tests.naming import naming

MANY = 20_000


def signed(number: int, *, revoked: bool = False) -> SignedCertificate:
    return SignedCertificate(
        serial=f"{number:x}", authority="ca", role="device", key=f"{number:064x}", not_after_utc_s=NOW, revoked=revoked
    )


def boards(count: int) -> dict[str, SiteAccount]:
    return {f"b-{number}": SiteAccount(certificates=(signed(number),)) for number in range(count)}


class Asked:
    """Counts what is read of a site's accounts, and how."""

    def __init__(self, monkeypatch) -> None:
        self.queries: list[tuple[str, tuple[str, ...]]] = []
        self.rows = 0
        asking = Accounts.ask

        def ask(accounts, query, *given):
            found = asking(accounts, query, *given)
            self.queries.append((query, given))
            self.rows += len(found)
            return found

        monkeypatch.setattr(Accounts, "ask", ask)

    def scans(self, path) -> list[str]:
        """Return the queries that look at every row."""
        with closing(sqlite3.connect(path)) as connection:
            plans = [connection.execute(f"EXPLAIN QUERY PLAN {query}", given) for query, given in self.queries]
            told = [(query, row[-1]) for (query, _), plan in zip(self.queries, plans, strict=True) for row in plan]
        return [query for query, how in told if how.startswith("SCAN") and "USING" not in how]


def test_one_of_many_is_signed_found_and_revoked_without_a_look_at_the_others(tmp_path, monkeypatch):
    site = make_site(tmp_path)
    write_accounts(site.path, boards(MANY))
    settings = (site.path / "state.json").stat()
    enrolment, public = EnrolmentSite(site.path, utc_s=lambda: NOW), public_of(new_key())
    asked = Asked(monkeypatch)
    for _ in range(2):  # joined, and renewed
        enrolment.issue(public, "pi-03")
    [*_, last] = read_state(site.path).accounts["pi-03"].certificates
    assert enrolment.find_holder(last.key).device == "pi-03"
    assert enrolment.find_holder(f"{MANY - 1:064x}").device == f"b-{MANY - 1}"
    assert enrolment.find_holder("nobody's") is None
    assert (site.path / "state.json").stat() == settings  # nothing is written but what is new
    assert not enrolment.is_denied("pi-03")
    asyncio.run(revoke(site.folder, "pi-03", now()))
    assert enrolment.is_denied("pi-03")
    assert read_denied(site.path) == {"pi-03"}
    assert enrolment.find_holder(last.key).revoked
    assert asked.rows < 100
    assert asked.scans(site.path / FILE) == []
    assert len(revoked_serials(read_state(site.path), last.authority)) == 3  # and the one that probes are refused by
    assert len(read_state(site.path).accounts) > MANY


def test_accounts_are_as_they_were_put_and_changed(tmp_path):
    kept = boards(5) | {"_peer-barn": SiteAccount(), "_server": SiteAccount(denied=True)}
    write_accounts(tmp_path, kept)
    found = Accounts(tmp_path / FILE)
    assert found == kept
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert found.find_by_prefix("_peer-") == ["_peer-barn"]
    changed = found.with_account("b-1", SiteAccount(certificates=(signed(1, revoked=True), signed(7)), denied=True))
    assert found == kept
    for one in (changed, Accounts(tmp_path / FILE)):
        assert one.denied_names() == ["_server", "b-1"] if one is changed else ["_server"]
        write_accounts(tmp_path, changed)
    assert Accounts(tmp_path / FILE) == changed
    assert Accounts(tmp_path / FILE).denied_names() == ["_server", "b-1"]
    assert Accounts(tmp_path / FILE).revoked_serials("ca") == [1]
    assert Accounts(tmp_path / FILE).find_by_key(f"{7:064x}") == ["b-1"]
    assert changed.find_by_key(f"{4:064x}") == ["b-4"]


def test_a_state_of_before_is_read_and_goes_over_at_the_first_change(tmp_path):
    """Version 1 had all accounts in one file."""
    old = {"version": 1, "site": "roof", "generation": 3, "accounts": boards(3) | {"x": SiteAccount(denied=True)}}
    (tmp_path / "state.json").write_bytes(msgspec.json.encode(old))
    state = read_state(tmp_path)
    assert (state.accounts, state.generation) == (old["accounts"], 3)
    assert read_denied(tmp_path) == {"x"}
    assert not (tmp_path / FILE).exists()
    write_state(tmp_path, with_account(state, "b-0", SiteAccount(denied=True)))
    assert b"b-1" not in (tmp_path / "state.json").read_bytes()
    assert read_denied(tmp_path) == {"b-0", "x"}
    assert read_state(tmp_path).accounts == {**old["accounts"], "b-0": SiteAccount(denied=True)}


def test_a_change_that_is_cut_short_leaves_what_was_there(tmp_path, monkeypatch):
    write_accounts(tmp_path, boards(3))

    class Killed(BaseException):
        pass

    def dying(connection, changed):
        putting(connection, changed)
        raise Killed

    putting = accounts_module.put_accounts
    monkeypatch.setattr(accounts_module, "put_accounts", dying)
    with suppress(Killed):
        write_accounts(tmp_path, {"b-0": SiteAccount(denied=True)})
    assert Accounts(tmp_path / FILE) == boards(3)


def test_accounts_that_are_gone_or_damaged_are_told(tmp_path):
    site = make_site(tmp_path)
    path = site.path / FILE
    whole = path.read_bytes()
    path.write_bytes(b"SQLite" + whole[6:2000])
    with pytest.raises(ConfigError, match=naming(path)):
        dict(read_state(site.path).accounts)
    path.unlink()
    with pytest.raises(ConfigError, match=naming(path)):
        read_state(site.path).accounts.get("pi-03")
    with pytest.raises(ConfigError, match=naming(path)):
        read_denied(site.path)
