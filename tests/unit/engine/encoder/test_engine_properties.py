"""Any sequence of add, step, abort and failing steps of an encoder: every request ends once with its rows."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.engine.encoder.batching import TextCapacity, TextQueue
from app.engine.scheduler.policy import size_class
from app.errors import StepFailed
from app.messages import Abort, ArraysReady, Encode, RequestFailed
from encoder_simulation import MAX_LEN, MAX_TEXTS, POISON, EncoderSimulation, FakeRunner, encode, rows_of
from hypothesis_examples import examples


class AnyRun(RuleBasedStateMachine):
    """The machine draws what happens; what must be true is looked at after each step and in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Encode] = {}
        self.aborted: set[str] = set()
        self.may_fail: set[str] = set()
        self.deadlines: dict[str, int] = {}  # the step by which a request must have ended, had every step gone well
        self.num_steps = 0

    @initialize(
        budget=st.sampled_from([1, 20, 64, 500]),
        overlaps=st.booleans(),
        memory=st.sampled_from([None, None, MAX_LEN, 30, 100]),
    )
    def begin(self, budget: int, overlaps: bool, memory: int | None) -> None:
        self.sim = EncoderSimulation(budget, runner=FakeRunner(overlaps, memory))

    @rule(
        lengths=st.lists(st.integers(1, MAX_LEN), min_size=1, max_size=12),
        outputs=st.sampled_from([("embedding",), ("last_hidden_state",), ("embedding", "last_hidden_state")]),
        poisoned=st.integers(0, 9),
    )
    def add(self, lengths: list[int], outputs: tuple[str, ...], poisoned: int) -> None:
        name = f"r{len(self.asked)}"
        first = POISON if poisoned == 0 else 100 * (1 + len(self.asked))
        order = encode(name, *lengths, outputs=outputs, first=first)
        ahead = sum(len(one.message.texts) for one in self.sim.engine.queue.requests)
        self.asked[name] = order
        self.deadlines[name] = self.num_steps + ahead + len(lengths)
        memory = self.sim.runner.memory
        if poisoned == 0 or (memory is not None and max(lengths) > memory):
            self.may_fail.add(name)
        self.sim.hear(self.sim.engine.add(order))

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            begun = len(self.sim.runner.batches)
            oldest = next((request for request in self.sim.engine.queue.requests if request.remaining), None)
            before = oldest.tokens_left if oldest else 0
            alone = {request.message.request_id for request in self.sim.engine.queue.requests if request.runs_alone}
            self.sim.step()
            self.num_steps += 1
            for batch in self.sim.runner.batches[begun:]:
                total = sum(span.num_tokens for span in batch)
                assert total <= max(self.sim.budget, batch[0].num_tokens) and len(batch) <= MAX_TEXTS
            if oldest is None or begun == len(self.sim.runner.batches):
                continue
            batch = self.sim.runner.batches[begun]
            # Who runs alone after a step that failed goes first, and has ended it by now.
            first = any(span.request is oldest or span.request.message.request_id in alone for span in batch)
            assert first or oldest.tokens_left < before

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        name = f"r{which % len(self.asked)}"
        if name not in self.sim.told:
            self.aborted.add(name)
        self.sim.hear(self.sim.engine.abort(Abort(name)))

    @precondition(lambda self: len(self.asked) % 5 == 4)
    @rule()
    def break_steps(self) -> None:
        """The device fails: whoever goes alone meanwhile ends."""
        self.may_fail |= set(self.asked)
        self.sim.runner.broken = True
        self.sim.step()
        self.sim.step()
        self.sim.runner.broken = False

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        if self.may_fail:
            return  # steps that failed do not count
        for name, deadline in self.deadlines.items():
            assert name in self.sim.told or name in self.aborted or self.num_steps < deadline

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        for _ in range(10_000):
            if not self.sim.engine.has_work:
                break
            self.sim.step()
        assert not self.sim.engine.has_work and self.sim.engine.step() == []
        for name, order in self.asked.items():
            self.check_told(name, order)

    def check_told(self, name: str, order: Encode) -> None:
        """Each got their own rows in their own order, or failed where it had to, or was aborted and hears nothing."""
        told = self.sim.told.get(name)
        if told is None:
            assert name in self.aborted
        elif isinstance(told, RequestFailed):
            assert name in self.may_fail and isinstance(told.error, StepFailed)
        else:
            assert isinstance(told, ArraysReady) and name not in self.aborted
            assert set(told.arrays) == set(order.outputs)
            assert told.num_tokens == sum(len(text.token_ids) for text in order.texts)
            for output, array in told.arrays.items():
                assert array.data == b"".join(rows_of(text)[output] for text in order.texts)
                rows = told.num_tokens if output == "last_hidden_state" else len(order.texts)
                assert array.shape == (rows, len(array.data) // 4 // rows)


def test_who_runs_alone_goes_before_the_oldest() -> None:
    """Found by hypothesis: the oldest of two requests waits while the other one runs alone."""
    state = AnyRun()
    state.begin(budget=20, overlaps=False, memory=None)
    state.add(lengths=[1], outputs=("embedding",), poisoned=0)
    state.add(lengths=[1, 1, 1, 18], outputs=("embedding",), poisoned=0)
    state.add(lengths=[1, 1, 1, 1, 1, 1, 1], outputs=("embedding",), poisoned=1)
    state.step(times=3)
    state.teardown()


TestAnyRun = AnyRun.TestCase
TestAnyRun.settings = settings(max_examples=examples(80), stateful_step_count=25)


def taken(queue: TextQueue, budget: int) -> list[tuple[str, int]]:
    return [(span.request.message.request_id, span.num_tokens) for span in queue.take(TextCapacity(budget, 9))]


def test_a_short_request_does_not_wait_behind_a_long_one() -> None:
    queue = TextQueue()
    queue.add(encode("long", *[10] * 100))
    queue.add(encode("middle", 9, 9))
    queue.add(encode("short", 4))
    assert taken(queue, 40) == [("long", 10), ("long", 10), ("middle", 9), ("middle", 9)]  # half is the oldest's
    assert taken(queue, 40) == [("long", 10), ("long", 10), ("short", 4), ("long", 10)]  # and what nobody else wants


def test_requests_that_fit_a_step_go_as_they_came_and_larger_ones_behind_them() -> None:
    queue = TextQueue()
    for name, texts in (
        ("oldest", [10]),
        ("large", [10] * 5),
        ("larger", [10] * 20),
        ("small", [20]),
        ("smaller", [5]),
    ):
        queue.add(encode(name, *texts))
    assert taken(queue, 40) == [("oldest", 10), ("small", 20), ("smaller", 5)]
    queue.remove("oldest")
    assert [name for name, _ in taken(queue, 40)] == ["large"] * 4
    assert [size_class(tokens, 40) for tokens in (1, 40, 41, 80, 81, 160, 161)] == [0, 0, 1, 1, 2, 2, 3]


def test_a_text_that_is_longer_than_half_a_step_goes_all_the_same() -> None:
    queue = TextQueue()
    queue.add(encode("first", 60))
    queue.add(encode("second", 50))
    queue.add(encode("third", 3))
    assert taken(queue, 64) == [("first", 60), ("third", 3)]
    queue.remove("first")
    assert taken(queue, 32) == [("second", 50)]  # longer than a whole one


def test_texts_of_one_request_fill_what_is_left_over() -> None:
    queue = TextQueue()
    queue.add(encode("one", 7, 30, 12, 2, 25))
    assert taken(queue, 64) == [("one", 30), ("one", 2), ("one", 25), ("one", 7)]
    assert taken(queue, 64) == [("one", 12)]


def test_what_was_put_back_comes_again() -> None:
    queue = TextQueue()
    queue.add(encode("one", 5, 6, 7))
    spans = queue.take(TextCapacity(18, 9))
    assert queue.num_tokens == 0
    queue.oldest.put_back(spans[1:])
    assert queue.num_tokens == 11
    assert {span.index for span in queue.take(TextCapacity(18, 9))} == {span.index for span in spans[1:]}


def test_a_step_has_at_most_so_many_texts() -> None:
    queue = TextQueue()
    queue.add(encode("one", 1, 1, 1))
    queue.add(encode("two", 1, 1))
    assert [len(queue.take(TextCapacity(64, 2))) for _ in range(4)] == [2, 2, 1, 0]
