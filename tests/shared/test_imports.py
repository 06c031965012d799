"""What the light agent imports stays light; a fresh interpreter is asked, for here everything is loaded."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIGHT = [
    *(
        "config",
        "data.spec",
        "errors",
        "registry",
        "protocol.messages",
        "protocol.payload",
        "protocol.topics",
        "protocol.wire",
    ),
    *("runtime.clock", "runtime.executor", "runtime.processes", "transfer.frames", "transfer.to_file"),
    *("transport.base", "transport.memory", "transport.mqtt", "transport.mqtt_connection", "transport.presence"),
    "transport.simulated_link",
]
HEAVY = {"torch", "numpy", "onnxruntime", "safetensors", "sklearn", "scipy", "PIL"}


def loaded_after(modules: list[str]) -> set[str]:
    """Return the top-level names of everything that a new interpreter has loaded after importing `modules`."""
    program = f"import sys; import {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"

    async def ask() -> bytes:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await child.communicate()
        assert child.returncode == 0
        return output

    return set(asyncio.run(ask()).decode().split())


def test_light_modules_load_neither_torch_nor_numpy():
    """All together: if one did, this fails, and the import linter's contract says which."""
    loaded = loaded_after([f"shared.{name}" for name in LIGHT])
    assert {"msgspec", "paho", "xxhash"} <= loaded
    assert loaded & HEAVY == set()


def test_the_question_can_be_answered_with_no():
    """The same way of asking does see numpy where it is imported."""
    assert "numpy" in loaded_after(["numpy"])


@pytest.mark.parametrize("name", LIGHT)
def test_the_list_is_of_modules_that_exist(name):
    assert (ROOT / "shared" / (name.replace(".", "/") + ".py")).exists()
