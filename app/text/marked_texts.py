"""A conversation with a word in place of each text, which shows whether a chat template writes all of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

Message = Mapping[str, Any]


class MarkedTexts:
    """A conversation, in the form that a template gets, with words in place of its texts.

    `words` says what each word stands for, as a path in the request. Reasoning is no such text: templates leave it out
    of earlier turns, as models were trained.
    """

    def __init__(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> None:
        self.words: dict[str, str] = {}
        self.messages = [self._message(message, f"messages[{place}]") for place, message in enumerate(messages)]
        documents = variables.get("documents") or ()
        self.variables = dict(variables)
        if documents:
            self.variables["documents"] = [self._document(one, f"documents[{at}]") for at, one in enumerate(documents)]

    def lost(self, text: str) -> str | None:
        """Return the path of the first part that is not in a rendered text; None if all are there."""
        return next((path for word, path in self.words.items() if word not in text), None)

    def _word(self, text: str, path: str) -> str:
        if not text.strip():
            return text
        word = f"zq{len(self.words)}qz"
        self.words[word] = path
        return word

    def _message(self, message: Message, path: str) -> dict[str, Any]:
        marked = dict(message)
        for name in ("content", "tool_plan"):
            if name in marked:
                marked[name] = self._content(marked[name], f"{path}.content")
        if marked.get("tool_calls"):
            calls = enumerate(marked["tool_calls"])
            marked["tool_calls"] = [self._call(call, f"{path}.tool_calls[{place}]") for place, call in calls]
        return marked | {name: "reasoning" for name in ("reasoning_content", "thinking") if marked.get(name)}

    def _content(self, content: Any, path: str) -> Any:
        if isinstance(content, str):
            return self._word(content, path)
        if isinstance(content, list):
            return [part | {"text": self._word(part["text"], f"{path}[{at}].text")} for at, part in enumerate(content)]
        return content

    def _call(self, call: Message, path: str) -> dict[str, Any]:
        function = call["function"]
        arguments, path = function.get("arguments"), f"{path}.function.arguments"
        if isinstance(arguments, dict):
            arguments = self._arguments(arguments, path)
        elif isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                found = json.loads(arguments)
                arguments = json.dumps(self._arguments(found, path)) if isinstance(found, dict) else arguments
        return {**call, "function": {**function, "arguments": arguments}}

    def _arguments(self, arguments: Mapping[str, Any], path: str) -> dict[str, str]:
        return {name: self._word(name, f"{path}.{name}") for name in arguments}

    def _document(self, document: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return a document's longest text as a word: a template may leave out its other fields, such as a title."""
        texts = {name: text for name, text in document.items() if isinstance(text, str)}
        name = max(texts, key=lambda one: len(texts[one]), default=None)
        return {**document} if name is None else {**document, name: self._word(texts[name], f"{path}.{name}")}
