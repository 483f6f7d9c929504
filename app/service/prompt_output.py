"""What a response shows of its prompt: the text, if the request has `echo`, and its tokens with their scores."""

from __future__ import annotations

from dataclasses import replace

from app.messages import Generate, PromptScored, TokenScore
from app.service.requests import GenerationRequest, PromptToken, ScoredToken, TextDelta
from app.service.served_model import ServedDecoder
from app.text.tokenizer import Tokenizer


class PromptOutput:
    """The prompt of one request, shown once for each choice before its completion."""

    def __init__(self, request: GenerationRequest, model: ServedDecoder, command: Generate) -> None:
        self._text = ""
        if request.echo:
            self._text = model.tokenizer.decode(command.token_ids) if request.prompt is None else request.prompt
        self._echo, self._num_choices, self._num_tokens = request.echo, command.params.n, len(command.token_ids)
        self._scored = command.params.prompt_logprobs is not None
        self._texts = TokenTexts(model.tokenizer)
        first_id = command.token_ids[0]
        self._tokens = [PromptToken(first_id, self._texts[first_id].text)]

    def start(self) -> list[TextDelta]:
        """Return the deltas that need no scores: all, unless scores of further tokens are wanted."""
        return self._deltas()

    def take(self, event: PromptScored) -> list[TextDelta]:
        """Return the deltas, once all tokens are scored."""
        self._tokens += map(self._prompt_token, event.scores)
        return self._deltas()

    def _deltas(self) -> list[TextDelta]:
        if self._scored and len(self._tokens) < self._num_tokens:
            return []
        tokens = tuple(self._tokens) if self._scored else ()
        shown = self._num_choices if self._echo or self._scored else 0
        return [TextDelta(choice, self._text, prompt=tokens) for choice in range(shown)]

    def _prompt_token(self, score: TokenScore) -> PromptToken:
        top = tuple(replace(self._texts[token_id], logprob=logprob) for token_id, logprob in score.top)
        own = replace(self._texts[score.token_id], logprob=score.logprob, top=top)
        return PromptToken(score.token_id, own.text, own, score.rank)


class TokenTexts(dict[int, ScoredToken]):
    """Tokens by id with their texts, each decoded at its first use: many of them recur among the most likely ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> ScoredToken:
        spelled = self._tokenizer.token_bytes(token_id)
        self[token_id] = token = ScoredToken(token_id, spelled.decode(errors="replace"), spelled, 0.0)
        return token
