"""Grammars of structured output: JSON schemas, regular expressions, choices and context-free grammars.

The library llguidance compiles a grammar and computes the tokens that may come next. A grammar is compiled in a process
with limits first (`text/grammar_process.py`), and in the server once it is known to be cheap.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from types import TracebackType
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from app.errors import InvalidRequest
from app.text.grammar_definition import LIMITS, STACK_BYTES, GrammarSource, check_source, refusal
from app.text.grammar_process import QUICK_SECONDS, SLOW_SECONDS, GrammarProcess
from app.text.json_repeats import JsonRepeats, SchemaPlaces, TokenBytes
from app.text.rust_panics import ConvertRustErrors, is_rust_panic
from app.text.template_messages import ReplyStatus
from app.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_KEPT_GRAMMARS = 16
MAX_KEPT_SLOW_GRAMMARS = 2
MAX_KEPT_REFUSALS = 64
# Texts in JSON strings by length: the library keeps the masks of the tokens that match each. With more lengths than its
# own, 10 and 30, masks in strings of limited length take a third of the time.
_SLICES = (*(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (3, 6, 9, 12, 16, 30)), r'[^"\\\x00-\x1F\x7F]+')
_REPEATED = "a key or a unique item was written twice"
_UNFOLLOWED = "no token that the grammar allows was possible"
_MAX_FORCED_TOKENS = 64  # returned at once; a step uses fewer
_JSON_KINDS = ("json_schema", "lark")  # the latter are tool calls


@dataclass(frozen=True, slots=True)
class SlashEscape:
    r"""Tokens for the escape `\/` in JSON, which the library does not know: after `\` the slash is read as `u002f`."""

    slash_id: int
    same_ids: tuple[int, ...]
    text_of: Callable[[int], bytes]

    @classmethod
    def find(cls, vocabulary: LLTokenizer) -> SlashEscape | None:
        """Return the tokens of a vocabulary; None if it has no such tokens."""
        slash, same = (vocabulary.greedy_tokenize(text) for text in ("/", "u002f"))
        if len(slash) != 1 or vocabulary.decode_bytes(slash) != b"/" or vocabulary.decode_bytes(same) != b"u002f":
            return None
        return cls(slash[0], tuple(same), lambda token_id: vocabulary.decode_bytes([token_id]))

    def is_open(self, before: bool, token_id: int) -> bool:
        """Return True if a text ends with an escape that has begun. `before`: it did before this token."""
        text = self.text_of(token_id)
        length = len(text) - len(text.rstrip(b"\\"))
        return (length % 2 == 1) != (before and length == len(text))


_MakeRepeats = Callable[[], JsonRepeats]


class CompiledGrammar:
    """A grammar for one vocabulary. Any thread may use it."""

    def __init__(
        self, matcher: LLMatcher, eos_token_ids: frozenset[int], slash: SlashEscape | None, repeats: _MakeRepeats | None
    ) -> None:
        self._matcher, self._eos_token_ids, self._slash = matcher, eos_token_ids, slash
        self._repeats = repeats

    def start(self) -> MatcherState:
        """Return the state before the first token of a sequence."""
        repeats = self._repeats and self._repeats()
        return MatcherState(self._matcher.deep_copy(), self._eos_token_ids, self._slash, repeats)


class MatcherState:
    """The place in a grammar that one sequence has reached; see `messages.GrammarState`."""

    __slots__ = ("_eos_token_ids", "_forced", "_is_escape_open", "_matcher", "_repeats", "_slash", "error", "finished")

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: frozenset[int],
        slash: SlashEscape | None,
        repeats: JsonRepeats | None,
    ) -> None:
        self._matcher, self._eos_token_ids, self._slash = matcher, eos_token_ids, slash
        self._repeats = repeats
        self._is_escape_open = False
        self._forced: deque[int] = deque()  # computed once: a grammar may force a hundred thousand tokens
        self.finished = False
        self.error = ""

    def fill_masks(self, address: int, row_bytes: int, draft_ids: Sequence[int]) -> None:
        """Write the mask of the next token, and of the one after each draft token."""
        repeats = self._repeats
        with _Panics(self):
            was_open, count = self._is_escape_open, 0
            before = repeats and repeats.copy_of_state()
            self._fill_mask(address, row_bytes)
            for place, token_id in enumerate(draft_ids, 1):
                count += self._consume(token_id)
                if repeats:
                    repeats.read(token_id)
                self._fill_mask(address + place * row_bytes, row_bytes)
            if count:
                self._matcher.rollback(count)
            if repeats and before:
                repeats.restore(before)
            self._is_escape_open = was_open
            self._check()

    def advance(self, token_id: int) -> None:
        """Take a sampled token."""
        if self.finished or self.error:
            return
        with _Panics(self):
            if token_id in self._eos_token_ids:
                self.finished = True
                if not self._matcher.is_accepting():
                    self.error = _UNFOLLOWED
                return
            if self._forced and self._forced.popleft() != token_id:
                self._forced.clear()
            self._consume(token_id)
            self._check()
            if self._repeats and not self._repeats.read(token_id) and not self.error:
                self.error = _REPEATED
            self.finished = not self.error and self._matcher.is_stopped()

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may follow in order and leave the text unfinished."""
        known = next((place for place, one in enumerate(token_ids) if one in self._eos_token_ids), len(token_ids))
        with _Panics(self):
            count = self._matcher.try_consume_tokens(list(token_ids[:known]))
            stopped = self._matcher.is_stopped()
            if count:
                self._matcher.rollback(count)
            self._check()
            return min(max(count - stopped, 0), self._count_before_repetition(token_ids[:count]))
        return 0

    def _count_before_repetition(self, token_ids: Sequence[int]) -> int:
        if self._repeats is None:
            return len(token_ids)
        before = self._repeats.copy_of_state()
        count = next((place for place, one in enumerate(token_ids) if not self._repeats.read(one)), len(token_ids))
        self._repeats.restore(before)
        return count

    def forced_tokens(self) -> Sequence[int]:
        """Return the first tokens of the text that must follow."""
        if self.finished or self.error:
            return []
        if not self._forced:
            with _Panics(self):
                self._forced.extend(self._matcher.compute_ff_tokens())
        return list(islice(self._forced, _MAX_FORCED_TOKENS))

    def _consume(self, token_id: int) -> int:
        """Take a token; return the number of the library's tokens that this is."""
        slash, was_open = self._slash, self._is_escape_open
        if slash is None:
            self._matcher.consume_token(token_id)
            return 1
        self._is_escape_open = slash.is_open(was_open, token_id)
        if was_open and token_id == slash.slash_id and self._takes_slash(slash, keeps=True):
            return len(slash.same_ids)
        self._matcher.consume_token(token_id)
        return 1

    def _fill_mask(self, address: int, row_bytes: int) -> None:
        self._matcher.unsafe_compute_mask_ptr(address, row_bytes)
        slash = self._slash
        if slash is not None and self._is_escape_open and self._takes_slash(slash, keeps=False):
            byte = ctypes.c_uint8.from_address(address + slash.slash_id // 8)
            byte.value |= 1 << slash.slash_id % 8
        forbidden = list(self._repeats.forbidden()) if self._repeats else ()
        for token_id in forbidden:
            byte = ctypes.c_uint8.from_address(address + token_id // 8)
            byte.value &= ~(1 << token_id % 8)
        if forbidden and not ctypes.string_at(address, row_bytes).strip(b"\0"):
            self.error = self.error or _UNFOLLOWED

    def _takes_slash(self, slash: SlashEscape, keeps: bool) -> bool:
        """Return True if a slash may follow; with `keeps` it is then taken."""
        count = self._matcher.try_consume_tokens(list(slash.same_ids))
        taken = count == len(slash.same_ids)
        if count and not (taken and keeps):
            self._matcher.rollback(count)
        return taken

    def _check(self) -> None:
        if self._matcher.is_error():
            self.error = self._matcher.get_error().partition("\n")[0] or _UNFOLLOWED


class _Panics:
    """A panic of the library is an error of the text alone."""

    __slots__ = ("_state",)

    def __init__(self, state: MatcherState) -> None:
        self._state = state

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not is_rust_panic(kind):
            return False
        self._state.error = f"the library for grammars failed: {error}"
        return True


class GrammarCompiler:
    """Compiler of grammars for one vocabulary, with the compiled grammars that were used last.

    `vocab_size` is the number of logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._inner, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, tokenizer.eos_token_ids
        bare = {"vocab_size": vocab_size, "special": sorted(tokenizer.added_tokens.items())}
        self._quick, self._slow = GrammarProcess(bare, QUICK_SECONDS), GrammarProcess(bare, SLOW_SECONDS)
        self._kept: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._kept_slow: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[GrammarSource, str] = OrderedDict()
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()

    def prepare(self) -> None:
        """Build the library's form of the vocabulary, and start the process that compiles first.

        The former takes about 10 µs a token, during which no other thread runs Python.
        """
        with suppress(InvalidRequest):  # each request for structured output gets this error
            _ = self._vocabulary
        self._quick.start()

    def close(self) -> None:
        """End the processes, and with them compilations that other threads wait for."""
        self._quick.close()
        self._slow.close()

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar, or return it if it was compiled before.

        Raises:
            InvalidRequest: The source is too large, is not valid, needs too much time or memory, or has something that
                the library cannot do, which the message names.
        """
        return self.compile_quickly(source) or self.compile_slowly(source)

    def compile_quickly(self, source: GrammarSource) -> CompiledGrammar | None:
        """Compile a grammar; None if it takes longer than most. Raises as `compile` does."""
        with self._lock:
            for kept in (self._kept, self._kept_slow):
                if source in kept:
                    kept.move_to_end(source)
                    return kept[source]
            if source in self._refused:
                raise refusal(source, self._refused[source])
        check_source(source)
        return self._compile(source, self._quick, self._kept, MAX_KEPT_GRAMMARS)

    def compile_slowly(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar that takes long. Raises as `compile` does."""
        compiled = self._compile(source, self._slow, self._kept_slow, MAX_KEPT_SLOW_GRAMMARS)
        assert compiled is not None, "the slow process decides"
        return compiled

    def _compile(
        self,
        source: GrammarSource,
        process: GrammarProcess,
        kept: OrderedDict[GrammarSource, CompiledGrammar],
        most: int,
    ) -> CompiledGrammar | None:
        vocabulary = self._vocabulary
        status, text = process.compile(source)
        if status is ReplyStatus.STOPPED and process is self._quick:
            return None
        if status in (ReplyStatus.STOPPED, ReplyStatus.MEMORY):
            with self._lock:
                _keep(self._refused, source, text, MAX_KEPT_REFUSALS)
        if status is ReplyStatus.REFUSED:
            raise InvalidRequest(text, field=source.field)
        if status is not ReplyStatus.TEXT:
            raise refusal(source, text)
        matcher = _on_large_stack(lambda: LLMatcher(vocabulary, text, log_level=0, limits=LIMITS), source)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too much work for the first token is refused before it is admitted
        if matcher.is_error():
            raise refusal(source, matcher.get_error())
        slash = self._slash if source.kind in _JSON_KINDS else None
        compiled = CompiledGrammar(matcher, self._eos_token_ids, slash, self._repeats(source))
        with self._lock:
            _keep(kept, source, compiled, most)
        return compiled

    def _repeats(self, source: GrammarSource) -> _MakeRepeats | None:
        if source.kind != "json_schema":
            return None
        places, after = SchemaPlaces(json.loads(source.text)), source.after.encode()
        return partial(JsonRepeats, places, self._token_texts, after)

    @cached_property
    def _token_texts(self) -> TokenBytes:
        return TokenBytes([self._inner.token_bytes(token_id) for token_id in range(self._vocab_size)])

    @property
    def _vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            return self._built_vocabulary

    @cached_property
    def _built_vocabulary(self) -> LLTokenizer:
        sentence = "Structured output is not possible with this checkpoint's tokenizer"
        try:
            with ConvertRustErrors(InvalidRequest, sentence):
                return LLTokenizer(
                    self._inner.as_json(),
                    n_vocab=self._vocab_size,
                    eos_token=sorted(self._eos_token_ids) or None,
                    slices=list(_SLICES),
                )
        except ValueError as error:
            raise InvalidRequest(f"{sentence}: {error}") from error

    @cached_property
    def _slash(self) -> SlashEscape | None:
        return SlashEscape.find(self._built_vocabulary)


def _keep(kept: OrderedDict[GrammarSource, T], source: GrammarSource, value: T, most: int) -> None:
    kept[source] = value
    if len(kept) > most:
        kept.popitem(last=False)


def _on_large_stack(make: Callable[[], LLMatcher], source: GrammarSource) -> LLMatcher:
    """Return the result of `make`, which runs on a thread whose stack the recursion of large grammars fits."""
    with _STACK_LOCK:
        before = threading.stack_size(STACK_BYTES)
        try:
            pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="armature-grammar")
            made = pool.submit(make)
        finally:
            threading.stack_size(before)
    pool.shutdown(wait=False)
    with ConvertRustErrors(partial(InvalidRequest, field=source.field), f"{source.field} cannot be followed"):
        return made.result()


_STACK_LOCK = threading.Lock()
