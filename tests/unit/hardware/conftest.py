"""The facts of recorded hosts (`hosts/README.md`), and a model to plan for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.hardware.facts import Facts, Needs
from app.hardware.probe.probe import probe
from recorded_hosts import read_tree, write_tree

Recorded = Callable[[str], Facts]


@pytest.fixture(autouse=True)
def _settings_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan makes of defaults is tested with them; other tests say that nothing is measured."""
    monkeypatch.delenv("ARMATURE_CALIBRATE", raising=False)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The facts of a recorded host, probed once."""
    known: dict[str, Facts] = {}

    def facts(name: str) -> Facts:
        if name not in known:
            root = tmp_path_factory.mktemp(name)
            known[name] = probe(root, write_tree(read_tree(name), root))
        return known[name]

    return facts


@pytest.fixture
def llama_1b() -> Needs:
    """Llama-3.2-1B: its config.json and the headers of its safetensors."""
    return Needs(
        kind="decoder",
        architecture="LlamaForCausalLM",
        num_parameters=1_235_814_400,
        weight_bytes=2_471_645_608,
        bytes_by_precision={"fp32": 4_943_257_600, "bf16": 2_471_628_800, "int8": 1_240_000_000, "int4": 660_000_000},
        kv_elements_per_token=2 * 16 * 8 * 64,
        max_model_len=131_072,
        num_layers=16,
        hidden_size=2048,
        vocab_size=128_256,
        stored_dtype="bfloat16",
        int8_copy_bytes=980_000_000,
        num_kv_heads=8,
        layer_weights={2048: 16 * (3072 + 2048 + 2 * 8192) * 2048, 8192: 16 * 2048 * 8192},
    )


@pytest.fixture
def recipes() -> frozenset[tuple[str, str, str]]:
    """What is built: both precisions on both kinds of processor."""
    return frozenset(
        ("cpu", architecture, precision) for architecture in ("x86_64", "arm64") for precision in ("fp32", "bf16")
    )
