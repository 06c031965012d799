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
    ("text", "key", "problem", "remedy"),
    [
        (GOOD + "round = 1", "top level", "unknown field `round`", "remove it or correct its spelling (known: name,"),
        (GOOD + "[broker]\nhots = 1", "broker", "unknown field `hots`", "remove it or correct its spelling"),
        (GOOD + 'rate = "fast"', "rate", "Expected `float`, got `str`", "correct the value"),
        (GOOD + "rate = true", "rate", "Expected `float`, got `bool`", "correct the value"),
        ('name = "x"\nrounds = 1.5', "rounds", "Expected `int`, got `float`", "correct the value"),
        ("name = 1979-05-27\nrounds = 1", "name", "Expected `str`, got `date`", "correct the value"),
        (GOOD + "[broker]\nport = '1883'", "broker.port", "Expected `int`, got `str`", "correct the value"),
        (GOOD + "[broker]\nversion = 4", "broker.version", "Invalid enum value 4", "correct the value: use 3 or 5"),
        (GOOD + "broker = 5", "broker", "Expected `object`, got `int`", "correct the value"),
        ("rounds = 3", "top level", "missing required field `name`", "add it"),
        (GOOD + "[data]\npath = 'x'", "data", "missing required field `source`", "add it"),
        (GOOD + "[data]\nsource = 'digits'\nholdout = 1.5", "data", "holdout must be in [0, 1), not 1.5", "correct"),
        (GOOD + "[broker]\nport = 99999", "broker.port", "Expected `int` <= 65535", "correct the value"),
        (GOOD + "[broker]\nport = 0", "broker.port", "Expected `int` >= 1", "correct the value"),
        (GOOD + "[broker]\nhost = ''", "broker.host", "Expected `str` of length >= 1", "correct the value"),
        (GOOD + "[broker]\nkeepalive_s = 70000", "broker.keepalive_s", "Expected `int` <= 65535", "correct the value"),
        ("", "top level", "missing required field `name`", "add it"),
    ],
)
def test_a_wrong_key_or_value(mistake, text, key, problem, remedy):
    """First the key, then what is wrong with it, then what to do."""
    said = mistake(text)
    assert said.startswith(f"{key}: ")
    assert problem in said
    assert f"; {remedy}" in said


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


@pytest.mark.parametrize(
    "text",
    ["rounds = ", "[broker", 'name = "a"\nname = "b"', "name = 'a", "\0", "just words"],
)
def test_not_toml(mistake, text):
    """The parser's own words name the line."""
    said = mistake(text)
    assert "line" in said or "end of document" in said
    assert said.endswith("; correct that line")


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
    assert [line.partition(";")[0] for line in mistake(text).split("\n")] == [
        "name: Expected `str`, got `int`",
        "top level: Object contains unknown field `rat`",
        "broker.port: Expected `int`, got `str`",
        "broker: Object contains unknown field `hots`",
        "data.path: Expected `str`, got `int`",
        "data: Object missing required field `source`",
        "links[0].mbit_s: Expected `float`, got `str`",
        "links[0]: Object contains unknown field `mbits`",
        "links[1].kind: Invalid value 'wires'",
        "top level: Object missing required field `rounds`",
    ]


def test_no_more_mistakes_are_listed_than_somebody_reads(mistake):
    assert len(mistake("\n".join(f"k{n} = 1" for n in range(1000))).split("\n")) == 50


def test_not_json(mistake):
    assert mistake("{", ".json").endswith("; correct that line")
    assert mistake('{"name": 1}', ".json").startswith("name: Expected `str`, got `int`")


def test_not_text(mistake):
    assert mistake(b"name = '\xff\xfe'").startswith("cannot be read as UTF-8 text")


@pytest.mark.parametrize(
    ("text", "suffix", "problem"),
    [
        ("name = " + "[" * 5000, ".toml", "within one another beyond all measure; flatten them"),
        ("name = " + "{a=" * 5000, ".toml", "within one another beyond all measure; flatten them"),
        ("a." * 30_000 + "a = 1", ".toml", "a key of more than 64 parts"),
        ("[" + "a." * 64 + "a]", ".toml", "a key of more than 64 parts"),
        ('"a.b" . ' * 64 + "c = 1", ".toml", "a key of more than 64 parts"),
        ("rounds = " + "1" * 5000, ".toml", "an integer of more than 64 bits"),
        ('name = "x"\nrounds = 0x' + "f" * 17, ".toml", "an integer of more than 64 bits"),
        ('{"name": "x", "rounds": 1' + "0" * 30 + "}", ".json", "an integer of more than 64 bits"),
        ('{"rounds": 1' + "0" * 5000 + "}", ".json", "rounds: Integer value out of range"),
        ("[" * 100_000, ".json", "Expected `object`, got `array`"),
        ('{"x":' * 100_000, ".json", "unknown field `x`"),
        (r'{"name": "\ud800"}', ".json", "; correct that line"),
        (r'name = "\ud800"', ".toml", "not a Unicode scalar value"),
        (r'"a\nb\u001b[2J" = 1', ".toml", r"unknown field `a\nb\x1b[2J`"),
        ("#" * (config.MAX_BYTES + 1), ".toml", "more than 1048576 bytes"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_no_parser_should_be_given(mistake, text, suffix, problem):
    """Nesting, numbers, keys and lengths beyond all measure: refused in few lines, soon, and without much memory."""
    tracemalloc.start()
    try:
        began = time.process_time()
        assert problem in mistake(text, suffix)
        assert time.process_time() - began < 60  # the dotted key took 17 s, which alone proves nothing, and 4 GB
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_file_is_not_read_to_its_end_if_it_has_none():
    with pytest.raises(ConfigError, match="more than 1048576 bytes; give the path of a configuration"):
        config.read(Path("/dev/zero"), Plan)


def test_a_key_of_some_parts_and_a_line_of_dots_are_read(tmp_path):
    """The guard against endless keys minds neither."""
    path = tmp_path / "plan.toml"
    path.write_text(f"# {'.' * 200}\n" + GOOD + "broker.port = 1884 # 1.5 2.5 3.5\n")
    assert config.read(path, Plan).broker.port == 1884


def test_no_such_file_and_a_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file; give the path of an existing TOML file$"):
        config.read(tmp_path / "absent.toml", Plan)
    with pytest.raises(ConfigError, match=r"cannot be read as UTF-8 text .*; fix the file or its permissions$"):
        config.read(tmp_path, Plan)
