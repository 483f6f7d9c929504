"""`armature chat`: a conversation in a terminal, or one prompt from an argument or a pipe.

The answer goes to standard output, everything else to standard error. Control characters of an answer are left out.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from app.cli.clients.connection import ServerConnection, ServerRefused
from app.errors import SettingsInvalid

PROMPT = "> "
MORE_PROMPT = "… "
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
HELP = """\
/model NAME       go on with another of the server's models; /model lists them
/system TEXT      set the system message; /system shows it, /system off removes it
/set NAME VALUE   set temperature, max_tokens, …; /set shows them, /set NAME off leaves it to the server
/stats            show tokens per second after each answer, or stop that
/clear            forget the conversation; the system message and the parameters stay
/exit             leave; so do Ctrl-D, and Ctrl-C twice
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one. A space before / makes it a message."""

CHAT_PATH = "/v1/chat/completions"
SAMPLING: dict[str, Callable[[str], int | float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
}


class AnswerPrinter:
    """Writes the parts of an answer as they arrive. Reasoning is dim, and shown on a terminal only."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._wrap = WordWrap(lambda: shutil.get_terminal_size().columns)
        self._shows_reasoning = out.isatty()
        self._has_control = out.isatty() and not Console(file=out).is_dumb_terminal
        self._reasons = False
        self._at_line_start = True

    def write(self, part: str, is_reasoning: bool) -> None:
        if is_reasoning and not self._shows_reasoning:
            return
        if self._reasons and not is_reasoning:
            self._write("\n\n")
        self._reasons = is_reasoning
        self._write(part)

    def end(self) -> None:
        if not self._at_line_start:
            self._reasons = False
            self._write("\n")

    def _write(self, text: str) -> None:
        shown = CONTROL.sub("", text) if self._out.isatty() else text
        if not shown:
            return
        self._at_line_start = shown.endswith("\n")
        if self._has_control:
            shown = self._wrap.feed(shown)
        self._out.write(f"\x1b[2m{shown}\x1b[0m" if self._has_control and self._reasons else shown)
        self._out.flush()


class WordWrap:
    """Breaks lines between words while text arrives in parts; a word at the terminal's edge is written again."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0  # cells written in this line
        self._word = ""  # what was written since the last space, in this line

    def feed(self, part: str) -> str:
        """Return what to write to the terminal for the next part."""
        return "".join(map(self._feed, part))

    def _feed(self, character: str) -> str:
        width, cells = max(self._width(), 2), cell_len(character)
        does_fit = self._column + cells <= width
        if character == "\n" or (character.isspace() and not does_fit):
            self._column, self._word = 0, ""
            return "\n"
        before = "" if does_fit else self._start_line(width - cells)
        self._column += cells
        self._word = "" if character.isspace() else self._word + character
        return before + character

    def _start_line(self, room: int) -> str:
        """Return what takes the unfinished word to the next line, unless it is longer than `room`."""
        word, cells = self._word, cell_len(self._word)
        if cells > room:
            self._column, self._word = 0, ""
            return "\n"
        start, self._column = self._column - cells, cells
        return f"\x1b[{start + 1}G\x1b[K\n{word}" if word else "\n"


class LineReader:
    def __init__(self, commands: tuple[str, ...]) -> None:
        self._has_editing = sys.stdin.isatty() and sys.stdout.isatty()
        if self._has_editing:
            with suppress(ImportError):
                _complete_commands(commands)

    def read(self) -> str:
        """Return one message; a line that ends with a backslash goes on. Raises `EOFError`."""
        lines = [self._line(PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(MORE_PROMPT))
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if self._has_editing:
            return input(prompt)
        sys.stderr.write(prompt)  # an answer in a file has no prompts between
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


def _complete_commands(commands: tuple[str, ...]) -> None:
    import readline

    def complete(text: str, state: int) -> str | None:
        words = SAMPLING if readline.get_line_buffer().startswith("/set ") else commands
        found = [f"{word} " for word in words if text and word.startswith(text)]
        return found[state] if state < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")


@dataclass(slots=True)
class Chat:
    server: ServerConnection
    conversation: Conversation
    has_stats: bool = False

    def answer(self, text: str) -> StreamedAnswer:
        """Ask, and print the answer as it arrives, until a Ctrl-C. Raises `ServerRefused` if it is incomplete."""
        answer, printer = StreamedAnswer(), AnswerPrinter(sys.stdout)
        is_refused = False
        try:
            with closing(answer.read(self.server, self.conversation.body(text))) as parts:
                for part, is_reasoning in parts:
                    printer.write(part, is_reasoning)
        except ServerRefused:
            is_refused = True
            raise
        finally:
            printer.end()
            if not is_refused and (answer.text or answer.finish_reason):
                self.conversation.add(text, answer.text)
        if answer.finish_reason == "length":
            _note("The answer ended at its limit of tokens.")
        if self.has_stats:
            _note(answer.describe())
        return answer

    def run_command(self, line: str) -> bool:
        """Run a command such as `/clear`; return False if it ends the conversation."""
        name, _, text = line.partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return False
        run = COMMANDS.get(name)
        if run is None:
            _note(f"There is no command {name}. /help lists them; a space before / makes it a message.")
            return True
        try:
            run(self, text.strip())
        except SettingsInvalid as error:
            _note(error.message)
        return True

    def set_system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "off" else text
        _note(f"system message: {self.conversation.system or 'none'}")

    def set_model(self, text: str) -> None:
        """Go on with another of the server's models, or list them."""
        try:
            data = self.server.get_json("/v1/models").get("data") or ()
        except ServerRefused as error:
            _note(error.message)
            return
        names = [str(one.get("id")) for one in data]
        if text and text not in names:
            _note(f"There is no model {text!r}. There are: {', '.join(names)}.")
            return
        self.conversation.model = text or self.conversation.model
        _note(f"model: {self.conversation.model}; there are: {', '.join(names)}")

    def set_parameter(self, text: str) -> None:
        if text:
            name, _, value = text.partition(" ")
            self.conversation.set(name, value.strip())
        given = ", ".join(f"{name} {value:g}" for name, value in self.conversation.sampling.items())
        _note(given or f"Nothing is set, so the server's defaults apply. There are: {', '.join(SAMPLING)}.")

    def toggle_stats(self, text: str) -> None:
        self.has_stats = not self.has_stats
        _note("The speed of each answer is shown." if self.has_stats else "The speed of answers is not shown.")

    def clear(self, text: str) -> None:
        self.conversation.messages.clear()
        _note("The conversation is empty.")

    def show_help(self, text: str) -> None:
        _note(HELP)


COMMANDS: Mapping[str, Callable[[Chat, str], None]] = {
    "/help": Chat.show_help,
    "/model": Chat.set_model,
    "/system": Chat.set_system,
    "/set": Chat.set_parameter,
    "/stats": Chat.toggle_stats,
    "/clear": Chat.clear,
}


def converse(chat: Chat) -> int:
    """Read messages and print answers until the user leaves, and return the exit status."""
    _note(f"{chat.conversation.model} at {chat.server.url}. /help lists the commands.")
    lines, was_interrupted, is_answering = LineReader((*COMMANDS, "/exit")), False, False
    while True:
        try:
            is_answering = False
            line = lines.read()
            was_interrupted = False
            if line.startswith("/"):
                if not chat.run_command(line.rstrip()):
                    return 0
            elif line.strip():
                is_answering = True
                chat.answer(line)
        except ServerRefused as error:
            _note(error.message)
        except EOFError:
            sys.stderr.write("\n")
            return 0
        except KeyboardInterrupt:
            sys.stderr.write("" if is_answering else "\n")
            if was_interrupted:
                return 0
            was_interrupted = True
            _note("Stopped. Ctrl-C again leaves." if is_answering else "Ctrl-C again, Ctrl-D or /exit leaves.")


def _note(text: str) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(Text(CONTROL.sub("", text), style="dim cyan"), soft_wrap=True)


@dataclass(slots=True)
class Conversation:
    """The messages so far, without the system message, and what each request says."""

    model: str
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    sampling: dict[str, int | float] = field(default_factory=dict)

    def set(self, name: str, text: str) -> None:
        """Set a sampling parameter; `off` leaves it to the server. Raises `SettingsInvalid`."""
        if name not in SAMPLING:
            raise SettingsInvalid(f"There is no parameter {name!r}. There are: {', '.join(SAMPLING)}.")
        if text == "off":
            self.sampling.pop(name, None)
            return
        try:
            self.sampling[name] = SAMPLING[name](text)
        except ValueError:
            kind = "a whole number" if SAMPLING[name] is int else "a number"
            raise SettingsInvalid(f"{name} is {kind} or off, not {text!r}.") from None

    def body(self, text: str) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*system, *self.messages, {"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }

    def add(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


@dataclass(slots=True)
class StreamedAnswer:
    """An answer as far as it has arrived. Times are `time.monotonic` seconds, 0 before the first token."""

    text: str = ""
    num_events: int = 0  # with text; a step with accepted draft tokens gives several tokens in one
    completion_tokens: int | None = None  # the server's own count, at the end of a complete answer
    finish_reason: str = ""
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0

    def read(self, server: ServerConnection, body: dict[str, Any]) -> Generator[tuple[str, bool], None, None]:
        """Yield the parts of the answer's text, and whether each is reasoning. Raises `ServerRefused`."""
        with closing(server.events(CHAT_PATH, body)) as events:
            for event in events:
                self.completion_tokens = (event.get("usage") or {}).get("completion_tokens", self.completion_tokens)
                choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                delta = choice.get("delta") or {}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                text = delta.get("content") or ""
                if reasoning or text:
                    self._note_time()
                if reasoning:
                    yield reasoning, True
                if text:
                    self.text += text
                    yield text, False

    def _note_time(self) -> None:
        self.num_events += 1
        self.last = time.monotonic()
        self.first = self.first or self.last

    def describe(self) -> str:
        """Return the number of tokens, the tokens per second after the first, and the wait for the first."""
        if not self.first:
            return "no tokens"
        is_counted = self.completion_tokens is not None
        tokens = self.completion_tokens if self.completion_tokens is not None else self.num_events
        rate = (tokens - 1) / (self.last - self.first) if self.last > self.first else 0.0
        wait = self.first - self.began
        parts = [
            f"{'' if is_counted else 'about '}{tokens:,} {'token' if tokens == 1 else 'tokens'}",
            f"{rate:,.1f} tokens/s" if rate else "",
            f"first after {f'{wait:.2f} s' if wait >= 1 else f'{wait * 1e3:.0f} ms'}",
        ]
        return ", ".join(filter(None, parts))
