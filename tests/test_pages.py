"""Pages for people: every relative link leads to something, and the first page stays short."""

from __future__ import annotations

import re
import subprocess  # noqa: TID251 - asks git which files are the project's
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FIRST_PAGE_LINES, GLOSSARY_LINES, CONTRIBUTING_BYTES = 150, 40, 8000
DECISIONS = ROOT / "deploy" / "docs" / "decisions"
DECISION = re.compile(
    r"# (?P<title>.+)\n\nStatus: accepted, \d{4}-\d\d-\d\d(?:, amended \d{4}-\d\d-\d\d)?\n\n"
    r"## Context\n\n(?:.+\n)+\n## Decision\n\n(?:.+\n)+\n## Consequences\n(?:\n(?:.+\n)+)+"
)
SOURCE = re.compile(r"`([a-z_]+/[\w./]+\.(?:py|sh|md|toml))`")
"""A file of the repository that a page names."""


def pages() -> list[Path]:
    """Return the project's pages; without git all of them below its folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    names = done.stdout.split("\0") if done.returncode == 0 else []
    return [ROOT / name for name in names if name] or [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/**/*.md")]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the usual viewers make them."""
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(page.read_text()))
    return {one.strip().replace(" ", "-") for one in words}


def test_every_relative_link_leads_somewhere():
    """To a file or a folder, and within a page to a heading."""
    found = pages()
    assert ROOT / "README.md" in found
    broken = []
    for page in found:
        for link in LINK.findall(re.sub(r"`[^`\n]*`", "", page.read_text())):
            if re.match(r"\w+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_the_first_page_is_for_newcomers():
    """Short, and it leads to every page beside a package."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= FIRST_PAGE_LINES
    beside = [page for page in pages() if page.name == "README.md" and page.parent != ROOT]
    assert [str(page.relative_to(ROOT)) for page in beside if f"({page.relative_to(ROOT)})" not in text] == []


def test_the_glossary_is_short_and_in_order():
    text = (ROOT / "deploy" / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([a-z, ]+?) \|", text, re.MULTILINE)[1:]
    assert terms
    assert len(text.splitlines()) <= GLOSSARY_LINES
    assert terms == sorted(terms)


def absent_files(text: str) -> list[str]:
    """Return the files that a page names and the repository does not have."""
    return [name for name in SOURCE.findall(text) if not (ROOT / name).exists()]


def test_contributing_is_short_and_names_existing_files():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.encode()) <= CONTRIBUTING_BYTES
    assert absent_files(text) == []


def test_decisions_have_one_form_and_are_listed():
    """Each file has the four parts, names existing files, and is in the list once, by its title."""
    paths = sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")
    index = (DECISIONS / "README.md").read_text()
    listed = sorted(re.findall(r"^- \[(.+)\]\((.+)\)$", index, re.MULTILINE))
    faults, titles = [], []
    for path in paths:
        text = path.read_text()
        form = DECISION.fullmatch(text)
        if form is None or not re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", path.name):
            faults.append(f"{path.name}: not of the form of the others")
        else:
            titles.append((form["title"], path.name))
        faults += [f"{path.name}: {name} does not exist" for name in absent_files(text)]
    assert faults == []
    assert paths
    assert listed == sorted(titles)
    assert len({name[:4] for _, name in titles}) == len(titles)


@pytest.mark.parametrize("command", ["edge-server", "device-agent"])
def test_every_command_of_the_pages_is_one(command):
    """The first word behind the program, in every block of the pages."""
    main = (ROOT / command.replace("-server", "_server").replace("-agent", "_agent") / "__main__.py").read_text()
    verbs = {
        verb
        for page in pages()
        for verb in re.findall(rf"(?:^    |`){command} ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    }
    assert verbs
    assert [verb for verb in sorted(verbs) if f'"{verb}"' not in main] == []
