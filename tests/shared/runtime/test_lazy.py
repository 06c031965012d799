"""A module that is imported and not used is not loaded; one that is used is the module itself."""

from __future__ import annotations

import subprocess  # noqa: TID251 - what an interpreter has loaded is seen in one of its own
import sys

HEAVY = ("email.message", "http.client", "importlib.metadata", "torch", "numpy")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    return done.stdout.strip()


def test_an_agent_loads_nothing_that_it_does_not_use_while_it_waits():
    """Each of these is half a megabyte or more."""
    code = "import sys, device_agent.commands.run, shared.transport.mqtt; print(*sys.modules)"
    assert not {*run(code).split()} & {*HEAVY}


def test_what_is_used_is_loaded_then():
    code = """
from shared.runtime.lazy import load_lazily
load_lazily("urllib.request")
import sys, urllib.request
print("http.client" in sys.modules)
print(urllib.request.Request("http://x/").host, "http.client" in sys.modules)
from urllib.request import Request
print(Request is urllib.request.Request, hasattr(urllib.request, "no such thing"))
"""
    assert run(code).splitlines() == ["False", "x True", "True False"]


def test_what_is_loaded_already_stays():
    code = """
import urllib.request
was = urllib.request
from shared.runtime.lazy import load_lazily
load_lazily("urllib.request")
print(urllib.request is was)
"""
    assert run(code) == "True"
