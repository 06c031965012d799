"""Files as Notepad and PowerShell write them: a byte order mark, and lines that end in CR LF."""

from __future__ import annotations

import pytest

from device_agent.commands.join import read_token
from device_agent.config import load
from device_agent.profile.load import load_file, read_source
from shared.errors import ConfigError
from shared.transport.base import Broker
from shared.transport.login import read_login
from tests.naming import naming

MARK = b"\xef\xbb\xbf"
AGENT = 'device = "a"\nsite = "s"\nstate_dir = "state"\n[broker]\nuser = "me"\npassword_file = "password"\n[data]\n'


def test_configuration_and_password_are_read(tmp_path) -> None:
    text = AGENT + 'source = "csv"\npath = "Möbel.csv"\n'
    (tmp_path / "agent.toml").write_bytes(MARK + text.replace("\n", "\r\n").encode())
    (tmp_path / "password").write_bytes(MARK + "geheim é\r\n".encode())
    (tmp_path / "password").chmod(0o600)
    config = load(tmp_path / "agent.toml")
    assert config.examples.path.endswith("Möbel.csv")
    login = read_login(config.broker)
    assert login is not None
    assert (login.user, login.password) == ("me", "geheim é")
    assert read_login(Broker()) is None


def test_a_profile_is_read(tmp_path) -> None:
    path, source = tmp_path / "generic-x86.toml", read_source("generic-x86")
    path.write_bytes(MARK + source.encode())
    assert load_file(path).id == "generic-x86"
    assert read_source(str(path)) == source


def test_a_token_is_refused_for_its_content_alone(tmp_path) -> None:
    (tmp_path / "token").write_bytes(MARK + b"nonsense\r\n")
    with pytest.raises(ConfigError) as marked:
        read_token("-", tmp_path / "token")
    (tmp_path / "token").write_bytes(b"nonsense\n")
    with pytest.raises(ConfigError) as plain:
        read_token("-", tmp_path / "token")
    assert str(marked.value) == str(plain.value)


def test_utf16_is_refused_with_what_to_do(tmp_path) -> None:
    (tmp_path / "agent.toml").write_text(AGENT, encoding="utf-16")
    with pytest.raises(ConfigError, match=naming(tmp_path / "agent.toml", "UTF-8")):
        load(tmp_path / "agent.toml")
