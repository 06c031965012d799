"""Exit with code 0 if this interpreter has torch, without importing it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

if __name__ == "__main__":
    sys.exit(0 if find_spec("torch") else 1)
