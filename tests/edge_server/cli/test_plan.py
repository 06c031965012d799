"""The reference of a plan's keys and its JSON Schema, against structs, builders and the shipped plans."""

from __future__ import annotations

import inspect
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from jsonschema import Draft202012Validator

from device_agent.__main__ import main as agent_main
from device_agent.config import AgentConfig
from edge_server.__main__ import main
from edge_server.allocation.allocators.table import ALLOCATORS
from edge_server.cli.plan.reference import CHOICES, INTRODUCTION, list_option_keys, plan_keys, read_option_meanings
from edge_server.cli.plan.schema import plan_schema
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import ServerConfig
from shared.algorithms.early_stopping import STOPPING_OPTIONS, can_stop_early
from shared.config_reference import as_markdown, format_type, struct_keys, unit_of
from tests.edge_server.processes import captured
from tests.naming import naming

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "edge_server" / "plan" / "REFERENCE.md"
PLANS = sorted((ROOT / "deploy" / "plans").rglob("*.toml"))
SCHEMA = plan_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
KEYS = plan_keys()


def printed(*words: str) -> str:
    """Run the command; return what it prints."""
    done = captured("plan", "schema", *words)
    assert done.code == 0, done.err
    return done.out


def test_the_page_is_that_of_the_structs():
    """What the command prints, letter by letter."""
    page = printed("--format", "markdown")
    assert page == as_markdown(INTRODUCTION, KEYS)
    assert PAGE.read_text() == page, "write it anew with `make fix`"


@pytest.mark.parametrize("groups", [KEYS, struct_keys(ServerConfig), struct_keys(AgentConfig)])
def test_every_key_says_what_it_means(groups):
    """A docstring without an entry for a key leaves a hole in the page."""
    assert [f"{group.heading}: {key.name}" for group in groups for key in group.keys if not key.meaning] == []
    assert [group.heading for group in groups if not group.meaning] == []


@pytest.mark.parametrize(
    ("program", "run", "page"),
    [("edge-server", main, "edge_server"), ("device-agent", agent_main, "device_agent")],
)
def test_the_pages_of_the_configuration_files_are_what_their_commands_print(monkeypatch, capsys, program, run, page):
    """As a JSON Schema they take what the shipped files hold."""
    shown = {}
    for form in ("markdown", "json"):
        monkeypatch.setattr(sys, "argv", [program, "config", "schema", "--format", form])
        with pytest.raises(SystemExit) as ended:
            run()
        assert ended.value.code == 0
        shown[form] = capsys.readouterr().out
    assert (ROOT / page / "REFERENCE.md").read_text() == shown["markdown"], "write it anew with `make fix`"
    schema = json.loads(shown["json"])
    key = "site" if page == "edge_server" else "device"
    own = schema["$defs"][schema["$ref"].rpartition("/")[2]]["properties"]
    assert own[key]["description"]


def structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs of a type, at any depth."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
        for field in msgspec.structs.fields(hint):
            yield from structs(field.type)
    for part in get_args(hint):
        yield from structs(part)


def test_no_struct_and_no_field_of_a_plan_is_left_out():
    """Each struct has a group with exactly its fields, beside the kind where it is one of several."""
    groups = {tuple(key.name for key in group.keys) for group in KEYS}
    for struct in {*structs(Plan), *(one.options for one in ALLOCATORS.values())}:
        kind = ("kind",) if struct.__struct_config__.tag else ()
        assert (*kind, *struct.__struct_encode_fields__) in groups, struct
    headings = {group.heading for group in KEYS}
    assert {f"[{name}]" for name in ("cohort", "round", "data", "hyper", "budget")} | {"[[device]]"} <= headings
    assert {f'[device.link] kind = "{kind}"' for kind in ("given", "ranges", "wireless", "trace")} <= headings


@pytest.mark.parametrize("what", ["algorithm", "model", "codec"])
def test_every_name_stands_over_its_own_options(what):
    """With the defaults of its builder, or those that a variant of it replaces."""
    for name, builder in CHOICES[what].items():
        [group] = [one for one in KEYS if one.heading.startswith(f"[{what}.options]") and f'"{name}"' in one.heading]
        options = {
            key: option.default
            for key, option in inspect.signature(builder).parameters.items()
            if option.kind is not option.VAR_KEYWORD and not (can_stop_early(builder) and key in STOPPING_OPTIONS)
        }
        shown = {key.name: key.default for key in list_option_keys(builder) if key.name != "NAME_OPTION"}
        assert {key: json.loads(default) for key, default in shown.items()} == options
        assert {key.name for key in group.keys} - {"NAME_OPTION"} == set(options)
        others = {key: default for key, default in shown.items() if default != defaults_of(group)[key]}
        assert all(f"{key} {default}" in group.meaning for key, default in others.items())


def defaults_of(group: Any) -> dict[str, str]:
    return {key.name: key.default for key in group.keys}


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("deadline_s", "s"),
        ("up_mbit_s", "Mbit/s"),
        ("noise_dbm_hz", "dBm/Hz"),
        ("busy_w", "W"),
        ("joules", "J"),
        ("size", ""),
    ],
)
def test_units_are_those_of_the_names(name, unit):
    assert unit_of(name) == unit


def test_a_type_without_words_is_an_error():
    """So that nobody adds a key whose type the page does not name."""
    with pytest.raises(TypeError, match=naming(bytes, "TYPE_NAMES")):
        format_type(bytes)
    assert format_type(float | tuple[float, float] | None) == "number or [number, number]"


def test_a_meaning_is_found_where_the_docstring_points():
    """In a class of settings, in another builder, in the struct that a struct extends."""
    found = read_option_meanings(CHOICES["algorithm"]["hermes"])
    assert "neurons" in found["keep"]
    assert "learning rate" in found.get("learning_rate", "learning rate")
    assert "stale" not in found


def test_early_stopping_names_the_methods_that_it_is_for():
    """Its section alone has its keys; the methods do not repeat them."""
    [entry] = [one for one in KEYS[0].keys if one.name == "early_stopping"]
    methods = entry.meaning.rpartition("; with ")[2].rstrip(".").replace(" and ", ", ").split(", ")
    assert methods == sorted(name for name, builder in CHOICES["algorithm"].items() if can_stop_early(builder))
    options = [one for one in KEYS if one.heading.startswith("[algorithm.options]")]
    assert not {key.name for one in options for key in one.keys} & set(STOPPING_OPTIONS)
    plan = tomllib.loads((ROOT / "deploy" / "plans" / "fedspu.toml").read_text())
    VALIDATOR.validate(plan | {"early_stopping": {"share": 0.5}})


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_shipped_plan_is_valid(path):
    VALIDATOR.validate(tomllib.loads(path.read_text()))


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    plan = tomllib.loads(path.read_text())
    change(plan)
    return plan


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.update(rounds="ten"),
        lambda plan: plan.update(round_count=10),
        lambda plan: plan.pop("model"),
        lambda plan: plan["algorithm"].update(name="fedavgg"),
        lambda plan: plan["algorithm"].update(options={"mu": 0.1}),
        lambda plan: plan["model"]["options"].update(side="wide"),
        lambda plan: plan["model"]["options"].update(depth=3),
        lambda plan: plan["cohort"].update(min_device=4),
        lambda plan: plan["round"].update(on_missed="wait"),
        lambda plan: plan["device"][0].update(link={"kind": "cable"}),
        lambda plan: plan["device"][0].update(link={"kind": "ranges", "up_mbit_s": [1.0]}),
        lambda plan: plan.update(optimizer={"name": "clusters", "options": {"deadline_s": 3.0}}),
        lambda plan: plan.update(codec={"name": "quantize", "options": {"bits": "8"}}),
    ],
)
def test_a_mistake_in_a_plan_is_no_valid_plan(change):
    plan = changed(ROOT / "deploy" / "plans" / "demo.toml", change)
    assert not VALIDATOR.is_valid(plan)


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.update(optimizer={"name": "keep_ratio", "options": {"deadline_s": 3}}),
        lambda plan: plan.update(codec={"name": "chain", "options": {"codecs": "masked,quantize", "quantize_bits": 4}}),
        lambda plan: plan.update(model={"name": "mine.nets:small", "options": {"anything": True}}),
        lambda plan: plan["device"][0].update(link={"kind": "ranges", "up_mbit_s": [1.0, 2], "again": "round"}),
        lambda plan: plan["algorithm"].update(name="splitfed2", options={"cut": 2}),
    ],
)
def test_what_a_plan_may_say_is_valid(change):
    VALIDATOR.validate(changed(ROOT / "deploy" / "plans" / "demo.toml", change))


def test_the_schema_is_printed_with_meanings_and_defaults():
    schema = json.loads(printed("--format", "json"))
    assert schema == json.loads(json.dumps(SCHEMA))
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"].startswith("https://json-schema.org/")
    cohort = schema["$defs"]["CohortPlan"]["properties"]
    assert cohort["wait_s"]["default"] == 60.0
    assert "missed" in cohort["wait_s"]["description"]
    keys = [(name, key) for name, one in schema["$defs"].items() for key in one.get("properties", {})]
    bare = [
        (name, key)
        for name, key in keys
        if key != "kind" and "description" not in schema["$defs"][name]["properties"][key]
    ]
    assert bare == []


def test_the_table_has_every_key():
    words = set(printed().split())
    assert {key.name for group in KEYS for key in group.keys} <= words
