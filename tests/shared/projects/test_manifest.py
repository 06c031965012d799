"""Manifests of projects: a newer format asks for an upgrade, whatever its fields are."""

from __future__ import annotations

import msgspec
import pytest

from shared.errors import ConfigError, WireError
from shared.projects.manifest import FORMAT, decode_project


def test_a_newer_format_is_named_before_its_fields_are_read() -> None:
    with pytest.raises(ConfigError, match=rf"{FORMAT + 1}.*{FORMAT}.*upgrade"):
        decode_project(msgspec.json.encode({"format": FORMAT + 1, "parts": []}))


def test_one_of_this_format_without_its_fields_is_malformed() -> None:
    with pytest.raises(WireError) as refused:
        decode_project(msgspec.json.encode({"format": FORMAT}))
    assert refused.value.reason == "malformed"
