"""Smoke test of torch or ONNX Runtime in a child process.

On some boards the first convolution crashes. `python -m device_agent.hardware.library_smoke_test torch auto` prints its
result as JSON on the last line and exits with 0; 3 means not installed, 4 out of memory. The second argument is
`[trainer] device`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

EXIT_MISSING, EXIT_MEMORY = 3, 4
STEPS, STEP = 3, 0.1
NO_GPU = "the driver reports no GPU"

SQUARE_MODEL = bytes.fromhex(
    "08083a400a110a01780a017812017922064d61744d756c1201675a130a0178120e0a0c080112080a0208020a0208"
    "0262130a0179120e0a0c080112080a0208020a02080242040a00100d"
)
"""An ONNX model: y = x @ x, both of shape (2, 2), float32; IR version 8, operator set 13."""


def main(library: str, device: str = "cpu") -> int:
    """Import a library and run a small computation; return the exit code."""
    with contextlib.suppress(OSError):  # out of memory should end this process, not the agent
        Path("/proc/self/oom_score_adj").write_text("500")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        module = importlib.import_module(library)
        done, lack = _test_torch(module, device) if library == "torch" else _test_onnxruntime(module)
    except MemoryError:
        return EXIT_MEMORY
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        return EXIT_MISSING
    import json  # noqa: PLC0415 - the agent imports only the constants of this file

    result = {"version": getattr(module, "__version__", ""), "done": done, "lack": lack}
    sys.stdout.write(f"\n{json.dumps(result)}\n")
    return 0


def _test_torch(torch: Any, device: str) -> tuple[str, str]:
    """Train a convolution for three steps, which crashes unsuitable builds; return a summary and what is missing."""
    layer = torch.nn.Conv2d(3, 8, 3)
    cuda, has_gpu = torch.version.cuda, torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise RuntimeError(f"{NO_GPU if cuda else 'it was built without CUDA'}, and [trainer] device is cuda")
    place = "cuda" if has_gpu and device != "cpu" else "cpu"
    optimizer, losses = torch.optim.SGD(layer.to(place).parameters(), lr=STEP), list[float]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = layer(torch.ones(2, 3, 16, 16, device=place)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    if not losses[-1] < losses[0]:  # also where one is not a number
        raise ArithmeticError(f"{STEPS} steps of a convolution change its loss to {losses}")
    hardware = f"{torch.cuda.get_device_name()} with CUDA {cuda}" if place == "cuda" else "the CPU"
    lack = f"it is built for CUDA {cuda}, and {NO_GPU}" if cuda and not has_gpu and device != "cpu" else ""
    return f"trains on {hardware}, Python {platform.python_version()}", lack


def _test_onnxruntime(onnxruntime: Any) -> tuple[str, str]:
    """Run one matrix product; return a summary and what is missing."""
    numpy = importlib.import_module("numpy")
    session = onnxruntime.InferenceSession(SQUARE_MODEL, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": numpy.ones((2, 2), numpy.float32)})
    if (result != 2).any():  # noqa: PLR2004 - two ones in each product
        raise ArithmeticError(f"a product of ones is {result.tolist()}")
    return "imports and computes", ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
