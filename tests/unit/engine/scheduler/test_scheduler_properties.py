"""Any sequence of add, step, abort, failing steps and out of memory, with steps launched ahead or not: memory limits
hold, contents are right, and every request ends once with the right events.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from app.engine.scheduler.batch import resolve_seed
from app.engine.scheduler.kv_allocator import StateCheckpoints
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, max_sequence_tokens
from app.messages import Abort, Generate, SamplingParams
from engine_simulation import EOS, Simulation, plain_beams, plain_completion, plain_scores
from hypothesis_examples import examples
from kept_prefixes import KeptPrefixes

FAMILIES = {"a": [1, 2, 3, 4] * 20, "b": [1, 2, 3, 4] * 6 + [5] * 60, "c": [6] * 80}  # a and b part after 24 tokens


class AnyRun(RuleBasedStateMachine):
    """The machine draws what happens; `Simulation` holds each step against what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Generate] = {}
        self.aborted: set[tuple[str, int | None]] = set()
        self.failed: set[str] = set()

    @initialize(
        num_slots=st.sampled_from([4, 5, 9]),
        capacity=st.sampled_from([64, 97, 150, 400]),
        page=st.sampled_from([1, 2, 4, 7]),
        running=st.integers(2, 4),
        batch_tokens=st.sampled_from([4, 9, 64]),
        itl=st.sampled_from([None, 1.0, 50.0]),
        guessed=st.sampled_from([None, None, 0.0, 0.5, 0.9, 1.0]),
        flying=st.sampled_from([0.0, 0.5, 1.0, 1.0]),
        kept=st.sampled_from([None, None, 0.0, 0.5]),
        checkpoints=st.sampled_from([None, None, 0, 2, 9]),
    )
    def begin(
        self,
        num_slots: int,
        capacity: int,
        page: int,
        running: int,
        batch_tokens: int,
        itl: float | None,
        guessed: float | None,
        flying: float,
        kept: float | None,
        checkpoints: int | None,
    ) -> None:
        limits = EngineLimits(max_model_len=90, max_running_seqs=running, max_batch_tokens=batch_tokens)
        pace = PrefillBudget(batch_tokens, itl)
        states = None if checkpoints is None else StateCheckpoints(num_slots, checkpoints, 5)
        self.sim = Simulation(num_slots, capacity, page, limits, pace, states).flying(0.0 if states else flying)
        if guessed is not None:
            self.sim.with_guesses(guessed)
        if kept is not None:  # on a device there is no store, and on a processor nothing is launched ahead
            self.sim.flying(0.0).scheduler.prefix_store = KeptPrefixes(self.sim.runner, kept)

    @rule(
        family=st.sampled_from(sorted(FAMILIES)),
        shared=st.integers(1, 60),
        own=st.lists(st.integers(1, 6), max_size=8),
        seed=st.integers(0, 3),
        shape=st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 3)]),
        penalty=st.sampled_from([1.0, 0.0, 2.0]),
        max_tokens=st.sampled_from([0, 1, 3, 12, None]),
        ignore_eos=st.booleans(),
        scored=st.sampled_from([None, None, 0, 2]),
        salt=st.sampled_from([None, None, "a", "b"]),
    )
    def add(
        self,
        family: str,
        shared: int,
        own: list[int],
        seed: int,
        shape: tuple[int, int],
        penalty: float,
        max_tokens: int | None,
        ignore_eos: bool,
        scored: int | None,
        salt: str | None,
    ) -> None:
        params = SamplingParams(
            max_tokens=1 if max_tokens == 0 and scored is None else max_tokens,
            seed=seed,
            n=shape[0],
            beam_width=shape[1],
            length_penalty=penalty,
            ignore_eos=ignore_eos,
            prompt_logprobs=scored,
        )
        prompt = tuple(FAMILIES[family][:shared] + own)
        request = Generate(f"r{len(self.asked)}", prompt, params, 0.0, cache_salt=salt)
        self.asked[request.request_id] = request
        self.sim.hear(self.sim.engine.add(request))
        self.failed |= self.sim.failures.keys() & {request.request_id}

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.sim.step()

    @rule()
    def keep_prefixes(self) -> None:
        self.sim.engine.save_prefixes(lambda: False)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 1000), choice=st.sampled_from([None, None, 0, 1]))
    def abort(self, which: int, choice: int | None) -> None:
        request_id = f"r{which % len(self.asked)}"
        self.aborted.add((request_id, choice))
        self.sim.hear(self.sim.engine.abort(Abort(request_id, choice=choice)))

    @precondition(lambda self: len(self.asked) % 5 == 4)
    @rule(late=st.booleans())
    def break_a_step(self, late: bool) -> None:
        before = set(self.sim.failures)
        self.sim.runner.broken, self.sim.runner.broken_late = not late, late
        self.sim.step()
        self.sim.runner.broken = self.sim.runner.broken_late = False
        self.failed |= set(self.sim.failures) - before

    @precondition(lambda self: len(self.asked) % 4 == 3)
    @rule(which=st.integers(0, 1000))
    def let_logits_overflow(self, which: int) -> None:
        """From the next step on, all rows of a request are not finite. It may fail, and no other."""
        request_id = f"r{which % len(self.asked)}"
        self.sim.runner.not_finite.add(request_id)
        self.failed.add(request_id)

    @precondition(lambda self: self.sim.pool.checkpoints is None)
    @rule(tokens=st.sampled_from([3, 3, 5, 17, None]), late=st.booleans())
    def have_memory_for_fewer(self, tokens: int | None, late: bool) -> None:
        """As long as a search's beams find room together nobody has to fail for it."""
        self.sim.runner.most_tokens, self.sim.runner.wants_late = tokens, late

    @precondition(lambda self: self.asked)
    @rule()
    def check(self) -> None:
        """The device works, whatever requests made it compute."""
        most, self.sim.runner.most_tokens = self.sim.runner.most_tokens, None
        self.sim.engine.check()
        self.sim.runner.most_tokens = most

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        self.sim.finish()
        assert self.sim.pool.in_use_tokens() == 0
        assert self.sim.step() is None
        assert self.sim.engine._launched_ahead is None and self.sim.engine._batch is None, "something is left in flight"
        for request in self.asked.values():
            self.check_told(request)

    def check_told(self, request: Generate) -> None:
        """Each choice ended exactly once, with the words of the plain loop, or their beginning where it was stopped."""
        if request.request_id in self.sim.failures:
            assert request.request_id in self.failed, "nobody fails but those who were refused, or whose step broke"
            return
        limit, eos = (
            max_sequence_tokens(request, self.sim.scheduler._limits, self.sim.pool),
            None if request.params.ignore_eos else EOS,
        )
        self.check_scores(request)
        for choice in range(request.params.n):
            key = (request.request_id, choice)
            ending = self.sim.endings[key]
            if ending.reason == "aborted":
                first = (request.request_id, 0) if request.params.beam_width > 1 else key  # the search is choice 0
                assert (request.request_id, None) in self.aborted or first in self.aborted
            said = list(ending.token_ids) or self.sim.completions.get(key, [])
            if request.params.max_tokens == 0:
                expected: list[int] = []
            elif request.params.beam_width > 1:
                width, penalty = request.params.beam_width, request.params.length_penalty
                beams = plain_beams(request.token_ids, width, limit, eos, penalty)
                expected = beams[min(choice, len(beams) - 1)]
            else:
                expected = plain_completion(request.token_ids, resolve_seed(request.params.seed, choice), limit, eos)
            assert said == (expected[: len(said)] if ending.reason == "aborted" else expected)
            assert (ending.reason == "stop") == (ending.stop_token_id == EOS)

    def check_scores(self, request: Generate) -> None:
        """Each token of the prompt but the first was scored once, in order; or fewer, if nobody waited for them."""
        told = self.sim.scores.get(request.request_id, [])
        if request.params.prompt_logprobs is None:
            assert not told
            return
        endings = [self.sim.endings[request.request_id, choice] for choice in range(request.params.n)]
        expected = plain_scores(request.token_ids, request.params.prompt_logprobs)
        stopped = all(ending.reason == "aborted" for ending in endings)
        assert told == (expected[: len(told)] if stopped else expected)


TestAnyRun = AnyRun.TestCase
TestAnyRun.settings = settings(max_examples=examples(150), stateful_step_count=30)
