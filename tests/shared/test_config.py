"""A mistake in a file is one line that names the file, the key and what to do."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from shared import config
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.transport.base import Broker
from tests.naming import names_all, naming


class Wired(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="wired", tag_field="kind"):
    """One kind of link."""

    mbit_s: float = 1.0


class Radio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="radio", tag_field="kind"):
    """Another."""

    distance_m: float = 1.0


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something to read."""

    name: str
    rounds: int
    rate: float = 1.0
    broker: Broker = Broker()
    data: Data | None = None
    links: list[Wired | Radio] = []


GOOD = 'name = "demo"\nrounds = 3\n'


@pytest.fixture
def mistake(tmp_path):
    """Return the remark on a file with this text, and check its form."""

    def remark(text: str | bytes, suffix: str = ".toml") -> str:
        path = tmp_path / f"plan{suffix}"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ConfigError) as caught:
            config.read(path, Plan)
        prefix, lines = f"{path}: ", str(caught.value).split("\n")
        assert all(line.startswith(prefix) for line in lines)
        return "\n".join(line.removeprefix(prefix) for line in lines)

    return remark


def test_toml_and_json_read_alike(tmp_path):
    """Nested tables, defaults, an integer where a float is wanted; the suffix tells which it is."""
    toml, json = tmp_path / "plan.toml", tmp_path / "plan.json"
    toml.write_text(GOOD + 'rate = 2\n[broker]\nport = 1884\n[data]\nsource = "digits"\n')
    json.write_text('{"name": "demo", "rounds": 3, "rate": 2, "broker": {"port": 1884}, "data": {"source": "digits"}}')
    expected = Plan(name="demo", rounds=3, rate=2.0, broker=Broker(port=1884), data=Data(source="digits"))
    assert config.read(toml, Plan) == expected
    assert config.read(json, Plan) == expected
    assert isinstance(config.read(toml, Plan).rate, float)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD + "round = 1", ["round", "name", "rounds"]),
        (GOOD + "[broker]\nhots = 1", ["broker", "hots", "host"]),
        (GOOD + 'rate = "fast"', ["rate", "float", "str"]),
        (GOOD + "rate = true", ["rate", "float", "bool"]),
        ('name = "x"\nrounds = 1.5', ["rounds", "int", "float"]),
        ("name = 1979-05-27\nrounds = 1", ["name", "str", "date"]),
        (GOOD + "[broker]\nport = '1883'", ["broker.port", "int", "str"]),
        (GOOD + "[broker]\nversion = 4", ["broker.version", 4, 3, 5]),
        (GOOD + "broker = 5", ["broker", "object", "int"]),
        ("rounds = 3", ["name"]),
        (GOOD + "[data]\npath = 'x'", ["data", "source"]),
        (GOOD + "[data]\nsource = 'digits'\nholdout = 1.5", ["data", "holdout", "[0, 1)", 1.5]),
        (GOOD + "[broker]\nport = 99999", ["broker.port", "int", 65535]),
        (GOOD + "[broker]\nport = 0", ["broker.port", "int", 1]),
        (GOOD + "[broker]\nhost = ''", ["broker.host", "str", 1]),
        (GOOD + "[broker]\nkeepalive_s = 70000", ["broker.keepalive_s", "int", 65535]),
        ("", ["name"]),
    ],
)
def test_a_wrong_key_or_value(mistake, text, named):
    """The key, its value or type, and what it may be."""
    assert names_all(mistake(text).splitlines()[0], *named)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (GOOD + "roundz = 1", "(known: name, rounds, rate, broker, data, links); did you mean `rounds`?"),
        (GOOD + "[broker]\nkeepalive = 1", "did you mean `keepalive_s`?"),
        (GOOD + "[[links]]\nkind = 'wired'\nrate = 1", "(known: kind, mbit_s)"),
        (GOOD + "[[links]]\nkind = 'wired'\n[[links]]\nkind = 'radio'\nmbit_s = 1", "(known: kind, distance_m)"),
    ],
)
def test_an_unknown_key_is_answered_with_the_keys_of_its_table_and_the_closest(mistake, text, remedy):
    """Also where the table is one of several in an array, and its kind says what it may hold."""
    assert mistake(text).endswith(remedy)


def test_a_value_whose_error_states_the_remedy_gets_no_second_one(mistake):
    assert mistake(GOOD + "[data]\nsource = 'csv'\npath = 'x'\ntargets = 'values'").endswith("remove it")
    assert mistake(GOOD + "[data]\nsource = 'digits'\nholdout = 1.5").endswith("correct the value")


@pytest.mark.parametrize(
    "text",
    ["rounds = ", "[broker", 'name = "a"\nname = "b"', "name = 'a", "\0", "just words"],
)
def test_not_toml(mistake, text):
    """The parser's own words name the line."""
    said = mistake(text)
    assert "line" in said or "end of document" in said


def test_every_mistake_has_a_line(mistake):
    """Within tables, arrays of tables and tables by name; a faulty value hides no other one."""
    text = """
    name = 3
    rat = 1
    [broker]
    port = "x"
    hots = 1
    [data]
    path = 1
    [[links]]
    kind = "wired"
    mbit_s = "x"
    mbits = 1
    [[links]]
    kind = "wires"
    """
    faults = [
        ("name", "str", "int"),
        ("rat",),
        ("broker.port", "int", "str"),
        ("broker", "hots"),
        ("data.path", "str", "int"),
        ("data", "source"),
        ("links[0].mbit_s", "float", "str"),
        ("links[0]", "mbits"),
        ("links[1].kind", "'wires'"),
        ("rounds",),
    ]
    lines = mistake(text).splitlines()
    assert len(lines) == len(faults)
    for line, named in zip(lines, faults, strict=True):
        assert names_all(line, *named)


def test_no_more_mistakes_are_listed_than_somebody_reads(mistake):
    assert len(mistake("\n".join(f"k{n} = 1" for n in range(1000))).split("\n")) == 50


def test_not_json(mistake):
    assert mistake("{", ".json")
    assert names_all(mistake('{"name": 1}', ".json"), "name", "str", "int")


def test_not_text(mistake):
    assert names_all(mistake(b"name = '\xff\xfe'"), "UTF-8", "0xff")


@pytest.mark.parametrize(
    ("text", "suffix", "named"),
    [
        ("name = " + "[" * 5000, ".toml", []),
        ("name = " + "{a=" * 5000, ".toml", []),
        ("a." * 30_000 + "a = 1", ".toml", [64]),
        ("[" + "a." * 64 + "a]", ".toml", [64]),
        ('"a.b" . ' * 64 + "c = 1", ".toml", [64]),
        ("rounds = " + "1" * 5000, ".toml", [64]),
        ('name = "x"\nrounds = 0x' + "f" * 17, ".toml", [64]),
        ('{"name": "x", "rounds": 1' + "0" * 30 + "}", ".json", [64]),
        ('{"rounds": 1' + "0" * 5000 + "}", ".json", ["rounds"]),
        ("[" * 100_000, ".json", ["object", "array"]),
        ('{"x":' * 100_000, ".json", ["`x`"]),
        (r'{"name": "\ud800"}', ".json", []),
        (r'name = "\ud800"', ".toml", ["Unicode scalar"]),  # the parser's words
        (r'"a\nb\u001b[2J" = 1', ".toml", [r"`a\nb\x1b[2J`"]),
        ("#" * (config.MAX_BYTES + 1), ".toml", [config.MAX_BYTES]),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_no_parser_should_be_given(mistake, text, suffix, named):
    """Nesting, numbers, keys and lengths beyond all measure: refused in few lines, soon, and without much memory."""
    tracemalloc.start()
    try:
        began = time.process_time()
        assert names_all(mistake(text, suffix), *named)
        assert time.process_time() - began < 60  # the dotted key took 17 s, which alone proves nothing, and 4 GB
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_file_is_not_read_to_its_end_if_it_has_none():
    with pytest.raises(ConfigError, match=naming("/dev/zero", config.MAX_BYTES)):
        config.read(Path("/dev/zero"), Plan)


def test_a_key_of_some_parts_and_a_line_of_dots_are_read(tmp_path):
    """The guard against endless keys minds neither."""
    path = tmp_path / "plan.toml"
    path.write_text(f"# {'.' * 200}\n" + GOOD + "broker.port = 1884 # 1.5 2.5 3.5\n")
    assert config.read(path, Plan).broker.port == 1884


def test_no_such_file_and_a_folder(tmp_path):
    with pytest.raises(ConfigError, match=naming(tmp_path / "absent.toml")):
        config.read(tmp_path / "absent.toml", Plan)
    with pytest.raises(ConfigError, match=naming(tmp_path, "Is a directory")):
        config.read(tmp_path, Plan)
