"""Texts of any length: refused before they are tokenized if they are certainly too long, tokenized in chunks if that is exact."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

import small_tokenizers
from app.errors import ContextLengthExceeded, InvalidRequest
from app.messages import SamplingParams
from app.metrics.steps import EngineSnapshot
from app.service.encode import tokenize_texts
from app.service.engine_client import EngineClient, TextPool
from app.service.prompt import tokenize_prompt
from app.service.requests import EncodingRequest, GenerationRequest, Truncation
from app.service.served_model import ServedDecoder, ServedEncoder, ServingLimits
from app.settings import DEMO_DIRECTORY
from app.text import bounds
from app.text.bounds import EncodingLimits, TextBounds
from app.text.child_process import WorkCancelled, stop_if_cancelled
from app.text.tokenizer import _BYTE_OF_CHARACTER, Tokenizer
from fake_encoder import CONFIG, LIMITS

BERT = DEMO_DIRECTORY.parent / "bert"
MEGABYTE = 2**20


def demo_decoder() -> Tokenizer:
    return Tokenizer(DEMO_DIRECTORY)


def _unknown(fuse: bool) -> Inner:
    """BPE of a few characters; others are one unknown token each, or one for all neighbours."""
    inner = Inner(models.BPE({"<unk>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")], unk_token="<unk>", fuse_unk=fuse))
    inner.pre_tokenizer = pre_tokenizers.Digits()
    return inner


def _roberta() -> Inner:
    """Byte-level, with an added token that takes the white space before it."""
    inner = small_tokenizers.byte_level()
    inner.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return inner


def _normalized() -> Inner:
    """As Qwen's: NFC before bytes."""
    inner = small_tokenizers.byte_level()
    inner.normalizer = normalizers.NFC()
    return inner


def _words() -> Inner:
    return Inner.from_file(str(BERT / "tokenizer.json"))


def _metaspace() -> Inner:
    chunks = [("<unk>", 0.0), ("\u2581", -2.0), ("a", -2.0), ("b", -2.0), ("\u2581ab", -1.0), ("ba", -1.5)]
    inner = Inner(models.Unigram(chunks, unk_id=0))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return inner


FORMS: dict[str, Callable[[], Inner]] = {
    "byte level": small_tokenizers.byte_level,
    "sentence piece": small_tokenizers.sentence_piece,
    "unknown": lambda: _unknown(False),
    "unknown fused": lambda: _unknown(True),
    "roberta": _roberta,
    "NFC": _normalized,
    "words": _words,
    "unigram": _metaspace,
}
ALPHABET = st.sampled_from(
    [
        *"ab aB zZ09  \t\n!-[]#'",
        "é",
        "e\u0301",
        "\u0301",
        "\u2581",
        "東",
        "🙂",
        "\x00",
        "\x7f",
        "\xa0",
        "[MASK]",
        "<mask>",
        "</s>",
        "<unk>",
        "the",
        "over",
    ]
)
TEXTS = st.lists(ALPHABET, max_size=60).map("".join)


@pytest.mark.parametrize("form", FORMS)
@given(text=TEXTS)
def test_a_text_never_has_fewer_tokens_than_its_bound(form: str, text: str) -> None:
    inner, weights = _bounds(form)
    least = weights.least_tokens(text, 10**9)
    assert least <= len(inner.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("form", [name for name in FORMS if name not in ("unknown fused", "words")])
def test_letters_count(form: str) -> None:
    """The bound is no empty promise: a text of letters of the vocabulary is refused by it."""
    assert _bounds(form)[1].least_tokens("ab" * 10_000, 10**9) > 100


def test_isolated_punctuation_counts_in_a_vocabulary_of_words() -> None:
    assert _bounds("words")[1].least_tokens("!" * 10_000, 10**9) >= 2_500


@pytest.mark.parametrize("form", ["words", "byte level", "unigram", "NFC", "roberta"])
@given(text=st.lists(ALPHABET | st.sampled_from(["a b", "the fox", "z" * 130]), max_size=60).map("".join))
def test_pieces_have_the_tokens_of_the_text(form: str, text: str) -> None:
    inner, cuts = _bounds(form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "CHUNK_CHARACTERS", 7)
        shortened = cuts.shorten(text)
        chunks = [shortened[start:end] for start, end in cuts.chunks(shortened)]
    joined = [one for chunk in chunks for one in inner.encode(chunk, add_special_tokens=False).ids]
    assert joined == inner.encode(text, add_special_tokens=False).ids


def test_cuts_are_found_where_there_are_words() -> None:
    for form in ("words", "byte level", "unigram"):
        text = "the fox said hello " * 20_000
        sizes = [end - start for start, end in _bounds(form)[1].chunks(text)]
        assert len(sizes) >= 5 and max(sizes) < bounds.CHUNK_CHARACTERS + 100


def test_a_tokenizer_with_unknown_parts_is_never_weighed() -> None:
    inner = small_tokenizers.byte_level()
    inner.normalizer = normalizers.Replace("a", "")
    assert TextBounds(inner, _BYTE_OF_CHARACTER).least_tokens("a" * 10**6, 10) == 0
    assert list(TextBounds(inner, _BYTE_OF_CHARACTER).chunks("a b" * 10**5)) == [(0, 3 * 10**5)]


_KNOWN: dict[str, tuple[Inner, TextBounds]] = {}


def _bounds(form: str) -> tuple[Inner, TextBounds]:
    if form not in _KNOWN:
        inner = FORMS[form]()
        _KNOWN[form] = (inner, TextBounds(inner, _BYTE_OF_CHARACTER))
    return _KNOWN[form]


# ---- requests --------------------------------------------------------------------------------------------------------


class CountingInner:
    """The library's tokenizer, which counts the characters that it is given."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.num_characters, self.longest = inner, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode_batch_fast(self, inputs: list[Any], **options: Any) -> Any:
        sizes = [sum(map(len, (one,) if isinstance(one, str) else one)) for one in inputs]
        self.num_characters += sum(sizes)
        self.longest = max(self.longest, sum(sizes))
        return self._inner.encode_batch_fast(inputs, **options)


def counting(tokenizer: Tokenizer) -> CountingInner:
    tokenizer.least_tokens("", 1)
    tokenizer._inner = CountingInner(tokenizer._inner)
    return tokenizer._inner


def decoder(tokenizer: Tokenizer, context: int = 2048) -> ServedDecoder:
    return ServedDecoder("demo", ServingLimits(context, 8, 8, 60.0, tokenizer.vocab_size), tokenizer, None)


def generation(prompt: str) -> GenerationRequest:
    return GenerationRequest(SamplingParams(max_tokens=2), "native", "r", prompt=prompt)


@pytest.mark.parametrize("text", ["a", "the fox said hello ", "é", "0", "!", "\n", "a b"])
def test_a_prompt_of_16_megabytes_is_refused_before_a_token_exists(text: str) -> None:
    tokenizer = demo_decoder()
    seen = counting(tokenizer)
    prompt = text * (15 * MEGABYTE // len(text.encode()))
    tracemalloc.start()
    with pytest.raises(ContextLengthExceeded) as caught:
        tokenize_prompt(decoder(tokenizer), generation(prompt))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.field == "prompt"
    assert seen.num_characters == 0 and peak < 2 * MEGABYTE


def test_a_prompt_that_fits_is_never_refused() -> None:
    """As long as the context can hold: the longest token, again and again."""
    tokenizer = demo_decoder()
    longest = max((tokenizer.decode([i]) for i in range(10, tokenizer.vocab_size)), key=len)
    token_id = tokenizer.encode(longest, False)
    text = longest * (70_000 // len(longest))
    count = len(tokenizer.encode(text, False))
    assert len(token_id) == 1
    ids = tokenize_prompt(decoder(tokenizer, len(tokenizer.encode(text)) + 2), generation(text)).token_ids
    assert len(ids) in (count, count + 1)
    with pytest.raises(ContextLengthExceeded):
        tokenize_prompt(decoder(tokenizer, count), generation(text))


def test_a_text_that_must_be_tokenized_at_once_is_bounded() -> None:
    tokenizer = demo_decoder()
    with pytest.raises(InvalidRequest, match="bytes that must be tokenized at once"):
        tokenizer.encode("z" * 200_000, True, EncodingLimits(max_bytes=100_000))


def bert(truncate: bool, *inputs: Any, left: bool = False) -> tuple[Any, CountingInner]:
    tokenizer = Tokenizer(BERT)
    seen = counting(tokenizer)
    limits = replace(LIMITS, max_model_len=512, vocab_size=tokenizer.vocab_size)
    served = ServedEncoder("bert", limits, tokenizer, CONFIG)
    request = EncodingRequest(inputs, ("embedding",), "native", "r", truncation=Truncation(truncate, left))
    return lambda: tokenize_texts(served, request), seen


WORDS = "the fox said hello to the world, over and over. "


@pytest.mark.parametrize("text", [WORDS, "!", "9 "])
def test_a_long_text_for_an_encoder_is_refused_soon(text: str) -> None:
    run, seen = bert(False, text * (8 * MEGABYTE // len(text)))
    with pytest.raises(ContextLengthExceeded, match="has at least"):
        run()
    assert seen.longest <= 2 * bounds.CHUNK_CHARACTERS and seen.num_characters <= 2 * bounds.CHUNK_CHARACTERS


@pytest.mark.cases(ci=1)
@pytest.mark.full
@pytest.mark.parametrize("left", [False, True])
def test_a_truncated_text_is_read_as_far_as_it_matters(left: bool) -> None:
    text = "first " + WORDS * 40_000 + "last"
    run, seen = bert(True, text, (text, WORDS), left=left)
    found = run()
    assert seen.longest <= 2 * bounds.CHUNK_CHARACTERS
    assert [one.token_ids for one in found] == _truncated_whole(text, left)


def _truncated_whole(text: str, left: bool) -> list[tuple[int, ...]]:
    inner = Inner.from_file(str(BERT / "tokenizer.json"))
    inner.no_padding()
    inner.enable_truncation(512, direction="left" if left else "right")
    return [tuple(inner.encode(text).ids), tuple(inner.encode(text, WORDS).ids)]


@pytest.mark.parametrize(("text", "tokens"), [("a", 3), (" ", 2), ("a ", None)])
def test_a_word_of_16_megabytes_is_one_unknown_token(text: str, tokens: int | None) -> None:
    """Valid, if useless: such a text fits, so it is not refused, and takes the memory of a short one."""
    run, seen = bert(False, text * (4 * MEGABYTE) + ("x" if text == " " else ""))
    if tokens is None:
        with pytest.raises(ContextLengthExceeded):
            run()
    elif text == " ":
        with pytest.raises(InvalidRequest, match="tokenized at once"):
            run()
    else:
        (found,) = run()
        assert len(found.token_ids) == tokens
    assert seen.longest < 2 * bounds.CHUNK_CHARACTERS


# ---- waiting ---------------------------------------------------------------------------------------------------------


async def test_work_in_the_pool_counts_until_its_thread_ends_it() -> None:
    pool = TextPool()
    pool.open(1)
    started, release = threading.Event(), threading.Event()
    went_on: list[bool] = []

    def work() -> None:
        started.set()
        assert release.wait(60)
        stop_if_cancelled()
        went_on.append(True)  # after its client had left

    first = asyncio.create_task(pool.run(5_000, work))
    await asyncio.to_thread(started.wait, 60)
    second = asyncio.create_task(pool.run(5_000, work))
    await asyncio.sleep(0)
    assert pool.num_requests == 2
    first.cancel()
    second.cancel()
    assert await asyncio.gather(first, second, return_exceptions=True)
    assert pool.num_requests == 1  # the thread still works, the other one never began
    release.set()
    await asyncio.to_thread(pool._pool.shutdown)  # type: ignore[union-attr]
    assert pool.num_requests == 0
    assert not went_on


async def test_close_ends_work_between_its_steps() -> None:
    pool = TextPool()
    pool.open(1)
    started = threading.Event()

    def work() -> None:
        while True:
            started.set()
            stop_if_cancelled()

    task = asyncio.create_task(pool.run(1, work))
    await asyncio.to_thread(started.wait, 60)
    pool.close()
    with pytest.raises(WorkCancelled):
        await task


async def test_waiting_texts_are_part_of_the_predicted_wait() -> None:
    client = EngineClient(_NoWorker(), None, lambda: 0.0)  # type: ignore[arg-type]
    client.texts.open(2)
    client.texts._seconds_per_byte = 1e-6
    client.texts._flags[threading.Event()] = 8_000_000
    assert client.texts.wait_seconds() == 4.0
    assert client.admission.retry_after_seconds() == 4.0
    client.close()


class _NoWorker:
    snapshot = EngineSnapshot()
    alive = True
