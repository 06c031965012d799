"""A failed thread ends its process."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

from shared.runtime.processes import EXIT_THREAD

FAILING = """
import threading, time
from shared.runtime import processes
processes.configure("warning")
processes.end_on_thread_failure()
def fail(): {what}
threading.Thread(target=fail, name="reader").start()
time.sleep(1 if "Exit" in "{what}" else 60)
"""


async def _run(code):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=PIPE)
    _, said = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, said.decode()


def test_an_error_in_a_thread_ends_the_process_and_names_the_thread():
    code, said = asyncio.run(_run(FAILING.format(what="raise TypeError(7)")))
    assert code == EXIT_THREAD
    assert "'reader'" in said
    assert "TypeError: 7" in said


def test_a_thread_may_end_itself():
    assert asyncio.run(_run(FAILING.format(what="raise SystemExit"))) == (0, "")
