"""Topic names and filters, by the examples of the MQTT specification."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.protocol import topics
from shared.protocol.topics import ANY, CHANNELS, matches, parse_channel, parse_device, topic
from tests.naming import naming

PLAYER = "sport/tennis/player1"


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        # MQTT 3.1.1, section 4.7.1.2 and 4.7.1.3; MQTT 5 says the same
        (f"{PLAYER}/#", [PLAYER, f"{PLAYER}/ranking", f"{PLAYER}/score/wimbledon"], ["sport/tennis/player2", "sport"]),
        ("sport/#", ["sport", "sport/tennis"], ["sports", "other"]),
        ("#", ["sport", "/", "a/b/c"], []),
        ("sport/tennis/+", [PLAYER, "sport/tennis/player2"], [f"{PLAYER}/ranking", "sport/tennis"]),
        ("sport/+", ["sport/", "sport/x"], ["sport", "sport/x/y"]),
        ("+/+", ["/finance", "a/b"], ["finance", "a/b/c"]),
        ("/+", ["/finance"], ["finance", "/finance/a"]),
        ("+", ["finance", ""], ["/finance"]),
        ("+/tennis/#", ["sport/tennis", "a/tennis/b/c"], ["sport/golf", "tennis"]),
        ("sport/+/player1", [PLAYER, "sport//player1"], ["sport/tennis/player2", "sport/player1"]),
        # section 4.7.3: case matters, a leading or trailing slash makes another topic, levels are whole
        ("ACCOUNTS", ["ACCOUNTS"], ["Accounts", "/ACCOUNTS", "ACCOUNTS/", "ACCOUNTS2"]),
        ("a/b", ["a/b"], ["a", "a/b/c", "a/bc", "b/a"]),
    ],
)
def test_matches(pattern, names, others):
    assert [name for name in names if not matches(pattern, name)] == []
    assert [name for name in others if matches(pattern, name)] == []


def test_names_and_their_parts():
    """Every channel of the module's table can be built and taken apart again; a filter for all devices finds it."""
    for channel in CHANNELS:
        name = topic("attic", "pi-4", channel)
        assert name == f"fieldfleet/v1/attic/pi-4/{channel}"
        assert (parse_device(name), parse_channel(name)) == ("pi-4", channel)
        assert matches(topic("attic", ANY, channel), name)
        assert not matches(topic("cellar", ANY, channel), name)
        assert not matches(topic("attic", ANY, "offer" if channel == "task" else "task"), name)


@pytest.mark.parametrize("name", ["", "status", "fieldfleet/v1/attic/status", "fieldfleet/v1/a/b/c/d", "/" * 5])
def test_a_topic_of_another_form_has_no_device(name):
    assert parse_device(name) == ""


@pytest.mark.parametrize("name", ["a", "0", "pi-4", "Jetson_Nano.2", "x" * 64])
def test_names_that_may_be_used(name):
    assert topics.is_name(name)
    assert topics.check_name(name, "device") == name


@pytest.mark.parametrize(
    "name",
    ["", "+", "#", "a/b", "a+", "..", ".a", "_all", "_server", "-rf", "a b", "a\n", "a\0", "ä", "\u0661", "x" * 65],
)
def test_names_that_mqtt_or_a_file_system_would_misread(name):
    """One line names what is wrong and what to use; our own reserved words are refused as well."""
    assert not topics.is_name(name)
    with pytest.raises(ConfigError, match=naming("site", repr(name), 64)) as caught:
        topics.check_name(name, "site")
    assert "\n" not in str(caught.value)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.text("aB3._-", min_size=1, max_size=5).filter(topics.is_name), min_size=3, max_size=3))
def test_valid_names_never_collide(names):
    """Two sites, devices or channels that differ make topics that differ, and no filter confuses them."""
    site, device, other = names
    assert parse_device(topic(site, device, "task")) == device
    assert matches(topic(site, device, "task"), topic(site, other, "task")) == (device == other)
