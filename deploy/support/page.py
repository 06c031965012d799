"""Write the page of supported systems out of the table that `setup` and `doctor` read.

python deploy/support/page.py > deploy/SUPPORT.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from shared.runtime.support.table import Row, WheelSet, read_sets, read_table

TOP = """# Which systems are supported

Written by `python deploy/support/page.py` out of [table.toml](../shared/runtime/support/table.toml), which
`device-agent setup`, `edge-server setup` and `device-agent doctor` read; the first row that fits a system counts.
Sizes are what comes over the network. Tested: *real*, on a machine of that kind; *emulated*, its processor in software,
which shows that it works and not how fast; *recorded*, the choice alone, by the files of such a board; *not yet*.

| system | Python | to train | to serve | a gateway | tested |
|---|---|---|---|---|---|
"""
BELOW = """
The emulated processors are a Cortex-A72 (Raspberry Pi 4) and a Cortex-A76 (Raspberry Pi 5) of QEMU. On the former
`import torch` of 2.10.0 dies of an illegal instruction, and the version of the table trains. To try another one there:
`proot -q 'qemu-aarch64-static -cpu cortex-a72' -r build/arm/root …` after `make arm`.
"""


def rows() -> Iterator[str]:
    """Yield a line of the page for each row of the table."""
    sets = read_sets()
    for row in read_table().row:
        if row.refused:
            yield f"| {row.systems} | {row.python or 'any'} | no: {row.refused} | no | no | {row.tested} |"
        else:
            cells = [cell(sets[row.wheels], purpose) for purpose in ("train", "infer", "server")]
            yield f"| {told(row)} | {row.python} | {' | '.join(cells)} | {row.tested} |"


def told(row: Row) -> str:
    """Return what the page says of a system."""
    return f"{row.systems}. {row.note[:1].upper()}{row.note[1:]}" if row.note else row.systems


def cell(wheels: WheelSet, purpose: str) -> str:
    """Return the versions and the size of what a purpose takes."""
    names = getattr(wheels, purpose)
    chosen = {one.name: one for one in wheels.wheels if one.name in names}
    main = [f"{name} {chosen[name].version}" for name in ("torch", "onnxruntime", "cvxpy") if name in chosen]
    return f"{', '.join(main)}; {sum(one.bytes for one in chosen.values()) / 1e6:.0f} MB"


def page() -> str:
    """Return the page."""
    return TOP + "\n".join(rows()) + "\n" + BELOW


if __name__ == "__main__":
    sys.stdout.write(page())
