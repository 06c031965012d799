"""Other processes' calendar clocks, moved from outside while they run: C's too, by which OpenSSL judges dates.

A library put before the C library answers for the calendar and leaves the monotonic clock alone. How far a process is
ahead stands in a file of its own, which it maps, so that a test moves a clock as an operator or a time server would.
"""

from __future__ import annotations

import shutil
import struct
import subprocess  # noqa: TID251 - a compiler
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <time.h>
#include <unistd.h>

static const volatile double *shift; /* seconds ahead, and whether the kernel calls the clock right */

__attribute__((constructor)) static void open_shift(void) {
    const char *name = getenv("SHIFTED_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(0, 2 * sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) shift = found;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += (long)shift[0];
    return failed;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict told, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    told->tv_sec = now.tv_sec;
    told->tv_usec = now.tv_nsec / 1000;
    return 0;
}

int adjtimex(struct timex *about) {
    (void)about;
    return shift && shift[1] > 0 ? TIME_OK : TIME_ERROR;
}
"""

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed")


@dataclass(frozen=True)
class ShiftedClock:
    """The calendar clock of some processes.

    Attributes:
        library: As `compiled` made it.
        path: Where it stands how far they are ahead.
    """

    library: Path
    path: Path

    def move(self, ahead_s: float, *, kept_right: bool = False) -> None:
        """Move the clock of all who run by it.

        Args:
            ahead_s: Seconds before this machine's clock.
            kept_right: Whether their kernel calls it right.
        """
        data = struct.pack("dd", ahead_s, float(kept_right))
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.write(data)

    def environment(self) -> dict[str, str]:
        """Return what a process that runs by it is started with."""
        return {"LD_PRELOAD": str(self.library), "SHIFTED_CLOCK": str(self.path)}


def compiled(folder: Path) -> Path:
    """Return the library, made in a folder."""
    source, made = folder / "shifted.c", folder / "shifted.so"
    source.write_text(SOURCE)
    words = ["cc", "-shared", "-fPIC", "-O1", "-D_TIME_BITS=64", "-D_FILE_OFFSET_BITS=64", "-o", made, source]
    subprocess.run([*map(str, words)], check=True)  # noqa: S603 - ours
    return made
