"""Keys and values from files of an earlier process give the same tokens as computing them, and damaged ones are computed."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.engine.decoder import prompt_cache
from app.engine.decoder.prompt_cache import PrefixFiles, PromptCache
from app.engine.scheduler import scheduler
from app.hardware.step_times import StepTimeTable
from app.messages import Generate, LoadedAdapter
from app.metrics.steps import StepTimeModel
from hypothesis_examples import examples
from loaded_models import load
from tests.parity.test_speculation_exact import MAX_LEN, Engine, prompt_of, request_of, tokens_of
from tiny_checkpoints import write_checkpoint

BLOCK = 16
LONG, SHARED = prompt_of(100, 1), prompt_of(50, 2)
REQUESTS = [
    request_of("greedy", LONG, temperature=0.0),
    request_of("seeded", LONG[:70] + prompt_of(30, 3), seed=3),
    request_of("one", SHARED + prompt_of(20, 4), temperature=0.0),
    request_of("two", SHARED + prompt_of(33, 5), seed=4, n=2),
    request_of("exact", prompt_of(3 * BLOCK, 6), temperature=0.0),
    request_of("short", prompt_of(9, 7), temperature=0.0),
    request_of("beams", prompt_of(40, 8), temperature=0.0, beam_width=2, logprobs=None, max_tokens=4),
]
SLOW_STEPS = StepTimeTable(((1, 1.0),), ((1, 1.0), (64, 64.0)))  # reading always takes less
FAST_STEPS = StepTimeTable(((1, 1e-12),), ((1, 1e-12), (64, 64e-12)))


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return load(write_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=11), max_model_len=MAX_LEN)


def started(
    model: torch.nn.Module, dtype: torch.dtype, folder: Path, table: StepTimeTable | None = None, capacity: int = 0
) -> tuple[Engine, PromptCache]:
    """An engine that was just started, with the prompt cache of this folder."""
    engine = Engine(model, dtype, capacity=capacity)
    files = PrefixFiles(folder, {"model": "tiny", "kv": str(dtype)}, 2**30)
    cache = PromptCache(files, engine.engine.runner.kv_cache, StepTimeModel(table), BLOCK)  # type: ignore[attr-defined]
    engine.engine.scheduler.prefix_store = cache
    return engine, cache


def cached_tokens(engine: Engine) -> int:
    return sum(step.cached_tokens for step in engine.stats)


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_process_says_the_same_from_files(model: torch.nn.Module, dtype: torch.dtype, tmp_path: Path) -> None:
    config: Any = model.config
    if dtype == torch.bfloat16 and config.experts is not None:
        pytest.skip("a request alone differs too: other steps round keys to another BF16, and it selects other experts")
    plain = tokens_of(Engine(model, dtype).generate(REQUESTS))
    first, _ = started(model, dtype, tmp_path)
    assert tokens_of(first.generate(REQUESTS)) == plain
    first.engine.save_prefixes(lambda: False)
    before = cached_tokens(first)
    second, _ = started(model, dtype, tmp_path)
    assert tokens_of(second.generate(REQUESTS)) == plain
    assert cached_tokens(second) >= before + 200
    computed = sum(step.prefill_tokens for step in second.stats)
    assert computed < 0.5 * sum(step.prefill_tokens for step in first.stats)


def test_prompts_of_adapters_are_neither_kept_nor_found(model: torch.nn.Module, tmp_path: Path) -> None:
    plain = REQUESTS[0]
    adapted = replace(plain, request_id="adapted", adapter=LoadedAdapter(0, 1))
    for number, (kept, asked) in enumerate([(adapted, plain), (plain, adapted), (plain, plain)]):
        folder = tmp_path / str(number)
        first, _ = started(model, torch.float32, folder)
        first.generate([kept])
        first.engine.save_prefixes(lambda: False)
        second, _ = started(model, torch.float32, folder)
        second.generate([asked])
        assert (cached_tokens(second) > 0) == (kept is asked)


@pytest.mark.cases(test=1)
def test_files_of_one_salt_are_found_with_that_salt_only(model: torch.nn.Module, tmp_path: Path) -> None:
    salts = [None, "a", "b"]
    requests = {salt: replace(REQUESTS[0], request_id=f"salt {salt}", cache_salt=salt) for salt in salts}
    plain = tokens_of(Engine(model, torch.float32).generate([REQUESTS[0]]))
    for kept in salts:
        folder = tmp_path / str(kept)
        first, _ = started(model, torch.float32, folder)
        first.generate([requests[kept]])
        first.engine.save_prefixes(lambda: False)
        for asked in salts:
            second, _ = started(model, torch.float32, folder)
            told = tokens_of(second.generate([requests[asked]]))
            assert list(told.values()) == list(plain.values())
            assert cached_tokens(second) == (6 * BLOCK if asked == kept else 0)
            second.engine.save_prefixes(lambda: False)
            if asked != kept:  # each has files of its own
                third, _ = started(model, torch.float32, folder)
                third.generate([requests[asked]])
                assert cached_tokens(third) == 6 * BLOCK
                third.generate([requests[kept]])
                assert cached_tokens(third) == 12 * BLOCK


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_same_bytes_are_found_also_where_a_prefix_was_shared(
    model: torch.nn.Module, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The second prompt's block from 48 to 64 begins in the slot of the first one."""
    shared, own = LONG[:50], LONG[:50] + prompt_of(40, 3)
    first, _ = started(model, dtype, tmp_path)
    first.generate([request_of("first", shared, temperature=0.0, max_tokens=None)])
    first.generate([request_of("own", own, temperature=0.0, max_tokens=1)])
    (slot,) = [one for one in first.engine.scheduler.pool.slots if one.token_ids[:90] == own]
    assert slot.prefix_slot is not None and slot.prefix_tokens == 50
    first.engine.save_prefixes(lambda: False)
    second, _ = started(model, dtype, tmp_path)
    second.generate([request_of("own", own, temperature=0.0, max_tokens=1)])
    (found,) = [one for one in second.engine.scheduler.pool.slots if one.token_ids[:90] == own]
    ours, theirs = (engine.engine.runner.kv_cache for engine in (first, second))  # type: ignore[attr-defined]
    rows = [torch.empty(BLOCK * ours.bytes_per_token, dtype=torch.uint8) for _ in range(2)]
    for start in range(0, 80, BLOCK):
        ours.read_block(rows[0], slot.index, slot.prefix_slot, slot.prefix_tokens, start)
        theirs.read_block(rows[1], found.index, found.prefix_slot, found.prefix_tokens, start)
        assert torch.equal(*rows), start
    assert cached_tokens(second) == 80


def test_all_whole_blocks_of_a_prompt_are_found(model: torch.nn.Module, tmp_path: Path) -> None:
    first, _ = started(model, torch.bfloat16, tmp_path)
    first.generate([REQUESTS[0]])
    first.engine.save_prefixes(lambda: False)
    second, _ = started(model, torch.bfloat16, tmp_path)
    second.generate([REQUESTS[0]])
    assert cached_tokens(second) == 6 * BLOCK and second.stats[0].prefill_tokens == len(LONG) - 6 * BLOCK


class CountedDigest:
    """SHA-256 that counts the bytes of all digests."""

    num_bytes = 0

    def __init__(self, content: bytes) -> None:
        self._digest = hashlib.sha256(content)

    def update(self, content: memoryview) -> None:
        CountedDigest.num_bytes += content.nbytes
        self._digest.update(content)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def test_a_prompt_is_hashed_once_in_all_of_its_steps(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is looked for before each of the three steps of the prompt."""
    engine, _ = started(model, torch.bfloat16, tmp_path)
    monkeypatch.setattr(CountedDigest, "num_bytes", 0)
    monkeypatch.setattr(prompt_cache, "hashlib", SimpleNamespace(sha256=CountedDigest))
    engine.generate([request_of("long", prompt_of(150, 1), temperature=0.0, max_tokens=2)])
    assert sum(step.prefill_tokens > 0 for step in engine.stats) == 3
    assert CountedDigest.num_bytes == 4 * (128 + BLOCK), "up to the block that the last step looks for"


@pytest.mark.cases(test=1)
def test_names_are_held_of_some_prompts_only(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache, "MOST_PROMPTS", 2)
    plain = tokens_of(Engine(model, torch.bfloat16).generate(REQUESTS))
    engine, cache = started(model, torch.bfloat16, tmp_path)
    assert tokens_of(engine.generate(REQUESTS)) == plain
    assert len(cache._names) == 2


def test_the_last_token_is_computed_for_its_logits(model: torch.nn.Module, tmp_path: Path) -> None:
    request = request_of("exact", LONG[: 3 * BLOCK], temperature=0.0)
    first, _ = started(model, torch.bfloat16, tmp_path)
    plain = first.generate([request])
    first.engine.save_prefixes(lambda: False)
    second, _ = started(model, torch.bfloat16, tmp_path)
    assert tokens_of(second.generate([request])) == tokens_of(plain)
    assert cached_tokens(second) == 3 * BLOCK - 1 and second.stats[0].prefill_tokens == 1


def test_an_answer_is_found_as_part_of_the_next_prompt(model: torch.nn.Module, tmp_path: Path) -> None:
    first, _ = started(model, torch.bfloat16, tmp_path)
    said = tokens_of(first.generate([REQUESTS[0]]))["greedy", 0]
    first.engine.save_prefixes(lambda: False)
    second, _ = started(model, torch.bfloat16, tmp_path)
    second.generate([request_of("next", LONG + said + prompt_of(5, 9), temperature=0.0, max_tokens=2)])
    assert cached_tokens(second) == (len(LONG) + len(said) - 1) // BLOCK * BLOCK


def test_what_memory_has_is_not_read_and_files_go_on_after_it(model: torch.nn.Module, tmp_path: Path) -> None:
    first, _ = started(model, torch.bfloat16, tmp_path)
    first.generate([REQUESTS[0]])
    first.engine.save_prefixes(lambda: False)
    second, cache = started(model, torch.bfloat16, tmp_path)
    second.generate([request_of("part", LONG[:41], temperature=0.0, max_tokens=1)])
    reads: list[int] = []
    read = cache.files.read
    cache.files.read = lambda block, rows: reads.append(block.index) or read(block, rows)  # type: ignore[func-returns-value, method-assign]
    said = tokens_of(second.generate([REQUESTS[0]]))
    assert reads == [2, 3, 4, 5], "the block in whose midst memory ends is the first"
    assert said == tokens_of(Engine(model, torch.bfloat16).generate([REQUESTS[0]]))


def test_nothing_is_read_where_computing_is_faster(model: torch.nn.Module, tmp_path: Path) -> None:
    first, _ = started(model, torch.bfloat16, tmp_path)
    first.generate([REQUESTS[0]])
    first.engine.save_prefixes(lambda: False)
    for table, all_read in ((SLOW_STEPS, True), (FAST_STEPS, False)):
        engine, cache = started(model, torch.bfloat16, tmp_path, table)
        cache.read_seconds = 0.01
        engine.generate([REQUESTS[0]])
        assert cached_tokens(engine) == (6 * BLOCK if all_read else 0)
    assert cache.read_seconds < 0.01, "it is tried again some time"


def test_scores_of_a_prompt_are_computed(model: torch.nn.Module, tmp_path: Path) -> None:
    first, _ = started(model, torch.bfloat16, tmp_path)
    first.generate([REQUESTS[0]])
    first.engine.save_prefixes(lambda: False)
    second, _ = started(model, torch.bfloat16, tmp_path)
    second.engine.add(request_of("scored", LONG, temperature=0.0, prompt_logprobs=1, max_tokens=1))
    scored = 0
    while second.engine.has_work:
        second.engine.step()
        scored += second.engine.stats.scored_tokens if second.engine.stats else 0
    assert scored == len(LONG) - 1


@pytest.mark.cases(test=1)
def test_preempted_sequences_find_their_blocks_too(model: torch.nn.Module, tmp_path: Path) -> None:
    requests: list[Generate] = [request_of(str(number), prompt_of(40, number), temperature=0.0) for number in range(4)]
    plain = tokens_of(Engine(model, torch.bfloat16).generate(requests))
    first, _ = started(model, torch.bfloat16, tmp_path)
    first.generate(requests)
    first.engine.save_prefixes(lambda: False)
    second, _ = started(model, torch.bfloat16, tmp_path, capacity=170)
    assert tokens_of(second.generate(requests)) == plain
    assert sum(step.preempted for step in second.stats) > 0
    assert cached_tokens(second) == sum(len(one.token_ids) // BLOCK * BLOCK for one in requests), "counted once"


def test_saving_stops_at_once_and_goes_on_later(model: torch.nn.Module, tmp_path: Path) -> None:
    engine, cache = started(model, torch.bfloat16, tmp_path)
    engine.generate(REQUESTS[:1])
    asked = iter([False, False, True])
    engine.engine.save_prefixes(lambda: next(asked))
    assert len(list(cache.files.folder.iterdir())) == 2
    engine.engine.save_prefixes(lambda: False)
    assert len(list(cache.files.folder.iterdir())) == 7
    cache.files.write = lambda block, rows: pytest.fail("nothing is left to write")  # type: ignore[method-assign]
    engine.engine.save_prefixes(lambda: False)


@pytest.mark.cases(ci=1)
@pytest.mark.full
@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.lists(st.sampled_from(["change", "cut", "remove", "swap"]), min_size=1, max_size=6))
def test_damaged_files_change_no_answer(
    model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory, seed: int, damages: list[str]
) -> None:
    dice, folder = random.Random(seed), tmp_path_factory.mktemp("prefixes")
    first, cache = started(model, torch.bfloat16, folder)
    plain = tokens_of(first.generate(REQUESTS[:3]))
    first.engine.save_prefixes(lambda: False)
    for damage in damages:
        files = sorted(cache.files.folder.iterdir())
        file = dice.choice(files)
        content = bytearray(file.read_bytes())
        if damage == "change":
            content[dice.randrange(len(content))] ^= dice.randint(1, 255)
        elif damage == "cut":
            del content[dice.randrange(len(content)) :]
        elif damage == "swap":
            content = bytearray(dice.choice(files).read_bytes())
        file.write_bytes(content)
        if damage == "remove":
            file.unlink()
    second, _ = started(model, torch.bfloat16, folder)
    assert tokens_of(second.generate(REQUESTS[:3])) == plain


@pytest.fixture(scope="module", params=["Qwen3_5ForCausalLM", "Mamba2ForCausalLM", "Lfm2ForCausalLM"])
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return load(write_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=11), max_model_len=MAX_LEN)


def recurrent_start(model: torch.nn.Module, folder: Path) -> tuple[Engine, list[int]]:
    """An engine that has said something and saved it, and what it said."""
    engine, _ = started(model, torch.float32, folder)
    said = tokens_of(engine.generate([REQUESTS[0]]))["greedy", 0]
    engine.engine.save_prefixes(lambda: False)
    return engine, said


def test_a_restart_goes_on_from_a_state(recurrent: torch.nn.Module, tmp_path: Path) -> None:
    """A second turn from the end of the answer, others from the last state in what is shared."""
    _, said = recurrent_start(recurrent, tmp_path)
    turns = [
        (LONG + said + prompt_of(5, 9), len(LONG) + len(said) - 1),
        (LONG, 96),
        (LONG[:83] + prompt_of(9, 10), 80),
        (LONG[:20] + prompt_of(40, 11), BLOCK),
        (LONG[:15] + prompt_of(40, 12), 0),
    ]
    for prompt, cached in turns:
        request = request_of("turn", prompt, temperature=0.0, max_tokens=8)
        engine, _ = started(recurrent, torch.float32, tmp_path)
        assert tokens_of(engine.generate([request])) == tokens_of(Engine(recurrent, torch.float32).generate([request]))
        assert cached_tokens(engine) == cached
        states = engine.engine.snapshot().states
        assert states is not None and states.hits == (cached > 0)


def test_blocks_before_a_state_may_take_several_steps(
    recurrent: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said = recurrent_start(recurrent, tmp_path)
    monkeypatch.setattr(scheduler, "READ_SECONDS_ALONE", 0.0)
    engine, cache = started(recurrent, torch.float32, tmp_path)
    reads: list[int] = []
    read = cache.files.read
    cache.files.read = lambda block, rows: reads.append(block.index) or read(block, rows)  # type: ignore[func-returns-value, method-assign]
    assert tokens_of(engine.generate([REQUESTS[0]]))["greedy", 0] == said
    assert reads == [0, 1, 2, 3, 4, 5, 6] and cached_tokens(engine) == 96 - 5, "five steps compute a token each"


@pytest.mark.parametrize("place", [16, -1], ids=["another version", "damaged"])
def test_a_state_that_cannot_be_used_is_computed(
    recurrent: torch.nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    _, said = recurrent_start(recurrent, tmp_path)
    second, cache = started(recurrent, torch.float32, tmp_path)
    for state in cache.files.names(BLOCK).states(LONG, 1, len(LONG)):
        file = cache.files.folder / state.name
        if file.exists():
            content = bytearray(file.read_bytes())
            content[place] ^= 255
            file.write_bytes(content)
    assert tokens_of(second.generate([REQUESTS[0]]))["greedy", 0] == said
    assert cached_tokens(second) == 0 and "of the prompt cache cannot be used" in caplog.text
