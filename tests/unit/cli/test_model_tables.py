"""Output of `armature probe --model`: one screen of 120 columns, from facts and earlier measurements."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from app.cli.tables import PlanExplanation, explain_plan, render_explanation
from app.engine.calibration.cache import Calibration, CalibrationFile, calibration_key
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import CudaDevice, Facts, Needs
from app.hardware.plan.plan import make_plan
from app.settings import DEMO_DIRECTORY, Settings
from app.weights.checkpoint import open_checkpoint
from app.weights.forms import RECIPES
from planned_machines import machine

COLUMNS, LINES = 120, 45
H200 = CudaDevice(3, "NVIDIA H200", (9, 0), 143_771 * 2**20, 143_000 * 2**20, "GPU-3", "580.65.06")
ON_GPU = machine(cuda=(dataclasses.replace(H200, index=0, uuid="GPU-0", free_bytes=2**30), H200))
ON_M1 = machine(os="macos", architecture="arm64", mps=True, isa=frozenset({"neon", "lse"}))
NEEDS = Needs(
    "decoder", "LlamaForCausalLM", 1_235_814_400, 2_471_645_608, {"bf16": 2_471_628_800, "int8": 1_240_000_000, "int4": 660_000_000},
    16384, 131_072, 16, 2048, 128_256, "bfloat16", 980_000_000, 8,
)  # fmt: skip
SIZES = (16, 32, 64, 128, 256, 512)


def trial(precision: str, speed: float, threads: int = 8, *, full: bool = False, int8_copy: bool = False) -> TrialTimes:
    """`speed` tokens a second at one sequence, four times that at eight, twenty times that of a prompt."""
    decode = {1: 1 / speed, 8: 2 / speed}
    more = {2: 1.1 / speed, 4: 1.5 / speed, 16: 3 / speed, 32: 5 / speed, 64: 9 / speed} if full else {}
    prefill = {size: size / (20 * speed) for size in (SIZES if full else (128,))}
    return TrialTimes(precision, threads, decode | more, prefill, 2e-7, 10**9, 2e9, int8_copy)


MEASURED = Measurements(
    50e9, {"bf16": 1e12, "int8": 3e12, "int4": 3e12},
    (trial("bf16", 12.5), trial("int8", 25, full=True), trial("int4", 30), trial("int8", 20, threads=7)), seconds=2.9,
)  # fmt: skip


ENCODER = Needs(
    "encoder", "BertModel", 334_000_000, 1_336_000_000, {"fp32": 1_336_000_000, "bf16": 668_000_000, "int8": 400_000_000},
    0, 512, 24, 1024, 30_522, "float32",
)  # fmt: skip
TEXTS = {
    16: 16 / 400,
    32: 32 / 500,
    64: 64 / 700,
    128: 128 / 900,
    256: 256 / 1200,
    512: 512 / 1500,
    1024: 1024 / 1510,
    2048: 2048 / 1520,
}
ENCODED = Measurements(
    50e9, {"bf16": 1e12, "int8": 3e12},
    (
        TrialTimes("bf16", 8, {}, {}, read_bytes=10**9, operations_per_token=6e8, encode_seconds=TEXTS),
        TrialTimes("int8", 8, {}, {}, encode_seconds={16: 16 / 800, 256: 256 / 2400}),
    ),
    seconds=2.9,
)  # fmt: skip


def explained(
    measurements: Measurements | None,
    origin: str = "now",
    needs: Needs = NEEDS,
    host: Facts | None = None,
    **asked: str,
) -> PlanExplanation:
    host = machine() if host is None else host
    plan = make_plan(host, measurements, Settings(**asked), needs, RECIPES.keys())
    return PlanExplanation("a-model", host, needs, plan, measurements, origin)


def printed(what: PlanExplanation) -> str:
    console = Console(width=COLUMNS)
    with console.capture() as capture:
        console.print(render_explanation(what))
    return capture.get()


@pytest.mark.parametrize(
    "what",
    [
        explained(None),
        explained(MEASURED),
        explained(dataclasses.replace(MEASURED, trials=(trial("int4", 40, full=True),) * 9), precision="int4"),
        explained(
            dataclasses.replace(
                MEASURED, trials=(trial("int4", 9, full=True), trial("int4", 10, full=True, int8_copy=True))
            ),
            precision="int4",
            int8_copy="on",
        ),
        explained(dataclasses.replace(MEASURED, trials=(TrialTimes("bf16", 8, {}, {}),))),
        explained(ENCODED, needs=ENCODER),
        explained(None, needs=dataclasses.replace(ENCODER, kind="program", max_model_len=1, hidden_size=0)),
        explained(None, host=ON_GPU),
        explained(None, host=ON_GPU, needs=ENCODER),
        explained(None, host=ON_M1),
    ],
)
def test_it_is_one_screen(what: PlanExplanation) -> None:
    lines = printed(what).splitlines()
    assert len(lines) <= LINES
    assert max(len(line) for line in lines) <= COLUMNS
    assert not any("…" in line for line in lines), "nothing is cut off"


def test_what_serves_where_that_is_no_processor() -> None:
    text = printed(explained(None, host=ON_GPU))
    assert "3: NVIDIA H200, 140.4 GiB, 139.6 GiB free, capability 9.0, driver 580.65.06" in text
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("cuda_device")] == [["cuda_device", "3"]]
    assert "Apple GPU (MPS), may hold 48.0 GiB of 64.0 GiB, FP16 but no BF16" in printed(explained(None, host=ON_M1))
    forced = printed(explained(None, host=ON_GPU, device="cpu"))
    assert "NVIDIA" not in forced and "cuda_device" not in forced and "Asked for." in forced
    assert "\ndevice" not in printed(explained(None)), "where there is but a processor nobody wonders"


def test_the_chosen_way_is_marked_and_everything_that_was_timed_is_shown() -> None:
    text = printed(explained(MEASURED))
    marked = [line for line in text.splitlines() if line.startswith("▸")]
    assert len(marked) == 1 and marked[0].split()[:4] == ["▸", "int8,", "8", "threads"]
    assert marked[0].split()[-1] == "500", "of a prompt in the longest steps"
    rows = [line.split() for line in text.splitlines()]
    assert ["bf16,", "8", "threads", "12.5"] in [row[:4] for row in rows]
    assert ["int8,", "7", "threads", "20.0"] in [row[:4] for row in rows]


@pytest.mark.parametrize(
    "words",
    [
        "a-model on this machine",
        "LlamaForCausalLM, 1,236M parameters, 2.3 GiB of bfloat16, made for 131,072 tokens",
        "AMD EPYC (Zen 5), 8 cores",
        "12 minutes ago",
        "not measured for this model",
        "7 threads would take 1.25 times as long",
        "From measured steps: 24.9 tokens/s at 1 sequence",
        "Share of what this machine's memory and products allow: 50% at one sequence",
    ],
)
def test_what_it_says(words: str) -> None:
    text = " ".join(printed(explained(MEASURED, "12 minutes ago")).split())
    assert words in text


def test_an_encoder_is_reported_in_texts() -> None:
    text = printed(explained(ENCODED, needs=ENCODER))
    lines = [line.split() for line in text.splitlines()]
    assert "texts of 16" in text and "decode" not in text and "prompt" not in text
    assert next(line for line in lines if line[:2] == ["▸", "bf16,"])[4] == "400"
    assert next(line for line in lines if line[:1] == ["int8,"])[3] == "800"
    words = " ".join(text.split())
    assert "int8 was measured 2.00 times as fast" in words
    assert "11.7 texts of 128 tokens a second" in words and "in steps of 512" in words
    assert "batch_target_tokens 512" in words
    assert not any(name in words for name in ("kv_cache_bytes", "speculation", "itl_target_seconds"))


def test_a_copy_is_spoken_of_only_where_it_could_be() -> None:
    assert "int8_copy" not in printed(explained(MEASURED))
    assert "int8_copy" in printed(explained(MEASURED, precision="int4"))


def test_measurements_that_were_not_believed_are_not_shown() -> None:
    text = printed(explained(dataclasses.replace(MEASURED, fallback="the machine is too busy")))
    assert "▸" not in text and "From measured steps" not in text
    assert "Estimated from bytes and operations" in text
    assert "not used, since the machine is too busy" in text


def test_it_finds_what_an_earlier_start_measured(tmp_path: Path) -> None:
    asked, host = Settings(model=DEMO_DIRECTORY, cache_dir=tmp_path, calibrate="auto"), machine(cores=2)
    before = explain_plan(asked, host)
    assert before.measurements is None and f"armature calibrate --model {DEMO_DIRECTORY}" in before.origin
    checkpoint = open_checkpoint(DEMO_DIRECTORY)
    first = make_plan(host, None, asked, checkpoint.needs(), RECIPES.keys())
    timed = Measurements(trials=(trial("bf16", 900, threads=2, full=True),), seconds=1.2)
    CalibrationFile(tmp_path, calibration_key(host, asked, first, checkpoint.model_config)).write(
        Calibration(timed, time.time(), from_cache=False)
    )
    after = explain_plan(asked, host)
    assert after.origin == "just now, in 1.2 s, with this model's shapes"
    assert after.plan.speed.capacity_tokens_per_second["decode"][1] > 100
    fields = json.loads(json.dumps(after.to_json()))
    assert fields["measurements"]["trials"][0]["precision"] == "bf16" and fields["plan"]["threads"]["value"] == 2
    off = explain_plan(asked.model_copy(update={"calibrate": "off"}), host)
    assert off.measurements is None and "Asked for" in off.origin


def test_a_program_is_reported_in_rows() -> None:
    text = printed(
        explained(ENCODED, needs=dataclasses.replace(ENCODER, kind="program", max_model_len=1, hidden_size=0))
    )
    assert "Measured rows/s" in text and "steps of 16" in text
    assert not any(word in text for word in ("tokens/s", "texts", "max_model_len"))
