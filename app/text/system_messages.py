"""System messages in a conversation, for templates that write them in some places only.

Some templates refuse a system message that is not the first one, or any (Gemma), and others leave it out without a
word. Trial conversations show at load what a template writes. A message that it would not write becomes a part of a
message that it does, so nothing of a conversation is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
_FIRST, _SECOND, _QUESTION, _ANSWER = "trial-alpha", "trial-beta", "trial-gamma", "trial-delta"


@dataclass(frozen=True, slots=True)
class SystemRules:
    """The places of system messages that a template writes.

    - `first`: one before all other messages.
    - `several`: more than one there.
    - `later`: one after other messages.
    """

    first: bool = True
    several: bool = True
    later: bool = True


def find_system_rules(written: Callable[[Sequence[Message]], str | None]) -> SystemRules:
    """Return the rules of a template. `written` returns the text of a conversation, or None if it is refused."""
    user, answer = _message("user", _QUESTION), _message("assistant", _ANSWER)
    first, second = _message("system", _FIRST), _message("system", _SECOND)

    def writes(*messages: Message) -> bool:
        text = written(messages)
        return text is not None and all(message["content"] in text for message in messages)

    if not writes(user, answer, user):
        return SystemRules()  # the template wants something that is not known here: nothing can be tried
    if not writes(first, user):
        return SystemRules(first=False, several=False, later=writes(user, answer, second, user))
    return SystemRules(True, writes(first, second, user), writes(first, user, answer, second, user))


def fold_system_messages(messages: Sequence[dict[str, Any]], rules: SystemRules) -> list[dict[str, Any]]:
    """Return a conversation whose system messages are in places that the template writes.

    Several first ones are joined. A later one is put before the user's next message if that follows directly, else
    after the user's last message if that precedes it, else it becomes a message of the user.
    """
    num_first = next((place for place, one in enumerate(messages) if one["role"] != "system"), len(messages))
    start, rest = [dict(one) for one in messages[:num_first]], messages[num_first:]
    if len(start) > 1 and not rules.several:
        start = [start[0] | {"content": joined(*start)}]
    if not rules.first:
        rest, start = [*start, *rest], []
    return [*start, *(rest if rules.later and rules.first else _without_system(rest, rules.later))]


def _without_system(messages: Sequence[dict[str, Any]], keeps_later: bool) -> list[dict[str, Any]]:
    """Return messages whose system messages are folded; with `keeps_later` only those at the beginning."""
    done: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system" and not (keeps_later and any(one["role"] != "system" for one in done)):
            waiting.append(message)
        elif waiting and message["role"] == "user":
            done.append(message | {"content": joined(*waiting, message)})
            waiting = []
        else:
            done += _as_user(done, waiting)
            done.append(message)
            waiting = []
    return done + _as_user(done, waiting)


def _as_user(done: list[dict[str, Any]], waiting: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages to add for system messages that no message of the user follows."""
    if not waiting:
        return []
    if done and done[-1]["role"] == "user":
        done[-1] = done[-1] | {"content": joined(done[-1], *waiting)}
        return []
    return [{"role": "user", "content": joined(*waiting)}]


def joined(*messages: Message) -> str:
    """Return the texts of messages, with an empty line between them. Each part of a text is a line."""
    return "\n\n".join(text for one in messages if (text := _content_text(one.get("content"))))


def _content_text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
