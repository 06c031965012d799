"""What an operator may write about data, and what the light agent must not pay for reading it."""

from __future__ import annotations

import subprocess  # noqa: TID251 - a fresh interpreter is the point
import sys
from pathlib import Path

import msgspec
import pytest

from shared.data.spec import Client, Data, Dirichlet, Even, Shards, require_source
from shared.errors import ConfigError
from tests.naming import naming


@pytest.mark.parametrize(
    ("text", "partition"),
    [
        ("{kind = 'dirichlet', alpha = 1, parts = 4, index = 3}", Dirichlet(alpha=1.0, parts=4, index=3)),
        ("{kind = 'shards', parts = 4, index = 0, seed = 7}", Shards(parts=4, index=0, seed=7)),
        ("{kind = 'even', parts = 1, index = 0}", Even(parts=1, index=0)),
        ("{kind = 'client', client = 'f3'}", Client(client="f3")),
    ],
)
def test_partitions_are_told_apart_by_kind(text, partition):
    spec = msgspec.toml.decode(f"source = 'digits'\npartition = {text}", type=Data)
    assert spec == Data(source="digits", partition=partition)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=Data) == spec


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("source = 'idx'", "path"),
        ("source = 'digits'\nhots = 1", "hots"),
        ("source = 'digits'\nholdout = 1.0", "holdout"),
        ("source = 'digits'\nholdout = nan", "holdout"),
        ("source = 'digits'\nvalidation = 1.0", "validation"),
        ("source = 'digits'\nvalidation = -0.1", "validation"),
        ("source = 'digits'\nlimit = 0", "limit"),
        ("source = 'digits'\nclient_column = 'who'", "client_column"),
        ("source = 'digits'\npartition = {kind = 'even', parts = 0, index = 0}", "parts"),
        ("source = 'digits'\npartition = {kind = 'even', parts = 4, index = 4}", "index"),
        ("source = 'digits'\npartition = {kind = 'even', parts = 4, index = -1}", "index"),
        ("source = 'digits'\npartition = {kind = 'even', parts = 4, index = 0, seed = -1}", "seed"),
        ("source = 'digits'\npartition = {kind = 'shards', parts = 2, index = 0, shards_per_device = 0}", "shards_per"),
        ("source = 'digits'\npartition = {kind = 'dirichlet', parts = 2, index = 0, alpha = 0}", "alpha"),
        ("source = 'digits'\npartition = {kind = 'dirichlet', parts = 2, index = 0, alpha = inf}", "alpha"),
        (
            "source = 'digits'\npartition = {kind = 'dirichlet', parts = 2, index = 0, alpha = 1, min_examples = -1}",
            "min",
        ),
        ("source = 'digits'\npartition = {kind = 'client', client = 'a', parts = 2}", "parts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text, word):
    with pytest.raises(msgspec.ValidationError, match=word):
        msgspec.toml.decode(text, type=Data)


def test_a_spec_is_parsed_without_torch_or_numpy():
    code = "import sys, shared.data.spec; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False)  # noqa: S603 - ours
    assert done.returncode == 0


def test_a_source_that_nobody_offers_is_refused_with_the_nearest_name():
    require_source(Data(source="mymodule:read"), "x.toml")  # imported where it is read
    with pytest.raises(ConfigError, match=naming("x.toml", "data.source", "'nzp'", "'npz'")):
        require_source(Data(source="nzp", path="x"), "x.toml")
