"""Worker process of a study: run cells until the study ends.

An order is a line on standard input, an answer a line on standard output. Errors of fieldfleet fail the cell and are
answered; any other error ends the process, which the study detects.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue

import msgspec

from shared import registry
from shared.errors import FieldFleetError
from shared.projects.working_folder import activate_found
from shared.runtime import memory, processes
from shared.runtime.processes import loading

with loading():
    from edge_server.replay.study.cell import run_cell
    from edge_server.replay.study.pool import remove_leftovers
    from edge_server.replay.study.result import Order

# Delays between interrupts at the end: without a cell, with a cell, and before it is killed.
IDLE_S, SOON_S, GRACE_S = 0.05, 0.1, 5.0

NO_MORE = b""


def main() -> None:
    """Run cells until the study has no more or has ended."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep prints out of the answers
    faulthandler.enable()
    processes.configure("warning")
    registry.allow(registry.entries_of_environment())
    activate_found()
    memory.prefer_oom_kill()  # under memory pressure, kill the cell rather than the study
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored
    orders: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True, name="orders").start()
    with suppress(KeyboardInterrupt):
        _work(orders, answers)


def _work(orders: SimpleQueue[bytes], answers: int) -> None:
    while (line := orders.get()) != NO_MORE:
        order = msgspec.json.decode(line, type=Order)
        cause = ""
        try:
            run_cell(order)
        except FieldFleetError as error:
            cause = f"{type(error).__name__}: {error}"
        os.write(answers, msgspec.json.encode(cause) + b"\n")


def _read_orders(orders: SimpleQueue[bytes]) -> None:
    """Queue orders; when standard input ends, end the process even during a cell."""
    with open(sys.stdin.fileno(), "rb", closefd=False) as lines:  # sys.stdin would abort the process at exit
        for line in lines:
            orders.put(line)
    orders.put(NO_MORE)
    for patience_s in (IDLE_S, SOON_S, GRACE_S):  # a first interrupt cancels at the next await, a second one at once
        threading.Event().wait(patience_s)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    remove_leftovers(os.getpid())
    os._exit(0)


if __name__ == "__main__":
    main()
