"""Check a release, then build its sdist, wheel and Debian packages.

    release.py [--out DIR]

Exit codes: 0 built, 1 a build failed, 2 the checkout is not ready for a release.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^## \[?([^\]\s]+)\]?(?: - (.+?))?[ \t]*$", re.MULTILINE)
CHECKSUMS = "SHA256SUMS"
TOOLS = {"git": "git", "tar": "tar", "dpkg-deb": "dpkg"}
"""Programs that the build runs, each with its Debian package."""


@dataclass(frozen=True)
class Section:
    """Release section of a changelog.

    Attributes:
        version: `Unreleased` for the section of pending changes.
        date: As written; empty without one.
        entries: Lines that are neither blank nor headings.
    """

    version: str
    date: str
    entries: tuple[str, ...]


@dataclass(frozen=True)
class Repository:
    """State of a git checkout.

    Attributes:
        changes: Output lines of `git status --porcelain`, untracked files included.
        head: Commit that is checked out.
        tagged: Commit of the release's tag; empty if there is no such tag.
    """

    changes: tuple[str, ...]
    head: str
    tagged: str


def tag_name(version: str) -> str:
    """Return the git tag of a version."""
    return f"v{version}"


def parse_changelog(text: str) -> list[Section]:
    """Return the sections of a changelog in the format of Keep a Changelog."""
    headings = list(SECTION.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    sections = []
    for heading, end in zip(headings, ends, strict=True):
        lines = text[heading.end() : end].splitlines()
        entries = tuple(line for line in lines if line.strip() and not line.startswith("#"))
        sections.append(Section(heading[1], heading[2] or "", entries))
    return sections


def is_date(text: str) -> bool:
    """Tell whether a text is a calendar date such as 2026-11-28."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def check_version_section(sections: Sequence[Section], version: str) -> Iterator[str]:
    """Yield what is wrong with a version's changelog section."""
    heading = f"## [{version}] - YYYY-MM-DD"
    section = next((section for section in sections if section.version == version), None)
    if section is None:
        yield (
            f"CHANGELOG.md has no section for version {version} of pyproject.toml; "
            f"add the heading '{heading}' below Unreleased, or correct the version"
        )
        return
    if not is_date(section.date):
        shown = f"'{section.date}', which is not a date" if section.date else "no date"
        yield f"CHANGELOG.md: section {version} has {shown}; write the heading as '{heading}'"
    if not section.entries:
        yield f"CHANGELOG.md: section {version} has no entries; describe what changes for a user"


def check_unreleased(sections: Sequence[Section], version: str) -> Iterator[str]:
    """Yield a problem if the section of pending changes has entries."""
    pending = [entry for section in sections if section.version.lower() == "unreleased" for entry in section.entries]
    if pending:
        yield (
            f"CHANGELOG.md: Unreleased is not empty (lines: {len(pending)}; first: '{pending[0]}'); "
            f"move its entries to section {version}, condensed to a line or two each"
        )


def check_tree(repository: Repository) -> Iterator[str]:
    """Yield a problem if files of the working tree are changed or untracked."""
    if repository.changes:
        yield (
            f"the working tree is not clean (files: {len(repository.changes)}; first: '{repository.changes[0]}'); "
            "commit, ignore or remove what 'git status' shows"
        )


def check_tag(repository: Repository, version: str) -> Iterator[str]:
    """Yield a problem if the version's tag marks another commit."""
    if repository.tagged not in ("", repository.head):
        tag = tag_name(version)
        yield (
            f"tag {tag} marks commit {repository.tagged[:12]}, but {repository.head[:12]} is checked out; "
            f"raise the version in pyproject.toml, or rebuild the released commit after 'git checkout {tag}'"
        )


def check_tools(missing: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each program that the build needs and this machine lacks."""
    for tool in missing:
        yield f"{tool} is not installed; install it, on Debian by 'sudo apt install {TOOLS[tool]}'"


def find_problems(version: str, changelog: str, repository: Repository) -> list[str]:
    """Return all that keeps a checkout from being released, each with its remedy."""
    sections = parse_changelog(changelog)
    return [
        *check_tree(repository),
        *check_version_section(sections, version),
        *check_unreleased(sections, version),
        *check_tag(repository, version),
    ]


def run(*command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output; if it fails, print its last messages and exit with code 1."""
    words = list(map(str, command))
    variables = {**os.environ, **(environment or {})}
    result = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.stderr.write(f"{result.stdout[-2000:]}{result.stderr[-4000:]}")
        sys.exit(f"release.py: '{' '.join(words)}' failed with code {result.returncode}; see its messages above")
    return result.stdout


def read_repository(root: Path, version: str) -> Repository:
    """Read the state of a checkout from git."""
    # Commits of an annotated tag and of a lightweight one: the first word of "COMMIT TAG" and of "COMMIT".
    tags = run(
        "git", "for-each-ref", "--format=%(*objectname) %(objectname)", f"refs/tags/{tag_name(version)}", cwd=root
    )
    return Repository(
        changes=tuple(run("git", "status", "--porcelain", cwd=root).splitlines()),
        head=run("git", "rev-parse", "HEAD", cwd=root).strip(),
        tagged=tags.split()[0] if tags.strip() else "",
    )


def build_distributions(out: Path, backend: Sequence[str]) -> None:
    """Build sdist and wheel of the checked-out commit.

    Args:
        out: Folder for both files.
        backend: Requirements of the build backend, `build-system.requires` of pyproject.toml.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        source, tools = scratch / "source", scratch / "tools"
        source.mkdir()
        # An export of the commit, so that no ignored file can get into the sdist.
        run("git", "archive", "--format=tar", f"--output={scratch / 'source.tar'}", "HEAD")
        run("tar", "-xf", scratch / "source.tar", "-C", source)
        run(sys.executable, "-m", "pip", "install", "--quiet", f"--target={tools}", *backend)
        environment = {"PYTHONPATH": str(tools), "SOURCE_DATE_EPOCH": run("git", "log", "-1", "--format=%ct").strip()}
        command = (sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", out)
        run(*command, cwd=source, environment=environment)


def digest(file: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def format_table(files: Sequence[Path]) -> str:
    """Return a table of files with size and SHA-256."""
    width = max(len(file.name) for file in files)
    lines = [f"{'file':<{width}}  size (MB)  SHA-256"]
    lines += [f"{file.name:<{width}}  {file.stat().st_size / 1e6:9.2f}  {digest(file)}" for file in files]
    return "\n".join(lines) + "\n"


def write_checksums(files: Sequence[Path], out: Path) -> None:
    """Write a checksum file that `sha256sum -c` reads."""
    (out / CHECKSUMS).write_text("".join(f"{digest(file)}  {file.name}\n" for file in files))


def build(out: Path, backend: Sequence[str]) -> list[Path]:
    """Build all files of a release; they reach the folder only if all builds succeed."""
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        sys.stderr.write("release.py: building sdist and wheel\n")
        build_distributions(stage, backend)
        sys.stderr.write("release.py: building the Debian packages for amd64 and arm64, which takes minutes\n")
        run(sys.executable, ROOT / "deploy" / "debian" / "build.py", "--out", stage)
        out.mkdir(parents=True, exist_ok=True)
        names = sorted(file.name for file in stage.iterdir())
        for name in names:
            shutil.move(stage / name, out / name)
    return [out / name for name in names]


def main() -> None:
    """Check the checkout, build the release and print its files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files; default: dist")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = project["project"]["version"]
    problems = list(check_tools([tool for tool in TOOLS if not shutil.which(tool)]))
    if not problems:
        problems = find_problems(version, (ROOT / "CHANGELOG.md").read_text(), read_repository(ROOT, version))
    if problems:
        sys.stderr.write("".join(f"release.py: {problem}\n" for problem in problems))
        sys.exit(2)
    files = build(options.out.resolve(), project["build-system"]["requires"])
    write_checksums(files, options.out)
    sys.stdout.write(format_table(files))


if __name__ == "__main__":
    main()
