"""Plugins: entry points and attributes that the operator lists, with the version and digest of their code."""

from __future__ import annotations

import subprocess  # noqa: TID251 - a fresh interpreter
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared import plugins, registry
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm
from shared.codecs import CODECS
from shared.data.sources.read import read_whole
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.build import build_initial
from shared.protocol.messages import Spec
from shared.registry import Registry, build, find
from tests.naming import names_all, naming
from tests.plugin_files import write_distribution
from tests.shared.test_imports import ROOT, loaded_after


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Iterator[Path]:
    """A distribution with entry points on the Python path; nothing is allowed, before and after."""
    write_distribution(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    registry.allow([])
    plugins.source_digest.cache_clear()
    plugins.owning_distribution.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fieldplug", "elsewhere")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "entry", ["field-plug:slow", "Field_Plug:slow", "field-plug:*", "fieldplug.methods:slow", "fieldplug.methods:*"]
)
def test_an_entry_point_is_found_by_its_name_where_it_is_listed(installed, entry):
    registry.allow([entry])
    algorithm = build(ALGORITHMS, Spec(name="slow", options={"share": 0.5}), "algorithm")
    assert isinstance(algorithm, Algorithm)
    with pytest.raises(ConfigError, match=naming("'slow'", "'shere'", "share")):
        build(ALGORITHMS, Spec(name="slow", options={"shere": 0.5}), "algorithm")


@pytest.mark.parametrize("allowed", [[], ["field-plug:other"], ["plug:slow"], ["fieldplug:*"], ["fieldplug.method:*"]])
def test_an_entry_point_that_is_not_listed_is_not_imported(installed, allowed):
    registry.allow(allowed)
    with pytest.raises(ConfigError, match=naming("field-plug:slow", registry.VARIABLE)):
        build(ALGORITHMS, Spec(name="slow"), "algorithm")
    assert "fieldplug.methods" not in sys.modules


def test_an_entry_point_is_of_its_own_kind(installed):
    registry.allow(["field-plug:*"])
    with pytest.raises(ConfigError, match=naming("unknown codec 'slow'")):
        build(CODECS, Spec(name="slow"), "codec")


def test_the_same_name_of_two_distributions_is_ambiguous_until_one_is_listed(installed):
    write_distribution(installed, package="elsewhere", name="else-where")
    registry.allow(["field-plug:slow", "else-where:slow"])
    with pytest.raises(ConfigError, match=naming("field-plug", "else-where")):
        build(ALGORITHMS, Spec(name="slow"), "algorithm")
    registry.allow(["else-where:slow"])
    assert find(ALGORITHMS, "slow", "algorithm").__module__ == "elsewhere.methods"


def test_a_builder_of_another_thing_is_refused(installed):
    registry.allow(["fieldplug.methods:*"])
    with pytest.raises(ConfigError, match=naming("fieldplug.methods:wrong", "int", "shared.codecs.base.Codec")):
        build(CODECS, Spec(name="fieldplug.methods:wrong"), "codec")
    with pytest.raises(ConfigError, match=naming("fieldplug.methods:raising", "KeyError")):
        build(CODECS, Spec(name="fieldplug.methods:raising"), "codec")
    things = Registry("thing", "things", {"a": 1}, product=int, holds_products=True)
    assert find(things, "fieldplug.methods:FIGURE", "thing") == 7
    with pytest.raises(ConfigError, match=naming("fieldplug.methods:wrong", "int")):
        find(things, "fieldplug.methods:wrong", "thing")


@pytest.mark.parametrize("name", ["pairs", "fieldplug.methods:pairs"])
def test_a_source_of_ones_own_gives_inputs_and_targets(installed, name):
    registry.allow(["field-plug:*", "fieldplug.methods:*"])
    path = installed / "count"
    path.write_text("9")
    examples = read_whole(Data(source=name, path=str(path)))
    assert (examples.inputs.shape, examples.inputs.dtype) == ((9, 4), np.float32)
    assert examples.labels.tolist() == [0, 1, 2] * 3
    path.write_text("many")
    with pytest.raises(ConfigError, match=naming(f"'{name}'", "ValueError")):
        read_whole(Data(source=name, path=str(path)))


def test_identity_is_name_version_and_a_digest_of_the_whole_package(installed):
    registry.allow(["field-plug:*", "fieldplug.methods:*"])
    uses = [(ALGORITHMS, "slow"), (CODECS, "dense"), (ALGORITHMS, "slow"), (MODELS, "fieldplug.methods:net")]
    slow, net = plugins.identify(uses)
    assert (slow.kind, slow.name, slow.distribution, slow.version) == ("algorithm", "slow", "field-plug", "1.2")
    assert (net.kind, net.name, net.version) == ("model", "fieldplug.methods:net", "1.2")
    assert slow.digest == net.digest
    assert len(slow.digest) == 64
    plugins.source_digest.cache_clear()
    (installed / "fieldplug" / "unused.txt").write_text("no source")
    assert plugins.source_digest("fieldplug") == slow.digest
    plugins.source_digest.cache_clear()
    (installed / "fieldplug" / "more.py").write_text("")
    assert plugins.source_digest("fieldplug.methods") != slow.digest
    assert plugins.source_digest("no_such_module_at_all") == ""


def test_a_device_with_other_code_refuses_and_names_both(installed):
    registry.allow(["field-plug:slow"])
    [here] = plugins.identify([(ALGORITHMS, "slow")])
    plugins.require_same([here], [ALGORITHMS, CODECS], "cam")
    there = msgspec.structs.replace(here, version="1.3", digest="f" * 64)
    with pytest.raises(
        ConfigError, match=naming("cam", "algorithm", "'slow'", "1.2", "1.3", here.digest[:12], "ffffffffffff")
    ):
        plugins.require_same([there], [ALGORITHMS, CODECS], "cam")
    registry.allow([])
    with pytest.raises(ConfigError, match=naming("field-plug:slow", registry.VARIABLE)):
        plugins.require_same([here], [ALGORITHMS], "cam")


def test_a_module_without_distribution_has_a_digest_of_its_file(tmp_path, monkeypatch):
    (tmp_path / "lonely.py").write_text("def net():\n    return 1\n")
    (tmp_path / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    digest = plugins.source_digest("lonely")
    plugins.source_digest.cache_clear()
    (tmp_path / "other.py").write_text("changed = True")
    assert plugins.source_digest("lonely") == digest


def test_what_is_built_in_looks_up_no_entry_point():
    """Reading the metadata of installed distributions takes megabytes and milliseconds."""
    program = [
        "shared.plugins",
        "shared.registry",
        "shared.data.spec",
        "device_agent.config",
        "device_agent.agent.build",
    ]
    assert not {"torch", "numpy"} & loaded_after(program)
    imports = f"import {', '.join(program)}; from shared.data.spec import Data, require_source; "
    assert "importlib.metadata" not in modules_after(imports + "require_source(Data(source='digits'), 'x')")
    assert "importlib.metadata" in modules_after(imports + "require_source(Data(source='a-b'), 'x')", fails=True)


def modules_after(program: str, *, fails: bool = False) -> set[str]:
    """Return the modules that a new interpreter has loaded after a program, which may raise."""
    attempt = f"failed = False\ntry:\n    {program}\nexcept Exception:\n    failed = True\n"
    text = f"import sys\n{attempt}print(failed, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, cwd=ROOT)  # noqa: S603
    failed, *modules = done.stdout.split()
    assert failed == str(fails)
    return set(modules)


def test_a_network_of_an_entry_point_has_the_weights_of_its_seed(installed):
    registry.allow(["field-plug:*"])
    first, again = (build_initial(Spec(name="tiny"), 7).tree() for _ in range(2))
    assert {key: leaf.tolist() for key, leaf in first.items()} == {key: leaf.tolist() for key, leaf in again.items()}
    assert names_all(str(sorted(first)), "0.weight")
