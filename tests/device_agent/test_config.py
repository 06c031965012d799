"""`agent.toml`: defaults of missing keys, and one-line errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from device_agent.config import AgentConfig, LinkConfig, TrainerConfig, load
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.transport.base import Broker
from tests.naming import names_all, naming

DATA = '[data]\nsource = "digits"\n'
PLAIN = 'device = "board"\nsite = "lab"\nstate_dir = "/var/lib/board"\n'


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[str], str]:
    """Return the one line with which a file is refused, without the file's path, which must stand first."""

    def message(text: str) -> str:
        path = tmp_path / "agent.toml"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(path)
        first, _, rest = str(caught.value).partition(f"{path}: ")
        assert not first
        assert "\n" not in rest
        return rest

    return message


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(PLAIN + DATA)
    assert load(path) == AgentConfig(device="board", site="lab", state_dir="/var/lib/board", data=Data(source="digits"))


def test_every_section_is_read(tmp_path: Path) -> None:
    """No key is read into the wrong place."""
    path = tmp_path / "agent.toml"
    path.write_text(
        'device = "b.1_x-Y"\nsite = "barn"\nstate_dir = "s"\nreport_s = 5\nlog_level = "debug"\n'
        '[broker]\nhost = "gateway"\nport = 8883\nversion = 3\n'
        "[trainer]\nidle_s = 1.5\nmemory_mb = 700\nthreads = 2\n"
        "[link]\nframe_bytes = 4096\nwindow = 5\npatience_s = 0.5\nmax_payload_mb = 64\n"
        '[data]\nsource = "csv"\npath = "x.csv"\nholdout = 0.2\n'
        '[data.partition]\nkind = "even"\nparts = 4\nindex = 3\n'
    )
    config = load(path)
    assert (config.device, config.site, config.report_s, config.log_level) == ("b.1_x-Y", "barn", 5.0, "debug")
    assert config.broker == Broker(host="gateway", port=8883, version=3)
    assert config.trainer == TrainerConfig(idle_s=1.5, memory_mb=700, threads=2)
    assert config.link == LinkConfig(frame_bytes=4096, window=5, patience_s=0.5, max_payload_mb=64)
    assert (config.data.path, config.data.partition.index) == (str(tmp_path / "x.csv"), 3)


def test_relative_paths_start_at_the_file(tmp_path: Path, monkeypatch) -> None:
    """From whatever folder the agent is started; absolute ones stay, and so does the id of a profile."""
    monkeypatch.chdir("/")
    path = tmp_path / "agent.toml"
    path.write_text(
        'device = "b"\nsite = "lab"\nstate_dir = "state"\n[data]\nsource = "folder"\npath = "../pictures"\n'
        '[board]\nprofile = "mine.toml"\nroot = "copy"\n'
    )
    config = load(path)
    assert config.state_dir == str(tmp_path / "state")
    assert config.data.path == str(tmp_path / "../pictures")
    assert (config.board.profile, config.board.root) == (str(tmp_path / "mine.toml"), str(tmp_path / "copy"))
    path.write_text(f'{PLAIN}[board]\nprofile = "auto"\nroot = "/"\n{DATA}')
    assert load(path) == AgentConfig(device="board", site="lab", state_dir="/var/lib/board", data=Data(source="digits"))


@pytest.mark.parametrize("key", ["device", "site", "state_dir"])
def test_a_missing_key_is_named(refused: Callable[[str], str], key: str) -> None:
    lines = {"device": 'device = "board"\n', "site": 'site = "lab"\n', "state_dir": 'state_dir = "s"\n', "data": DATA}
    message = refused("".join(line for name, line in lines.items() if name != key))
    assert names_all(message.replace("device-agent join", ""), key)
    assert ("`device-agent join`" in message) == (key != "state_dir")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('devise = "b"\n', ["devise", "device", "device, state_dir, data, site, broker, trainer, link"]),
        ("report_s = 'often'\n", ["report_s", "float", "str"]),
        ("report_s = 0\n", ["report_s", "0.0"]),
        ("report_s = -1.0\n", ["report_s", "-1.0"]),
        ("report_s = nan\n", ["report_s", "nan"]),
        ("log_level = 'loud'\n", ["log_level", "'loud'", "debug", "info", "warning", "error"]),
        ("site = 'a/b'\n", ["site", "'a/b'", 64]),
        ("site = '_all'\n", ["site", "'_all'", 64]),
        ("site = 3\n", ["site", "str", "int"]),
    ],
)
def test_a_wrong_key_is_named_with_its_value(refused: Callable[[str], str], text: str, named: list[object]) -> None:
    plain = PLAIN.replace('site = "lab"\n', "") if text.startswith("site") else PLAIN
    assert names_all(refused(plain + text + DATA), *named)


@pytest.mark.parametrize(
    ("section", "line", "named"),
    [
        ("broker", "hots = 'x'", ["host"]),
        ("broker", "port = 'x'", ["int", "str"]),
        ("broker", "version = 4", [4, 3, 5]),
        ("trainer", "idle = 3", ["idle_s"]),
        ("trainer", "idle_s = -1", ["-1.0"]),
        ("trainer", "idle_s = nan", ["nan"]),
        ("trainer", "memory_mb = -1", []),
        ("trainer", "memory_mb = 1.5", ["int", "float"]),
        ("trainer", "threads = -2", []),
        ("trainer", "threads = 5000000000", [1024]),
        ("trainer", "memory_mb = 9000000000000000000", [1048576]),
        ("link", "windows = 3", ["window"]),
        ("link", "frame_bytes = 1023", [1024, 4194304]),
        ("link", "frame_bytes = 4194305", [1024, 4194304]),
        ("link", "window = 0", [1, 64]),
        ("link", "window = 65", [1, 64]),
        ("link", "patience_s = 0", []),
        ("link", "patience_s = nan", []),
        ("link", "max_payload_mb = 0", [1]),
        ("serve.cut", "codec = 'masked'", ["'masked'"]),
        ("serve.cut", "bits = 0", [1, 16]),
        ("serve.cut", "bits = 17", [1, 16]),
        ("serve.cut", "bits = 2.5", ["int", "float"]),
        ("serve.cut", "bits = true", ["int", "bool"]),
    ],
)
def test_a_wrong_key_in_a_section_is_named_with_its_section(
    refused: Callable[[str], str], section: str, line: str, named: list[object]
) -> None:
    message = refused(f"{PLAIN}{DATA}[{section}]\n{line}\n")
    assert message.startswith(section)
    assert names_all(message, line.partition(" ")[0], *named)


@pytest.mark.parametrize("edge", ["frame_bytes = 1024", "frame_bytes = 4194304", "window = 1", "window = 64"])
def test_the_edges_of_a_range_are_taken(tmp_path: Path, edge: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(f"{PLAIN}{DATA}[link]\n{edge}\n")
    load(path)


@pytest.mark.parametrize("name", ["a b", "a/b", "+", "#", "..", "_all", "_server", "ä", "x" * 65, "a\n"])
def test_a_device_name_that_a_topic_or_a_folder_would_misread_is_refused(
    refused: Callable[[str], str], name: str
) -> None:
    escaped = name.replace("\n", "\\n")
    message = refused(f'device = "{escaped}"\nsite = "lab"\nstate_dir = "s"\n{DATA}')
    assert names_all(message, "device", repr(name), 64)


@pytest.mark.parametrize("name", ["a", "7", "Board-7.left_side", "x" * 64])
def test_a_plain_device_name_is_taken(tmp_path: Path, name: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(f'device = "{name}"\nsite = "lab"\nstate_dir = "s"\n{DATA}')
    assert load(path).device == name


def test_the_data_section_is_checked_before_anything_is_read(refused: Callable[[str], str]) -> None:
    """A partition that cannot be, a source nobody knows: seen without a look at the disk."""
    assert refused(f'{PLAIN}[data]\nsource = "tape"\n').startswith("data.source: ")
    message = refused(f'{PLAIN}{DATA}[data.partition]\nkind = "even"\nparts = 2\nindex = 2\n')
    assert names_all(message, "data.partition", "index", 2)


@pytest.mark.parametrize("text", ["device = ", "\xff"])
def test_a_file_that_is_no_toml_is_refused(refused: Callable[[str], str], text: str) -> None:
    assert "line" in refused(text) or "end of document" in refused(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=naming(tmp_path / "absent.toml")):
        load(tmp_path / "absent.toml")
