"""HTML and SVG builder that escapes everything except `Markup`.

Device names and causes come from devices, so none of them may end up as markup. The page's policy loads nothing.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from importlib.resources import files

NOTHING = "\N{EN DASH}"
MAX_TEXT = 300
_VOID = frozenset({"meta"})

SCOPE = "fieldfleet"
"""Class of the element that embedded content is in."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy of the page: nothing may be loaded or run."""


class Markup(str):
    """Text that is markup already; made only by this module and from constants."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Return text escaped, cut to `MAX_TEXT` and without unprintable characters; markup is unchanged."""
    if isinstance(text, Markup):
        return text
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + "\N{HORIZONTAL ELLIPSIS}"
    return _safe(text)


def _safe(text: str) -> Markup:
    if not text.isprintable():
        text = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return Markup(html.escape(text))


def join(parts: Iterable[str] = ()) -> Markup:
    """Return texts and markup concatenated."""
    return Markup("".join(map(escape, parts)))


def element(name: str, content: str | Iterable[str] = (), /, **attributes: float | str | None) -> Markup:
    """Return an element.

    Args:
        content: A text or markup, or several.
        attributes: `_` stands for a hyphen and is dropped at the end (`class_`); those that are None are omitted.
    """
    inner = escape(content) if isinstance(content, str) else join(content)
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{attribute_text}>" if name in _VOID else f"<{name}{attribute_text}>{inner}</{name}>")


def _value(value: float | str) -> str:
    return _safe(value) if isinstance(value, str) else number(value)


def number(value: float) -> str:
    """Return a coordinate with one decimal, all that a screen can show."""
    return f"{value:.1f}".removesuffix(".0")


def document(title: str, content: Iterable[str]) -> str:
    """Return a complete page with its style, for light and dark screens."""
    head = element(
        "head",
        [
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=POLICY),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("title", title),
            element("style", _style()),
        ],
    )
    body = element("body", element("main", content))
    return f"<!doctype html>\n{element('html', [head, body], lang='en')}\n"


def render_fragment(content: Iterable[str]) -> str:
    """Return content as a part of another page, such as a notebook, with the style restricted to it."""
    frame = f".{SCOPE} {{ padding: 8px; background: var(--paper); color: var(--ink); }}"
    scoped = f".{SCOPE} {{\n{_style().replace(':root', '&')}}}"
    return element("div", [element("style", Markup(f"{frame}\n{scoped}\n")), *content], class_=SCOPE)


def _style() -> Markup:
    return Markup(files("edge_server.report").joinpath("page.css").read_text("utf-8"))
