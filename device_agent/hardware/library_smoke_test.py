"""Smoke test of torch or ONNX Runtime in a child process: on some boards the first convolution ends the process.

`python -m device_agent.hardware.library_smoke_test torch` prints the version and exits with 0; 3 means not installed,
4 out of memory.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

EXIT_MISSING, EXIT_MEMORY = 3, 4

SQUARE_MODEL = bytes.fromhex(
    "08083a400a110a01780a017812017922064d61744d756c1201675a130a0178120e0a0c080112080a0208020a0208"
    "0262130a0179120e0a0c080112080a0208020a02080242040a00100d"
)
"""An ONNX model: y = x @ x, both of shape (2, 2), float32; IR version 8, operator set 13."""


def main(library: str) -> int:
    """Import a library and let it compute a little; return the exit code."""
    with contextlib.suppress(OSError):  # where memory is short, it ends this process and not the agent
        Path("/proc/self/oom_score_adj").write_text("500")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        module = importlib.import_module(library)
        SMOKE_TESTS[library](module)
    except MemoryError:
        return EXIT_MEMORY
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        return EXIT_MISSING
    sys.stdout.write(f"\n{getattr(module, '__version__', '')}\n")
    return 0


def _test_torch(torch: Any) -> None:
    """Take one convolution forward and backward: it is there that builds for newer CPUs die."""
    layer = torch.nn.Conv2d(3, 8, 3)
    layer(torch.ones(2, 3, 16, 16)).square().sum().backward()
    if not layer.weight.grad.isfinite().all():
        raise ArithmeticError("the gradient of a convolution is not finite")


def _test_onnxruntime(onnxruntime: Any) -> None:
    """Run one matrix product."""
    numpy = importlib.import_module("numpy")
    session = onnxruntime.InferenceSession(SQUARE_MODEL, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": numpy.ones((2, 2), numpy.float32)})
    if (result != 2).any():  # noqa: PLR2004 - two ones in each product
        raise ArithmeticError(f"a product of ones is {result.tolist()}")


SMOKE_TESTS: Mapping[str, Callable[[Any], None]] = {"torch": _test_torch, "onnxruntime": _test_onnxruntime}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
