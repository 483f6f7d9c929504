"""From a checkpoint and a plan for a GPU to an engine on a fake device: reported stages, pages, captured steps, and a
warm-up without traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.backends import selection
from app.engine.build import BuildRequest, BuiltEngine, build
from app.engine.decoder import paged_kv_cache
from app.engine.decoder.build import build_device_decoder_engine, warm_up_device_decoder
from app.engine.decoder.cuda_graphs import GraphShape
from app.engine.decoder.device_runner import DeviceDecoderRunner
from app.engine.decoder.engine import DecoderEngine
from app.errors import PlanImpossible, StepFailed
from app.hardware.facts import CudaDevice
from app.hardware.plan.plan import ServingPlan
from app.messages import Generate, RequestFailed, SamplingParams
from app.models.decoders.decoder import Decoder
from app.weights.checkpoint import Checkpoint, open_checkpoint
from planned_machines import GIB, ON_GPUS, machine, plan
from simulated_device import SimulatedDeviceBackend
from tiny_checkpoints import write_checkpoint

EOS = 1
GPU = CudaDevice(0, "NVIDIA H200", (9, 0), 141 * GIB, 140 * GIB, "GPU-1", "580.65.06")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("build") / "tiny"))


@pytest.fixture(scope="module")
def planned(checkpoint: Checkpoint) -> ServingPlan:
    facts = machine(cuda=(GPU,))
    return plan(
        facts,
        checkpoint.needs(),
        ON_GPUS,
        device="cuda",
        precision="fp32",
        threads=1,
        max_running_seqs=3,
        speculation="off",
    )


@pytest.fixture(autouse=True)
def twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setitem(selection.DEVICE_BACKENDS, "cuda", SimulatedDeviceBackend)  # type: ignore[call-overload]
    yield
    torch.set_num_threads(threads)


def built_of(
    checkpoint: Checkpoint, planned: ServingPlan, told: list[str] | None = None
) -> BuiltEngine[DecoderEngine, DeviceDecoderRunner, Decoder]:
    return build_device_decoder_engine(
        BuildRequest(checkpoint, planned, (told if told is not None else []).append, eos_token_ids=(EOS,))
    )


def changed(planned: ServingPlan, **values: object) -> ServingPlan:
    return planned.changed(**values)


def test_loading_is_reported_stage_by_stage(checkpoint: Checkpoint, planned: ServingPlan) -> None:
    told: list[str] = []
    built_of(checkpoint, planned, told)
    told = [str(stage) for stage in told]
    kinds = list(dict.fromkeys(stage.partition(",")[0] for stage in told))
    assert kinds == ["preparing the device", "loading weights", "reserving KV memory", "capturing steps", "warming up"]
    assert "capturing steps, 100%" in told


def test_the_plans_device_says_which_engine_is_built(checkpoint: Checkpoint, planned: ServingPlan) -> None:
    engine = build(BuildRequest(checkpoint, planned, eos_token_ids=(EOS,)))
    assert isinstance(engine, DecoderEngine)
    assert isinstance(engine.runner, DeviceDecoderRunner) and engine.runner.shapes.decodes == (1, 2, 4)


def test_common_steps_are_captured_while_loading(checkpoint: Checkpoint, planned: ServingPlan) -> None:
    built = built_of(checkpoint, planned)
    prompts = {GraphShape(0, 256, tokens, fresh=True) for tokens in (32, 64, 128, 192, 256, 384, 512)}
    warm_up = GraphShape(0, 256, 32)  # the rest of a prompt
    assert set(built.runner.graphs.captured) == {warm_up, *prompts, *(GraphShape(bucket, 256) for bucket in (1, 2, 4))}
    eager = built_of(checkpoint, changed(planned, compile=False))
    assert not eager.runner.graphs.captured and eager.runner.graphs.reason == planned.decisions["compile"].reason


def test_the_warm_up_leaves_no_trace(checkpoint: Checkpoint, planned: ServingPlan) -> None:
    built = built_of(checkpoint, planned)
    pool = built.engine.scheduler.pool
    assert (
        built.runner.kv_cache.num_free_pages * built.runner.kv_cache.tokens_per_page
        == built.runner.kv_cache.capacity_tokens
    )
    assert pool.used_tokens == 0 and pool.capacity_tokens == built.runner.kv_cache.capacity_tokens
    assert built.engine.stats is None and built.engine.snapshot().rows == ()


def test_pages_take_no_more_than_the_plan_says(checkpoint: Checkpoint, planned: ServingPlan) -> None:
    page = 64 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, head_dim, FP32
    cache = built_of(checkpoint, changed(planned, kv_cache_bytes=5 * page + 7)).runner.kv_cache
    assert cache.reserved_bytes == 5 * page and cache.capacity_tokens == 4 * 64
    roomy = built_of(checkpoint, changed(planned, kv_cache_bytes=2**40)).runner.kv_cache
    assert roomy.capacity_tokens == 6 * 256, "two slots of a whole context for each sequence"


def test_a_model_with_states_is_built_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, "Qwen3_5ForCausalLM"))
    made = {"device": "cuda", "precision": "fp32", "threads": 1, "max_running_seqs": 3}
    built = built_of(checkpoint, plan(machine(cuda=(GPU,)), checkpoint.needs(), ON_GPUS, **made))
    pool, prompt = built.engine.scheduler.pool, tuple(range(4, 100))
    assert pool.checkpoints is not None and pool.checkpoints.num_rows > 0
    for name in ("first", "again"):
        built.engine.add(Generate(name, prompt, SamplingParams(max_tokens=3, temperature=0.0), arrived_at=0.0))
        while built.engine.has_work:
            built.engine.step()
    assert pool.checkpoints.hits == 1 and built.runner.graphs.num_replayed > 0


def test_less_than_two_pages_are_refused_with_numbers(checkpoint: Checkpoint, planned: ServingPlan) -> None:
    with pytest.raises(PlanImpossible, match=r"kv_cache_bytes is 30,000, but a page of 64 tokens takes 16,384"):
        built_of(checkpoint, changed(planned, kv_cache_bytes=30_000))


def test_memory_that_somebody_else_took_meanwhile_is_reported(
    checkpoint: Checkpoint, planned: ServingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(paged_kv_cache, "PagedKvCache", taken)
    with pytest.raises(PlanImpossible, match=r"no longer has .* GiB free for keys and values \(planted\)"):
        built_of(checkpoint, planned)


def test_the_largest_step_is_tried_and_what_does_not_fit_is_reported(
    checkpoint: Checkpoint, planned: ServingPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = built_of(checkpoint, planned)
    tokens, logits = list[int](), built.runner._forward.logits

    def scarce(views: object, sizes: object, bounds: object) -> object:
        tokens.append(sizes.tokens)  # type: ignore[attr-defined]
        if tokens[-1] > 100:
            raise torch.OutOfMemoryError("planted")
        return logits(views, sizes, bounds)  # type: ignore[arg-type]

    monkeypatch.setattr(built.runner._forward, "logits", scarce)
    warm_up_device_decoder(built.runner, 10_000)
    assert max(tokens) == 256, "nearly a whole context, of which the last token comes by itself, padded"
    assert "A step of 255 tokens needs more memory than the device has (planted)" in caplog.text
    assert built.runner.kv_cache.num_free_pages * 64 == built.runner.kv_cache.capacity_tokens


def test_a_model_that_is_not_finite_fails_its_requests_and_nothing_else(
    checkpoint: Checkpoint, planned: ServingPlan
) -> None:
    built = built_of(checkpoint, planned)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    built.engine.add(Generate("first", (5, 6, 7), params, 0.0))
    built.engine.step()
    norm = built.model.norm.weight
    assert isinstance(norm, torch.Tensor)
    before = norm.clone()
    with torch.inference_mode():
        norm.fill_(torch.nan)
    events = [event for _ in range(4) for event in built.engine.step()]
    assert isinstance(events[-1], RequestFailed) and "not finite" in str(events[-1].error)
    assert not built.engine.has_work
    with pytest.raises(StepFailed, match="not finite"):
        built.engine.check()
    with torch.inference_mode():
        norm.copy_(before)
    built.engine.add(Generate("again", (5, 6, 7), params, 0.0))
    while built.engine.has_work:
        assert not any(isinstance(event, RequestFailed) for event in built.engine.step())


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_model_of_a_few_positions_still_warms_up(length: int, checkpoint: Checkpoint, planned: ServingPlan) -> None:
    built_of(checkpoint, changed(planned, max_model_len=length))
