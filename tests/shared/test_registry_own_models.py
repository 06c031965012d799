"""User builders: only those allowed by the operator are imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared import registry
from shared.errors import ConfigError
from shared.models.build import build_blank, build_initial
from shared.models.cost import cut_table
from shared.models.evaluate import build_skeleton
from shared.protocol.messages import Spec
from tests.naming import names_all, naming

SOURCE = """
from os import system  # what somebody else defined
from pathlib import Path

from torch import nn

from shared.models.base import Model

Path(__file__).with_suffix(".imported").touch()


def net(hidden: int = 3) -> Model:
    layers = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    return Model(layers, {1: 2}, example=(4,))


def nothing() -> None:
    return None


def wrong() -> Model:
    return Model(nn.Sequential(nn.ReLU()), {1: 1})


class Moody(nn.Module):
    def forward(self, inputs):
        return inputs.no_such_thing


def moody() -> Model:
    return Model(nn.Sequential(nn.Linear(4, 2), Moody()), {1: 1}, example=(4,))


def raising(kind: str = "KeyError") -> Model:
    raise {"KeyError": KeyError, "NameError": NameError, "ZeroDivisionError": ZeroDivisionError}[kind]("of its own")


figure = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A module `fieldnets` on the Python path; nothing is allowed, before and after."""
    path = tmp_path / "fieldnets.py"
    path.write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def net(:\n")
    (tmp_path / "lacking.py").write_text("import no_such_library\n")
    (tmp_path / "failing.py").write_text("nobody_has_defined_this\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    registry.allow([])
    for name in ("fieldnets", "broken", "lacking", "failing"):
        sys.modules.pop(name, None)


def refusal(name: str, **options: int) -> str:
    with pytest.raises(ConfigError) as caught:
        build_blank(Spec(name=name, options=options))
    return str(caught.value)


def test_an_allowed_builder_is_a_model_like_any_other(module):
    """Seeded, blank, cut and with options that are checked."""
    registry.allow(["fieldnets:net"])
    spec = Spec(name="fieldnets:net", options={"hidden": 5})
    first, again = build_initial(spec, 7).tree(), build_initial(spec, 7).tree()
    assert first["0.weight"].shape == (5, 4)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert all(leaf.is_meta for leaf in build_skeleton(spec).parameters())
    assert [cut.shape for cut in cut_table(spec).cuts] == [(5,)]
    assert names_all(refusal("fieldnets:net", depth=3), "'depth'", "hidden")


def test_what_is_not_allowed_is_not_imported(module):
    """Neither by default, nor because another name is allowed; the module has not run."""
    imported = module.with_suffix(".imported")
    for allowed in ([], ["fieldnets:wrong"], ["other:*"], ["field:*", "fieldnets.net:*"]):
        registry.allow(allowed)
        assert names_all(refusal("fieldnets:net"), "'fieldnets:net'")
    assert not imported.exists()
    registry.allow(["fieldnets:*"])
    build_blank(Spec(name="fieldnets:net"))
    assert imported.exists()


def test_a_star_allows_what_the_module_defines_and_not_what_it_imports(module, tmp_path):
    """A shell that a module happens to import is no model; the star itself is no name."""
    registry.allow(["fieldnets:*"])
    assert build_blank(Spec(name="fieldnets:net")).cuts == {1: 2}
    with pytest.raises(ConfigError, match=naming("fieldnets", "system")):
        build_blank(Spec(name="fieldnets:system", options={"command": f"touch {tmp_path}/ran"}))
    assert not (tmp_path / "ran").exists()
    assert names_all(refusal("fieldnets:*"), "'fieldnets:*'")


@pytest.mark.parametrize(
    "name",
    ["os:system", ":net", "fieldnets:", "fieldnets:net:net", "../fieldnets:net", "fieldnets:__import__", ":", "a b:c"],
)
def test_names_that_try_it_are_refused(module, name):
    """Also where all of an honest module is allowed."""
    registry.allow(["fieldnets:*"])
    assert name in refusal(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fieldnets:figure", "'figure'"),
        ("fieldnets:absent", "'absent'"),
        ("fieldnets:nothing", "NoneType"),
        ("fieldnets:wrong", "fieldnets:wrong"),
        ("broken:net", "invalid syntax"),
        ("lacking:net", "No module named 'no_such_library'"),
        ("failing:net", "NameError: name 'nobody_has_defined_this' is not defined"),
        ("nowhere_to_be_found:net", "No module named 'nowhere_to_be_found'"),
    ],
)
def test_what_is_no_model_says_so(module, name, problem):
    registry.allow([name])
    assert problem in refusal(name)


@pytest.mark.parametrize("kind", ["KeyError", "NameError", "ZeroDivisionError"])
def test_a_builder_that_fails_in_its_own_way_says_so(module, kind):
    registry.allow(["fieldnets:raising"])
    told = refusal("fieldnets:raising", kind=kind)
    assert kind in told
    assert "of its own" in told


def test_layers_that_fail_in_their_own_way_take_no_such_examples(module):
    registry.allow(["fieldnets:moody"])
    with pytest.raises(ConfigError, match=naming("(4,)", "'no_such_thing'")):
        cut_table(Spec(name="fieldnets:moody"))


@pytest.mark.parametrize("entry", ["fieldnets", "fieldnets:", "*", "*:*", "fieldnets.*:net", "field nets:net", "a:b:c"])
def test_an_allow_list_that_cannot_be_meant_is_refused(entry):
    """Above all one that would allow everything."""
    registry.allow([])
    with pytest.raises(ConfigError, match=naming(repr(entry))):
        registry.allow([entry])
    assert registry.allowed_entries() == []


def test_allowing_replaces_what_was_allowed():
    registry.allow(["b:c", "a:*"])
    assert registry.allowed_entries() == ["a:*", "b:c"]
    registry.allow([])
    assert registry.allowed_entries() == []
