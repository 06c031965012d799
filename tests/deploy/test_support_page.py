"""The page of supported systems is the table that decides."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_table_says():
    """Else: `python deploy/support/page.py > deploy/SUPPORT.md`."""
    spec = spec_from_file_location("support_page", ROOT / "deploy/support/page.py")
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    assert (ROOT / "deploy/SUPPORT.md").read_text() == found.page()
