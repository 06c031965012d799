"""What a profile may not say, and how it is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from device_agent.profile.check import find_conflicts
from device_agent.profile.load import load_file
from device_agent.profile.match import Identity, choose_profile
from device_agent.profile.schema import Match, Profile
from shared.errors import ConfigError
from tests.naming import names_all, naming

GOOD = """
schema = 1
id = "board"
name = "Board"

[cpu]
policies = [{ first_cpu = 0 }, { first_cpu = 4 }]

[power]
sources = ["ina3221", "model"]
total = ["IN"]
rails = [{ label = "IN" }, { label = "CPU", child_of = "IN" }, { label = "CORE", child_of = "CPU" }]

[power.model]
idle_w = 2.0
max_w = 6.0
core_joules_per_cycle = 0.5e-9
max_hertz = 1.5e9
provenance = "a meter"

[thermal]
zones = { cpu-thermal = "cpu" }
"""

WRONG = [
    ("schema = 1", "schema = 2", ["schema", 2]),
    ('id = "board"', 'id = "My Board"', ["id", "'My Board'"]),
    ('name = "Board"', 'name = " "', ["name"]),
    ("schema = 1", 'schema = 1\nmatch = { compatible = ["a,b "] }', ["match"]),
    ("first_cpu = 4", "first_cpu = 0", ["cpu.policies", "first_cpu", "[0, 0]"]),
    ("first_cpu = 4 }", "first_cpu = 4, max_hertz = -1.0 }", ["cpu.policies", "max_hertz"]),
    ("[cpu]", "[cpu]\nsources = []", ["cpu.sources"]),
    ("[cpu]", "[cpu]\nlow_opp_correction = 88.0", ["cpu.low_opp_correction", 88.0]),
    ('total = ["IN"]', 'total = ["IN", "CPU"]', ["power.total", "CPU", "IN"]),
    ('total = ["IN"]', 'total = ["IN", "CORE"]', ["power.total", "CORE", "IN"]),
    ('total = ["IN"]', 'total = ["IN", "IN"]', ["power.total"]),
    ('total = ["IN"]', 'total = ["VDD"]', ["power.total", "VDD", "power.rails"]),
    ('total = ["IN"]', "total = []", ["power.total", "ina3221"]),
    ('label = "CORE"', 'label = "CPU"', ["power.rails", "CPU", 2]),
    ('child_of = "CPU"', 'child_of = "GPU"', ["power.rails", "CORE", "child_of", "GPU"]),
    ('label = "IN" }', 'label = "IN", child_of = "CORE" }', ["power.rails", "IN", "child_of"]),
    ('label = "CORE"', 'label = "NC"', ["power.rails", "NC"]),
    ("[power]", "[power]\nvalid_w = [9.0, 1.0]", ["power.valid_w", "[9.0, 1.0]"]),
    ("[power]", "[power]\nuncertainty = 3.0", ["power.uncertainty", 3.0]),
    ("[power]", "[power]\nsample_hz = 50.0", ["power.sample_hz", 50.0, "max_hz", 20.0]),
    ("[power]", "[power]\ngain = 0.0", ["power.gain", 0.0]),
    ('"ina3221", "model"', '"ina3221"', ["power.model", '"model"']),
    ('"ina3221", "model"', '"ina3221", "model", "model"', ["power.sources"]),
    ("max_w = 6.0", "max_w = 1.0", ["power.model", "idle_w 2.0", "max_w 1.0"]),
    ("0.5e-9", "0.5", ["power.model", "core_joules_per_cycle", "max_hertz"]),
    ("max_hertz = 1.5e9", "max_hertz = 1.5e9\nexponent = 0.5", ["power.model.exponent", 0.5]),
    ("max_hertz = 1.5e9", "max_hertz = 1.5e9\ntx_w = -1.0", ["power.model", "tx_w", "rx_w"]),
    ("max_hertz = 1.5e9", "max_hertz = 1.5e9\nuncertainty = 0.0", ["power.model.uncertainty", 0.0]),
    ('"a meter"', '""', ["power.model.provenance"]),
    ('= "cpu"', '= "hot"', ["thermal.zones", "cpu-thermal", "'hot'", "board, cpu, cv"]),
    ("[thermal]", '[thermal]\nignore = ["cpu-thermal"]', ["thermal.ignore", "cpu-thermal", "thermal.zones"]),
    ("[thermal]", "[thermal]\naccept_celsius = [125.0, -40.0]", ["thermal.accept_celsius", "[125.0, -40.0]"]),
    ("[thermal]", "[thermal]\nthrottle_celsius = 300.0", ["thermal.throttle_celsius", 300.0]),
    ("[thermal]", '[power_mode]\nconf = "/etc/x.conf"\n[thermal]', ["power_mode.conf", "/etc/x.conf"]),
    ("[thermal]", '[power_mode]\nstatus = "../x"\n[thermal]', ["power_mode.status", "../x"]),
    ("[thermal]", "[memory]\ngpu_context_bytes = -1\n[thermal]", ["memory.gpu_context_bytes", -1]),
    ("[thermal]", "[inference]\nthreads = 0\n[thermal]", ["inference.threads", 0, 1024]),
    ("[thermal]", "[inference]\ntrainer_nice = 20\n[thermal]", ["inference.trainer_nice", 20, 19]),
    ("[thermal]", "[inference]\nspared_cpus = 1\n[thermal]", ["inference.spared_cpus"]),
    ("[thermal]", '[inference]\norigin = { nice = "x" }\n[thermal]', ["inference.origin", "'nice'"]),
    ("[thermal]", "[thermal]\nzone = {}", ["thermal", "`zone`"]),
    ('child_of = "IN"', 'childof = "IN"', ["power.rails[1]", "`childof`"]),
]


def written(folder: Path, text: str) -> Path:
    path = folder / "board.toml"
    path.write_text(text)
    return path


def test_a_good_profile_is_taken(tmp_path):
    """So that each refusal below is for the one thing that was changed."""
    assert load_file(written(tmp_path, GOOD)).power.total == ("IN",)


@pytest.mark.parametrize(("good", "bad", "named"), WRONG)
def test_what_cannot_be_true_is_refused_by_file_and_table(tmp_path, good, bad, named):
    assert good in GOOD
    path = written(tmp_path, GOOD.replace(good, bad, 1))
    with pytest.raises(ConfigError) as refused:
        load_file(path)
    assert any(names_all(problem, path, *named) for problem in str(refused.value).splitlines())


FIGURES = {
    "[cpu]": ("nominal_hertz", "low_opp_correction", "low_opp_hertz"),
    "[power]": ("gain", "offset_w", "uncertainty", "sample_hz", "max_hz"),
    "[power.model]": ("exponent", "tx_w", "rx_w", "uncertainty"),
    "[thermal]": ("throttle_celsius",),
}
PAIRS = (("[power]", "valid_w"), ("[thermal]", "accept_celsius"))


@pytest.mark.parametrize("figure", ["nan", "inf", "-inf"])
def test_what_is_no_figure_is_refused_everywhere(tmp_path, figure):
    """TOML has words for them, and sums with them are none."""
    lines = [(table, f"{key} = {figure}") for table, keys in FIGURES.items() for key in keys]
    lines += [(table, f"{key} = [{ends}]") for table, key in PAIRS for ends in (f"{figure}, 1.0", f"1.0, {figure}")]
    texts = {f"{table} {line}": GOOD.replace(table, f"{table}\n{line}", 1) for table, line in lines}
    texts |= {"policy": GOOD.replace("first_cpu = 4", f"first_cpu = 4, max_hertz = {figure}")}
    texts |= {key: re.sub(rf"{key} = .*", f"{key} = {figure}", GOOD) for key in ("idle_w", "max_w", "max_hertz")}
    assert len(texts) == 21
    for line, text in texts.items():
        assert text != GOOD
        with pytest.raises(ConfigError):
            pytest.fail(f"{line} is taken: {load_file(written(tmp_path, text))}")


def test_all_problems_are_told_at_once(tmp_path):
    text = GOOD.replace('"a meter"', '""').replace("schema = 1", "schema = 7")
    with pytest.raises(ConfigError) as refused:
        load_file(written(tmp_path, text))
    assert len(str(refused.value).splitlines()) == 2


def profile(id_: str, *tokens: str, priority: int = 0) -> Profile:
    return Profile(schema=1, id=id_, name=id_, match=Match(compatible=tokens, priority=priority))


def test_the_highest_priority_wins_and_a_tie_is_refused():
    """Two that claim one board with equal right are found without that board, too."""
    one, other, third = profile("one", "a,b"), profile("other", "a,b", "c,d", priority=5), profile("third", "c,d")
    here = Identity(compatible=("x,y", "a,b"))
    assert choose_profile([one, other, third], here) == other
    assert choose_profile([third], here) is None
    assert find_conflicts({"one": one, "other": other}) == ()
    twin = profile("twin", "a,b")
    with pytest.raises(ConfigError, match=naming("one", "twin")):
        choose_profile([one, twin], here)
    [rivalry] = find_conflicts({"one": one, "twin": twin})
    assert names_all(rivalry, "match", "one", "twin", "'a,b'")
