"""An agent's file: what is left out has a default, what is wrong is one line that says where and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from device_agent.config import AgentConfig, LinkConfig, TrainerConfig, load
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.transport.base import Broker

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
    assert f"`{key}`" in message or f"{key} is missing" in message
    assert message.endswith(("add it", "or join a site by `device-agent join`"))


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ('devise = "b"\n', "`devise`", "known: device, state_dir, data, site, broker, trainer, link"),
        ("report_s = 'often'\n", "report_s: Expected `float`", "correct the value"),
        ("report_s = 0\n", "report_s", "above zero"),
        ("report_s = -1.0\n", "report_s", "above zero"),
        ("report_s = nan\n", "report_s", "above zero"),
        ("log_level = 'loud'\n", "log_level: 'loud'", "use debug, info, warning or error"),
        ("site = 'a/b'\n", "site 'a/b'", "use 1 to 64 letters, digits"),
        ("site = '_all'\n", "site '_all'", "starting with a letter or digit"),
        ("site = 3\n", "site: Expected `str`, got `int`", "correct the value"),
    ],
)
def test_a_wrong_key_is_named_with_a_remedy(refused: Callable[[str], str], text: str, key: str, remedy: str) -> None:
    plain = PLAIN.replace('site = "lab"\n', "") if text.startswith("site") else PLAIN
    message = refused(plain + text + DATA)
    assert key in message
    assert remedy in message


@pytest.mark.parametrize(
    ("section", "line", "remedy"),
    [
        ("broker", "hots = 'x'", "unknown field `hots`; remove it or correct its spelling"),
        ("broker", "port = 'x'", "port: Expected `int`, got `str`; correct the value"),
        ("broker", "version = 4", "version: Invalid enum value 4; correct the value"),
        ("trainer", "idle = 3", "unknown field `idle`; remove it or correct its spelling"),
        ("trainer", "idle_s = -1", "idle_s must be"),
        ("trainer", "idle_s = nan", "idle_s must be"),
        ("trainer", "memory_mb = -1", "memory_mb and threads must be"),
        ("trainer", "memory_mb = 1.5", "memory_mb: Expected `int`, got `float`; correct the value"),
        ("trainer", "threads = -2", "memory_mb and threads must be"),
        ("trainer", "threads = 5000000000", "up to 1048576 and 1024"),
        ("trainer", "memory_mb = 9000000000000000000", "up to 1048576 and 1024"),
        ("link", "windows = 3", "unknown field `windows`; remove it or correct its spelling"),
        ("link", "frame_bytes = 1023", "frame_bytes must be 1024 to 4194304"),
        ("link", "frame_bytes = 4194305", "frame_bytes must be 1024 to 4194304"),
        ("link", "window = 0", "window 1 to 64"),
        ("link", "window = 65", "window 1 to 64"),
        ("link", "patience_s = 0", "patience_s must be"),
        ("link", "patience_s = nan", "patience_s must be"),
        ("link", "max_payload_mb = 0", "max_payload_mb 1 or more"),
        ("serve.cut", "codec = 'masked'", "codec: Invalid enum value 'masked'"),
        ("serve.cut", "bits = 0", "bits must be 1 to 16"),
        ("serve.cut", "bits = 17", "bits must be 1 to 16"),
        ("serve.cut", "bits = 2.5", "bits: Expected `int`, got `float`"),
        ("serve.cut", "bits = true", "bits: Expected `int`, got `bool`"),
    ],
)
def test_a_wrong_key_in_a_section_is_named_with_its_section(
    refused: Callable[[str], str], section: str, line: str, remedy: str
) -> None:
    message = refused(f"{PLAIN}{DATA}[{section}]\n{line}\n")
    assert message.startswith(section)
    assert remedy in message


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
    assert message.startswith("device ")
    assert "use 1 to 64 letters" in message


@pytest.mark.parametrize("name", ["a", "7", "Board-7.left_side", "x" * 64])
def test_a_plain_device_name_is_taken(tmp_path: Path, name: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(f'device = "{name}"\nsite = "lab"\nstate_dir = "s"\n{DATA}')
    assert load(path).device == name


def test_the_data_section_is_checked_before_anything_is_read(refused: Callable[[str], str]) -> None:
    """A partition that cannot be, a source nobody knows: seen without a look at the disk."""
    assert refused(f'{PLAIN}[data]\nsource = "tape"\n').startswith("data.source: ")
    message = refused(f'{PLAIN}{DATA}[data.partition]\nkind = "even"\nparts = 2\nindex = 2\n')
    assert message.startswith("data.partition: index must be from 0")


@pytest.mark.parametrize(("text", "remedy"), [("device = ", "correct that line"), ("\xff", "correct that line")])
def test_a_file_that_is_no_toml_is_refused(refused: Callable[[str], str], text: str, remedy: str) -> None:
    assert refused(text).endswith(remedy)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file; give the path"):
        load(tmp_path / "absent.toml")
