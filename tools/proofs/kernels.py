"""int4 on 64-bit Arm: our kernels at each level, and torch's KleidiAI kernels without them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tools.proofs.containers import Container, Image
from tools.proofs.findings import ROOT, Findings

INSTALLED = "/opt/armature"
LIBRARY = f"{INSTALLED}/armature_kernels/libarmature.so"
# The text whose activations packing observes. Its beginning is enough here: emulated, the whole takes 15 minutes.
TEXT = "app/engine/calibration/calibration_text.txt"
TEXT_CHARACTERS = 4_000
PROMPT = "Once upon a time"
TOKENS = 8
EMULATED_SECONDS = 900.0
# The processor that the emulation presents: its best, and one without i8mm. No effect on a real processor. With SVE of
# 512 bits or more in the emulator, torch's Cholesky decomposition in FP32 is wrong by 20%.
LEVELS = {"max,sve-max-vq=2": "i8mm", "neoverse-n1": "dotprod"}
PROBE = Path(__file__).with_name("kleidi_probe.py")
MOST_ROUNDING = 1.1
MOST_ERROR = 0.02  # share of the largest product: activations have eight bits, and half a step is one part in 254

TWO_WAYS = """torch's operator has two implementations. If the processor and the scales allow it, weights are packed
into bytes for KleidiAI's kernels, and the operator calls those for any weight of the packed size. Otherwise weights
are kept as FP32 numbers and multiplied by a plain loop. The dtype of the packed weight therefore shows which one
runs."""


def run(findings: Findings, image: Image, here: Image, limits: tuple[str, ...]) -> None:
    """Run the checks. `here` is this machine's own image, which then starts with the same cache volume."""
    with tempfile.TemporaryDirectory() as folder:
        cache, empty = Path(folder) / "cache", Path(folder) / "empty"
        cache.mkdir()
        cache.chmod(0o777)
        empty.touch()
        text = Path(folder) / "text"
        text.write_text((ROOT / TEXT).read_text()[:TEXT_CHARACTERS])
        limits = (*limits, f"--volume={text}:{INSTALLED}/{TEXT}:ro")
        volume = f"--volume={cache}:/var/cache/armature"
        for processor, level in LEVELS.items():
            with Container(image, (*limits, volume, f"--env=QEMU_CPU={processor}"), ("--precision", "int4")) as server:
                server.wait_until_ready()
                _serves(findings, server, f"{processor}: our library at level {level}", level)
        if here.architecture != image.architecture:
            _shares(findings, here, cache, (*limits, volume))
        without = (*limits, f"--volume={empty}:{LIBRARY}:ro")
        with Container(image, without, ("--precision", "int4")) as server:
            server.wait_until_ready()
            _serves(findings, server, "without our library", "torch")
        _kleidi(findings, image, without)


def _shares(findings: Findings, here: Image, cache: Path, options: tuple[str, ...]) -> None:
    """Check two architectures on one cache volume: neither uses, removes or complains about the other's packs."""
    before = _packs(cache)
    with Container(here, options, ("--precision", "int4")) as server:
        server.wait_until_ready()
        warnings = [line for line in server.log().splitlines() if " WARNING " in line and "pack" in line]
    after = _packs(cache)
    kept = bool(before) and before.items() <= after.items() and len(after) > len(before) and not warnings
    found = f"{len(before)} files before, all kept and {len(after) - len(before)} more after; {len(warnings)} warnings"
    findings.check(
        f"{here.architecture} packs beside {len(before)} of another architecture, in one volume", kept, found
    )


def _packs(cache: Path) -> dict[str, tuple[int, int]]:
    found = {str(file.relative_to(cache)): file.stat() for file in (cache / "packs").rglob("*") if file.is_file()}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found.items()}


def _serves(findings: Findings, server: Container, what: str, level: str) -> None:
    plan = server.get("/info")["plan"]
    serving = plan["kernels"]["value"], plan["precision"]["value"]
    findings.check(f"{what} serves int4", serving == (level, "int4"), ", ".join(serving), f"{level}, int4")
    answer = server.post("/generate", {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True})
    made = answer["usage"]["completion_tokens"]
    findings.check(f"{what}: generates", made == TOKENS, f"“{answer['text']}”", f"{TOKENS} tokens")


def _kleidi(findings: Findings, image: Image, options: tuple[str, ...]) -> None:
    """Profile the whole engine on one prompt, then compare one product with the exact result for its codes."""
    found = json.loads(image.python(PROBE.read_text(), *options, seconds=EMULATED_SECONDS).splitlines()[-1])
    layers, forms = found["layers"], found["forms"]
    findings.check(
        "every layer of the engine but the output layer holds torchao's tensor for KleidiAI",
        forms.get("IntxOpaqueTensor") == layers - 1,
        forms,
        f"{layers - 1} of {layers} layers",
    )
    least = found["steps"] * (layers - 1)
    findings.check(
        "each step multiplied by torch's operator for it",
        found["products"] >= least,
        f"{found['products']} products by aten::_dyn_quant_matmul_4bit in {found['steps']} steps",
        f">= {least}",
    )
    findings.check(
        "weights are packed, bytes for KleidiAI's kernels", found["packed"] == "torch.uint8", found["packed"], "uint8"
    )
    findings.check(
        "the reference path is told apart by this",
        found["reference"] == "torch.float32",
        f"with scales that KleidiAI does not take: {found['reference']}",
        "float32, which is how torch keeps weights that its own loop multiplies",
    )
    findings.check(
        "products are right", found["error"] <= MOST_ERROR, f"{found['error']:.4f} of the largest", f"<= {MOST_ERROR}"
    )
    findings.check(
        "its codes are roundings of the weights",
        found["rounding"] <= MOST_ROUNDING,
        f"{found['rounding']:.3f} times the largest error of torch's codes",
        f"<= {MOST_ROUNDING}",
    )
    findings.notes.append(TWO_WAYS)
