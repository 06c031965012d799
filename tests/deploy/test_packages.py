"""Contents of the Debian packages, checked before they are built."""

from __future__ import annotations

import re
import subprocess  # noqa: TID251 - shells read the scripts
import sys
import tomllib
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path

import pytest

from device_agent.__main__ import COMMANDS as AGENT_COMMANDS
from edge_server.__main__ import COMMANDS as SERVER_COMMANDS
from tests.naming import names_all

ROOT = Path(__file__).parents[2]
DEBIAN = ROOT / "deploy" / "debian"
COMMANDS = {"device-agent": AGENT_COMMANDS, "edge-server": SERVER_COMMANDS}


@pytest.fixture(scope="module")
def build():
    return load("build")


@pytest.fixture(scope="module")
def pages():
    return load("pages")


def load(name: str):
    """Return a script of deploy/debian as a module."""
    sys.path.insert(0, str(DEBIAN))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(DEBIAN))


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str) -> set[str]:
    """Return what a distribution needs on Linux with Python 3.11, and what that needs."""
    found = set()
    for line in requires(name) or []:
        need, _, marker = line.partition(";")
        if not re.search(r"extra|win32|Windows|python_version *<|platform_python_implementation *== *.PyPy", marker):
            one = plain(re.split(r"[ <>=!~\[(]", need.strip())[0])
            found |= {one} | needed(one)
    return found


def test_the_packages_bring_along_just_what_the_light_part_needs(build):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (line for line in project["dependencies"] if "python_version <" not in line)
    named = {plain(re.split(r"[><=]", line)[0]) for line in lines}
    assert set(build.LIGHT) == named.union(*map(needed, named)) - {"typing-extensions"}
    older = {plain(re.split(r"[><=]", one)[0]) for one in project["dependencies"] if "python_version <" in one}
    assert set(build.BACKPORTS) == older | {"typing-extensions"}, "exceptiongroup needs the last"
    assert set(build.TABLES) == {"jinja2", "rich", "segno"} | needed("jinja2") | needed("rich")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_manual_tells_of_every_command_and_option(pages, command):
    page = pages.man(command, "1.2.3", "20261123")
    told = page.replace("\\-", "-")
    assert page.startswith(f'.TH {command.upper()} 1 "2026-11-23" "fieldfleet 1.2.3"')
    for verb in COMMANDS[command]:
        assert f".SS {command} {verb}\n" in told
    assert "--config FILE" in told
    for line in page.splitlines():
        assert not re.match(r"'|\.(?!TH|SH|SS|TP|B|BR|I|nh|ad|\b)", line), f"no request of troff: {line}"


@pytest.mark.parametrize("command", COMMANDS)
def test_bash_completes_verbs_and_options_and_leaves_files_to_itself(pages, command, tmp_path):
    script = tmp_path / "completion"
    script.write_text(pages.completion(command))
    name = f"_{command.replace('-', '_')}"

    def complete(*words: str) -> set[str]:
        asked = f"source {script}; COMP_WORDS=({command} {' '.join(words)}); COMP_CWORD={len(words)}; {name}"
        told = f'{asked}; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True)  # noqa: S603, S607
        return set(done.stdout.split())

    assert complete('""') >= set(COMMANDS[command])
    assert complete("ru") == {verb for verb in COMMANDS[command] if verb.startswith("ru")}
    assert complete("run", "--con") == {"--config"}
    assert complete("-v", "run", "--config", "x", "--ver") == {"--verbose"}
    assert complete("run", "--config", "agent") == set()
    if command == "edge-server":
        assert complete("rollout", "sta") == {"start", "status"}
        assert "--canary" in complete("rollout", "start", "x", "--c")


@pytest.mark.parametrize("side", ["AGENT", "SERVER"])
def test_maintainer_scripts_are_whole_and_shells_take_them(build, side, tmp_path):
    package, target = getattr(build, side), build.Target("arm64", "1.2.3", 0)
    (tmp_path / "opt").mkdir()
    build.write_control(tmp_path, package, target)
    for name in ("postinst", "prerm", "postrm"):
        script = tmp_path / "DEBIAN" / name
        assert "@" not in script.read_text().replace('"$@"', "")
        subprocess.run(["sh", "-n", str(script)], check=True)  # noqa: S603, S607
    control = (tmp_path / "DEBIAN/control").read_text()
    assert "Version: 1.2.3+py3\nArchitecture: arm64\n" in control
    assert f"python3 (>= {package.pythons[0]}~), python3 (<< 3.15~)" in control
    assert (tmp_path / "DEBIAN/postrm").read_text().count(f"rm -rf /var/lib/{package.user} {package.home}") == 1


def launched(build, folder: Path, python: Path) -> subprocess.CompletedProcess:
    """Lay an agent's version in a folder and run its launcher where `python` is the system's Python."""
    home, system = folder / "opt", folder / "python3"
    build.make_environment(home / "1.0", build.AGENT)
    (home / "current").symlink_to("1.0")
    (home / "1.0/bin/python3").unlink()
    (home / "1.0/bin/python3").symlink_to(system)
    system.symlink_to(python)
    words = {"HOME": str(home), "MODULE": "platform", "COMMAND": "device-agent", "PACKAGE": "fieldfleet-agent"}
    words |= {"FIRST": "3.10", "LAST": "3.14", "STATE": "/var/lib/fieldfleet"}
    text = build.filled_in((DEBIAN / "launcher.sh").read_text(), words)
    (folder / "launcher").write_text(text.replace("/usr/bin/python3", str(system)))
    return subprocess.run(["sh", folder / "launcher"], capture_output=True, text=True, check=False)  # noqa: S603, S607


def test_a_version_runs_on_the_systems_python_whichever_it_is(build, tmp_path):
    done = launched(build, tmp_path, Path(sys.executable).resolve())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Linux")


def test_an_upgrade_of_the_system_beyond_the_package_names_the_remedy(build, tmp_path):
    later = tmp_path / "python3.99"
    later.touch()
    done = launched(build, tmp_path, later)
    assert done.returncode == 2
    assert names_all(done.stderr, later, "3.10", "3.14", "fieldfleet-agent", "/var/lib/fieldfleet")


@pytest.mark.parametrize("side", ["AGENT", "SERVER"])
def test_what_a_package_lays_is_there_and_its_unit_runs_its_command(build, side):
    package = getattr(build, side)
    laid = build.laid_of(package)
    for source in laid:
        assert (ROOT / "deploy" / source).is_file()
    unit = (ROOT / "deploy/systemd" / f"{package.name}.service").read_text()
    assert f"ExecStart=/usr/bin/{package.command} run --config /etc/fieldfleet/" in unit
    assert f"User={package.user}\n" in unit
    assert f"StateDirectory={package.user}\n" in unit


def test_a_record_lists_only_files_that_are_there(build, tmp_path):
    record = tmp_path / "x-1.dist-info" / "RECORD"
    record.parent.mkdir()
    (tmp_path / "x.py").touch()
    lines = ["x.py,sha256=a,0\n", "x-1.dist-info/direct_url.json,sha256=b,80\n", "x-1.dist-info/RECORD,,\n"]
    record.write_text("".join(lines))
    build.drop_missing(tmp_path)
    assert record.read_text() == lines[0] + lines[2]
