"""Print what this build of ONNX Runtime computes with, the best first: a module to be run, in a process of its own."""

from __future__ import annotations

import sys


def main() -> None:
    """Import it and ask it."""
    import onnxruntime  # noqa: PLC0415 - it may end the process

    sys.stdout.write("\n" + " ".join(onnxruntime.get_available_providers()) + "\n")


if __name__ == "__main__":
    main()
