"""`armature chat`: one prompt from an argument or a pipe, what is sent and shown, and what is refused."""

from __future__ import annotations

import io
import re
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from app.cli.clients import chat, command
from app.cli.clients.chat import AnswerPrinter, Chat, Conversation, StreamedAnswer, WordWrap
from app.cli.clients.connection import ServerConnection, ServerRefused
from app.cli.main import main
from app.errors import SettingsInvalid
from scripted_http import ScriptedServer, chatting, delta, running

USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}
FOX = [delta(role="assistant", content=""), delta(reasoning_content="Hm."), delta(content="A \x1b[31mfox"), USAGE]


class Input(io.StringIO):
    def __init__(self, text: str, is_terminal: bool = False) -> None:
        super().__init__(text)
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def run(monkeypatch: pytest.MonkeyPatch, piped: str, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", Input(piped))
    return main(["chat", *flags])


def conversation_with(script: ScriptedServer, lines: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", Input(lines, is_terminal=True))
    return main(["chat", "--url", script.url, *flags])


@pytest.mark.parametrize(
    ("words", "piped", "sent"),
    [
        (["Tell me", "a story"], "", "Tell me a story"),
        ([], "of a pipe\n", "of a pipe"),
        (["Shorten"], "a text\n", "Shorten\n\na text"),
    ],
)
def test_a_prompt_of_an_argument_and_of_a_pipe(
    words: list[str], piped: str, sent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(chatting(*FOX)) as script:
        flags = ["--url", script.url, "--system", "Be brief.", "--temperature", "0", "--stats", "--api-key", "k"]
        assert run(monkeypatch, piped, *words, *flags) == 0
    said = capsys.readouterr()
    assert said.out == "A \x1b[31mfox\n", "a pipe gets the text as it is, without reasoning"
    assert said.err.startswith("5 tokens, ")
    body = script.asked[0]
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": sent}]
    assert (body["model"], body["temperature"], body["stream"]) == ("fox", 0, True)
    assert script.keys.count("Bearer k") == len(script.keys)


def test_the_key_is_also_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_API_KEYS", "first,second")
    with running(chatting(*FOX)) as script:
        assert run(monkeypatch, "", "hi", "--url", script.url, "--model", "other") == 0
    assert set(script.keys) == {"Bearer first"}
    assert script.asked[0]["model"] == "other"


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ([], 2, "There is nothing to send"),
        (["hi", "--url", "x", "--threads", "2"], 2, "--threads does not apply to a server that already runs"),
        (["hi", "--url", "x", "--temperature", "hot"], 2, "temperature is a number or off, not 'hot'."),
        (["hi", "--tls-cert", "x"], 2, "there is no flag --tls-cert"),
    ],
)
def test_flags_that_make_no_sense(
    flags: list[str], status: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "", *flags) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"/v1/models": (200, {"data": []})}, "lists no model. Name one with --model."),
        ({"/v1/models": (401, {})}, "This server needs an API key."),
        (
            {"/info": (200, {"stage": "ready", "model": {"kind": "encoder"}})},
            "fox, which is no language model (encoder)",
        ),
        ({"/readyz": (503, {"status": "stopping"})}, "is stopping"),
        ({"/v1/chat/completions": (400, {"error": {"message": "No template."}})}, "No template."),
    ],
)
def test_a_server_that_does_not_chat(
    others: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(chatting(*FOX, **others)) as script:
        assert run(monkeypatch, "", "hi", "--url", script.url) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err


def test_a_server_on_this_machine_is_found_and_gets_no_key_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(chatting(*FOX, **{"/info": (200, {"stage": "ready", "model": {"kind": "decoder"}})})) as script:
        monkeypatch.setenv("ARMATURE_PORT", script.url.rpartition(":")[2])
        monkeypatch.setenv("ARMATURE_API_KEYS", "mine")
        assert run(monkeypatch, "hi\n") == 0
    assert script.keys[0] is None
    assert set(script.keys[1:]) == {"Bearer mine"}


def test_a_silent_program_at_the_port_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FIND_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = ServerConnection(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert command._running_server(address) is None
    with running(ScriptedServer({"/info": (200, "<html>")})) as script:
        assert command._running_server(ServerConnection(script.url)) is None


def test_a_conversation_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Input is a terminal and output is not: no prompt is between the answers."""
    lines = "one\n\n/system Be brief.\ntwo \\\nlines\n/clear\n /three\n/nonsense\n/exit\nnever\n"
    with running(chatting(*FOX)) as script:
        assert conversation_with(script, lines, monkeypatch) == 0
    said = capsys.readouterr()
    assert said.out == "A \x1b[31mfox\n" * 3
    assert "There is no command /nonsense." in said.err
    system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "A \x1b[31mfox"}
    assert [body["messages"] for body in script.asked] == [
        [{"role": "user", "content": "one"}],
        [system, {"role": "user", "content": "one"}, answer, {"role": "user", "content": "two \nlines"}],
        [system, {"role": "user", "content": " /three"}],
    ]


def test_a_refused_message_is_not_part_of_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(chatting(delta(content="half"), {"error": {"message": "The step failed."}})) as script:
        assert conversation_with(script, "one\ntwo\n", monkeypatch) == 0
    assert [len(body["messages"]) for body in script.asked] == [1, 1]
    said = capsys.readouterr()
    assert (said.out, said.err.count("The step failed.")) == ("half\nhalf\n", 2)


def test_ctrl_c_keeps_what_arrived_and_twice_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(self: StreamedAnswer, server: ServerConnection, body: Any) -> Any:
        self.text = "half"
        yield "half", False
        raise KeyboardInterrupt

    class Interrupted(Input):
        def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
            line = super().readline()
            if line == "^C\n":
                raise KeyboardInterrupt
            return line

    monkeypatch.setattr(StreamedAnswer, "read", parts)
    monkeypatch.setattr("sys.stdin", Interrupted("one\n^C\nnever\n", is_terminal=True))
    talk = Chat(ServerConnection("http://x"), Conversation("fox"))
    assert chat.converse(talk) == 0
    assert talk.conversation.messages[-1] == {"role": "assistant", "content": "half"}
    assert len(talk.conversation.messages) == 2
    monkeypatch.setattr("sys.stdin", Interrupted("^C\n/clear\n^C\n/exit\n", is_terminal=True))
    assert chat.converse(talk) == 0
    assert talk.conversation.messages == [], "a command between two Ctrl-C goes on"


def test_a_terminal_shows_reasoning_and_no_control_characters() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    printer = AnswerPrinter(out)
    for part, is_reasoning in (("[b]Hm.", True), ("A \x1b]0;title\x07\x9b31mfox\r:smile:", False)):
        printer.write(part, is_reasoning)
    printer.end()
    text = out.getvalue().replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert text == "[b]Hm.\n\nA ]0;title31mfox:smile:\n"


def test_parameters() -> None:
    talk = Conversation("fox")
    talk.set("max_tokens", "9")
    talk.set("top_p", "0.5")
    assert talk.body("hi")["max_tokens"] == 9
    talk.set("max_tokens", "off")
    assert "max_tokens" not in talk.body("hi")
    for name, value in (("n", "2"), ("max_tokens", "1.5"), ("top_p", "")):
        with pytest.raises(SettingsInvalid):
            talk.set(name, value)


def test_the_speed_of_an_answer() -> None:
    assert StreamedAnswer().describe() == "no tokens"
    counted = StreamedAnswer(num_events=3, completion_tokens=11, began=1.0, first=3.0, last=4.0)
    assert counted.describe() == "11 tokens, 10.0 tokens/s, first after 2.00 s"
    stopped = StreamedAnswer(num_events=1, began=1.0, first=1.5, last=1.5)
    assert stopped.describe() == "about 1 token, first after 500 ms"


def test_a_refusal_is_raised_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(ScriptedServer({})) as script, pytest.raises(ServerRefused, match="Not Found"):
        Chat(ServerConnection(script.url), Conversation("fox")).answer("hi")


class Terminal:
    """The lines of a terminal of some width that knows new lines, a cursor's column and erase to the end of a line."""

    def __init__(self, width: int) -> None:
        self.width, self.column = width, 0
        self.lines: list[list[str]] = [[]]

    def write(self, text: str) -> None:
        for control, character in re.findall(r"\x1b\[(\d*[GK])|(.)", text, re.DOTALL):
            if control.endswith("G"):
                self.column = int(control[:-1]) - 1
            elif control:
                del self.lines[-1][self.column :]
            elif character == "\n":
                self.lines.append([])
                self.column = 0
            else:
                assert self.column + cell_len(character) <= self.width, "the terminal breaks the line"
                del self.lines[-1][self.column :]
                self.lines[-1] += [character, *[""] * (cell_len(character) - 1)]
                self.column += cell_len(character)

    def text(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.lines]


@given(
    st.lists(st.text(alphabet="ab 你\n", max_size=12), max_size=12),
    st.integers(min_value=4, max_value=11),
)
def test_words_are_not_broken(parts: list[str], width: int) -> None:
    terminal, wrap = Terminal(width), WordWrap(lambda: width)
    for part in parts:
        terminal.write(wrap.feed(part))
    text = "".join(parts)
    shown = terminal.text()
    assert "".join(shown).replace(" ", "") == re.sub(r"\s", "", text)
    for word in text.split():
        if cell_len(word) <= width:
            assert any(word in line for line in shown), (word, shown)
