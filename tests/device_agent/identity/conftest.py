"""This program was written before any test is run, whatever the machine's clock says."""

import pytest

from device_agent.identity import clock_floor
from tests.edge_server.gateway.enrolments import DAY_S, NOW


@pytest.fixture(autouse=True)
def _written_before(monkeypatch):
    monkeypatch.setattr(clock_floor, "WRITTEN_UTC_S", NOW - 30 * DAY_S)
