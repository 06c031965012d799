"""Parts of the standard library that Python 3.10 lacks.

JetPack 6 has that version, and NVIDIA builds torch for it. From Python 3.11 on, the standard library's own are used.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup, run, timeout
    from builtins import BaseExceptionGroup
else:
    from exceptiongroup import BaseExceptionGroup
    from taskgroup import TaskGroup, run, timeout

__all__ = ["BaseExceptionGroup", "TaskGroup", "run", "timeout"]
