"""Write the table of docs/auto.md from recorded hosts: `python -m tools.auto_table`; `--check` only compares it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from app.errors import PlanImpossible
from app.hardware.decision import format_bytes
from app.hardware.facts import Facts, NativeLibrary, Needs
from app.hardware.plan.plan import make_plan
from app.hardware.plan.speed import FEW_SEQS, SEVERAL_SEQS, format_rate
from app.hardware.probe.probe import probe
from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import tensors_of
from app.settings import Settings
from app.weights.checkpoint import Checkpoint
from app.weights.forms import RECIPES
from app.weights.safetensors import TensorEntry
from armature_bench.published.models import LLAMA_1B, LLAMA_3B, LLAMA_8B
from tools.generated_page import write_or_check
from tools.random_checkpoint import SHAPES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from recorded_hosts import HOSTS, read_tree, write_tree

TARGET = Path(__file__).resolve().parent.parent / "docs" / "auto.md"
LEVELS = {
    "x86_64": ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "portable"),
    "arm64": ("i8mm", "dotprod", "neon"),
}  # levels of the released wheels (armature_kernels/csrc/levels)

# Recorded hosts, and the name of each processor.
SHOWN: Mapping[str, str] = {
    "radxa-x4": "Intel N100 (Radxa X4)",
    "core-i7-1360p": "Intel i7-1360P",
    "xeon-avx2": "Intel Broadwell",
    "skylake": "Intel Skylake",
    "cascade-lake": "Intel Cascade Lake",
    "ice-lake": "Intel Ice Lake",
    "xeon-amx": "Intel Sapphire Rapids",
    "zen2": "AMD Zen 2",
    "zen3": "AMD Zen 3",
    "zen4": "AMD Zen 4",
    "zen5-vm": "AMD Zen 5",
    "graviton2": "AWS Graviton2",
    "graviton3": "AWS Graviton3",
    "graviton4": "AWS Graviton4",
    "altra": "Ampere Altra",
    "axion": "Google Axion",
    "grace": "NVIDIA Grace",
    "orion-o6": "CIX P1 (Radxa Orion O6)",
    "rock-5b": "Rockchip RK3588",
    "raspberry-pi-5": "Raspberry Pi 5",
}

# SmolLM2-135M, Llama 3.2 1B and 3B, and Llama 3.1 8B.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "135M": SHAPES["llama-135m"],
    **{f"{size}B": each.config | {"max_position_embeddings": 131_072}
       for size, each in ((1, LLAMA_1B), (3, LLAMA_3B), (8, LLAMA_8B))},
}  # fmt: skip


def needs_of(config: Mapping[str, Any]) -> Needs:
    values = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "hidden_act": "silu", **config}
    model = ModelConfig.from_hf(values)
    nowhere = Path("model.safetensors")
    tensors: dict[str, TensorEntry] = {}
    for name, shape in tensors_of(model).items():
        entry = TensorEntry(nowhere, "BF16", shape, 0, 0)
        tensors[name] = replace(entry, end=2 * entry.num_elements)
    return Checkpoint(nowhere.parent, values, {}, model, tensors).needs()


def facts_of(host: str) -> Facts:
    """Return the facts of a recorded host, with the released native library and without a GPU."""
    with TemporaryDirectory() as folder:
        found = probe(Path(folder), write_tree(read_tree(host), Path(folder)))
    return replace(found, native=NativeLibrary(LEVELS[found.architecture]), torch=None, cuda=(), mps=False)


def page() -> str:
    head = ("processor", "cores", "memory", "kernels", *MODELS)
    needs = [needs_of(config) for config in MODELS.values()]
    rows = [head, ["---"] * len(head), *(_row(host, facts_of(host), needs) for host in SHOWN)]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), ""])


def _row(host: str, facts: Facts, needs: Sequence[Needs]) -> Sequence[str]:
    plan = make_plan(facts, None, Settings(), None, RECIPES.keys())
    source = (HOSTS / host / "SOURCE.md").read_text(encoding="utf-8")
    star = " *" if "\nComposed from" in source else ""
    memory, choices = format_bytes(facts.memory_bytes), (choice(facts, each) for each in needs)
    return SHOWN[host] + star, str(plan.cpu.threads), memory, plan.weights.kernels, *choices


def choice(facts: Facts, needs: Needs) -> str:
    """Return the chosen precision and its two rates, or that the model is refused."""
    try:
        plan = make_plan(facts, None, Settings(), needs, RECIPES.keys())
    except PlanImpossible:
        return "refused"
    rates = plan.speed.capacity_tokens_per_second.get("decode", {})
    shown = (format_rate(rates.get(rows, rates[max(rates)])) for rows in (FEW_SEQS, SEVERAL_SEQS))
    return f"{plan.weights.precision}, {' and '.join(shown)}"


def main(arguments: list[str]) -> int:
    return write_or_check(arguments, TARGET, page())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
