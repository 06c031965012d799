"""The agent's bundle as an operator asks for it: without options, and with logs that are none."""

from __future__ import annotations

import argparse
import re
import tarfile
from pathlib import Path

import pytest

from device_agent.commands import support_bundle as command
from shared.errors import ConfigError
from shared.runtime.diagnosis.bundle import MOST_BYTES


def bundle(tmp_path, monkeypatch, log=None):
    monkeypatch.setattr(command, "run_checks", lambda *_: ())
    path = tmp_path / "bundle.tar.gz"
    assert command.run(argparse.Namespace(config=None, out=path, log=log)) == 0
    with tarfile.open(path) as packed:
        [name] = [one for one in packed.getnames() if one.endswith("log.txt")]
        return packed.extractfile(name).read()


def test_without_a_log_the_journal_is_asked(tmp_path, monkeypatch):
    """On a machine that has none, it says so."""
    assert bundle(tmp_path, monkeypatch)


def test_a_log_without_end_is_read_so_far(tmp_path, monkeypatch):
    assert len(bundle(tmp_path, monkeypatch, Path("/dev/zero"))) <= MOST_BYTES + 1


def test_a_log_that_is_none_is_told(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        bundle(tmp_path, monkeypatch, tmp_path)
