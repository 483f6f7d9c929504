"""Driver that adds requests to an engine and times its steps; a served engine is driven by its worker."""

from __future__ import annotations

import time
from itertools import count

from app.bench.stats import MeasurementFailed
from app.bench.workload import Deck
from app.engine.decoder import DecoderEngine
from app.messages import Abort, Generate, RequestFailed, SamplingParams

PROMPT_TOKENS = 128
SITTING_STEPS = 100  # more steps would measure the growing context instead of the step
SMALLEST_CHUNK = 8  # smallest prefill chunk of a step, as in engine/pace.py
MAX_STEPS = 10_000  # limit until all sequences of a workload decode together


class Driver:
    """Submits prompts to an engine and steps it on this thread.

    Prompts never repeat, so the prefix cache never matches. Decode measurements start with new sequences every
    `sitting_steps` steps.
    """

    def __init__(self, engine: DecoderEngine, deck: Deck, max_model_len: int) -> None:
        self._engine = engine
        self._deck = deck
        self._max_tokens = max_model_len - PROMPT_TOKENS
        self._names = count()
        self.sitting_steps = min(SITTING_STEPS, max(1, self._max_tokens // 2))

    def decode(self, rows: int, steps: int) -> list[float]:
        """Return the seconds of `steps` steps, each of which only decodes `rows` sequences."""
        seconds: list[float] = []
        while len(seconds) < steps:
            seconds += self._sitting(rows, min(self.sitting_steps, steps - len(seconds)))
        return seconds

    def _sitting(self, rows: int, steps: int) -> list[float]:
        # Prompts are prefilled in chunks while earlier sequences already decode.
        # The earlier sequences must not end before the last one has started.
        waiting = rows * PROMPT_TOKENS // SMALLEST_CHUNK
        max_tokens = min(steps + 2 * waiting, self._max_tokens)
        names = [self._add(PROMPT_TOKENS, max_tokens) for _ in range(rows)]
        self._until_decoding(rows)
        seconds: list[float] = []
        while len(seconds) < steps:
            elapsed, tokens = self._step()
            if tokens == (0, rows):
                seconds.append(elapsed)
        for name in names:
            self._engine.abort(Abort(name))
        return seconds

    def prefill(self, tokens: int, prompts: int = 1) -> float:
        """Return the seconds from an idle engine to the first token of all `prompts`, submitted together."""
        for _ in range(prompts):
            self._add(tokens, max_tokens=1)
        seconds = 0.0
        while self._engine.has_work:
            seconds += self._step()[0]
        return seconds

    def _until_decoding(self, rows: int) -> None:
        for _ in range(MAX_STEPS):
            if self._step()[1] == (0, rows):
                return
        raise MeasurementFailed(f"{rows} sequences never decoded together: the plan runs fewer, or the KV cache is too small")

    def _add(self, num_tokens: int, max_tokens: int) -> str:
        name = f"bench-{next(self._names)}"
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        refused = self._engine.add(Generate(name, tuple(self._deck.prompt(num_tokens)), params, time.monotonic()))
        for event in refused:
            if isinstance(event, RequestFailed):
                raise MeasurementFailed(event.error.message)
        return name

    def _step(self) -> tuple[float, tuple[int, int]]:
        """Run one step; return its seconds, and its numbers of prefilled and decoded tokens."""
        start = time.perf_counter()
        self._engine.step()
        elapsed = time.perf_counter() - start
        stats = self._engine.stats
        assert stats is not None, "an engine with work has run a step"
        return elapsed, (stats.prefill_tokens, stats.decode_tokens)
