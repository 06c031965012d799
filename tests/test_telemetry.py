"""Nothing tells anybody outside the site what is computed here: ONNX Runtime would, unless it is told not to."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - what a process leaves is seen from outside
import sys

import pytest

COMPUTES = """
import {module}
import numpy, onnxruntime
from device_agent.hardware.library_smoke_test import SQUARE_MODEL
session = onnxruntime.InferenceSession(SQUARE_MODEL, providers=["CPUExecutionProvider"])
session.run(None, {{"x": numpy.ones((2, 2), numpy.float32)}})
"""
MODULES = ("device_agent.inference.session", "device_agent.hardware.library_smoke_test", "edge_server.release.graph")


def left_by(code: str, home: str, **more: str) -> list[str]:
    """Return the files that a process leaves in its home and in its folder of temporary files."""
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": home, "TMPDIR": home, **more}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)  # noqa: S603 - ours
    return sorted(name for _, _, names in os.walk(home) for name in names)


@pytest.mark.parametrize("module", MODULES)
def test_a_process_of_ours_keeps_no_identifier_and_no_events(tmp_path, module):
    assert left_by(COMPUTES.format(module=module), str(tmp_path)) == []


def test_without_our_word_it_would(tmp_path):
    """So that the test above cannot pass by itself; and who wants the reports may have them."""
    found = left_by(COMPUTES.format(module=MODULES[0]), str(tmp_path), ORT_DISABLE_TELEMETRY="0")
    if not found:
        pytest.skip("this build of ONNX Runtime has no telemetry")
    assert "deviceid" in found
