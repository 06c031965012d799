"""What every page is around its content: nothing of it is loaded from anywhere, and nothing in it runs."""

from __future__ import annotations

from importlib.resources import files

from edge_server.report.html import Markup, element

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for the page: nothing."""


def document(title: str, *content: str) -> str:
    """Return a whole page with its style, for light and dark screens."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(files("edge_server.report").joinpath("page.css").read_text("utf-8"))),
    )
    body = element("body", element("main", *content))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"
