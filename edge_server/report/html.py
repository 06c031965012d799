"""HTML and SVG as nested calls: whatever is not markup is escaped, so that no device can write into the page.

What every page is around its content: nothing of it is loaded from anywhere, and nothing in it runs.
"""

from __future__ import annotations

import html
from importlib.resources import files

NOTHING = "\N{EN DASH}"
MAX_TEXT = 300
_VOID = frozenset({"meta"})

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for the page: nothing."""


class Markup(str):
    """Text that is markup already. Only this module and constants make any."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Return any text as text of the page: nothing in it is markup, hidden, or without end."""
    if isinstance(text, Markup):
        return text
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + "\N{HORIZONTAL ELLIPSIS}"
    return _safe(text)


def _safe(text: str) -> Markup:
    if not text.isprintable():
        text = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
    return Markup(html.escape(text))


def joined(*parts: str) -> Markup:
    """Return texts and markup one after another."""
    return Markup("".join(map(escaped, parts)))


def element(name: str, /, *content: str, **attributes: float | str | None) -> Markup:
    """Return an element.

    Args:
        content: Texts and markup in it.
        attributes: `_` stands for a hyphen and is dropped at the end (`class_`); those that are None are left out.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{said}>" if name in _VOID else f"<{name}{said}>{joined(*content)}</{name}>")


def _value(value: float | str) -> str:
    return _safe(value) if isinstance(value, str) else number(value)


def number(value: float) -> str:
    """Return a coordinate with no more digits than a screen can show."""
    return f"{value:.1f}".removesuffix(".0")


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
