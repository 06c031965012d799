"""Checks before a release, and the table of its files; `make release` builds them for real."""

from __future__ import annotations

import hashlib
import subprocess  # noqa: TID251 - git and sha256sum
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.naming import names_all, naming

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

### Added

## [1.2.0] - 2026-11-28

### Added

- One thing,
  on two lines.

## [1.1.0] - 2026-11-21

- Another thing.
"""


@pytest.fixture(scope="module")
def release():
    spec = spec_from_file_location("fieldfleet_release", ROOT / "deploy/release.py")
    module = sys.modules["fieldfleet_release"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clean(release):
    return release.Repository(changes=(), head="a" * 40, tagged="")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Tester", "-c", "user.email=tester@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, "-c", "tag.gpgsign=false", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


@pytest.fixture
def checkout(tmp_path):
    """A repository of one commit that is ready for release 1.2.0."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n[build-system]\nrequires = []\n')
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_sections_have_version_date_and_entries(release):
    pending, newest, older = release.parse_changelog(CHANGELOG)
    assert pending == release.Section("Unreleased", "", ())
    assert newest == release.Section("1.2.0", "2026-11-28", ("- One thing,", "  on two lines."))
    assert (older.version, older.entries) == ("1.1.0", ("- Another thing.",))


def test_headings_need_no_brackets(release):
    sections = release.parse_changelog("## Unreleased\n\n## 1.2.0 - 2026-11-28\n- x\n")
    assert [(section.version, section.date) for section in sections] == [("Unreleased", ""), ("1.2.0", "2026-11-28")]


def test_a_checkout_that_is_ready_has_no_problems(release, clean):
    assert release.find_problems("1.2.0", CHANGELOG, clean) == []


def test_the_projects_own_changelog_has_a_complete_section_for_the_version(release):
    version = release.tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    sections = release.parse_changelog((ROOT / "CHANGELOG.md").read_text())
    assert list(release.check_version_section(sections, version)) == []
    assert sections[0].version == "Unreleased"


@pytest.mark.parametrize(
    ("version", "old", "new", "named"),
    [
        ("1.3.0", "", "", ["CHANGELOG.md", "1.3.0", "pyproject.toml"]),
        ("1.2", "", "", ["CHANGELOG.md", "1.2"]),
        ("1.2.0", " - 2026-11-28", "", ["1.2.0", "'## [1.2.0] - YYYY-MM-DD'"]),
        ("1.2.0", "2026-11-28", "2026-11-31", ["1.2.0", "'2026-11-31'"]),
        ("1.2.0", "2026-11-28", "20261128", ["1.2.0", "'20261128'"]),
        ("1.2.0", "- One thing,\n  on two lines.\n", "", ["1.2.0"]),
        ("1.2.0", "### Added\n\n## [1.2", "- New.\n\n## [1.2", ["Unreleased", 1, "'- New.'"]),
    ],
)
def test_each_fault_of_the_changelog_is_reported_with_a_remedy(release, clean, version, old, new, named):
    assert old in CHANGELOG
    [problem] = release.find_problems(version, CHANGELOG.replace(old, new, 1), clean)
    assert names_all(problem, *named)


def test_all_problems_are_reported_at_once(release):
    repository = release.Repository(changes=("?? notes.txt",), head="a" * 40, tagged="b" * 40)
    tree, section, tag = release.find_problems("1.3.0", CHANGELOG, repository)
    assert names_all(tree, 1, "'?? notes.txt'")
    assert names_all(section, "CHANGELOG.md", "1.3.0")
    assert names_all(tag, "v1.3.0", "b" * 12, "a" * 12)


def test_missing_programs_are_named_with_their_package(release):
    [problem] = release.check_tools(["dpkg-deb"])
    assert names_all(problem, "dpkg-deb", "sudo apt install dpkg")


def test_untracked_and_changed_files_make_a_tree_unclean(release, checkout):
    assert release.read_repository(checkout, "1.2.0").changes == ()
    (checkout / "notes.txt").write_text("x")
    (checkout / "CHANGELOG.md").write_text("x")
    assert release.read_repository(checkout, "1.2.0").changes == (" M CHANGELOG.md", "?? notes.txt")


@pytest.mark.parametrize("options", [(), ("-a", "-m", "release")], ids=["lightweight", "annotated"])
def test_a_tag_may_mark_the_commit_that_is_checked_out_alone(release, checkout, options):
    git(checkout, "tag", *options, "v1.2.0")
    git(checkout, "tag", "v1.2.0rc1")
    repository = release.read_repository(checkout, "1.2.0")
    assert repository.tagged == repository.head == git(checkout, "rev-parse", "HEAD")
    assert list(release.check_tag(repository, "1.2.0")) == []
    git(checkout, "commit", "-q", "--allow-empty", "-m", "second")
    assert len(list(release.check_tag(release.read_repository(checkout, "1.2.0"), "1.2.0"))) == 1


def test_problems_end_the_command_with_code_2_before_anything_is_built(release, checkout, monkeypatch, capsys):
    monkeypatch.setattr(release, "ROOT", checkout)
    monkeypatch.setattr(release, "TOOLS", {})
    monkeypatch.setattr(sys, "argv", ["release.py", "--out", str(checkout / "dist")])
    (checkout / "notes.txt").write_text("x")
    with pytest.raises(SystemExit) as ended:
        release.main()
    assert ended.value.code == 2
    assert names_all(capsys.readouterr().err, "release.py", "?? notes.txt")
    assert not (checkout / "dist").exists()


def test_a_failed_command_is_named_after_its_messages(release, checkout, capsys):
    with pytest.raises(SystemExit, match=naming("git show absent", 128)):
        release.run("git", "show", "absent", cwd=checkout)
    assert "ambiguous argument 'absent'" in capsys.readouterr().err


def test_files_appear_only_if_all_builds_succeed(release, tmp_path, monkeypatch):
    def fail(*_command):
        raise SystemExit(1)

    monkeypatch.setattr(release, "build_distributions", lambda out, _backend: (out / "x.whl").write_text("wheel"))
    monkeypatch.setattr(release, "run", fail)
    with pytest.raises(SystemExit):
        release.build(tmp_path / "dist", [])
    assert not (tmp_path / "dist").exists()
    monkeypatch.setattr(release, "run", lambda *command: (command[-1] / "x.deb").write_text("package"))
    assert release.build(tmp_path / "dist", []) == [tmp_path / "dist" / "x.deb", tmp_path / "dist" / "x.whl"]


def test_the_table_has_size_and_digest_of_each_file(release, tmp_path):
    files = [tmp_path / "a.whl", tmp_path / "longer-name.deb"]
    for file, size in zip(files, (1_234_567, 3), strict=True):
        file.write_bytes(bytes(size))
    heading, *rows = release.format_table(files).splitlines()
    assert heading == "file             size (MB)  SHA-256"
    assert rows[0] == f"a.whl                 1.23  {hashlib.sha256(bytes(1_234_567)).hexdigest()}"
    assert rows[1] == f"longer-name.deb       0.00  {hashlib.sha256(bytes(3)).hexdigest()}"


def test_the_checksum_file_is_read_by_sha256sum(release, tmp_path):
    (tmp_path / "a.whl").write_text("wheel")
    release.write_checksums([tmp_path / "a.whl"], tmp_path)
    command = ["sha256sum", "-c", release.CHECKSUMS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout == "a.whl: OK\n"
