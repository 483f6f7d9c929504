"""`armature chat` and `armature top` from their flags: which server they talk to, and in which way they show it."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from app.cli.clients.chat import Chat, Conversation, converse
from app.cli.clients.connection import ServerConnection, ServerRefused, parse_object, parse_server_url
from app.cli.clients.own_server import POLL_SECONDS, is_ready, own_server
from app.cli.clients.top import open_figures, show_figures
from app.errors import SettingsInvalid
from app.server.start_console import command_progress
from app.settings import Settings, given_settings, setting_flags, unix_path_of

FIND_SECONDS = 2.0  # another program may have the port, and say nothing
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def run_chat(settings: Settings, arguments: Namespace) -> int:
    """Talk to the chosen server, or send it one prompt, and return the exit status. Raises an `ArmatureError`."""
    conversation = Conversation("", arguments.system or "")
    for name in ("temperature", "max_tokens", "seed"):
        if getattr(arguments, name) is not None:
            conversation.set(name, getattr(arguments, name))
    prompt = _prompt(arguments.prompt)
    with _chosen_server(settings, arguments) as server:
        conversation.model = (getattr(arguments, "model", None) if arguments.url else None) or _served_model(server)
        chat = Chat(server, conversation, arguments.stats)
        if prompt is None:
            return converse(chat)
        chat.answer(prompt)
        return 0


def _prompt(words: Sequence[str]) -> str | None:
    """Return the one prompt of the argument and of a pipe, or None for a conversation on a terminal."""
    is_piped = not sys.stdin.isatty()
    if not words and not is_piped:
        return None
    piped = sys.stdin.read().rstrip("\n") if is_piped else ""
    prompt = "\n\n".join(filter(None, (" ".join(words), piped)))
    if not prompt.strip():
        raise SettingsInvalid("There is nothing to send: give a prompt, or text on standard input.")
    return prompt


def run_top(settings: Settings, arguments: Namespace) -> int:
    """Show what the chosen server does, and return the exit status. Raises `SettingsInvalid` or `ServerRefused`."""
    server = connect(settings, arguments)
    if not arguments.once:
        _ready_server(server, "top")
    return show_figures(open_figures(server, arguments.model), arguments.interval, arguments.once)


@contextmanager
def _chosen_server(settings: Settings, arguments: Namespace) -> Iterator[ServerConnection]:
    """Yield the server at `--url`; else one with the given settings; else the one that runs here, or a new one."""
    given = given_settings(arguments)
    if arguments.url:
        foreign = [name for name in given if name != "model"]
        if foreign:
            flag = f"--{foreign[0].replace('_', '-')}"
            raise SettingsInvalid(f"{flag} does not apply to a server that already runs: leave out --url or {flag}.")
        yield _ready_server(connect(settings, arguments), "chat")
        return
    running = None if given else _running_server(connect(settings, arguments))
    if running is not None:
        yield _ready_server(running, "chat")
        return
    with command_progress("chat") as console, own_server(setting_flags(arguments), console.show) as server:
        console.close()
        yield server


def connect(settings: Settings, arguments: Namespace) -> ServerConnection:
    """Return the connection to `--url` or the settings' address, with a key of either. Raises `SettingsInvalid`."""
    key = arguments.api_key or next(iter(settings.api_keys), None)
    if arguments.url:
        return ServerConnection(parse_server_url(arguments.url), key)
    first = settings.host[0]
    if unix_path_of(first) is not None:
        return ServerConnection(first, key)
    host = ANY_ADDRESS.get(first, first)
    address = f"[{host}]:{settings.port}" if ":" in host else f"{host}:{settings.port}"
    return ServerConnection(f"{'https' if settings.tls_cert else 'http'}://{address}", key)


def _running_server(server: ServerConnection) -> ServerConnection | None:
    """Return the server if an Armature is there. It gets no key before that is known."""
    try:
        status, body = ServerConnection(server.url).get("/info", FIND_SECONDS)
    except ServerRefused:
        return None
    found = parse_object(body.decode(errors="replace")) if status == 200 else None
    return server if found is not None and "stage" in found else None


def _ready_server(server: ServerConnection, command: str) -> ServerConnection:
    with command_progress(command) as console:
        while not is_ready(server, console.show):
            time.sleep(POLL_SECONDS)
    return server


def _served_model(server: ServerConnection) -> str:
    served = server.get_json("/v1/models").get("data")
    name = next((one["id"] for one in served or () if isinstance(one, dict) and "id" in one), None)
    if name is None:
        raise ServerRefused(f"{server.url} lists no model. Name one with --model.")
    status, body = server.get("/info")  # only Armature has it
    info = (parse_object(body.decode(errors="replace")) or {}) if status == 200 else {}
    if (several := info.get("models")) is not None:
        decoder = next((one["name"] for one in several if one["kind"] == "decoder"), None)
        if decoder is None:
            raise ServerRefused(f"{server.url} serves no language model: its models do not chat.")
        return str(decoder)
    about = info.get("model")
    kind = about.get("kind", "decoder") if isinstance(about, dict) else "decoder"
    if kind != "decoder":
        raise ServerRefused(f"{server.url} serves {name}, which is no language model ({kind}): it does not chat.")
    return str(name)
