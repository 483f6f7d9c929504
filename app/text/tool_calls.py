"""Tool calls in generated text: a parser that reads a text as it grows.

It works character by character, so a text gives the same calls however it is divided. Text that begins like a call and
is none is returned as content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.text.call_readers import SPACES, CallReader, NotACall, ObjectReader, new_reader
from app.text.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one tool call. The first delta of a call has its id and name; `arguments` is more of its JSON text."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class ParsedText:
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    reasoning: str = ""


class ToolCallParser:
    """Parser of one choice's text.

    `tools` are the tools' names with the schemas of their arguments; None: calls are content. Without `parallel`, calls
    after the first are dropped. `begun`: the text before an answer that the prompt has.
    """

    def __init__(
        self,
        form: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]] | None,
        new_id: Callable[[], str],
        parallel: bool = True,
        begun: str = "",
    ) -> None:
        self._form, self._tools, self._new_id, self._parallel = form, tools or {}, new_id, parallel
        self._starts, self._end, self._ignored = () if tools is None else form.opening, form.end, form.ignored
        self._around = tuple(filter(None, form.around))
        self._words = tuple(filter(None, (*self._starts, *self._around, self._end, *self._ignored, form.head.strip())))
        self._firsts = frozenset(one[0] for one in (*self._starts, *self._around))
        self._begun = begun
        self._names_calls = form.head == "" and (not form.reads_objects or bool(form.also))
        self._reads_bare = form.is_bare and tools is not None
        self.num_calls = 0
        self._todo: deque[str] = deque(begun)  # characters that are not read yet
        self._content: list[str] = []  # what is certain, until it is returned
        self._deltas: list[_GrowingDelta] = []
        self._spaces: list[str] = []  # white space that is content only if text follows
        self._held = ""  # the beginning of what may be a marker
        self._region: list[str] | None = None  # text since the calls began, until one is certain; None: content is read
        self._settled = 0  # characters of it that are content if no call is found: a marker follows them
        self._is_bare = False  # the calls began without a marker
        self._in_list = False
        self._reader: CallReader | None = None
        self._word = ""  # the name in `name{…}`, or the beginning of a marker after a call
        self._at_start = True
        self._region_calls = 0
        self._index: int | None = None  # of the call that is read; None until its name is known

    def push(self, text: str) -> ParsedText:
        self._todo.extend(text)
        self._take_all()
        return self._certain()

    def flush(self) -> ParsedText:
        while self._region is not None and (self._region_calls == 0 or self._has_begun):
            self._leave()  # which may find another marker further on
            self._take_all()
        held = self._held.removeprefix(self._begun)
        if held or not self.num_calls:
            self._content += (*self._spaces, held)
        self._spaces, self._held = [], ""
        return self._certain()

    @property
    def _has_begun(self) -> bool:
        """True if a call after others is read and its name is not known."""
        return self._reader is not None and self._index is None

    def _certain(self) -> ParsedText:
        certain = ParsedText("".join(self._content), [delta.whole() for delta in self._deltas])
        self._content, self._deltas = [], []
        return certain

    def _take_all(self) -> None:
        while self._todo:
            self._take(self._todo.popleft())

    def _take(self, character: str) -> None:
        if self._region is None:
            self._take_content(character)
            return
        if self._region_calls == 0:
            self._region.append(character)
        try:
            self._take_call(character)
        except NotACall:
            self._leave(character)

    # ---- content ---------------------------------------------------------------------------------------------------

    def _take_content(self, character: str) -> None:
        if self._at_start and self._reads_bare and character in "{[":
            self._enter("", is_bare=True)
            self._take(character)
            return
        self._at_start = self._at_start and character in SPACES
        held = self._held + character
        while held:
            begun = held.lstrip(SPACES)
            self._spaces += held[: len(held) - len(begun)]
            held = begun
            if not begun:
                break
            if begun[0] in self._firsts:
                if begun in self._around:
                    held = ""
                    break
                if marker := self._start_of(begun):
                    self._enter(marker)
                    self._todo.extendleft(reversed(begun[len(marker) :]))
                    return
                if any(marker.startswith(begun) for marker in (*self._starts, *self._around)):
                    break
            self._content += (*self._spaces, begun[0])
            self._spaces, held = [], begun[1:]
        self._held = held

    def _start_of(self, text: str) -> str:
        """Return the marker with which a text begins; empty while it may become the longer text around an answer."""
        if any(one.startswith(text) for one in self._around):
            return ""
        return next((start for start in self._starts if text.startswith(start)), "")

    def _enter(self, marker: str, is_bare: bool = False) -> None:
        # What an answer may begin with is no sure sign of a call: it must name a tool.
        self._is_bare = is_bare or self._form.answer.startswith(marker)
        self._region, self._settled, self._in_list = list(marker), 0, False
        self._word, self._region_calls, self._held, self._at_start = "", 0, "", False
        if marker and marker == self._form.head.strip():
            self._reader = new_reader(self._form, marker, self._tools)

    def _leave(self, character: str = "") -> None:
        """Return to content: what began like a call is none. `character` is the last one that was read."""
        region, reader = self._region, self._reader
        assert region is not None, "calls are read"
        if self._region_calls == 0:
            # The first character of the last marker is certain, so that it is not found again.
            self._content += (*self._spaces, *region[: self._settled + 1])
            self._spaces = []
            self._todo.extendleft(reversed(region[self._settled + 1 :]))
            if self._is_bare:
                self._reads_bare = False
        else:
            begun = reader.text if reader is not None and self._index is None else [*self._word, character]
            self._todo.extendleft(reversed(begun))
        self._region, self._reader, self._index, self._word = None, None, None, ""

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _take_call(self, character: str) -> None:
        if self._reader is not None:
            self._read(character)
        elif self._word:
            self._take_word(character)
        elif character == "{" and self._form.reads_objects:
            self._reader = ObjectReader()
            self._read(character)
        elif character == "[" and not self._in_list and not self._region_calls:
            self._in_list = True
        elif character == "]" and self._in_list:
            self._in_list = False
        elif character in ",;" or character in SPACES:
            pass
        else:
            self._take_word(character)

    def _take_word(self, character: str) -> None:
        """Take a marker, or the beginning of a call that is no object."""
        word = self._word + character
        if word == self._form.head.strip():
            self._word, self._reader = "", new_reader(self._form, word, self._tools)
        elif word == self._end or word in self._around:
            if self._region_calls == 0:
                raise NotACall
            self._region, self._word = None, ""
            self._spaces = []
        elif marker := self._start_of(word):
            self._word, more = "", word[len(marker) :]
            self._todo.extendleft(reversed(more))
            if self._region_calls == 0:  # as if the calls began here
                assert self._region is not None, "calls are read"
                del self._region[len(self._region) - len(more) :]
                self._settled, self._in_list = len(self._region) - len(marker), False
        elif word in self._ignored:
            self._word = ""
        elif any(marker.startswith(word) for marker in self._words):
            self._word = word
        elif self._names_calls and not (self._in_list and self._form.reads_objects):
            self._word, self._reader = "", new_reader(self._form, "", self._tools)
            self._todo.extendleft(reversed(word))  # it is read again, as the beginning of a call
            if self._region_calls == 0:
                assert self._region is not None, "calls are read"
                del self._region[-len(word) :]
        else:
            raise NotACall

    def _read(self, character: str) -> None:
        reader = self._reader
        assert reader is not None, "a call is read"
        reader.push(character)
        if reader.name is not None and self._index is None:
            if self._is_bare and reader.name not in self._tools:
                raise NotACall
            self._start_call(reader.name)
        arguments = reader.arguments()
        if arguments and self._index is not None and self._keeps(self._index):
            if not self._deltas or self._deltas[-1].index != self._index:
                self._deltas.append(_GrowingDelta(self._index))
            self._deltas[-1].arguments.append(arguments)
        if reader.finished:
            self._todo.extendleft(reversed(reader.unread))
            self._reader = self._index = None

    def _start_call(self, name: str) -> None:
        self._index = self.num_calls
        self._region_calls += 1
        self.num_calls += 1
        self._spaces = []
        if self._keeps(self._index):
            self._deltas.append(_GrowingDelta(self._index, self._new_id(), name))

    def _keeps(self, index: int) -> bool:
        return self._parallel or index == 0


@dataclass(slots=True)
class _GrowingDelta:
    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> ToolCallDelta:
        return ToolCallDelta(self.index, "".join(self.arguments), self.id, self.name)
