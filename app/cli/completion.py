"""`armature completion`: static scripts that complete commands, flags and values in bash, zsh and fish."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SHELLS = ("bash", "zsh", "fish")
SWITCH, TEXT, PATH = "-", "text", "path"  # kinds of values that are not chosen from words
_MAX_DESCRIPTION = 70  # characters, so that one line shows it
_WORD_LIST = re.compile(r"[\w.-]+(\|[\w.-]+)+")
_PATH_NAMES = re.compile(r"PATH|DIR|FILE|RESULT")
_BASH = """\
# bash completion for armature. To use it now: source <(armature completion bash)

_armature_rows=(  # flag|values|,commands,
%(rows)s
)

_armature() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}
    local row flag values commands flags='' found='' IFS=$' \\t\\n'
    COMPREPLY=()
    if [[ $current == '=' ]]; then  # bash divides --flag=value
        current=''
    elif [[ $previous == '=' ]]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W '%(names)s --help --version' -- "$current"))
        return
    fi
%(below)s
    for row in "${_armature_rows[@]}"; do
        flag=${row%%%%|*} commands=${row##*|}
        values=${row#*|} values=${values%%%%|*}
        if [[ $commands == *",$command,"* ]]; then
            flags+=" $flag"
            if [[ $flag == "$previous" ]]; then found=$values; fi
        fi
    done
    case $found in
    ''|-) ;;
    text) return ;;
    path) _armature_files "$current"; return ;;
    *) COMPREPLY=($(compgen -W "$found" -- "$current")); return ;;
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$current"))
    elif [[ '%(files)s' == *",$command,"* ]]; then
        _armature_files "$current"
    elif [[ $command == completion ]]; then
        COMPREPLY=($(compgen -W '%(shells)s' -- "$current"))
    fi
}

_armature_files() {
    local IFS=$'\\n'
    compopt -o filenames 2>/dev/null  # bash 3.2 has none
    COMPREPLY=($(compgen -f -- "$1"))
}

complete -F _armature armature
"""
_BASH_BELOW = """\
    if [[ $command == %(parent)s ]]; then
        if (( COMP_CWORD == 2 )); then
            COMPREPLY=($(compgen -W '%(names)s --help' -- "$current"))
            return
        fi
        command="%(parent)s ${COMP_WORDS[2]}"
    fi"""
_ZSH = """\
#compdef armature
# zsh completion for armature. Put it into a folder of $fpath as _armature, or: source <(armature completion zsh)

_armature() {
    local command=$words[2] previous=$words[CURRENT-1] row flag values commands found=''
    local -a names flags rows
    rows=(  # flag|values|,commands,|description
%(rows)s
    )
    if (( CURRENT == 2 )); then
        names=(
%(names)s
            '--version:print the version'
        )
        _describe -t commands command names
        return
    fi
%(below)s
    if [[ $words[CURRENT] == --*=* ]]; then
        previous=${words[CURRENT]%%%%=*}
        compset -P '*='
    fi
    for row in $rows; do
        flag=${row%%%%|*} values=${${row#*|}%%%%|*} commands=${${row#*|*|}%%%%|*}
        if [[ $commands == *",$command,"* ]]; then
            flags+=("$flag:${row##*|}")
            [[ $flag == $previous ]] && found=$values
        fi
    done
    case $found in
    ''|-) ;;
    text) _message value; return ;;
    path) _files; return ;;
    *) compadd -- ${=found}; return ;;
    esac
    if [[ $words[CURRENT] == -* ]]; then
        _describe -o -t flags flag flags
    elif [[ '%(files)s' == *",$command,"* ]]; then
        _files
    elif [[ $command == completion ]]; then
        compadd -- %(shells)s
    fi
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _armature "$@"
else
    compdef _armature armature
fi
"""
_ZSH_BELOW = """\
    if [[ $command == %(parent)s ]]; then
        if (( CURRENT == 3 )); then
            names=(
%(names)s
            )
            _describe -t commands command names
            return
        fi
        command="%(parent)s $words[3]"
    fi"""
_FISH = """\
# fish completion for armature. To use it: armature completion fish > ~/.config/fish/completions/armature.fish

function __armature_at  # whether the command line has one of these commands
    set -l words (commandline -opc)
    set -l command "$words[2]"
    if contains -- "$command" %(parents)s
        set command "$command $words[3]"
    end
    contains -- "$command" $argv
end

function __armature_words  # whether the command line has this number of words before the cursor
    test (count (commandline -opc)) -eq $argv[1]
end

complete -c armature -f
complete -c armature -n "__armature_words 1" -l version -d 'print the version'
%(lines)s
"""


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """A command with its description. `words` are one or two, as in `bench http`; `takes_files`: after its flags."""

    words: tuple[str, ...]
    description: str
    takes_files: bool


@dataclass(frozen=True, slots=True)
class CompletedFlag:
    """A flag, the commands that have it, and its values: words separated by spaces, `SWITCH`, `TEXT` or `PATH`."""

    flag: str
    values: str
    description: str
    commands: tuple[str, ...]


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    commands = list(_commands(parser))
    return _SCRIPTS[shell](commands, _flags(parser))


def _commands(parser: argparse.ArgumentParser, before: tuple[str, ...] = ()) -> Iterator[CompletedCommand]:
    for name, (description, child) in _children(parser).items():
        words = (*before, name)
        yield CompletedCommand(words, _shorten(description), any(map(_is_file_argument, child._actions)))
        yield from _commands(child, words)


def _children(parser: argparse.ArgumentParser) -> dict[str, tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            return {name: (texts.get(name, ""), child) for name, child in action.choices.items()}
    return {}


def _is_file_argument(action: argparse.Action) -> bool:
    return not action.option_strings and action.type is Path


def _flags(parser: argparse.ArgumentParser) -> list[CompletedFlag]:
    found: dict[tuple[str, str], CompletedFlag] = {}
    for words, child in _parsers(parser):
        for action in child._actions:
            for flag in action.option_strings:
                if flag == "-h":
                    continue
                values, name = _values(action), " ".join(words)
                known = found.get((flag, values))
                commands = (*known.commands, name) if known else (name,)
                found[flag, values] = CompletedFlag(flag, values, _shorten(action.help or ""), commands)
    return list(found.values())


def _parsers(
    parser: argparse.ArgumentParser, before: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    children = _children(parser)
    if not children:
        yield before, parser
    for name, (_, child) in children.items():
        yield from _parsers(child, (*before, name))


def _values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return SWITCH
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if _WORD_LIST.fullmatch(metavar):  # an upper-case word such as INTEGER stands for a value
        return " ".join(word for word in metavar.split("|") if not word.isupper()) or TEXT
    return PATH if action.type is Path or _PATH_NAMES.fullmatch(metavar) else TEXT


def _shorten(text: str) -> str:
    """Return the first part of a help text, without what shells would read as their own syntax."""
    plain = re.sub(
        r"[^\w\s.,;()/+=<>’-]", "", text.replace("'", "’").replace(":", ",").replace("%%", "%").split(" [ARMATURE")[0]
    )
    first = re.split(r"(?<=\w)[.;] ", " ".join(plain.split()))[0].rstrip(".;,")
    return first if len(first) <= _MAX_DESCRIPTION else first[: _MAX_DESCRIPTION - 1].rsplit(" ", 1)[0] + "…"


def _names(commands: list[CompletedCommand], *before: str) -> str:
    return " ".join(one.words[-1] for one in commands if one.words[:-1] == before)


def _file_commands(commands: list[CompletedCommand]) -> str:
    return "".join(f",{' '.join(one.words)}" for one in commands if one.takes_files) + ","


def _parents(commands: list[CompletedCommand]) -> list[str]:
    return list(dict.fromkeys(one.words[0] for one in commands if len(one.words) > 1))


def _bash(commands: list[CompletedCommand], flags: list[CompletedFlag]) -> str:
    rows = "\n".join(f"    '{one.flag}|{one.values}|,{','.join(one.commands)},'" for one in flags)
    below = "\n".join(_BASH_BELOW % {"parent": name, "names": _names(commands, name)} for name in _parents(commands))
    return _BASH % {
        "rows": rows,
        "names": _names(commands),
        "below": below,
        "files": _file_commands(commands),
        "shells": " ".join(SHELLS),
    }


def _zsh(commands: list[CompletedCommand], flags: list[CompletedFlag]) -> str:
    rows = "\n".join(f"        '{one.flag}|{one.values}|,{','.join(one.commands)},|{one.description}'" for one in flags)

    def names(*before: str) -> str:
        return "\n".join(
            f"            '{one.words[-1]}:{one.description}'" for one in commands if one.words[:-1] == before
        )

    below = "\n".join(_ZSH_BELOW % {"parent": name, "names": names(name)} for name in _parents(commands))
    return _ZSH % {
        "rows": rows,
        "names": names(),
        "below": below,
        "files": _file_commands(commands),
        "shells": " ".join(SHELLS),
    }


def _fish(commands: list[CompletedCommand], flags: list[CompletedFlag]) -> str:
    lines = []
    for one in commands:
        where = (
            "__armature_words 1" if len(one.words) == 1 else f"__armature_words 2; and __armature_at '{one.words[0]} '"
        )
        lines.append(f"complete -c armature -n \"{where}\" -a {one.words[-1]} -d '{one.description}'")
        if one.takes_files:
            lines.append(f"complete -c armature -n \"__armature_at '{' '.join(one.words)}'\" -F")
    lines.append(f'complete -c armature -n "__armature_words 2; and __armature_at completion" -a "{" ".join(SHELLS)}"')
    for flag in flags:
        where = " ".join(f"'{name}'" for name in flag.commands)
        values = {SWITCH: "", TEXT: " -x", PATH: " -r -F"}.get(flag.values, f' -x -a "{flag.values}"')
        name = flag.flag.removeprefix("--")
        lines.append(f"complete -c armature -n \"__armature_at {where}\" -l {name}{values} -d '{flag.description}'")
    return _FISH % {"parents": " ".join(_parents(commands)), "lines": "\n".join(lines)}


_SCRIPTS: Mapping[str, Callable[[list[CompletedCommand], list[CompletedFlag]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
