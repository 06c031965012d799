"""Print the execution providers of ONNX Runtime, best first.

Run as a module in a child process, since the import may crash.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Print the providers on the last line."""
    import onnxruntime  # noqa: PLC0415 - it may end the process

    sys.stdout.write("\n" + " ".join(onnxruntime.get_available_providers()) + "\n")


if __name__ == "__main__":
    main()
