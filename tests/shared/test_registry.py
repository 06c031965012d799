"""Names in a plan or a message become things, or one line that says which names there are."""

from __future__ import annotations

import math

import pytest

from shared.algorithms import ALGORITHMS
from shared.codecs import CODECS
from shared.errors import ConfigError
from shared.models import MODELS
from shared.protocol.messages import Spec
from shared.registry import build
from tests.naming import names_all, naming


def line(size: int = 1, name: str = "x") -> tuple[int, str]:
    """Build a thing for these tests."""
    if size < 0:
        raise ValueError("size is negative")
    return size + 0, name.upper()


def nothing() -> str:
    """Build a thing without options."""
    return "nothing"


LINES = {"line": line, "nothing": nothing}


def mistake(spec: Spec) -> str:
    with pytest.raises(ConfigError) as caught:
        build(LINES, spec, "line")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_builds_with_options():
    assert build(LINES, Spec(name="line"), "line") == (1, "X")
    assert build(LINES, Spec(name="line", options={"size": 3, "name": "y"}), "line") == (3, "Y")


def test_an_unknown_name_lists_the_known_ones():
    assert names_all(mistake(Spec(name="lin")), "'lin'", "line, nothing", "'line'")


def test_an_unknown_option_lists_the_known_ones():
    said = mistake(Spec(name="line", options={"sise": 3}))
    assert names_all(said, "line 'line'", "'sise'", "size, name", "'size'")
    assert names_all(mistake(Spec(name="nothing", options={"a": 1})), "'nothing'", "'a'")


@pytest.mark.parametrize("options", [{"size": -1}, {"size": "many"}], ids=repr)
def test_a_value_that_the_builder_refuses(options):
    assert mistake(Spec(name="line", options=options)).startswith("line 'line': ")


def test_true_is_no_number():
    """Python counts with it as with 1: `share = true` was all of a change."""
    assert names_all(mistake(Spec(name="line", options={"size": True})), "line 'line'", "size", True)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_no_journal_keeps_is_refused(value):
    """JSON has no such numbers: the journal of a run with `switch_divergence = inf` could not be read again."""
    said = mistake(Spec(name="line", options={"name": "y", "size": value}))
    assert names_all(said, "line 'line'", "size", value)


@pytest.mark.parametrize("hidden", [-1, 1 << 50, 1 << 70])
def test_what_torch_refuses_is_one_line_as_well(hidden):
    """Negative, more than any memory, more than 64 bits: torch answers with another error and many lines each."""
    with pytest.raises(ConfigError, match=naming("model 'mlp'")) as caught:
        build(MODELS, Spec(name="mlp", options={"hidden": hidden}), "model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("registry", [ALGORITHMS, CODECS, MODELS], ids=["algorithms", "codecs", "models"])
def test_what_is_registered_builds_from_its_name_alone(registry):
    """And its name may stand in a plan and in a file name."""
    for name in registry:
        assert build(registry, Spec(name=name), "thing")
        assert name.replace("_", "").isalnum()
        assert name == name.lower()
