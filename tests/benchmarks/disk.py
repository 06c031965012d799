"""Rounds on a slow disk: every fsync and fdatasync of the server takes longer."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import fleet
from measure import Figure, NotRun, Row

MODEL_BYTES, ROUNDS, QUICK_ROUNDS = 4_000, 20, 6
CASES = ((50, 20, "<= 0.5"), (50, 5, ""), (50, 0, ""))
"""Devices, milliseconds per sync, and the target of a round in seconds."""
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static atomic_long syncs;

static int slow(const char *name, int file) {
    long ms = atol(getenv("SYNC_MS"));
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    atomic_fetch_add(&syncs, 1);
    nanosleep(&pause, NULL);
    return real(file);
}

int fsync(int file) { return slow("fsync", file); }
int fdatasync(int file) { return slow("fdatasync", file); }

__attribute__((destructor)) static void report(void) {
    FILE *file = fopen(getenv("SYNC_COUNT"), "w");
    if (file) { fprintf(file, "%ld", atomic_load(&syncs)); fclose(file); }
}
"""


def run(*, quick: bool = False) -> Sequence[Row]:
    """Measure rounds of 50 devices while each sync of the server takes 20, 5 and 0 ms longer."""
    if not (compiler := shutil.which("cc")):
        return [NotRun("rounds on a slow disk", "there is no C compiler `cc`")]
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="fieldfleet-disk-") as name:
        shim, count = Path(name) / "slow.so", Path(name) / "count"
        command = [compiler, "-shared", "-fPIC", "-O2", "-x", "c", "-o", str(shim), "-", "-ldl"]
        subprocess.run(command, input=SHIM, text=True, check=True)
        for devices, sync_ms, target in CASES[:1] if quick else CASES:
            rounds = QUICK_ROUNDS if quick else ROUNDS
            environment = {"LD_PRELOAD": str(shim), "SYNC_MS": str(sync_ms), "SYNC_COUNT": str(count)}
            done = asyncio.run(
                fleet.measure(
                    model_bytes=MODEL_BYTES, devices=devices, rounds=rounds, echo=True, server_environment=environment
                )
            )
            case = f"{devices} devices, {sync_ms} ms per sync"
            rows += [
                Figure(f"round 4kB, {case}", done.median_s, "s", target),
                Figure(f"server syncs a round, {case}", int(count.read_text()) / rounds, ""),
            ]
    return rows
