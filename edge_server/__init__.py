"""Edge server of a site: rounds, aggregation, resource coordinator, journal."""

import sys

import shared  # noqa: F401 - it sets what every process of ours runs with

if sys.version_info < (3, 11):  # noqa: UP036 - the agent, from the same package, runs on 3.10
    sys.exit(f"edge-server needs Python 3.11 or newer, and {sys.executable} is older; the agent alone runs on 3.10")
