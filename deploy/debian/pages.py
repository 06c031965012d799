"""Manual pages and bash completion of our commands, out of what they tell of themselves.

pages.py man device-agent 0.1.0 20261123      prints a page of section 1
pages.py completion device-agent              prints a script for bash-completion
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

FILES = {
    "device-agent": {
        "/etc/fieldfleet/agent.toml": "what the service runs with",
        "/var/lib/fieldfleet": "outbox, device state, payloads, the device's own key",
        "/opt/fieldfleet": "the agent's versions, and what `device-agent setup` brought",
        "/opt/fieldfleet/upgrade.json": "what became of the version that was offered last",
        "/etc/fieldfleet/upgrades.pem": "roots of the sites whose packages are taken, by `device-agent upgrade trust`",
    },
    "edge-server": {
        "/etc/fieldfleet/server.toml": "what the service runs with",
        "/var/lib/fieldfleet-server": "runs, releases and readings, as far as server.toml says so",
        "/opt/fieldfleet-server": "the server, and what `edge-server setup` brought",
    },
}
OTHER = {"device-agent": "edge-server", "edge-server": "device-agent"}


def find_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, all its verbs loaded."""
    if command == "device-agent":
        from device_agent.__main__ import COMMANDS, build_parser  # noqa: PLC0415

        return build_parser(COMMANDS)
    from edge_server.__main__ import build_parser as build_server_parser  # noqa: PLC0415

    return build_server_parser()


def walk(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = (), told: str = ""
) -> Iterator[tuple[tuple[str, ...], str, argparse.ArgumentParser]]:
    """Yield the command and every verb below it: its words, its summary, its parser."""
    yield path, told or (parser.description or ""), parser
    for action in parser._actions:  # noqa: SLF001 - argparse tells of them in no other way
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            told_of = {one.dest: one.help or "" for one in action._choices_actions}  # noqa: SLF001
            for name, verb in action.choices.items():
                yield from walk(verb, (*path, name), told_of.get(name, ""))


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a parser that are no verbs and mean something."""
    verbs = argparse._SubParsersAction  # noqa: SLF001
    return [one for one in parser._actions if not isinstance(one, verbs) and one.help != argparse.SUPPRESS]  # noqa: SLF001


def roff(text: str) -> str:
    """Return a text as troff prints it unchanged."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def name_of(action: argparse.Action) -> str:
    """Return what a manual calls an argument, such as `--config FILE`."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return value
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def help_of(action: argparse.Action) -> str:
    """Return the help of an argument, its default filled in."""
    return (action.help or "") % {**vars(action), "prog": "", "type": ""} if action.help else ""


def man(command: str, version: str, date: str) -> str:
    """Return the manual page of a command.

    Args:
        date: Of the version, as 20261123.
    """
    parser = find_parser(command)
    day = f"{date[:4]}-{date[4:6]}-{date[6:8]}"
    lines = [
        f'.TH {command.upper()} 1 "{day}" "fieldfleet {version}" "User Commands"',
        *(".nh", ".ad l", ".SH NAME"),
        f"{roff(command)} \\- {roff((parser.description or '').rstrip('.'))}",
        *(".SH SYNOPSIS", f".B {roff(command)}", r"\fICOMMAND\fR [\fIoption\fR ...]", ".SH COMMANDS"),
    ]
    for path, summary, verb in walk(parser):
        if not path:
            continue
        lines += [f".SS {roff(command)} {roff(' '.join(path))}", roff(summary[:1].upper() + summary[1:] + ".")]
        for action in options_of(verb):
            if action.dest not in ("help", "verbose"):
                lines += [".TP", f".B {roff(name_of(action))}", roff(help_of(action)) or "see above"]
    lines += [".SH OPTIONS"]
    for action in options_of(parser):
        lines += [".TP", f".B {roff(name_of(action))}", roff(help_of(action))]
    lines += [".SH EXIT STATUS", roff((parser.epilog or "").removeprefix("Exit codes: ")), ".SH FILES"]
    for path, meaning in FILES[command].items():
        lines += [".TP", f".I {roff(path)}", roff(meaning + ".")]
    lines += [".SH SEE ALSO", f".BR {roff(OTHER[command])} (1)"]
    return "\n".join(lines) + "\n"


def completion(command: str) -> str:
    """Return a script by which bash completes verbs and options of a command, and files elsewhere."""
    word = command.replace("-", "_")
    cases = []
    for path, _, verb in walk(find_parser(command)):
        verbs = [next_path[-1] for next_path, _, _ in walk(verb) if len(next_path) == 1]
        flags = [option for action in options_of(verb) for option in action.option_strings if option.startswith("--")]
        cases.append(f'        "{" ".join(path)}") words="{" ".join([*verbs, *flags])}" verbs="{" ".join(verbs)}" ;;')
    return f"""# bash completion of {command}
_{word}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} path="" words verbs index=0
    while :; do
        case $path in
{chr(10).join("    " + case for case in cases)}
        esac
        while ((++index < COMP_CWORD)) && [[ " $verbs " != *" ${{COMP_WORDS[index]}} "* ]]; do :; done
        ((index < COMP_CWORD)) || break
        path="${{path:+$path }}${{COMP_WORDS[index]}}"
    done
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}}
complete -o default -F _{word} {command}
"""


def main() -> None:
    """Print what is asked for."""
    kind, *rest = sys.argv[1:]
    sys.stdout.write({"man": man, "completion": completion}[kind](*rest))


if __name__ == "__main__":
    main()
