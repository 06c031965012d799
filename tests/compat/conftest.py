"""What the tests of compatibility share: the two sides, and sites for their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.compat.sides import Side, Site, after, before, mosquitto


@pytest.fixture(scope="session")
def old() -> Side:
    """Return the commit before."""
    return before()


@pytest.fixture(scope="session")
def new() -> Side:
    """Return this checkout."""
    return after()


@pytest.fixture(scope="module")
def make_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Site]]:
    """Return a maker of sites, each with a broker of its own; all their processes end with the module."""
    with ExitStack() as stack:

        def make(**keys: Any) -> Site:
            folder = tmp_path_factory.mktemp("site")
            site = Site(folder, stack.enter_context(mosquitto(folder)), **keys)
            stack.callback(site.close)
            return site

        yield make
