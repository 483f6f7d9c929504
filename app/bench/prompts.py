"""Detection of how prompts of a given length can be sent to a server.

Prompts are token ids if the server accepts them, else text whose tokens the server has counted.
"""

from __future__ import annotations

from contextlib import suppress

from app.bench.client import Stream, streamed
from app.bench.dialects import Ask, Dialect
from app.bench.wire import RequestBroken, Wire
from app.bench.workload import WORDS, Deck, TextDeck

FEW_WORDS, MORE_WORDS = 16, 80  # lengths of the two probe prompts
PROBE_IDS = 8
PROBE_TOKENS = 8  # more than one: the first tokens of some models have no text
# Tokenize requests of Armature and vLLM, and of llama.cpp.
_TOKENIZE = ({"prompt": WORDS, "add_special_tokens": False}, {"content": WORDS, "add_special": False})


async def prompts_for(wire: Wire, dialect: Dialect, model: str | None, seed: int) -> tuple[Deck | TextDeck, str]:
    """Return a source of prompts with a requested number of tokens, and a description of them."""
    if dialect.takes_ids:
        token_ids = await _tokenized(wire)
        if len(set(token_ids)) > 1 and await _takes(wire, dialect, token_ids, model):
            return Deck(token_ids, seed), "token ids"
    few, more = [await _counted(wire, dialect, model, num_words) for num_words in (FEW_WORDS, MORE_WORDS)]
    if few is None or more is None or more <= few:
        return TextDeck(1.0, 0.0, seed), "text, one word per token: the server does not report prompt tokens"
    tokens_per_word = (more - few) / (MORE_WORDS - FEW_WORDS)
    return TextDeck(tokens_per_word, few - FEW_WORDS * tokens_per_word, seed), "text, by the server's own count"


async def served_model(wire: Wire) -> str | None:
    """Return the first model that the server lists, or None."""
    with suppress(RequestBroken, ValueError, LookupError, TypeError):
        return str((await wire.get("/v1/models")).checked("/v1/models").json()["data"][0]["id"])
    return None


async def _tokenized(wire: Wire) -> list[int]:
    """Return the token ids of common words, or an empty list if the server has no usable tokenize route."""
    for body in _TOKENIZE:
        with suppress(RequestBroken, ValueError):
            answer = (await wire.post("/tokenize", body)).checked("/tokenize").json()
            token_ids = answer.get("token_ids") or answer.get("tokens") if isinstance(answer, dict) else None
            if token_ids and all(isinstance(token_id, int) for token_id in token_ids):
                return list(token_ids)
    return []


async def _takes(wire: Wire, dialect: Dialect, token_ids: list[int], model: str | None) -> bool:
    """Return True if the server accepts token ids as a prompt and counts them as such."""
    try:
        stream = await _asked(wire, dialect, model, token_ids[:PROBE_IDS])
    except RequestBroken as error:
        if error.kind == "no connection":
            raise
        return False
    return stream.usage is None or stream.usage.prompt_tokens == PROBE_IDS


async def _counted(wire: Wire, dialect: Dialect, model: str | None, num_words: int) -> int | None:
    usage = (await _asked(wire, dialect, model, TextDeck(1.0, 0.0).words(num_words))).usage
    return None if usage is None or not usage.prompt_tokens else usage.prompt_tokens


async def _asked(wire: Wire, dialect: Dialect, model: str | None, prompt: str | list[int]) -> Stream:
    return await streamed(wire, dialect, Ask(prompt, PROBE_TOKENS, model=model))
