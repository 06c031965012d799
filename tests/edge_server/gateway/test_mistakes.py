"""Mistakes at gateway commands: one line, an exit code, no traceback."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.site_folder import SiteFolder
from tests.edge_server.processes import captured
from tests.naming import names_all

NOW = datetime(2026, 11, 23, tzinfo=UTC)
WORDS = [
    "site init --name roof --folder FILE",
    "site init --name roof --folder FILE/below",
    "site init --name roof --folder NEW --address https://gateway.local",
    "site init --name roof --folder NEW --address gateway.local:8883",
    "site init --name roof --folder NEW --address [fe80::1]",
    "site init --name roof --folder NEW --address fe80::1%eth0",
    "site init --name roof --folder NEW --port 0",
    "site init --name roof --folder NEW --port 99999",
    "site init --name a/b --folder NEW",
    "site init --name other --folder SITE",
    "site check --folder FOLDER",
    "site reload --folder NEW",
    "site rotate-ca --folder FILE",
    "enrol pi-01 --folder FILE",
    "enrol pi/01 --folder SITE",
    "enrol pi-01 --ttl 0 --folder SITE",
    "enrol pi-01 --ttl nan --folder SITE",
    "enrol pi-01 --ttl 999999999999h --folder SITE",
    "enrol pi-01 --port 99999 --folder SITE",
    "enrol pi-01 --address https://127.0.0.1 --folder SITE",
    "enrol pi-01 --svg NEW/below/a.svg --folder SITE",
    "enrol pi-01 --svg FOLDER --folder SITE",
    "enrol --count 100000 --folder SITE",
    "enrol --count 3 --pattern {:1000000000} --folder SITE",
    "enrol --count 3 --pattern {0.__class__} --folder SITE",
    "enrolment-service --port -1 --folder SITE",
    "enrolment-service --port 99999 --folder SITE",
    "enrolment-service --host https://a --folder SITE",
    "enrolment-service --host 192.0.2.1 --folder SITE",
    "packages add FILE --folder SITE",
    "packages add FOLDER --folder SITE",
    "packages add /dev/zero --folder SITE",
    "packages add-wheels FILE --folder SITE",
    "packages remove \x1b[2J --folder SITE",
    "revoke nobody --folder FILE",
    "revoke ../.. --folder SITE",
    "devices approve nobody --folder SITE",
    "devices --watch nan --folder SITE",
    "rollout start --agent 9 --config FILE",
    "rollout start --agent 9 --config NEW",
    "setup --from FILE",
    "support-bundle --out FOLDER --folder FILE",
    "support-bundle --out BUNDLE --log NEW --folder SITE",
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    here = tmp_path_factory.mktemp("mistakes")
    initialise(SiteFolder(here / "site"), SiteSettings("roof", ("127.0.0.1",)), NOW)
    (here / "folder").mkdir()
    (here / "file").write_bytes(bytes(range(256)))
    names = {name: here / name.lower() for name in ("SITE", "FOLDER", "FILE", "NEW")}
    return names | {"BUNDLE": here / "bundle.tar.gz"}


@pytest.mark.parametrize(
    ("line", "place", "remedy"),
    [
        *((f"{verb} --folder NEW", "NEW", "edge-server site init") for verb in ("site reload", "revoke pi-03")),
        *((f"site {verb} --folder FILE", "FILE", "edge-server site init") for verb in ("check", "reload", "rotate-ca")),
        ("site init --name roof --folder FILE", "FILE", "--folder"),
        ("site init --name roof --folder FILE/below", "FILE", "--folder"),
    ],
)
def test_where_no_site_is_the_remedy_is_to_make_one_or_to_name_it(line, place, remedy, places):
    """Not to run it as another user, who would find none either."""
    for name, path in places.items():
        line = line.replace(name, str(path))
    code, _, said = captured(*line.split(" "))
    assert code == 2
    assert names_all(said, places[place], remedy)
    assert not places["NEW"].exists()


@pytest.mark.parametrize("line", WORDS)
def test_a_mistake_is_told_in_a_line(line, places, tmp_path):
    names = places | {"NEW": tmp_path / "new"}
    for name, path in names.items():
        line = line.replace(name, str(path))
    code, _, said = captured(*line.split(" "))
    assert code in (1, 2), said
    assert "edge-server" in said
    assert "Traceback" not in said
    assert "\x1b" not in said
    assert not names["NEW"].exists()
