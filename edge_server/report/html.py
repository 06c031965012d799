"""HTML from jinja2 templates that escape every text and load nothing.

Device names and causes come from devices, so none of them may end up as markup. The page's policy loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from edge_server.report.axes import format_tick
from edge_server.report.charts import COLOURS, MANY_POINTS, mark_shape, thin_points
from edge_server.report.formatting import format_bytes

MAX_TEXT = 300
SCOPE = "fieldfleet"
"""Class of the element that embedded content is in."""


def clean(value: object) -> object:
    """Return a value as a page shows it: texts cut and printable, coordinates with one decimal; markup is unchanged."""
    match value:
        case Markup():
            return value
        case str():
            text = value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "\N{HORIZONTAL ELLIPSIS}"
            return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
        case float():
            return f"{value:.1f}".removesuffix(".0")
        case _:
            return value


@cache
def _environment() -> Environment:
    folder = FileSystemLoader(str(files("edge_server.report").joinpath("templates")))
    environment = Environment(
        loader=folder, autoescape=True, finalize=clean, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": format_bytes,
        "shape": mark_shape,
        "thin": thin_points,
        "tick": format_tick,
    }
    environment.globals |= {"COLOURS": COLOURS, "MANY_POINTS": MANY_POINTS}
    return environment


def render(template: str, **values: object) -> Markup:
    """Return a template filled with values."""
    return Markup(_environment().get_template(template).render(values))  # noqa: S704 - the template escapes


def macro(name: str) -> Callable[..., Markup]:
    """Return a macro of `macros.html` as a function."""
    macros: Any = _environment().get_template("macros.html").module
    function: Callable[..., Markup] = getattr(macros, name)
    return function


def document(title: str, content: Markup) -> str:
    """Return a complete page with its style, for light and dark screens."""
    return render("document.html", title=title, content=content, style=_style())


def render_fragment(content: Markup) -> str:
    """Return content as a part of another page, such as a notebook, with the style restricted to it."""
    frame = f".{SCOPE} {{ padding: 8px; background: var(--paper); color: var(--ink); }}"
    style = f"{frame}\n.{SCOPE} {{\n{_style().replace(':root', '&')}}}\n"
    return Markup('<div class="{}"><style>{}</style>{}</div>').format(SCOPE, Markup(style), content)  # noqa: S704


def _style() -> Markup:
    return Markup(files("edge_server.report").joinpath("page.css").read_text("utf-8"))  # noqa: S704 - ours
