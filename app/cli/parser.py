"""The argument parser of `armature`: commands and their flags, one for each setting where a model is loaded."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from app.cli.completion import SHELLS
from app.errors import UnknownArgument
from app.settings import SETTING_GROUPS, Group, Settings, flag_of, named_models, settings_with, variable_of
from app.version import VERSION

MEASURING_COMMANDS = ("bench", "tco")  # of the package armature_bench
# The groups of settings for a server that `chat` starts. Its network is that of the command alone.
CHAT_GROUPS = tuple(group for group in SETTING_GROUPS if group != "network")
ABOUT_SETTINGS = "Each setting can also be given as the environment variable in brackets; the flag takes precedence."

FIRST_STEPS = """\
armature serves small language models on ordinary processors. Type one of these first:

  armature serve                          serve the small demo model that comes with the package
  armature serve ORG/NAME                 fetch and serve a model of Hugging Face's hub
  armature serve DIR                      serve a checkpoint directory, a GGUF file or an exported program
  armature chat                           talk to the server in a terminal; without one, to the demo model
  armature probe ORG/NAME                 show what would be chosen for it on this machine, and why
  armature --help                         list all commands"""

LEAST_INTERVAL = 0.2
_TYPE_NAMES: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as text: accepted form, default, and `is_list` if the flag takes several values."""

    name: str
    flag: str
    variable: str
    values: str
    default: str
    description: str
    is_list: bool = False

    @property
    def off_flag(self) -> str:
        """Flag without a value that turns off what is on by default; empty for other settings."""
        return f"--no-{self.flag.removeprefix('--')}" if self.values == "on|off" and self.default == "on" else ""


def setting_rows(groups: Sequence[Group] = SETTING_GROUPS) -> list[SettingRow]:
    """Return the settings of these groups. Flags, help texts and `docs/settings.md` are generated from these rows."""
    names = [name for group in groups for name in settings_with(group=group)]
    return [_setting_row(name, Settings.model_fields[name]) for name in names]


def _setting_row(name: str, field: FieldInfo) -> SettingRow:
    return SettingRow(
        name=name,
        flag=flag_of(name),
        variable=variable_of(name),
        values="LIST" if NoDecode in field.metadata else "|".join(dict.fromkeys(_accepted_forms(field.annotation))),
        default=_shown_default(field.default),
        description=field.description or "",
        is_list=NoDecode in field.metadata,
    )


def _shown_default(default: Any) -> str:
    if default in (None, ()):
        return ""
    return ",".join(default) if isinstance(default, tuple) else str(default)


def _accepted_forms(annotation: Any) -> list[str]:
    if get_origin(annotation) is Annotated:
        return _accepted_forms(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return sorted((word for part in parts for word in _accepted_forms(part)), key=str.isupper)
    if get_origin(annotation) is tuple:
        return ["LIST"]
    return [_TYPE_NAMES[annotation]]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Raises `UnknownArgument`; for a bad value, argparse exits with status 2."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        raise UnknownArgument(FIRST_STEPS)
    parser = make_parser(measures=words[0] in MEASURING_COMMANDS)
    _require_known_command(parser, words)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        command = " ".join(filter(None, (arguments.command, getattr(arguments, "bench", None))))
        complaint = _describe_unknown(unknown, hasattr(arguments, "results"))
        raise UnknownArgument(f"armature {command}: {complaint} armature {command} --help lists the flags.")
    _take_model_argument(arguments)
    return arguments


def _require_known_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raise `UnknownArgument`, with the nearest one that exists, for an unknown command or benchmark."""
    given, known = "armature", subcommands(parser)
    for word in words[:2]:
        if word.startswith("-") or not known:
            return
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            if near:
                hint = f"Did you mean {given} {near[0]}?"
            elif given == "armature" and _looks_like_model(word):
                hint = f"Did you mean armature serve {word}?"
            else:
                hint = f"There are: {', '.join(known)}."
            raise UnknownArgument(f"{given}: there is no command {word!r}. {hint} {given} --help lists all.")
        given, known = f"{given} {word}", subcommands(known[word])


def subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _looks_like_model(word: str) -> bool:
    return "/" in word or word.endswith((".gguf", ".pt2", ".onnx")) or Path(word).is_dir()


def _take_model_argument(arguments: argparse.Namespace) -> None:
    """Store a model that was given without its flag. Raises `UnknownArgument` if it was given twice."""
    model = vars(arguments).pop("model_argument", None)
    if model is None:
        return
    if hasattr(arguments, "model"):
        raise UnknownArgument(
            f"armature {arguments.command}: the model is given twice, as {model} and as --model {arguments.model}."
        )
    arguments.model = model


def make_parser(measures: bool = True) -> argparse.ArgumentParser:
    """Return the parser of all commands. `measures`: with the flags of `bench` and `tco`, from the other package."""
    parser = argparse.ArgumentParser(
        prog="armature", description="Serves small language models on ordinary processors.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"armature {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _model_command(commands, "serve", "serve a checkpoint over HTTP")
    _add_settings(serve)
    probe = _model_command(
        commands, "probe", "show this machine's hardware and the serving plan for it, each decision with its reason"
    )
    probe.add_argument("--json", action="store_true", help="print one JSON object")
    _add_settings(probe)
    pack = _model_command(
        commands, "pack", "quantize and pack a checkpoint's weights now, and cache them for every later start"
    )
    pack.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="typical text for this model, for calibration; default: a short text that is part of the package",
    )
    _add_settings(pack)
    calibrate = _model_command(
        commands,
        "calibrate",
        "measure this machine with a model's shapes now, and cache the result for every later start",
    )
    calibrate.add_argument("--json", action="store_true", help="print one JSON object")
    _add_settings(calibrate)
    bench = commands.add_parser("bench", help="run a benchmark", allow_abbrev=False)
    _add_model_commands(commands)
    _add_client_commands(commands)
    costs = _command(
        commands, "tco", "cost of a given load on each machine, from result files and prices", files="[RESULT…] "
    )
    if measures:
        _add_measuring_flags(bench, costs)
    return parser


def _add_model_commands(commands: Any) -> None:
    pull = _command(commands, "pull", "fetch a model of Hugging Face's hub into the hub's cache", files="NAME ")
    pull.add_argument("name", metavar="NAME", help="ORG/NAME, ORG/NAME@REVISION or ORG/NAME:FILE.gguf")
    listing = _command(commands, "list", "list the models in the hub's cache, and whether they can be served")
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    remove = _command(commands, "rm", "remove models from the hub's cache", files="NAME… ")
    remove.add_argument(
        "names", metavar="NAME", nargs="+", help="ORG/NAME, or ORG/NAME@REVISION for this revision alone"
    )
    remove.add_argument("--yes", action="store_true", help="do not ask")


def _add_client_commands(commands: Any) -> None:
    chat = _command(
        commands,
        "chat",
        "talk to a running server, or to one that is started for it with these settings",
        files="[PROMPT…] ",
    )
    for flag, options in chat_flags().items():
        chat.add_argument(flag, **options)
    _add_settings(chat, CHAT_GROUPS)
    top = _command(commands, "top", "show what a running server does now, in this terminal, until Ctrl-C")
    for flag, options in top_flags().items():
        top.add_argument(flag, **options)
    script = _command(
        commands, "completion", "print the script that completes this command's words in a shell", files="SHELL "
    )
    script.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _add_measuring_flags(bench: argparse.ArgumentParser, costs: argparse.ArgumentParser) -> None:
    from armature_bench.flags import BENCHES, bench_flags, cost_flags

    benches, known = bench.add_subparsers(dest="bench", required=True, metavar="WHAT"), bench_flags()
    for name, each in BENCHES.items():
        files = "[RESULT…] " if "results" in each.flags else ""
        parser = _command(benches, name, each.description, within="bench ", files=files)
        for flag, default in {"--json": None, **each.flags}.items():
            options = dict(known.get(f"{name} {flag}") or known[flag])
            shown = default[0] if isinstance(default, tuple) else default
            text = options.pop("help") + ("" if default is None else f" (default {shown})")
            parser.add_argument(flag, default=default, help=text, **options)
        _add_settings(parser)
    for flag, options in cost_flags().items():
        costs.add_argument(flag, **options)


def _command(commands: Any, name: str, description: str, within: str = "", files: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=description,
        description=f"{description[0].upper()}{description[1:]}.",
        usage=f"armature {within}{name} {files}[FLAGS]",
        allow_abbrev=False,
    )
    return parser


def _model_command(commands: Any, name: str, description: str) -> argparse.ArgumentParser:
    """Add a command that takes the model as its argument too, as `armature serve ORG/NAME`."""
    parser = _command(commands, name, description, files="[MODEL] ")
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")
    return parser


class _NamedModels(argparse.Action):
    """The flag --model, which is repeated as NAME=MODEL for several models."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        if before is not None and not (named_models(before) and named_models(values)):
            raise argparse.ArgumentError(
                self, f"given twice, as {before} and as {values}: give each of several models a name, as NAME=MODEL"
            )
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


class _CommaJoined(argparse.Action):
    """Several values of a flag, as the text in which an environment variable has them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None)  # a flag that is repeated adds to its list
        setattr(namespace, self.dest, ",".join(values if before is None else [before, *values]))


def _add_settings(parser: argparse.ArgumentParser, groups: Sequence[Group] = SETTING_GROUPS) -> None:
    for name in groups:
        group = parser.add_argument_group(f"{name} settings", ABOUT_SETTINGS if name == groups[0] else None)
        for row in setting_rows([name]):
            _add_setting(group, row)


def _add_setting(group: Any, row: SettingRow) -> None:
    default = f" Default: {row.default}." if row.default else ""
    text = f"{row.description}{default} [{row.variable}]".replace("%", "%%")
    metavar = row.values.replace(" ", "_")
    several: dict[str, Any] = {"nargs": "+", "action": _CommaJoined} if row.is_list else {}
    if row.name == "model":
        several = {"action": _NamedModels}
    group.add_argument(row.flag, dest=row.name, metavar=metavar, default=argparse.SUPPRESS, help=text, **several)
    if row.off_flag:
        group.add_argument(
            row.off_flag,
            dest=row.name,
            action="store_const",
            const="off",
            default=argparse.SUPPRESS,
            help=f"the same as {row.flag} off",
        )


def _describe_unknown(unknown: list[str], takes_files: bool) -> str:
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    if not word.startswith("-"):
        if takes_files:
            return f"{word!r} is not understood: give all result files together, before or after the flags."
        return f"{word!r} is not understood. A model is given as --model {word}."
    from armature_bench.flags import bench_flags, cost_flags

    flag = word.partition("=")[0]  # the value may be a secret
    settings = [flag for row in setting_rows() for flag in (row.flag, row.off_flag) if flag]
    known = [*settings, *bench_flags(), *cost_flags(), *chat_flags(), *top_flags(), "--help", "--yes"]
    near = difflib.get_close_matches(
        flag, [one for one in known if one.startswith("--") and one != flag], n=1
    )  # exclude the flag itself: it may belong to another command
    return f"there is no flag {flag}." + (f" Did you mean {near[0]}?" if near else "")


def server_flags() -> dict[str, dict[str, Any]]:
    return {
        "--url": {"help": "address of a running server, such as http://127.0.0.1:8000 or unix:/run/armature.sock"},
        "--api-key": {"metavar": "KEY", "help": "sent as a bearer token; default: the first of ARMATURE_API_KEYS"},
    }


def chat_flags() -> dict[str, dict[str, Any]]:
    return {
        "prompt": {
            "nargs": "*",
            "metavar": "PROMPT",
            "help": "send this, and the text of a pipe after it, print the answer and end; without both, a conversation",
        },
        **server_flags(),
        "--system": {"metavar": "TEXT", "help": "system message"},
        "--temperature": {"metavar": "T", "help": "0: always the most likely token; default: the server's"},
        "--max-tokens": {"metavar": "N", "help": "most tokens of an answer; default: the server's"},
        "--seed": {"metavar": "N", "help": "seed of the random numbers; default: another one for each answer"},
        "--stats": {"action": "store_true", "help": "show tokens per second after each answer"},
    }


def top_flags() -> dict[str, dict[str, Any]]:
    return {
        **server_flags(),
        "--model": {"metavar": "NAME", "help": "one of the server's models; default: the first"},
        "--interval": {
            "type": _interval,
            "default": 2.0,
            "metavar": "S",
            "help": "seconds between two readings (default 2)",
        },
        "--once": {"action": "store_true", "help": "print one picture and end, as without a terminal"},
    }


def _interval(text: str) -> float:
    seconds = float(text)
    if seconds < LEAST_INTERVAL:
        raise argparse.ArgumentTypeError(f"must be at least {LEAST_INTERVAL}, not {seconds:g}")
    return seconds
