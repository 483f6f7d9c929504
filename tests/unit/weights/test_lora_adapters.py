"""Opening adapters of peft: what is served, what is refused by its name, and mutated adapters."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.decoder.adapters import load_adapter
from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.weights.checkpoint import open_checkpoint
from app.weights.files import readable_or_invalid
from app.weights.lora.adapter import LoraAdapter, open_adapter
from tiny_adapters import PREFIX, adapter_tensors, write_adapter
from tiny_checkpoints import write_checkpoint

LAYER = "model.layers.0.self_attn.q_proj"
FIRST = "model.layers.0.mlp.down_proj"  # in the file
NAMES = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"))


def config_of(base: Path) -> ModelConfig:
    return open_checkpoint(base).decoder


def scales(adapter: LoraAdapter) -> set[float]:
    return {each.scale for each in adapter.matrices.values()}


def test_an_adapter_of_all_layers_is_opened(base: Path, tmp_path: Path) -> None:
    adapter = open_adapter(write_adapter(tmp_path, base, rank=4), config_of(base))
    assert len(adapter.matrices) == 2 * 7
    assert adapter.rank == 4
    assert scales(adapter) == {1.5}


def test_rslora_divides_by_the_root_of_the_rank(base: Path, tmp_path: Path) -> None:
    assert scales(open_adapter(write_adapter(tmp_path, base, rank=4, use_rslora=True), config_of(base))) == {3.0}


def test_alpha_patterns_name_layers(base: Path, tmp_path: Path) -> None:
    patterns = {"q_proj": 8, f"^{LAYER.replace('q_proj', 'k_proj')}": 16}
    adapter = open_adapter(write_adapter(tmp_path, base, rank=4, alpha_pattern=patterns), config_of(base))
    assert adapter.matrices[LAYER].scale == 2.0
    assert adapter.matrices[LAYER.replace("q_proj", "k_proj")].scale == 4.0
    assert adapter.matrices[LAYER.replace("q_proj", "v_proj")].scale == 1.5


def test_patterns_are_expressions_as_in_peft(base: Path, tmp_path: Path) -> None:
    """The first pattern that the end of a name matches counts; the end begins after a dot."""
    patterns = {r"layers\.0\..*\.(q|k)_proj": 8, "proj": 2, "[a-z]_proj": 16, r"^model\.layers\.\d\.mlp\.up_proj$": 32}
    adapter = open_adapter(write_adapter(tmp_path, base, rank=4, alpha_pattern=patterns), config_of(base))
    found = {name.removeprefix("model.layers."): each.scale for name, each in adapter.matrices.items()}
    assert (found["0.self_attn.k_proj"], found["1.self_attn.k_proj"]) == (2.0, 4.0)
    assert (found["1.mlp.up_proj"], found["1.mlp.gate_proj"]) == (8.0, 1.5)


def test_ranks_follow_patterns(base: Path, tmp_path: Path) -> None:
    low = adapter_tensors(base, rank=2, adapts=lambda name: "mlp" in name)
    tensors = {**adapter_tensors(base, rank=4), **low}
    values: dict[str, Any] = {"rank_pattern": {r"mlp\.\w+": 2}, "alpha_pattern": {"up_proj|down_proj": 3}}
    adapter = open_adapter(write_adapter(tmp_path, base, rank=4, tensors=tensors, **values), config_of(base))
    assert {name.rpartition(".")[2]: (each.rank, each.scale) for name, each in adapter.matrices.items()} == {
        **dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj"], (4, 1.5)),
        **dict.fromkeys(["up_proj", "down_proj"], (2, 1.5)),
        "gate_proj": (2, 3.0),
    }


TARGETS: list[dict[str, Any]] = [
    {"target_modules": "all-linear"},
    {"target_modules": NAMES, "exclude_modules": ["lm_head"]},
    {
        "target_modules": [f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj",)]
        + NAMES
    },
    {"target_modules": r"^(model(?=\.).*\.(q|k|v|o|gate|up|down)_proj)$", "exclude_modules": r".*\.(visual|lm_head).*"},
    {"target_modules": r"(?!.*vision)(?:.*?(?:self_attn|mlp).*?(?:proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.x)"},
    {"target_modules": NAMES, "layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]},
    {"target_modules": NAMES, "fan_in_fan_out": True, "lora_dropout": 0.1, "task_type": "CAUSAL_LM"},
]


@pytest.mark.parametrize("values", TARGETS)
def test_targets_of_every_form_are_followed(values: dict[str, Any], base: Path, tmp_path: Path) -> None:
    assert len(open_adapter(write_adapter(tmp_path, base, **values), config_of(base)).matrices) == 14


WRAPPED = (
    ("base_model.model.", "", ".default"),
    ("module.base_model.model.", "", ""),
    ("base_model.model._orig_mod.", "", ".default"),
    ("_fsdp_wrapped_module.base_model.model.", "_fsdp_wrapped_module.", ""),
    ("", "", ""),
)


@pytest.mark.parametrize(("start", "inside", "name"), WRAPPED)
def test_names_may_have_what_training_put_around_them(
    start: str, inside: str, name: str, base: Path, tmp_path: Path
) -> None:
    renamed = {
        stored.replace(PREFIX, start)
        .replace("self_attn.", f"self_attn.{inside}")
        .replace(".weight", f"{name}.weight"): one
        for stored, one in adapter_tensors(base).items()
    }
    adapter = open_adapter(write_adapter(tmp_path, base, tensors=renamed, target_modules=NAMES), config_of(base))
    assert len(adapter.matrices) == 14


def test_a_file_has_one_adapter(base: Path, tmp_path: Path) -> None:
    tensors = {name.replace(".weight", ".law.weight"): tensor for name, tensor in adapter_tensors(base).items()}
    with pytest.raises(CheckpointInvalid, match=r"holds several adapters \(law, no name\)"):
        open_adapter(write_adapter(tmp_path, base, tensors=tensors | adapter_tensors(base)), config_of(base))


def test_an_adapter_saved_without_the_output_layer_is_opened(base: Path, tmp_path: Path) -> None:
    renamed = {name.replace(f"{PREFIX}model.", PREFIX): tensor for name, tensor in adapter_tensors(base).items()}
    assert LAYER in open_adapter(write_adapter(tmp_path, base, tensors=renamed), config_of(base)).matrices


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is True, and DoRA"),
    ({"bias": "all"}, "bias is all"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"use_kasa": True, "kasa_config": {"beta": 1}}, "kasa_config is"),
    ({"lora_of_tomorrow": 3}, "lora_of_tomorrow is not known"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is pissa_niter_4"),
    ({"peft_type": "IA3"}, "peft_type is IA3"),
    ({"peft_type": None}, "peft_type is None"),
    ({"lora_alpha": "much"}, "lora_alpha must be a number, not much"),
    ({"lora_alpha": None}, "lora_alpha must be a number"),
    ({"alpha_pattern": {"(?<=q)_proj": 8}}, "alpha_pattern has '(?<=q)_proj', which has (?<, which is not supported"),
    ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern of 'q_proj' must be a number"),
    ({"rank_pattern": {"(": 8}}, "rank_pattern has '(', which has an unbalanced parenthesis"),
    ({"rank_pattern": {"q_proj": 8}}, f"gives {LAYER} the rank 8, and its matrices have 4"),
    ({"r": 8}, "the rank 8, and its matrices have 4"),
    ({"target_modules": ["k_proj"]}, f"the file has matrices of {FIRST}, which target_modules"),
    ({"target_modules": r".*\.mlp\..*"}, "matrices of model.layers.0.self_attn.k_proj"),
    ({"target_modules": [1]}, "target_modules must be an expression or a list of names"),
    ({"target_modules": "(" * 40 + ")" * 40}, "parentheses more than 32 deep"),
    ({"exclude_modules": ["q_proj"]}, f"matrices of {LAYER}"),
    ({"exclude_modules": ".*q_proj"}, f"matrices of {LAYER}"),
    ({"target_modules": NAMES, "layers_to_transform": [0]}, "matrices of model.layers.1.mlp.down_proj"),
    ({"target_modules": NAMES, "layers_to_transform": "0"}, "layers_to_transform must be"),
    ({"target_modules": NAMES, "layers_to_transform": 0, "layers_pattern": "h"}, f"matrices of {FIRST}"),
    ({"layers_pattern": 1}, "layers_pattern must be a name"),
    ({"alpha_pattern": [1]}, "alpha_pattern must map"),
    ({"rank": 65}, "has rank 65, and at most 64"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(
    values: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointInvalid) as refused:
        open_adapter(write_adapter(tmp_path, base, **values), config_of(base))
    assert message in refused.value.message


TENSORS: list[tuple[str, tuple[int, ...], str]] = [
    (f"{PREFIX}model.embed_tokens.lora_embedding_A", (4, 320), "the embedding or the output layer"),
    (f"{PREFIX}lm_head.lora_A.weight", (4, 32), "only one of lora_A and lora_B"),
    (f"{PREFIX}{LAYER}.lora_magnitude_vector", (32,), "belongs to DoRA"),
    (f"{PREFIX}{LAYER}.lora_A.bias", (32,), "is no matrix of a LoRA adapter"),
    (f"{PREFIX}{LAYER}.lora_A.weight", (4, 33), "Was the adapter made for another model?"),
    (f"{PREFIX}{LAYER}.lora_A.weight", (0, 32), "Was the adapter made for another model?"),
    (f"{PREFIX}{LAYER}.lora_B.weight", (32, 5), "Was the adapter made for another model?"),
    (f"{LAYER}.lora_A.weight", (4, 32), "has two matrices A"),
]


@pytest.mark.parametrize(("name", "shape", "message"), TENSORS)
def test_tensors_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], message: str, base: Path, tmp_path: Path
) -> None:
    tensors = adapter_tensors(base) | {name: torch.zeros(shape)}
    with pytest.raises(CheckpointInvalid) as refused:
        open_adapter(write_adapter(tmp_path, base, tensors=tensors), config_of(base))
    assert message in refused.value.message


@pytest.mark.parametrize("module", ["lm_head", "model.layers.9.mlp.up_proj", "model.layers.0.input_layernorm"])
def test_layers_that_the_model_does_not_adapt_are_refused(module: str, base: Path, tmp_path: Path) -> None:
    pair = {f"{PREFIX}{module}.lora_{matrix}.weight": torch.zeros(4, 4) for matrix in "AB"}
    with pytest.raises(CheckpointInvalid) as refused:
        open_adapter(write_adapter(tmp_path, base, tensors=adapter_tensors(base) | pair), config_of(base))
    assert f"it changes {module}, " in refused.value.message


@pytest.mark.parametrize("part", ["experts.2.up_proj", "shared_expert.down_proj", "gate", "shared_expert_gate"])
def test_a_mixture_of_experts_is_adapted_outside_of_its_experts(part: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "Qwen2MoeForCausalLM")
    plain = open_adapter(write_adapter(tmp_path / "plain", base), config_of(base))
    assert plain.matrices.keys() == {f"model.layers.{n}.self_attn.{one}_proj" for n in range(2) for one in "qkvo"}
    pair = {f"{PREFIX}model.layers.1.mlp.{part}.lora_{matrix}.weight": torch.zeros(4, 4) for matrix in "AB"}
    with pytest.raises(CheckpointInvalid, match="part of a mixture of experts, and only the linear layers outside"):
        open_adapter(write_adapter(tmp_path / "more", base, tensors=adapter_tensors(base) | pair), config_of(base))


def test_values_that_are_not_finite_are_refused(base: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(base)
    tensors[f"{PREFIX}{LAYER}.lora_B.weight"][0, 0] = torch.nan
    adapter = open_adapter(write_adapter(tmp_path, base, tensors=tensors), config_of(base))
    with pytest.raises(CheckpointInvalid, match="values that are not finite"):
        load_adapter(adapter, torch.bfloat16, {})


def test_pickled_weights_are_refused(base: Path, tmp_path: Path) -> None:
    (write_adapter(tmp_path, base) / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointInvalid, match="can run code when read"):
        open_adapter(tmp_path, config_of(base))


def test_an_adapter_that_is_given_as_the_model_is_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid) as refused:
        open_checkpoint(write_adapter(tmp_path / "mine", base))
    assert f"is a LoRA adapter for org/base, not a model: give --model org/base --lora NAME={tmp_path}/mine." in (
        refused.value.message
    )


# ---- mutated adapters ------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    float("nan"),
    "",
    "x" * 9,
    [],
    [[]],
    {},
    {"a": []},
    "\0",
    "../..",
    "\ud800",
]
KEYS = (
    "peft_type r lora_alpha bias use_rslora alpha_pattern rank_pattern init_lora_weights modules_to_save use_dora"
    " target_modules exclude_modules layers_to_transform layers_pattern".split()
)


def mutate(directory: Path, choose: random.Random) -> None:
    config, weights = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    length = int.from_bytes(content[:8], "little")
    kind = choose.randrange(7)
    if kind == 0:
        values = json.loads(config.read_text()) | {choose.choice(KEYS): choose.choice(VALUES) for _ in range(2)}
        config.write_text(json.dumps(values))
    elif kind == 1:
        text = bytearray(config.read_bytes())
        text[choose.randrange(len(text))] = choose.randrange(256)
        config.write_bytes(bytes(text))
    elif kind == 2:
        content[8 + choose.randrange(length)] = choose.randrange(256)
    elif kind == 3:
        content[choose.randrange(8)] = choose.randrange(256)
    elif kind == 4:
        del content[choose.randrange(len(content)) :]
    elif kind == 5:
        header = json.loads(content[8 : 8 + length])
        name = choose.choice(sorted(header))
        changed = choose.choice(["dtype", "shape", "data_offsets"])
        header[name][changed] = choose.choice([*VALUES, "F64", "BF16", "I8", [4, 32], [2**40, 2**40], [0, 2**62]])
        text = json.dumps(header).encode()
        content[: 8 + length] = len(text).to_bytes(8, "little") + text
    else:
        for _ in range(8):
            content[8 + length + choose.randrange(len(content) - 8 - length)] = choose.randrange(256)
    if kind > 1:
        weights.write_bytes(bytes(content))


def test_500_mutated_adapters_are_served_or_refused_with_a_sentence(base: Path, tmp_path: Path) -> None:
    config, refusals = config_of(base), 0
    directory = write_adapter(tmp_path / "mutated", base, rank=2, adapts=lambda name: "layers.0.self_attn" in name)
    original = {file: file.read_bytes() for file in directory.iterdir()}
    for seed in range(500):
        for file, content in original.items():
            file.write_bytes(content)
        mutate(directory, random.Random(seed))
        try:
            with readable_or_invalid(directory):
                packed = load_adapter(open_adapter(directory, config), torch.bfloat16, {})
        except CheckpointInvalid as refused:
            refusals += 1
            assert refused.message.endswith((".", "?")), refused.message
            assert len(refused.message) < 1000
            continue
        for name, weights in packed.items():
            assert weights.a.isfinite().all(), name
            assert weights.b.isfinite().all(), name
    assert 250 < refusals < 490
