"""Reads a page as a browser would, with the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta"}


@dataclass
class Element:
    name: str
    attributes: Mapping[str, str | None]
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def all(self, name: str = "", class_: str = "") -> list[Element]:
        """All elements below this one of a name and with a class, in order."""
        found = []
        for child in self.children:
            classes = (child.attributes.get("class") or "").split()
            if name in ("", child.name) and (not class_ or class_ in classes):
                found.append(child)
            found += child.all(name, class_)
        return found

    def words(self) -> str:
        """Its text and that of all below it, with a space between two."""
        return " ".join([self.text.strip(), *(child.words() for child in self.children)]).strip()


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {attrs}"
        child = Element(tag, dict(attrs))
        self.open[-1].children.append(child)
        if tag not in VOID:
            self.open.append(child)

    def handle_endtag(self, tag):
        assert self.open[-1].name == tag, f"</{tag}> ends <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].text += data


def parsed(page: str) -> Element:
    """The whole page; fails where an element is not closed, or another one is."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].name}> is not closed"
    return reader.open[0]


def rows(table: Element) -> dict[str, list[str]]:
    """A table's rows by the text of their first cell."""
    cells = [[cell.words() for cell in row.children] for row in table.all("tr")]
    return {first: rest for first, *rest in cells}
