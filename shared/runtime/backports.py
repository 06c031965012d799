"""Parts of the standard library that Python 3.10 lacks.

JetPack 6 has that version, and NVIDIA builds torch for it. From Python 3.11 on, these are the standard library's own.
"""

from __future__ import annotations

import sys
from typing import BinaryIO

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup, run, timeout
    from builtins import BaseExceptionGroup
    from hashlib import file_digest
else:
    import hashlib

    from exceptiongroup import BaseExceptionGroup
    from taskgroup import TaskGroup, run, timeout

    def file_digest(file: BinaryIO, digest: str) -> hashlib._Hash:
        """Return the digest of an open binary file, as `hashlib.file_digest` of Python 3.11 does."""
        found = hashlib.new(digest)
        while part := file.read(1 << 18):
            found.update(part)
        return found


__all__ = ["BaseExceptionGroup", "TaskGroup", "file_digest", "run", "timeout"]
