"""What guessing the next tokens brings, at one greedy sequence, when guesses are right so often: held against the same without any.

*Planted* means: the text is said once without guesses, and then said again with a drafter that knows it. Each token it proposes is the true
next one with the given probability, else another. Everything else is as it serves: how many guesses a step carries is decided as ever, and
each is computed and checked. Where two tokens are all but as likely and sums of another order swap them, the text is held to what was said
first, or models without training would soon say something else. How often lookup is right on real text is another question.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from app.bench.console import Advance, progress
from app.bench.driver import PROMPT_TOKENS
from app.bench.stats import Figure, MeasurementFailed, Outcome
from app.bench.workload import Deck
from app.engine.batch import Batch, Flight, Picked, rows_to_pick
from app.engine.build import build_engine
from app.engine.decoder import DecoderEngine, Runner
from app.engine.speculation import Speculation
from app.hardware.facts import Facts
from app.hardware.plan import ServingPlan
from app.hardware.step_seconds import StepSeconds
from app.messages import Event, Generate, RequestFailed, SamplingParams, TokensReady
from app.weights.checkpoint import Checkpoint

TARGETS: Mapping[float, float] = {0.0: 0.98, 0.3: 1.2, 0.6: 1.6, 0.9: 2.2}  # how often guesses are right: times the speed without
TOKENS = 256  # of each answer


@dataclass(slots=True)
class Answer:
    """One greedy answer: its tokens, and the steps that did nothing but decode it."""

    token_ids: list[int] = field(default_factory=list)
    made: int = 0
    drafted: int = 0
    accepted: int = 0
    judged: int = 0  # guesses up to the first wrong one of each step: those behind it say nothing
    step_seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Samples:
    """Of one probability: each round's answer, and its speed against the same round's without guesses."""

    answers: list[Answer] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


Taken = Mapping[float | None, Samples]  # None: without guesses


class Planted:
    """Proposes what is known to come, each token rightly with this probability."""

    def __init__(self, truth: Sequence[int], chance: float, dice: random.Random) -> None:
        self._truth, self._chance, self._dice = truth, chance, dice

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        ahead = self._truth[len(token_ids) : len(token_ids) + most]
        return tuple(token if self._dice.random() < self._chance else token ^ 1 for token in ahead)


class Prompter:
    """A runner that computes and picks as ever, and then holds the picks to the text, prompt and all, where there is one."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.text: Sequence[int] = ()
        self.num_picks = self.num_held = 0  # of the rows that every step has: what was guessed before others may be wrong

    @property
    def model_seconds(self) -> float:
        return self._runner.model_seconds

    def launch(self, batch: Batch, after: Flight | None = None) -> Flight:
        return self._runner.launch(batch, after)

    def wait(self, flight: Flight) -> list[Picked]:
        picked = list(self._runner.wait(flight))
        if not self.text:
            return picked
        held = [Picked((self.text[row.position],)) for row in rows_to_pick(flight.batch.spans)]
        self.num_picks += 1
        self.num_held += picked[:1] != held[:1]
        return held

    def follows(self, batch: Batch) -> bool:
        """What is held to the text is not known on a device."""
        return False

    def survives(self, error: Exception) -> bool:
        return self._runner.survives(error)


class Teller:
    """Has the engine say one answer after the other, timing its steps."""

    def __init__(self, engine: DecoderEngine, max_tokens: int) -> None:
        self.prompter = engine.runner = Prompter(engine.runner)
        self._engine, self._max_tokens = engine, max_tokens
        self._number = 0

    def say(self, prompt: Sequence[int], speculation: Speculation | None, text: Sequence[int] = ()) -> Answer:
        """With a `text` (prompt and all) its own words are said again."""
        self._engine.scheduler.speculation, self.prompter.text = speculation, text
        self._number += 1
        name, answer = f"bench-{self._number}", Answer()
        params = SamplingParams(max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True)
        events = self._engine.add(Generate(name, tuple(prompt), params, time.monotonic()))
        while True:
            for event in events:
                if isinstance(event, RequestFailed):
                    raise MeasurementFailed(event.error.message)
                if isinstance(event, TokensReady):
                    answer.token_ids += event.token_ids
            if not self._engine.has_work:
                return answer
            events = self._step(answer)

    def _step(self, answer: Answer) -> list[Event]:
        start = time.perf_counter()
        events = self._engine.step()
        elapsed = time.perf_counter() - start
        stats = self._engine.stats
        assert stats is not None, "an engine with work has made a step"
        if not stats.prefill_tokens:
            answer.step_seconds.append(elapsed)
            answer.made += stats.decode_tokens
            answer.drafted += stats.drafted_tokens
            answer.accepted += stats.accepted_tokens
            answer.judged += stats.accepted_tokens + (stats.accepted_tokens < stats.drafted_tokens)
        return events


def measure(checkpoint: Checkpoint, plan: ServingPlan, facts: Facts, steps: StepSeconds | None, rounds: int) -> Outcome:
    """Builds the engine as serving does. Every round has a prompt of its own, and one more that is not counted goes before them."""
    with progress(rounds + 2, "loading") as advance:
        built = build_engine(checkpoint, plan, (), lambda stage: None, steps)
        speculation = built.engine.scheduler.speculation
        if speculation is None:
            raise MeasurementFailed(f"nothing is guessed with this plan: {plan.speculation.reason}")
        teller = Teller(built.engine, min(TOKENS, plan.max_model_len.value - PROMPT_TOKENS))
        taken: Taken = {chance: Samples() for chance in (None, *TARGETS)}
        deck = Deck(range(2, checkpoint.decoder.vocab_size))
        with torch.inference_mode():
            complete = _rounds(rounds, Round(teller, deck, speculation), taken, advance)
    details = {"machine": facts.to_json(), "plan": plan.to_json(), "torch": torch.__version__}
    subject = f"{checkpoint.name}, {plan.precision.value}, {plan.threads.value} threads, greedy ×1"
    return Outcome("speculation", subject, tuple(_figures(taken)), details, complete, _notes(teller.prompter))


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt said without guesses, with each kind of them in turn, and without again."""

    teller: Teller
    deck: Deck
    speculation: Speculation

    def answers(self, chances: Sequence[float], seed: int) -> Mapping[float | None, list[Answer]]:
        prompt = self.deck.prompt(PROMPT_TOKENS)
        first = self.teller.say(prompt, None)
        text = [*prompt, *first.token_ids]
        answers: dict[float | None, list[Answer]] = {}
        for chance in chances:
            planted = Planted(text, chance, random.Random(seed))
            guessing = self.speculation.with_drafter(lambda sequence, planted=planted: planted)  # type: ignore[misc]
            answers[chance] = [self.teller.say(prompt, guessing, text)]
        return {None: [first, self.teller.say(prompt, None, text)], **answers}


def _rounds(rounds: int, one: Round, taken: Taken, advance: Advance) -> bool:
    """Ctrl-C keeps what is measured, and answers False."""
    try:
        for number in range(rounds + 1):
            chances = sorted(TARGETS, reverse=number % 2 == 1)
            advance("steps without guesses, and with them")
            answers = one.answers(chances, number)
            if number == 0:  # steps of these sizes are recorded now
                continue
            plain = _speed(answers[None])
            for chance, told in answers.items():
                taken[chance].answers += told
                taken[chance].ratios.append(_speed(told) / plain)
    except KeyboardInterrupt:
        return False
    return True


def _speed(answers: Sequence[Answer]) -> float:
    """Tokens a second."""
    return sum(answer.made for answer in answers) / max(sum(sum(answer.step_seconds) for answer in answers), 1e-9)


def _figures(taken: Taken) -> Iterator[Figure]:
    for chance, samples in taken.items():
        if not samples.ratios:
            continue
        if chance is None:
            yield Figure("without guesses", _speed(samples.answers), "tok/s")
            continue
        counts = ("drafted", "accepted", "judged")
        drafted, accepted, judged = (sum(getattr(one, name) for one in samples.answers) for name in counts)
        steps = sum(len(one.step_seconds) for one in samples.answers)
        name, ratio = f"right {chance:.0%} of the time", statistics.median(samples.ratios)
        yield Figure(name, _speed(samples.answers), "tok/s", ratio=ratio, against="without guesses", target=TARGETS[chance])
        yield Figure(f"{name}, guesses", drafted / steps, "a step")
        yield Figure(f"{name}, measured", 100 * accepted / max(judged, 1), "% of guesses that could be right")


def _notes(prompter: Prompter) -> tuple[str, ...]:
    planted = (
        "Planted: the drafter knows what comes, and each guess is right with the given probability. It says nothing of real text."
    )
    held = f"{prompter.num_held} of {prompter.num_picks} steps would have picked another token than the first time, and were held to it."
    return planted, held
