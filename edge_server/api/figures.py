"""Curves of one or several runs as HTML with inline SVG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from edge_server.report.digest import Digest
from edge_server.report.html import clean, document, render_fragment
from edge_server.report.page import render_progress
from shared.runtime.durable import replace_file


class RunFigure:
    """Curves of accuracy and loss against rounds, seconds, joules and bytes; a notebook shows it."""

    def __init__(self, runs: Sequence[Digest]) -> None:
        self._title = ", ".join(run.run for run in runs)
        self._content = render_progress(runs)

    @property
    def html(self) -> str:
        """The plot as a complete page."""
        return document(self._title, Markup("<h1>{}</h1>{}").format(clean(self._title), self._content))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file and return its path."""
        file = Path(path)
        replace_file(file, self.html.encode(), durable=False)
        return file

    def _repr_html_(self) -> str:
        return render_fragment(self._content)

    def __repr__(self) -> str:
        return f"<RunFigure of {self._title}; show it in a notebook, or write it with .save('figure.html')>"
