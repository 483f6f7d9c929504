"""Grammars of structured output: JSON schemas, regular expressions, choices and context-free grammars.

The library llguidance computes the tokens that may come next. A grammar is compiled in a process with limits first
(`text/grammar_process.py`), and in the server once it is known to be cheap.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from types import TracebackType
from typing import TypeVar
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from app.errors import InvalidRequest
from app.messages import GrammarSource
from app.text.child_process import ConvertRustErrors, ReplyStatus, is_rust_panic
from app.text.grammar_definition import LIMITS, STACK_BYTES, check_source, refusal
from app.text.grammar_process import QUICK_SECONDS, SLOW_SECONDS, GrammarProcess
from app.text.json_repeats import JsonRepeats, SchemaPlaces, TextBefore, TokenBytes
from app.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_KEPT_GRAMMARS = 16
MAX_KEPT_SLOW_GRAMMARS = 2
MAX_KEPT_REFUSALS = 64
MAX_SPELLED_TOKENS = 32  # added tokens whose text a grammar has; each takes 2 µs of a mask
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


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CompiledGrammar:
    """A grammar for one vocabulary. Any thread may use it.

    `definition` is what the library reads, and `matcher` is at its start. `spelled` are the added tokens with text that
    is part of the grammar's, each with the tokens as which it is read: special ones as their letters, others as
    themselves. These are checked too since the library, where several texts begin alike, may allow the usual tokens of
    that beginning alone. `slash` and `make_repeats` are for JSON.
    """

    definition: str
    matcher: LLMatcher
    field: str
    eos_token_ids: frozenset[int]
    spelled: Mapping[int, Sequence[int]]
    slash: SlashEscape | None = None
    make_repeats: _MakeRepeats | None = None

    def start(self) -> MatcherState:
        return MatcherState(self)


class MatcherState:
    """The place in a grammar that one sequence has reached; see `GrammarState` in the engine."""

    __slots__ = ("_forced", "_grammar", "_is_escape_open", "_matcher", "_repeats", "error", "field", "finished")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar, self._matcher, self.field = grammar, grammar.matcher.deep_copy(), grammar.field
        self._repeats = grammar.make_repeats and grammar.make_repeats()
        self._is_escape_open = False
        self._forced: deque[int] = deque()  # computed once: a grammar may force a hundred thousand tokens
        self.finished = False
        self.error = ""

    def fill_masks(self, address: int, row_bytes: int, draft_ids: Sequence[int]) -> None:
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
        if self.finished or self.error:
            return
        with _Panics(self):
            if token_id in self._grammar.eos_token_ids:
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
        ends = self._grammar.eos_token_ids
        known = next((place for place, one in enumerate(token_ids) if one in ends), len(token_ids))
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
        if self.finished or self.error:
            return []
        if not self._forced:
            with _Panics(self):
                self._forced.extend(self._matcher.compute_ff_tokens())
        return list(islice(self._forced, _MAX_FORCED_TOKENS))

    def _consume(self, token_id: int) -> int:
        """Take a token; return the number of the library's tokens that this is."""
        slash, was_open, spelled = self._grammar.slash, self._is_escape_open, self._grammar.spelled.get(token_id)
        if slash is not None:
            self._is_escape_open = slash.is_open(was_open, token_id)
            if was_open and token_id == slash.slash_id:
                spelled = slash.same_ids
        if spelled is not None and self._takes(spelled, keeps=True):
            return len(spelled)
        self._matcher.consume_token(token_id)
        return 1

    def _fill_mask(self, address: int, row_bytes: int) -> None:
        self._matcher.unsafe_compute_mask_ptr(address, row_bytes)
        others = [one for one in self._grammar.spelled.items() if self._takes(one[1], keeps=False)]
        slash = self._grammar.slash
        if slash is not None and self._is_escape_open and self._takes(slash.same_ids, keeps=False):
            others.append((slash.slash_id, slash.same_ids))
        for token_id, _ in others:
            byte = ctypes.c_uint8.from_address(address + token_id // 8)
            byte.value |= 1 << token_id % 8
        forbidden = list(self._repeats.forbidden()) if self._repeats else ()
        for token_id in forbidden:
            byte = ctypes.c_uint8.from_address(address + token_id // 8)
            byte.value &= ~(1 << token_id % 8)
        if forbidden and not ctypes.string_at(address, row_bytes).strip(b"\0"):
            self.error = self.error or _UNFOLLOWED

    def _takes(self, same_ids: Sequence[int], keeps: bool) -> bool:
        """Return True if these tokens may follow; with `keeps` they are then taken."""
        count = self._matcher.try_consume_tokens(list(same_ids))
        taken = count == len(same_ids)
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
        control = {token_id: tokenizer.token_text(token_id) for token_id in _control_ids(tokenizer, vocab_size)}
        bare = {"vocab_size": vocab_size, "special": sorted(control.items())}
        self._quick, self._slow = GrammarProcess(bare, QUICK_SECONDS), GrammarProcess(bare, SLOW_SECONDS)
        self._kept: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._kept_slow: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[GrammarSource, str] = OrderedDict()
        self._in_use: WeakValueDictionary[GrammarSource, CompiledGrammar] = WeakValueDictionary()
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()

    def prepare(self) -> None:
        """Build the forms of the vocabulary, about 20 µs a token, and start the process that compiles first."""
        self.prepare_vocabulary()
        self._quick.start()

    def prepare_vocabulary(self) -> None:
        with suppress(InvalidRequest):  # each request for structured output gets this error
            _ = self._vocabulary
            _ = self._token_bytes

    def close(self) -> None:
        """End the processes, and with them compilations that other threads wait for."""
        self._quick.close()
        self._slow.close()

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar, or return it if it was compiled before.

        Raises an `InvalidRequest` that says what is too large, not valid, or unknown to the library.
        """
        return self.compile_quickly(source) or self.compile_slowly(source)

    def compile_quickly(self, source: GrammarSource) -> CompiledGrammar | None:
        """Compile a grammar; None if it takes longer than most. Raises as `compile` does."""
        with self._lock:
            for kept in (self._kept, self._kept_slow):
                if source in kept:
                    kept.move_to_end(source)
                    return kept[source]
            if (in_use := self._in_use.get(source)) is not None:
                return in_use
            if source in self._refused:
                raise refusal(source, self._refused[source])
        check_source(source)
        return self._compile(source, self._quick, self._kept, MAX_KEPT_GRAMMARS)

    def compile_slowly(self, source: GrammarSource) -> CompiledGrammar:
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
        _ = self._vocabulary  # which may be impossible
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
        compiled = self.compile_definition(source, text)
        with self._lock:
            _keep(kept, source, compiled, most)
            self._in_use[source] = compiled
        return compiled

    def compile_definition(self, source: GrammarSource, definition: str) -> CompiledGrammar:
        """Compile a grammar whose definition the process with limits has compiled before."""
        vocabulary = self._vocabulary
        matcher = _on_large_stack(lambda: LLMatcher(vocabulary, definition, log_level=0, limits=LIMITS), source)
        if not matcher.is_error():
            # what is too much work for the first tokens is refused before it is admitted
            matcher.compute_bitmask()
            matcher.compute_ff_tokens()
        if matcher.is_error():
            raise refusal(source, matcher.get_error())
        special = self._inner.special_tokens
        spelled = {one: self._letters(name) if one in special else (one,) for one, name in self._added_in(source)}
        slash = self._slash if source.kind in _JSON_KINDS else None
        repeats = self._repeats(source)
        return CompiledGrammar(definition, matcher, source.field, self._eos_token_ids, spelled, slash, repeats)

    def find(self, source: GrammarSource) -> CompiledGrammar | None:
        """Return the grammar of this source, if somebody holds it. Any thread may call it."""
        return self._in_use.get(source)

    def _repeats(self, source: GrammarSource) -> _MakeRepeats | None:
        if source.kind != "json_schema":
            return None
        places, before = SchemaPlaces(json.loads(source.text)), TextBefore.of(source)
        return partial(JsonRepeats, places, self._token_bytes, before)

    @cached_property
    def _texts(self) -> list[bytes]:
        return [self._inner.token_bytes(token_id) for token_id in range(self._vocab_size)]

    @property
    def _token_bytes(self) -> TokenBytes:
        with self._vocabulary_lock:
            return self._built_token_bytes

    @cached_property
    def _built_token_bytes(self) -> TokenBytes:
        return TokenBytes(self._texts)

    def tokens_in(self, source: GrammarSource) -> Mapping[int, str]:
        """Return the special tokens, by id, that a grammar has as texts.

        One may be written as the token or as its letters, and either way it is part of the text.
        """
        special = self._inner.special_tokens
        return {token_id: name for token_id, name in self._added_in(source) if token_id in special}

    def _added_in(self, source: GrammarSource) -> Sequence[tuple[int, str]]:
        """Return the added tokens that a grammar has as texts, the longest ones if they are many."""
        text = source.literal_text()
        known = sorted(self._inner.added_tokens.items(), key=lambda one: len(one[1]), reverse=True)
        found = (one for one in known if one[1] in text and one[0] < self._vocab_size)
        return list(islice((one for one in found if one[0] not in self._eos_token_ids), MAX_SPELLED_TOKENS))

    def _letters(self, text: str) -> Sequence[int]:
        return self._vocabulary.greedy_tokenize(text)

    @property
    def _vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            return self._built_vocabulary

    @cached_property
    def _built_vocabulary(self) -> LLTokenizer:
        sentence = "Structured output is not possible with this checkpoint's tokenizer"
        try:
            with ConvertRustErrors(InvalidRequest, sentence):
                words = _Vocabulary(self._inner, self._texts)
                eos = sorted(self._eos_token_ids) or None
                made = LLTokenizer(TokenizerWrapper(words), n_vocab=self._vocab_size, eos_token=eos, slices=[*_SLICES])
                words.divide = made.greedy_tokenize
                return made
        except ValueError as error:
            raise InvalidRequest(f"{sentence}: {error}") from error

    @cached_property
    def _slash(self) -> SlashEscape | None:
        return SlashEscape.find(self._built_vocabulary)


class _Vocabulary:
    """A vocabulary as the library asks for it.

    Special tokens, and those that end a text, are no text: `GrammarCompiler.tokens_in` has the exceptions. All others
    are their bytes, also those that were added, such as Qwen's `<tool_call>`: where a grammar has their text, the model
    may write it as one token or as several.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[bytes]) -> None:
        self._inner = tokenizer
        self.special_token_ids = _control_ids(tokenizer, len(texts))
        self._names = {token_id: tokenizer.token_text(token_id) for token_id in self.special_token_ids}
        self.tokens = list(texts)
        for token_id in self.special_token_ids:
            self.tokens[token_id] = _CONTROL + self.tokens[token_id]
        self.eos_token_id = min(tokenizer.eos_token_ids & {*self.special_token_ids}, default=len(texts) - 1)
        self.bos_token_id = None
        self.divide: Callable[[str], list[int]] = lambda text: []

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that a grammar forces, with special tokens as their letters.

        A tokenizer may put a space in front: the text is then divided into its longest tokens.
        """
        whole = text.decode()
        ids: list[int] = []
        for token_id in self._inner.encode(whole, add_special_tokens=False):
            ids += self.divide(self._names[token_id]) if token_id in self._names else [token_id]
        is_exact = b"".join(self.tokens[token_id] for token_id in ids if token_id < len(self.tokens)) == text
        return ids if is_exact else self.divide(whole)


_CONTROL = b"\xff"  # the library's mark of tokens that are no text


def _control_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    return sorted({*tokenizer.special_tokens, *tokenizer.eos_token_ids} & set(range(vocab_size)))


def _keep(kept: OrderedDict[GrammarSource, T], source: GrammarSource, value: T, most: int) -> None:
    kept[source] = value
    if len(kept) > most:
        kept.popitem(last=False)


def _on_large_stack(make: Callable[[], LLMatcher], source: GrammarSource) -> LLMatcher:
    """Return the result of `make`, on a thread with a stack that the recursion of large grammars fits."""
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
