"""Sequences that follow a grammar: where they end, how one that cannot go on fails alone, drafts, and priorities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.engine.scheduler.scheduler import EngineLimits
from app.engine.scheduler.speculation import Speculation
from app.errors import InvalidRequest, StepFailed
from app.messages import Generate, GrammarSource, SamplingParams
from engine_simulation import FreeRows, Simulation


@dataclass
class Counted:
    """A text of so many tokens, whatever they are; the state of `broken_at` tokens has an error."""

    length: int
    broken_at: int = -1
    forced: tuple[int, ...] = ()
    taken: list[int] = field(default_factory=list)
    error: str = ""
    field: str = "tool_choice"

    def start(self) -> Counted:
        return Counted(self.length, self.broken_at, self.forced)

    @property
    def finished(self) -> bool:
        return len(self.taken) >= self.length

    def fill_masks(self, address: int, row_bytes: int, draft_ids: Sequence[int]) -> None:
        raise AssertionError("the fake runner needs no masks")

    def advance(self, token_id: int) -> None:
        self.taken.append(token_id)
        if len(self.taken) == self.broken_at:
            self.error = "it is too difficult"

    def count_valid(self, token_ids: Sequence[int]) -> int:
        return min(len(token_ids), self.length - len(self.taken) - 1)

    def forced_tokens(self) -> Sequence[int]:
        return self.forced


class Compiled(dict[GrammarSource, Counted]):
    def find(self, source: GrammarSource) -> Counted | None:
        return self.get(source)


def add(sim: Simulation, name: str, grammar: Counted | None, **params: Any) -> None:
    settings = {"ignore_eos": True, **params}
    source = None if grammar is None else GrammarSource("regex", name, "f")
    if source is not None and grammar is not None:
        sim.engine.grammars = Compiled({source: grammar})
    sim.hear(sim.engine.add(Generate(name, (1, 2, 3), SamplingParams(**settings), 0.0, (), source)))


def test_a_grammar_that_nobody_holds_fails_its_request_only() -> None:
    sim = Simulation()
    add(sim, "gone", Counted(5))
    sim.engine.grammars = Compiled()
    source = GrammarSource("regex", "other", "f")
    sim.hear(sim.engine.add(Generate("other", (1, 2, 3), SamplingParams(), 0.0, (), source)))
    assert isinstance(sim.failures["other"].error, StepFailed)
    sim.finish()
    assert ("gone", 0) in sim.endings


@pytest.mark.parametrize("chance", [0.0, 0.7, 1.0])
def test_a_complete_text_ends_its_sequence(chance: float) -> None:
    sim = Simulation().with_guesses(chance)
    add(sim, "a", Counted(7), n=2, seed=0, stop_token_ids=())
    add(sim, "b", None, max_tokens=11)
    sim.finish()
    for choice in range(2):
        ending = sim.endings["a", choice]
        stopped_early = ending.stop_token_id is not None
        assert ending.reason == "stop"
        assert len(sim.completions.get(("a", choice), [])) + stopped_early == ending.num_completion_tokens
        assert stopped_early or ending.num_completion_tokens == 7
    assert sim.endings["b", 0].reason == "length"


def test_one_that_cannot_go_on_fails_alone() -> None:
    sim = Simulation()
    add(sim, "bad", Counted(50, broken_at=3), n=2, seed=1)
    add(sim, "good", Counted(50), max_tokens=9, seed=2)
    sim.finish()
    failure = sim.failures["bad"]
    assert isinstance(failure.error, InvalidRequest) and "too difficult" in failure.error.message
    assert failure.error.field == "tool_choice", "the client's name for the grammar"
    assert sim.endings["good", 0].reason in ("length", "stop")


def test_no_draft_goes_past_the_end_and_forced_ones_do_not_pause() -> None:
    sim = Simulation()
    sim.scheduler.speculation = Speculation(lambda sequence: Nothing(), FreeRows())
    add(sim, "a", Counted(12, forced=(7, 7, 7, 7)), seed=3)
    drafts = []
    while sim.engine.has_work:
        batch = sim.step()
        assert batch is not None
        for span in batch.spans:
            if span.is_decode:
                drafts.append(len(span.draft_ids))
                assert span.known_end - 3 + len(span.draft_ids) < 12
    assert max(drafts) == 4
    assert sim.endings["a", 0].reason == "stop"


class Nothing:
    def propose(self, token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
        return ()


def test_a_beam_search_follows_no_grammar() -> None:
    sim = Simulation()
    add(sim, "a", Counted(5), beam_width=2)
    assert sim.failures["a"].error.field == "beam_width"


def test_the_lower_priority_goes_first() -> None:
    sim = Simulation(limits=EngineLimits(max_model_len=200, max_running_seqs=1, max_batch_tokens=64))
    for name, priority in (("running", 0), ("late", 5), ("usual", 0), ("urgent", -3)):
        add(sim, name, None, priority=priority, max_tokens=2)
        if name == "running":
            sim.step()
    sim.finish()
    assert [name for name, _ in sim.endings] == ["running", "urgent", "usual", "late"]
