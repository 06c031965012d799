"""Digests of first weights, here and on a board: `python weights.py FILE` compares all networks with those in FILE."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import xxhash

from shared.models import MODELS
from shared.models.build import build_initial
from shared.protocol.messages import Spec
from shared.tensors.tree import Tree

SEED = 1


def digest(tree: Tree) -> str:
    """Return the XXH3-128 of all leaves' names, dtypes, shapes and bytes."""
    found = xxhash.xxh3_128()
    for key, leaf in tree.items():
        found.update(f"{key} {leaf.dtype} {tuple(leaf.shape)} ".encode())
        found.update(leaf.numpy().tobytes())
    return found.hexdigest()


def digests(names: Iterable[str] = tuple(sorted(MODELS))) -> dict[str, str]:
    """Return those of networks with their default options at `SEED`."""
    return {name: digest(build_initial(Spec(name=name), SEED).tree()) for name in names}


def main() -> None:
    """Say which networks differ from a file of digests; fail where one does."""
    expected, found = json.loads(Path(sys.argv[1]).read_text()), digests()
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    sys.stdout.write(json.dumps({"networks": len(found), "wrong": wrong}) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
