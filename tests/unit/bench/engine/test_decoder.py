"""The engine's bench on a tiny checkpoint: it counts what it holds, times what it says, keeps what Ctrl-C leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from app.engine.build import BuildRequest
from app.engine.decoder.build import build_decoder_engine
from app.hardware.facts import Cache, Core, Cpu, Facts
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.messages import Abort
from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import active_weights, expert_weights
from app.settings import load_settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from armature_bench.console import BenchOutcome, Figure, MeasurementFailed, outcome_table
from armature_bench.engine import decoder
from armature_bench.engine.ceilings import CpuCeilingSampler, MachineCeilings, WorkSamples
from armature_bench.engine.decoder import DecoderLoad, EngineBenchOptions, measure_decoder_engine
from armature_bench.engine.driver import DecoderDriver, ProductCosts, largest_cache_bytes, product_costs
from armature_bench.http.workload import TokenPrompts
from armature_kernels import ceilings
from armature_kernels.ceilings import MatmulThroughputProbe, ReadBandwidthProbe
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from tiny_checkpoints import config_values, write_checkpoint

FACTS = Facts("linux", "x86_64", Cpu("", ""), (Core((0,)),), 2**34, 2**34, (0,))
FLAGS = {"max_running_seqs": "16", "kv_cache_bytes": "64MiB", "threads": "1", "precision": "fp32"}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "PRODUCT_SHAPES", ((64, 64, 64),))
    monkeypatch.setattr(ceilings, "SPIN_DOWN_SECONDS", 0.0)
    monkeypatch.setattr(decoder, "STEPS_PER_ROUND", 3)


@dataclass(frozen=True)
class Prepared:
    checkpoint: Checkpoint
    plan: ServingPlan


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    checkpoint = open_checkpoint(
        write_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", max_position_embeddings=1024)
    )
    plan = make_plan(probe(), None, load_settings(**FLAGS)[0], checkpoint.needs(), RECIPES.keys())
    return Prepared(checkpoint, plan)


@pytest.fixture
def built(prepared: Prepared) -> Any:
    return build_decoder_engine(BuildRequest(prepared.checkpoint, prepared.plan))


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def figures_of(outcome: BenchOutcome) -> dict[str, Figure]:
    return {figure.name: figure for figure in outcome.figures}


def run(prepared: Prepared, asked: EngineBenchOptions) -> BenchOutcome:
    return measure_decoder_engine(prepared.checkpoint, prepared.plan, FACTS, asked)


def test_every_load_that_the_plan_can_serve_and_both_ceilings_are_measured(prepared: Prepared) -> None:
    outcome = run(prepared, EngineBenchOptions(rounds=2))
    figures = figures_of(outcome)
    assert outcome.complete
    assert {"memory read", "products, float32", "products, bfloat16"} < figures.keys()
    loads = [name for name in figures if name.startswith(("decode", "prefill"))]
    assert loads == ["decode ×1", "decode ×2", "decode ×4", "decode ×8", "decode ×16", "prefill 128", "prefill 512"]
    for name in loads:
        assert 0.0 < (figures[name].ratio or 0.0) <= 1.0, name
        assert figures[name].parts["tok/s"] == pytest.approx(
            int(name.split()[1].strip("×")) / figures[name].value * 1e3
        )
    assert figures["decode ×1"].target == 0.9
    assert figures["prefill 512"].target == 0.75
    assert outcome.details["plan"]["threads"]["value"] == 1
    assert {name: len(steps) for name, steps in outcome.details["step_seconds"].items() if "×" in name} == {
        f"decode ×{rows}": 6 for rows in (1, 2, 4, 8, 16)
    }


def test_what_is_named_is_measured_and_nothing_else(prepared: Prepared) -> None:
    outcome = run(prepared, EngineBenchOptions(rounds=2, rows=(3,), prompts=(40,), steps=5))
    assert [name for name in figures_of(outcome) if name.startswith(("decode", "prefill"))] == [
        "decode ×3",
        "prefill 40",
    ]
    assert len(outcome.details["step_seconds"]["decode ×3"]) == 6


def test_steps_after_a_long_context_are_compared_with_a_short_one(prepared: Prepared) -> None:
    outcome = run(prepared, EngineBenchOptions(rounds=2, contexts=(40, 8), steps=6))
    figures = figures_of(outcome)
    assert [name for name in figures if "×" in name] == [
        "decode ×1 after 40",
        "decode ×1 after 8",
        "decode ×1 after 40, over 8",
    ]
    longer, shorter = figures["decode ×1 after 40"], figures["decode ×1 after 8"]
    assert figures["decode ×1 after 40, over 8"].value == pytest.approx(longer.value / shorter.value)
    share = {figure.parts["with KV"] / figure.parts["of read"] for figure in (longer, shorter)}
    assert len(share) == 2, "more keys and values are read"


def test_a_beam_searchs_steps_have_their_own_limit(prepared: Prepared) -> None:
    outcome = run(prepared, EngineBenchOptions(rounds=2, beam_width=3, steps=150))
    figures = figures_of(outcome)
    assert [name for name in figures if "×" in name] == ["beam search ×3", "beam search ×3, p99"]
    assert len(outcome.details["step_seconds"]["beam search ×3"]) == 150
    assert figures["beam search ×3"].parts["tok/s"] == pytest.approx(3 / figures["beam search ×3"].value * 1e3)
    late = figures["beam search ×3, p99"]
    assert (late.target, late.at_most) == (decoder.BEAM_TARGET_MS, True)


def test_a_segment_of_a_beam_search_decodes_all_beams_at_every_step(built: Any, prepared: Prepared) -> None:
    driver = DecoderDriver(built.engine, TokenPrompts(range(2, 60)), prepared.plan.memory.max_model_len)
    seen: list[tuple[int, int]] = []
    step = driver._step

    def recorded() -> tuple[float, tuple[int, int]]:
        seen.append(step()[1])
        return 0.001, seen[-1]

    driver._step = recorded  # type: ignore[method-assign]
    assert len(driver.beam_search(4, 30)) == 30
    assert set(seen[-30:]) == {(0, 4)}


def test_many_steps_show_how_steady_they_are(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.010] * 400 + [0.030] * 6 + [0.010] * 594)
    monkeypatch.setattr(decoder, "_work", lambda driver, load, steps: [next(seconds) for _ in range(steps)])
    outcome = run(prepared, EngineBenchOptions(rounds=1, rows=(8,), steps=1000))
    steady = figures_of(outcome)["decode ×8, p99/p50"]
    assert (steady.value, steady.met) == (pytest.approx(1.0), True)
    assert outcome.notes[0].startswith("decode ×8: 6 of 1,000 steps took over 1.5 times the median: #400 30.0 ms, #401")


def test_the_table_fits_a_terminal(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_work", lambda driver, load, steps: [1.2345] * steps)
    monkeypatch.setattr(ProductCosts, "read_bytes", lambda self, tokens: 10**9)
    outcome = run(prepared, EngineBenchOptions(rounds=1, rows=(16,), prompts=(512,), steps=1000))
    assert "with KV" in outcome.figures[-3].parts
    assert Console(width=1000).measure(outcome_table(outcome)).maximum <= 120


def test_ctrl_c_keeps_what_was_measured(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    work = decoder._work

    def interrupted(driver: DecoderDriver, load: DecoderLoad, steps: int) -> list[float]:
        if load.name == "decode ×8":
            raise KeyboardInterrupt
        return work(driver, load, steps)

    monkeypatch.setattr(decoder, "_work", interrupted)
    outcome = run(prepared, EngineBenchOptions(rounds=2))
    assert not outcome.complete
    assert "decode ×1" in figures_of(outcome)
    assert "decode ×8" not in figures_of(outcome)


def test_weights_are_counted_as_they_are_held(built: Any) -> None:
    weights = product_costs(built.model, 320, 0)
    attention = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32
    layer = attention + 3 * 32 * 48
    assert weights.operations_per_token == 2 * 2 * layer
    assert weights.operations_per_logit_row == 2 * 320 * 32
    assert weights.num_bytes >= 4 * (2 * layer + 320 * 32)


def test_a_token_passes_some_experts_of_a_mixture(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "mixture", "Qwen3MoeForCausalLM"))
    plan = make_plan(probe(), None, load_settings(**FLAGS)[0], checkpoint.needs(), RECIPES.keys())
    config = ModelConfig.from_hf(config_values("Qwen3MoeForCausalLM"))
    weights = product_costs(
        build_decoder_engine(BuildRequest(checkpoint, plan)).model, config.vocab_size, cache_bytes=0
    )
    active, every = active_weights(config), active_weights(config) + (6 - 3) * expert_weights(config)
    assert weights.operations_per_token == 2 * active
    assert 4 * (active + 320 * 32) <= weights.read_bytes(1) < 4 * (every + 320 * 32)
    assert weights.read_bytes(1) < weights.read_bytes(2) < weights.read_bytes(100)
    assert weights.read_bytes(100) == weights.num_bytes + weights.expert_bytes
    every_byte = weights.num_bytes + weights.expert_bytes
    assert dataclasses.replace(weights, cache_bytes=every_byte // 2 - 1).read_bytes(1) == weights.read_bytes(1)


def test_weights_that_fit_a_cache_are_not_held_against_memory() -> None:
    assert ProductCosts(1000, 1.0, 1.0, cache_bytes=100).read_bytes(1) == 1000
    assert ProductCosts(1000, 1.0, 1.0, cache_bytes=500).read_bytes(1) == 0
    cached = Facts("linux", "x86_64", Cpu("", ""), (Core((0,)),), 1, 1, (0,), caches=(Cache(3, "unified", 77, 1),))
    assert largest_cache_bytes(cached, torch.device("cpu")) == 77


def test_a_step_quicker_than_the_ceiling_is_a_failed_measurement() -> None:
    weights = ProductCosts(int(1e9), 1.0, 1.0)
    samples = WorkSamples(weights.read_bytes(1), weights.operations(1, 1))
    samples.add_round([0.5], MachineCeilings(read=1e9, product=1e12))
    assert samples.read_shares == [2.0]
    mistaken = next(iter(decoder._load_figures(DecoderLoad(1, 1), samples, 0.0)))
    assert mistaken.mistake is not None


def test_keys_and_values_are_read_too() -> None:
    weights = ProductCosts(int(1e9), 1.0, 1.0)
    samples = WorkSamples(weights.read_bytes(8), weights.operations(8, 8))
    samples.add_round([2.0], MachineCeilings(read=1e9, product=1e12))
    parts = next(iter(decoder._load_figures(DecoderLoad(8, 8), samples, kv_bytes=1e8))).parts
    assert (parts["of read"], parts["with KV"], parts["MB/token"]) == (0.5, pytest.approx(0.9), 125.0)


def test_a_decode_step_decodes_every_row_and_prefills_nothing(built: Any) -> None:
    driver = DecoderDriver(built.engine, TokenPrompts(range(2, 320)), 1024)
    assert len(driver.decode(8, steps=4)) == 4
    stats = built.engine.stats
    assert stats is not None
    assert (stats.prefill_tokens, stats.decode_tokens) == (0, 8)
    assert not built.engine.has_work


def test_many_steps_are_made_in_sittings_of_equal_context(built: Any) -> None:
    driver = DecoderDriver(built.engine, TokenPrompts(range(2, 320)), 1024)
    driver.segment_steps = 3
    assert len(driver.decode(2, steps=8)) == 8
    assert next(driver._names) == 6, "three sittings of two sequences"


def test_a_prefill_computes_every_token(built: Any) -> None:
    driver = DecoderDriver(built.engine, TokenPrompts(range(2, 320)), 1024)
    assert driver.prefill(300) > 0.0
    assert driver.prefill(300) > 0.0
    stats = built.engine.stats
    assert stats is not None
    assert stats.cached_tokens == 0


def test_what_cannot_be_added_says_why(built: Any) -> None:
    with pytest.raises(MeasurementFailed, match="context"):
        DecoderDriver(built.engine, TokenPrompts(range(2, 320)), 1024).prefill(5000)


def test_sequences_that_end_early_are_noticed(built: Any) -> None:
    driver = DecoderDriver(built.engine, TokenPrompts(range(2, 320)), 1024)

    def end(seconds: float, tokens: tuple[int, int]) -> None:
        if tokens == (0, 1):
            built.engine.abort(Abort("bench-0"))

    driver.after_step = end
    with pytest.raises(MeasurementFailed, match="ended before"):
        driver.decode(1, steps=8)


def test_more_rows_than_the_plan_runs_are_noticed(built: Any) -> None:
    with pytest.raises(MeasurementFailed, match="never decoded together"):
        DecoderDriver(built.engine, TokenPrompts(range(2, 320)), 1024).decode(17, steps=1)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_readers_read_the_whole_buffer(threads: int) -> None:
    reading = ReadBandwidthProbe(threads, num_bytes=3 * 2**16)
    assert reading.sample() > 0.0
    for address in reading.parts:
        reading._buffer[address - reading._buffer.data_ptr() + reading.share - 1] = ceilings.ABSENT_BYTE
        with pytest.raises(AssertionError):
            reading._search(address)
    reading.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_has_a_rate(dtype: torch.dtype) -> None:
    assert MatmulThroughputProbe(dtype, shapes=((16, 32, 32),)).sample() > 0.0


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_the_ceiling_of_integers_has_every_form(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    rows = []
    monkeypatch.setattr(ceilings, "is_faster_in_four_bits", lambda: level == "avx2")
    packed = ceilings._four_bits
    monkeypatch.setattr(ceilings, "_four_bits", lambda *size: rows.append(size) or packed(*size))
    assert MatmulThroughputProbe(torch.int8, shapes=((16, 32, 64),)).sample() > 0.0
    assert rows == ([(32, 64)] if level == "avx2" else [])
    assert MatmulThroughputProbe(torch.int8, shapes=((16, 32, 64),), bits=8).sample() > 0.0
    assert rows == ([(32, 64)] if level == "avx2" else []), "eight bits are not compared with four"
    assert packed(32, 64).dequantized().abs().max() > 0


def test_a_machine_keeps_its_samples() -> None:
    machine = CpuCeilingSampler(1, torch.bfloat16)
    machine.sample_other_dtypes()
    sampled = machine.sample()
    machine.close()
    assert machine.reads == [sampled.read]
    assert machine.products[torch.bfloat16] == [sampled.product]
    assert len(machine.products[torch.float32]) == 1
