"""From a checkpoint and a plan to an engine: reported stages, a warm-up without traces, and measured model time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.engine.build import BuildRequest, BuiltEngine
from app.engine.decoder import build
from app.engine.decoder.build import build_decoder_engine, kv_shape, warm_up_decoder
from app.engine.decoder.cpu_runner import CpuDecoderRunner, DecoderReplay
from app.engine.decoder.engine import DecoderEngine
from app.engine.encoder.build import build_encoder_engine
from app.errors import PlanImpossible
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.messages import Generate, SamplingParams
from app.metrics.instruments import Metrics
from app.metrics.load_progress import LoadProgress
from app.metrics.steps import EngineSnapshot, StepStats
from app.models.decoders.decoder import Decoder
from app.settings import Settings, load_settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from tiny_checkpoints import write_checkpoint
from tiny_encoders import write_encoder

EOS = 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("build") / "tiny"))


@pytest.fixture(scope="module")
def plan(checkpoint: Checkpoint) -> ServingPlan:
    settings, _ = load_settings(threads="1", precision="fp32", kv_cache_bytes="1MiB", max_running_seqs="3")
    return make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())


@pytest.fixture
def stages() -> list[LoadProgress | str]:
    return []


@pytest.fixture
def built(
    checkpoint: Checkpoint, plan: ServingPlan, stages: list[LoadProgress | str]
) -> Iterator[BuiltEngine[DecoderEngine, CpuDecoderRunner, Decoder]]:
    threads = torch.get_num_threads()
    yield build_decoder_engine(BuildRequest(checkpoint, plan, stages.append, eos_token_ids=(EOS,)))
    torch.set_num_threads(threads)


def run(built: BuiltEngine[DecoderEngine, CpuDecoderRunner, Decoder], **params: object) -> StepStats:
    built.engine.add(Generate("r", tuple(range(4, 40)), SamplingParams(temperature=0.0, **params), 0.0))  # type: ignore[arg-type]
    while built.engine.has_work:
        built.engine.step()
    assert built.engine.stats is not None
    return built.engine.stats


def test_loading_is_reported_stage_by_stage(
    built: BuiltEngine[DecoderEngine, CpuDecoderRunner, Decoder], stages: list[LoadProgress | str]
) -> None:
    kinds = list(dict.fromkeys(str(stage).partition(",")[0] for stage in stages))
    assert kinds == ["preparing the device", "loading weights", "reserving KV memory", "warming up"]
    reports = [stage for stage in stages if isinstance(stage, LoadProgress)]
    places = [(report.phase, report.done_bytes, report.done_layers) for report in reports]
    assert places == sorted(set(places)), "each report is new"
    assert reports[-1].percent == 100


def test_every_sequence_may_share_a_prefix_of_another(checkpoint: Checkpoint, plan: ServingPlan) -> None:
    shape = kv_shape(checkpoint.model_config, plan)
    assert (shape.num_slots, shape.max_len) == (6, plan.memory.max_model_len)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (2, 2, 8)


@pytest.mark.cases(test=1)
@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="no native kernels here")
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_keys_that_layers_share_are_stored_once_and_steps_are_replayed(tmp_path: Path, precision: str) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", "Gemma3nForCausalLM"))
    settings, _ = load_settings(threads="1", precision=precision, kv_cache_bytes="1MiB", max_running_seqs="3")
    plan = make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())
    threads = torch.get_num_threads()
    built = build_decoder_engine(BuildRequest(checkpoint, plan, lambda stage: None, eos_token_ids=(EOS,)))
    torch.set_num_threads(threads)
    cache = built.runner.kv_cache
    assert cache.shape.num_layers == 2 and cache.bytes_per_token == checkpoint.needs().kv_elements_per_token * (
        cache.dtype.itemsize
    )
    run(built, max_tokens=20, ignore_eos=True)
    replay = built.runner.model
    assert isinstance(replay, DecoderReplay) and replay.reason == "" and replay.num_replays > 5


def test_the_warm_up_leaves_no_trace(
    built: BuiltEngine[DecoderEngine, CpuDecoderRunner, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert built.runner.kv_cache.resident_bytes() == 0
    assert built.engine.stats is None
    now = built.engine.snapshot()
    assert (now.kv_used_tokens, now.rows, now.num_running) == (0, (), 0)
    monkeypatch.setattr(built.runner.kv_cache, "release", lambda *_: None)
    warm_up_decoder(built.runner)
    assert built.runner.kv_cache.resident_bytes() > 0, "a warm-up writes keys and values, or it warms nothing"


def test_the_budget_bounds_what_is_kept(
    built: BuiltEngine[DecoderEngine, CpuDecoderRunner, Decoder], plan: ServingPlan
) -> None:
    capacity = built.engine.snapshot().kv_capacity_tokens
    assert 0 < capacity * built.runner.kv_cache.bytes_per_token <= plan.memory.kv_cache_bytes


def test_a_budget_beyond_all_slots_is_not_used(
    checkpoint: Checkpoint, plan: ServingPlan, stages: list[LoadProgress | str]
) -> None:
    roomy = plan.changed(kv_cache_bytes=2**40)
    built = build_decoder_engine(BuildRequest(checkpoint, roomy, stages.append))
    assert (
        built.engine.snapshot().kv_capacity_tokens
        <= built.runner.kv_cache.shape.num_slots * built.runner.kv_cache.stride
    )


def test_a_quota_that_binds_reaches_the_engine(
    built: BuiltEngine[DecoderEngine, CpuDecoderRunner, Decoder], checkpoint: Checkpoint, plan: ServingPlan
) -> None:
    assert built.engine.throttle_correction.quota_cores == plan.cpu.throttling_quota
    throttled = plan.changed(throttling_quota=0.25)
    assert build_decoder_engine(BuildRequest(checkpoint, throttled)).engine.throttle_correction.quota_cores == 0.25


def test_a_quota_that_binds_reaches_an_encoders_engine(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_encoder(tmp_path / "tiny"))
    plan = make_plan(probe(), None, Settings(threads=1, precision="fp32"), checkpoint.needs(), RECIPES.keys())
    throttled = plan.changed(throttling_quota=0.25)
    assert build_encoder_engine(BuildRequest(checkpoint, throttled)).engine.throttle_correction.quota_cores == 0.25


def test_what_ends_a_text_reaches_the_scheduler(
    built: BuiltEngine[DecoderEngine, CpuDecoderRunner, Decoder], checkpoint: Checkpoint, plan: ServingPlan
) -> None:
    free = build_decoder_engine(BuildRequest(checkpoint, plan))
    picked: list[int] = []
    free.engine.add(Generate("r", (5, 6, 7), SamplingParams(max_tokens=1, temperature=0.0), 0.0))
    for event in free.engine.step():
        picked += getattr(event, "token_ids", ())
    stopping = build_decoder_engine(BuildRequest(checkpoint, plan, eos_token_ids=picked))
    stopping.engine.add(Generate("r", (5, 6, 7), SamplingParams(max_tokens=9, temperature=0.0), 0.0))
    (finished,) = stopping.engine.step()
    assert getattr(finished, "reason", None) == "stop"


def test_a_model_of_a_single_position_still_warms_up(
    built: BuiltEngine[DecoderEngine, CpuDecoderRunner, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "WARM_UP_TOKENS", 1)
    warm_up_decoder(built.runner)


def test_the_models_share_of_a_step_is_known(built: BuiltEngine[DecoderEngine, CpuDecoderRunner, Decoder]) -> None:
    stats = run(built, max_tokens=3, ignore_eos=True)
    assert 0.0 < stats.model_seconds < stats.seconds


def test_the_models_time_is_counted_by_phase() -> None:
    metrics = Metrics()
    metrics.on_step(StepStats(seconds=2.0, decode_tokens=1, model_seconds=1.5), EngineSnapshot())
    metrics.on_step(StepStats(seconds=2.0, decode_tokens=1, model_seconds=1.0), EngineSnapshot())
    text = metrics.render()[0].decode()
    assert 'armature_model_seconds_total{phase="decode"} 2.5' in text


@pytest.mark.skipif(not has_kernel(OpCode.ATTENTION), reason="no native kernels here")
def test_attention_that_depends_on_the_batch_is_refused_where_it_may_not(tmp_path: Path, plan: ServingPlan) -> None:
    odd = open_checkpoint(write_checkpoint(tmp_path, head_dim=12))
    chosen = {
        "deterministic": True,
        "precision": "int8",
        "dtype": "bfloat16",
        "kv_precision": "bf16",
        "pack_folder": None,
    }
    fixed = plan.changed(**chosen)
    with pytest.raises(PlanImpossible, match="our attention has no kernel for 4 heads of 12"):
        build_decoder_engine(BuildRequest(odd, fixed, eos_token_ids=(EOS,)))
