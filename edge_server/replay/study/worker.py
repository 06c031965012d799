"""A process that runs cells, one after another, as long as the study that started it lives.

An order is a line on its standard input, an answer a line on its standard output. What fails a cell by an error of ours
is answered; anything else ends the process, and the study sees that.
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
from shared.runtime import memory, processes
from shared.runtime.processes import loading

with loading():
    from edge_server.replay.study.cell import run_cell
    from edge_server.replay.study.pool import remove_leftovers
    from edge_server.replay.study.result import Order

IDLE_S, SOON_S, GRACE_S = 0.05, 0.1, 5.0
"""How long a process without orders waits for its own end, and one with a cell for the cell to give way."""

NO_MORE = b""


def main() -> None:
    """Run cells until the study has no more, or is no more."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints shall not be taken for an answer
    faulthandler.enable()
    processes.configure("warning")
    registry.allow(os.environ.get(registry.VARIABLE, "").split())
    memory.die_first()  # a cell can be run again, rather than the study
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
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
    """Take orders; where there will be none any more, end the process, whatever it does."""
    with open(sys.stdin.fileno(), "rb", closefd=False) as lines:  # as sys.stdin it would abort the process at its end
        for line in lines:
            orders.put(line)
    orders.put(NO_MORE)
    for patience_s in (IDLE_S, SOON_S, GRACE_S):  # asked once, asyncio cancels where it next waits; twice, at once
        threading.Event().wait(patience_s)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    remove_leftovers(os.getpid())
    os._exit(0)


if __name__ == "__main__":
    main()
