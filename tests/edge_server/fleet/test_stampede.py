"""A hundred agents lose their broker at once, in the middle of a round, and come back."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.fleet import broker
from tests.edge_server.stampede import stampede

AGENTS = 100


@pytest.mark.broker
@pytest.mark.slow
def test_all_are_back_spread_over_time_and_the_server_answers_meanwhile(tmp_path, record_property):
    """kill -9 of the broker and a start on the same port: the server hears every agent's new session.

    Their attempts do not fall together: without jitter nearly all are made within 0.3 s. The server, which gives each
    its task again, lets no timer wait until the herd is back: how long is in the record.
    """
    if not broker.mosquitto():
        pytest.skip("mosquitto is not installed")
    figures = asyncio.run(stampede(tmp_path, AGENTS))
    record_property("figures", repr(figures))
    assert sum(figures.tenths) >= AGENTS
    assert figures.crowd < 0.65
    assert figures.stall_s < 60.0
