"""Speedup of speculative decoding for one greedy sequence, at given acceptance probabilities.

The benchmark first generates a text without speculation, then again with a drafter that knows it: each draft token is
the correct next token with the given probability, else another token. Everything else is as in serving. When two tokens
are almost equally likely, another order of summation can swap them. The text is then forced to the first version;
otherwise untrained models would soon diverge. The benchmark says nothing about the acceptance rate of n-gram lookup on
real text.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from app.engine.build import BuildRequest
from app.engine.decoder.build import build_decoder_engine
from app.engine.decoder.draft_model import DraftModel
from app.engine.decoder.engine import DecoderEngine, DecoderRunner
from app.engine.scheduler.batch import Batch, InFlightStep, SampledTokens, logit_rows_of
from app.engine.scheduler.batch import Sequence as ScheduledSequence
from app.engine.scheduler.speculation import Speculation
from app.hardware.facts import Facts
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import StepTimeTable
from app.messages import Event, Generate, RequestFailed, SamplingParams, TokenScore, TokensReady
from app.metrics.steps import StepTimeModel
from app.weights.checkpoint import Checkpoint
from armature_bench.console import AdvanceProgress, BenchOutcome, Figure, MeasurementFailed, progress
from armature_bench.engine.driver import PROMPT_TOKENS
from armature_bench.http.workload import TokenPrompts

# Speedup over no speculation, by acceptance probability.
SPEEDUP_TARGETS: Mapping[float, float] = {0.0: 0.98, 0.3: 1.2, 0.6: 1.6, 0.9: 2.2}
# The same with a draft model, whose own time counts; for one of a tenth of the parameters.
DRAFT_MODEL_TARGETS: Mapping[float, float] = {0.0: 0.98, 0.6: 1.4, 0.8: 1.9}
TOKENS_PER_ANSWER = 256  # tokens of each answer


@dataclass(slots=True)
class GreedyAnswer:
    """One greedy answer: its tokens, and the steps that only decoded it.

    `made` counts generated tokens; `num_drafted` and `accepted` count draft tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    made: int = 0
    num_drafted: int = 0
    accepted: int = 0
    judged: int = 0  # draft tokens up to the first rejected one of each step: later ones are not verified
    step_seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class SpeculationSamples:
    """Results at one acceptance probability: the answers, and each round's speed relative to no speculation."""

    answers: list[GreedyAnswer] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


SamplesByProbability = Mapping[float | None, SpeculationSamples]  # None: without speculation


class PlantedDrafter:
    """Drafter that knows the text and proposes each token correctly with probability `probability`."""

    def __init__(self, truth: Sequence[int], probability: float, rng: random.Random) -> None:
        self._truth, self._probability, self._rng = truth, probability, rng

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        """Return up to `most` draft tokens for the positions after `token_ids`."""
        ahead = self._truth[len(token_ids) : len(token_ids) + most]
        return tuple(token if self._rng.random() < self._probability else token ^ 1 for token in ahead)


class PlantedChoice:
    """Replaces a draft model's token by the token of the text with probability `probability`, else by another one."""

    def __init__(self, truth: Sequence[int], probability: float, rng: random.Random) -> None:
        self._truth, self._probability, self._rng = truth, probability, rng

    def __call__(self, sequence: ScheduledSequence, position: int, token: int) -> int:
        """Return the draft token at `position`; the model's own `token` behind the end of the text."""
        if position >= len(self._truth):
            return token
        right = self._truth[position]
        return right if self._rng.random() < self._probability else right ^ 1


class ForcedTextRunner:
    """A runner that computes and samples as usual, and then replaces the sampled tokens by a text's.

    `text` includes the prompt; if it is empty, nothing is replaced.
    """

    def __init__(self, runner: DecoderRunner) -> None:
        self._runner = runner
        self.text: Sequence[int] = ()
        # Only each step's first row is counted: later rows can follow wrong draft tokens.
        self.num_checked = self.num_forced = 0

    @property
    def model_seconds(self) -> float:
        return self._runner.model_seconds

    @property
    def is_first(self) -> bool:
        return self._runner.is_first

    @property
    def is_native(self) -> bool:
        return self._runner.is_native

    @property
    def prompt_scores(self) -> Sequence[tuple[TokenScore, ...]]:
        return self._runner.prompt_scores

    def launch(self, batch: Batch, after: InFlightStep | None = None) -> InFlightStep:
        return self._runner.launch(batch, after)

    def wait(self, in_flight: InFlightStep) -> list[SampledTokens]:
        sampled = list(self._runner.wait(in_flight))
        if not self.text:
            return sampled
        forced = [SampledTokens((self.text[row.position],)) for row in logit_rows_of(in_flight.batch.spans)]
        self.num_checked += 1
        self.num_forced += sampled[:1] != forced[:1]
        return forced

    def can_run_ahead(self, batch: Batch) -> bool:
        """Return False: a device does not know the tokens that are forced on the host."""
        return False

    def survives(self, error: Exception) -> bool:
        return self._runner.survives(error)

    def use_idle_time(self, is_wanted: Callable[[], bool]) -> bool:
        return self._runner.use_idle_time(is_wanted)


class AnswerDriver:
    def __init__(self, engine: DecoderEngine, max_tokens: int) -> None:
        self.forced_runner = engine.runner = ForcedTextRunner(engine.runner)
        self._engine, self._max_tokens = engine, max_tokens
        self._number = 0

    def generate(
        self, prompt: Sequence[int], speculation: Speculation | None, text: Sequence[int] = ()
    ) -> GreedyAnswer:
        """Generate up to `max_tokens` tokens, forced to `text` (prompt included) if it is given."""
        self._engine.scheduler.speculation, self.forced_runner.text = speculation, text
        self._number += 1
        name, answer = f"bench-{self._number}", GreedyAnswer()
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

    def _step(self, answer: GreedyAnswer) -> list[Event]:
        start = time.perf_counter()
        events = self._engine.step()
        elapsed = time.perf_counter() - start
        stats = self._engine.stats
        assert stats is not None, "an engine with work has run a step"
        if not stats.prefill_tokens:
            answer.step_seconds.append(elapsed)
            answer.made += stats.decode_tokens
            answer.num_drafted += stats.draft_tokens
            answer.accepted += stats.accepted_tokens
            answer.judged += stats.accepted_tokens + (stats.accepted_tokens < stats.draft_tokens)
        return events


def measure_speculation(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    facts: Facts,
    steps: StepTimeTable | None,
    rounds: int,
    draft: Checkpoint | None = None,
) -> BenchOutcome:
    """Build the engine as for serving and measure it, with n-gram lookup and then with the draft model, if any.

    Every round has a new prompt; one additional first round is not counted. Raises `MeasurementFailed` if the plan has
    no speculation, or a request failed.
    """
    with progress((rounds + 1) * (1 if draft is None else 2) + 1, "loading") as advance:
        request = BuildRequest(checkpoint, plan, step_time_model=StepTimeModel(steps), draft=draft)
        built = build_decoder_engine(request)
        speculation = built.engine.scheduler.speculation
        if speculation is None:
            raise MeasurementFailed(f"this plan does not use speculation: {plan.decisions['speculation'].reason}")
        driver = AnswerDriver(built.engine, min(TOKENS_PER_ANSWER, plan.memory.max_model_len - PROMPT_TOKENS))
        prompts = TokenPrompts(range(2, checkpoint.decoder.vocab_size))
        methods = {"": SpeculationRound(driver, prompts, PlantedLookup(speculation), SPEEDUP_TARGETS)}
        if speculation.drafting is not None and isinstance(speculation.drafting.model, DraftModel):
            planted = PlantedDraftModel(speculation, speculation.drafting.model)
            methods["draft model "] = SpeculationRound(driver, prompts, planted, DRAFT_MODEL_TARGETS)
        figures: list[Figure] = []
        complete = True
        with torch.inference_mode():
            for name, one in methods.items():
                taken: SamplesByProbability = {chance: SpeculationSamples() for chance in (None, *one.targets)}
                complete = complete and _rounds(rounds, one, taken, advance)
                figures += _figures(taken, one.targets, name)
    details = {"machine": facts.to_json(), "plan": plan.to_json(), "torch": torch.__version__}
    subject = f"{checkpoint.name}, {plan.weights.precision}, {plan.cpu.threads} threads, greedy ×1"
    subject += "" if draft is None else f", draft model {draft.name}"
    return BenchOutcome("speculation", subject, tuple(figures), details, complete, _notes(driver.forced_runner))


PlantSpeculation = Callable[[Sequence[int], float, random.Random], Speculation]  # a text, the probability, randomness


@dataclass(frozen=True, slots=True)
class PlantedLookup:
    """Makes policies with a drafter that knows the text."""

    speculation: Speculation

    def __call__(self, text: Sequence[int], probability: float, rng: random.Random) -> Speculation:
        drafter = PlantedDrafter(text, probability, rng)
        return self.speculation.with_drafter(lambda sequence: drafter)


@dataclass(frozen=True, slots=True)
class PlantedDraftModel:
    """Makes policies in which only the draft model drafts. It computes as usual, and its tokens are replaced."""

    speculation: Speculation
    model: DraftModel

    def __call__(self, text: Sequence[int], probability: float, rng: random.Random) -> Speculation:
        self.model.choose = PlantedChoice(text, probability, rng)
        return self.speculation.with_draft_model(self.model)


@dataclass(frozen=True, slots=True)
class SpeculationRound:
    """One round: a prompt is generated without speculation, once at each acceptance probability, and again without.

    `targets` are the speedups to reach by probability.
    """

    driver: AnswerDriver
    prompts: TokenPrompts
    plant: PlantSpeculation
    targets: Mapping[float, float]

    def answers(self, probabilities: Sequence[float], seed: int) -> Mapping[float | None, list[GreedyAnswer]]:
        """Return the answers of one round by acceptance probability; None is without speculation."""
        prompt = self.prompts.prompt(PROMPT_TOKENS)
        first = self.driver.generate(prompt, None)
        text = [*prompt, *first.token_ids]
        answers: dict[float | None, list[GreedyAnswer]] = {}
        for probability in probabilities:
            planted = self.plant(text, probability, random.Random(seed))
            answers[probability] = [self.driver.generate(prompt, planted, text)]
        return {None: [first, self.driver.generate(prompt, None, text)], **answers}


def _rounds(rounds: int, one: SpeculationRound, taken: SamplesByProbability, advance: AdvanceProgress) -> bool:
    """Run all rounds. Ctrl-C stops early, keeps the measurements, and makes the result False."""
    try:
        for number in range(rounds + 1):
            probabilities = sorted(one.targets, reverse=number % 2 == 1)
            advance("steps without and with draft tokens")
            answers = one.answers(probabilities, number)
            if number == 0:  # the first round records the steps of these sizes
                continue
            plain = _speed(answers[None])
            for probability, round_answers in answers.items():
                taken[probability].answers += round_answers
                taken[probability].ratios.append(_speed(round_answers) / plain)
    except KeyboardInterrupt:
        return False
    return True


def _speed(answers: Sequence[GreedyAnswer]) -> float:
    return sum(answer.made for answer in answers) / max(sum(sum(answer.step_seconds) for answer in answers), 1e-9)


def _figures(taken: SamplesByProbability, targets: Mapping[float, float], method: str) -> Iterator[Figure]:
    """Yield the figures of a method, in rows that begin with its name; the one without speculation only once."""
    for probability, samples in taken.items():
        if not samples.ratios:
            continue
        if probability is None and method:
            continue
        if probability is None:
            yield Figure("without speculation", _speed(samples.answers), "tok/s")
            continue
        counts = ("num_drafted", "accepted", "judged")
        drafted, accepted, judged = (sum(getattr(one, name) for one in samples.answers) for name in counts)
        steps = sum(len(one.step_seconds) for one in samples.answers)
        name, ratio = f"{method}right {probability:.0%} of the time", statistics.median(samples.ratios)
        yield Figure(
            name,
            _speed(samples.answers),
            "tok/s",
            ratio=ratio,
            against="without speculation",
            target=targets[probability],
        )
        yield Figure(f"{name}, draft tokens", drafted / steps, "per step")
        yield Figure(f"{name}, measured", 100 * accepted / max(judged, 1), "% of verified draft tokens")


def _notes(forced_runner: ForcedTextRunner) -> tuple[str, ...]:
    planted = "Planted: the drafter knows the text; each draft token is correct with the given probability. Real text differs."
    forced = (
        f"{forced_runner.num_forced} of {forced_runner.num_checked} steps sampled another "
        "token than the first run and were forced to its token."
    )
    return planted, forced
