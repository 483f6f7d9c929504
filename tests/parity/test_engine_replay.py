"""A natively replayed step gives the same tokens as an eager step while requests join and leave."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from app.backends.cpu import CpuBackend
from app.engine.decoder.build import state_checkpoints
from app.engine.decoder.cpu_runner import RECORD_AFTER_STEPS, CpuDecoderRunner, DecoderReplay
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.kv_cache import KvCache, KvShape, kv_shape_of
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.messages import Abort, Generate, RequestFailed, SamplingParams, SequenceFinished, TokensReady
from app.models.decoders.decoder import Decoder
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from native_levels import at_level, levels
from tiny_checkpoints import OTHERS, RECURRENT, write_checkpoint

MAX_LEN, SLOTS = 160, 12
RECORDABLE = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "SmolLM3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
]
PICKING = ("LlamaForCausalLM", "Gemma2ForCausalLM")  # of them, those that are also asked for their best logits alone
pytestmark = pytest.mark.skipif(not has_kernel(OpCode.ROPE), reason="no native kernels here")


WHOLE_LOGITS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"top_k": 9, "seed": 6},
    {"n": 2, "seed": 7},
]
BEST: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "n": 2},
    {"top_k": 4, "seed": 9},
]


def served(
    model: torch.nn.Module,
    enabled: bool,
    kinds: list[dict[str, Any]] = WHOLE_LOGITS,
    kv: torch.dtype = torch.bfloat16,
) -> tuple[dict[str, list[int]], DecoderReplay]:
    """What every request was told, of a run in which requests join, share a prefix, draw, fork, leave early and end."""
    config: Any = model.config
    cache = KvCache(kv_shape_of(config, SLOTS, MAX_LEN), kv)
    replay = DecoderReplay(cast(Decoder, model), "" if enabled else "for this test", record_after=0)
    backend = CpuBackend(torch.float32 if kv == torch.float32 else torch.bfloat16)
    runner = CpuDecoderRunner(replay, cache, backend, Sampler(config.vocab_size))
    engine = DecoderEngine(
        Scheduler(
            KvSlots(SLOTS, SLOTS * MAX_LEN, checkpoints=state_checkpoints(cache)),
            PrefillBudget(24),
            EngineLimits(MAX_LEN, SLOTS // 2, 24),
            {1},
        ),
        runner,
        # In steps of one length no scheduling depends on the machine's speed: parts of a prompt round differently.
        clock=count().__next__,
    )
    said: dict[str, list[int]] = {}
    prompt = torch.randint(4, 320, (40,), generator=torch.Generator().manual_seed(3)).tolist()

    def hear(events: Any) -> None:
        for event in events:
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, TokensReady | SequenceFinished):
                said.setdefault(f"{event.request_id}/{event.choice}", []).extend(event.token_ids)

    for step in range(400):
        if step % 6 == 0 and step < 60:
            number = step // 6
            length = 12 + 3 * number if number % 3 else 40
            params = SamplingParams(max_tokens=20 + 2 * number, ignore_eos=True, **kinds[number % len(kinds)])
            hear(engine.add(Generate(str(number), tuple(prompt[:length]), params, arrived_at=0.0)))
        if len(said.get("4/0", ())) == 6:
            hear(engine.abort(Abort("4")))
        if engine.has_work:
            hear(engine.step())
    assert not engine.has_work
    return said, replay


@pytest.mark.cases(test=2, ci=10)
@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        *((name, "int4") for name in (*RECORDABLE, *OTHERS, *RECURRENT)),
        (RECORDABLE[0], "int8"),
        *((name, precision) for name in PICKING for precision in ("bfloat16", "float32")),
    ],
)
def test_steps_run_again_say_the_same(architecture: str, precision: str, tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, architecture, seed=11), precision, max_model_len=MAX_LEN)
    for kinds in (WHOLE_LOGITS, BEST) if architecture in PICKING else (WHOLE_LOGITS,):
        kv = torch.float32 if precision == "float32" else torch.bfloat16
        eager, _ = served(model, False, kinds, kv)
        replayed, replay = served(model, True, kinds, kv)
        assert replay.reason == ""
        assert replay.num_replays > 20
        assert {tokens == rows for tokens, rows, _ in replay.recorded} == {
            True,
            False,
        }  # alone, and beside chunks of prompts
        assert any(rows and wanted is None for _, rows, wanted in replay.recorded) == (kinds is WHOLE_LOGITS)
        assert replayed == eager


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("architecture", PICKING)
def test_keys_and_values_in_int8_are_read_again_too(architecture: str, tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, architecture, seed=11), "int4", max_model_len=MAX_LEN)
    eager, _ = served(model, False, kv=torch.int8)
    replayed, replay = served(model, True, kv=torch.int8)
    assert replay.reason == "" and replay.num_replays > 20
    assert replayed == eager
    assert eager != served(model, False)[0]  # bf16 says other words here and there


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_as_they_are_stored_are_read_the_same(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, architecture, seed=5, dtype=dtype, tie_word_embeddings=False)
    model = load(checkpoint, "int8", max_model_len=MAX_LEN)
    eager, _ = served(model, enabled=False)
    replayed, replay = served(model, enabled=True)
    assert replay.reason == "" and replay.num_replays > 20
    assert replayed == eager


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_every_step_is_native_once_its_shape_was_seen(level: str, precision: str, tmp_path: Path) -> None:
    with at_level(level):
        model = load(write_checkpoint(tmp_path, "LlamaForCausalLM", seed=11), precision, max_model_len=MAX_LEN)
        kv = torch.float32 if precision == "float32" else torch.bfloat16
        eager, _ = served(model, False, BEST, kv)
        replayed, replay = served(model, True, BEST, kv)
    assert replay.reason == "" and replayed == eager
    # Others are only the steps that are recorded, and the very first, which allocates scratch memory.
    assert replay.num_steps - replay.num_replays == len(replay.recorded) + 1
    assert replay.num_replays > 20


def test_what_was_not_run_for_long_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.engine.decoder.cpu_runner.MAX_RECORDINGS", 2)
    model = load(write_checkpoint(tmp_path, "LlamaForCausalLM", seed=11), "int4", max_model_len=MAX_LEN)
    eager, _ = served(model, enabled=False)
    replayed, replay = served(model, enabled=True)
    assert len(replay.recorded) == 2
    assert replayed == eager


class Scaled(torch.nn.Module):
    """An embedding that does something of its own."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.embedding(token_ids)
        return rows * 1.5


def test_a_model_that_does_something_else_stays_eager_and_says_what(tmp_path: Path) -> None:
    model: Any = load(write_checkpoint(tmp_path, "LlamaForCausalLM", seed=11), "int4", max_model_len=MAX_LEN)
    model.embedding = Scaled(model.embedding)
    eager, _ = served(model, enabled=False)
    tried, replay = served(model, enabled=True)
    assert replay.reason == "mul is not a native operation"
    assert tried == eager


def test_steps_of_a_new_shape_are_first_until_they_are_run_again(tmp_path: Path) -> None:
    model: Any = load(write_checkpoint(tmp_path, "LlamaForCausalLM", seed=11), "int4", max_model_len=MAX_LEN)
    config, replay = model.config, DecoderReplay(model)
    cache = KvCache(
        KvShape(config.num_layers, SLOTS, MAX_LEN, config.cache_heads, config.cache_head_dim), torch.bfloat16
    )
    runner = CpuDecoderRunner(replay, cache, CpuBackend(torch.bfloat16), Sampler(config.vocab_size))
    scheduler = Scheduler(
        KvSlots(SLOTS, SLOTS * MAX_LEN), PrefillBudget(24), EngineLimits(MAX_LEN, SLOTS // 2, 24), {1}
    )
    engine = DecoderEngine(scheduler, runner, clock=count().__next__)
    engine.add(Generate("r", tuple(range(4, 14)), SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0), 0.0))
    firsts = []
    while engine.has_work:
        engine.step()
        assert engine.stats is not None
        firsts += [engine.stats.is_first] if engine.stats.phase == "decode" else []
    seen = RECORD_AFTER_STEPS + 1  # by the interpreter, and the one that is recorded
    assert firsts == seen * [True] + (7 - seen) * [False]
