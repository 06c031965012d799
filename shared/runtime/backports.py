"""Parts of the standard library that Python 3.10 lacks.

JetPack 6 has that version, and NVIDIA builds torch for it. From Python 3.11 on, the standard library's own are used.
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
        """Compute the digest of an open binary file, as `hashlib.file_digest` of Python 3.11 does."""
        hasher = hashlib.new(digest)
        while part := file.read(1 << 18):
            hasher.update(part)
        return hasher


__all__ = ["BaseExceptionGroup", "TaskGroup", "file_digest", "run", "timeout"]
