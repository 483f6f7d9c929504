"""Mutated checkpoints of other libraries' formats: each is read whole, inside of its file, or refused by `CheckpointInvalid`."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import CheckpointInvalid
from app.weights.checkpoint import open_checkpoint
from app.weights.quantized.entries import PackedEntry
from app.weights.safetensors import TensorEntry
from app.weights.tensor_reader import MappedFiles
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from hypothesis_examples import examples
from loaded_models import load
from mxfp4_files import write_mxfp4
from quantized_files import FORMATS, quantized

ITEM_BYTES = {"F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I64": 8, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 8, 32, 33, 48, 64, 128, 2**31, 2**63, 10**400, -0.5, 1.5, 32.0, 1e308])
WORDS = st.sampled_from(["gptq", "gptq_v2", "marlin", "gemm", "gemv", "fp4", "nf4", "mxfp4", "group", "channel", "tensor",
    "block", "float", "int", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", ""])  # fmt: skip
PLAIN = NUMBERS | WORDS | st.none() | st.booleans() | st.sampled_from([math.inf, -math.inf, math.nan])
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(WORDS, PLAIN, max_size=2)
# Places are numbers, taken modulo what there is.
PLACES = st.integers(0, 2**16)
CONFIG = st.tuples(st.just("config"), PLACES, VALUES)
NEW = st.tuples(st.just("new"), st.sampled_from(["actorder", "block_structure", "checkpoint_format", "group_size",
    "weight_block_size", "sparsity_config", "strategy", "mode", "sym", "desc_act"]), VALUES)  # fmt: skip
HEADER = st.tuples(st.just("header"), PLACES, st.sampled_from(
    ["transpose", "flatten", "narrow", "wide", "remove", "rename", *ITEM_BYTES]))  # fmt: skip
BYTES = st.tuples(st.just("bytes"), PLACES, st.binary(min_size=1, max_size=40) | st.sampled_from(
    [b"\xff" * 64, b"\x00" * 64, b"9" * 20, b"\x7f\x80" * 16, b"null", b"1e999", b"[1]"]))  # fmt: skip
MUTATIONS = st.lists(CONFIG | NEW | HEADER | BYTES, min_size=1, max_size=3)


@dataclass
class Stored:
    """The content of a checkpoint: the quantization of config.json, the other values, the header, and the data."""

    quantization: dict[str, Any]
    config: Mapping[str, Any]
    key: str
    header: dict[str, Any]
    data: bytearray

    def write(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps({**self.config, self.key: self.quantization}))
        text = json.dumps(self.header).encode()
        (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + self.data)

    def change(self, kind: str, place: Any, value: Any) -> None:
        if kind == "config":
            objects = _objects(self.quantization)
            keys = [(one, name) for one in objects for name in one]
            one, name = keys[place % len(keys)]
            one[name] = value
        elif kind == "new":
            for one in _objects(self.quantization):
                one[place] = value
        elif kind == "header":
            self._change_header(place, value)
        else:
            start, end = self._span(place)
            added = value[: end - start]
            self.data[start : start + len(added)] = added

    def _span(self, place: int) -> tuple[int, int]:
        names = [name for name in self.header if name != "__metadata__" and ".layers." in name]
        start, end = self.header[names[place % len(names)]]["data_offsets"]
        return start, end

    def _change_header(self, place: int, change: str) -> None:
        names = [name for name in self.header if name != "__metadata__" and ".layers." in name]
        name = names[place % len(names)]
        entry = self.header[name]
        start, end = entry["data_offsets"]
        shape = entry["shape"]
        if change == "transpose":
            entry["shape"] = shape[::-1]
        elif change == "flatten":
            entry["shape"] = [math.prod(shape)]
        elif change in ("narrow", "wide") and len(shape) == 2 and shape[0] % 2 == shape[1] % 2 == 0:
            entry["shape"] = [shape[0] * 2, shape[1] // 2] if change == "narrow" else [shape[0] // 2, shape[1] * 2]
        elif change in ("remove", "rename"):
            self.header[name.rpartition(".")[0] + ".other" if change == "rename" else "removed"] = self.header.pop(name)
        elif change in ITEM_BYTES and (end - start) % ITEM_BYTES[change] == 0:
            entry["dtype"] = change
            entry["shape"] = [*shape[:-1], (end - start) // ITEM_BYTES[change] // max(1, math.prod(shape[:-1]))]


def _objects(value: Any) -> list[dict[str, Any]]:
    """All objects of a JSON value."""
    if not isinstance(value, dict):
        return []
    return [value, *(one for inner in value.values() for one in _objects(inner))]


def _mxfp4(folder: Path) -> Path:
    sizes = {"num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": None}
    return write_mxfp4(folder, **sizes)[0]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Stored]]:
    found = {}
    for name in (*FORMATS, "mxfp4"):
        folder = tmp_path_factory.mktemp("formats")
        directory = _mxfp4(folder) if name == "mxfp4" else quantized(folder, name, num_hidden_layers=1)[0]
        config, content = (
            json.loads((directory / "config.json").read_text()),
            (directory / "model.safetensors").read_bytes(),
        )
        key = "quantization" if "quantization" in config else "quantization_config"
        end = 8 + int.from_bytes(content[:8], "little")
        found[name] = (
            directory,
            Stored(config.pop(key), config, key, json.loads(content[8:end]), bytearray(content[end:])),
        )
    return found


def check_inside(entry: TensorEntry) -> None:
    """Each part lies in the file, and has as many bytes as its shape and dtype say."""
    parts = [part for _, part in entry.parts] if isinstance(entry, PackedEntry) else [entry]
    for part in parts:
        assert 0 <= part.start <= part.end <= part.file.stat().st_size
        assert math.prod(part.shape) * ITEM_BYTES[part.dtype] == part.end - part.start


def check(directory: Path, stored: Stored) -> bool:
    """True if the checkpoint is read, False if it is refused."""
    stored.write(directory)
    try:
        checkpoint, files = open_checkpoint(directory), MappedFiles()
        for entry in checkpoint.tensors.values():
            check_inside(entry)
            assert files.tensor(entry).shape == entry.shape
        kept = checkpoint.needs().codes_precision
        if kept and has_kernel(OpCode.LINEAR_INT):
            load(directory, kept)
    except CheckpointInvalid as error:
        assert 0 < len(error.message) < 2_000
        return False
    return True


@pytest.mark.cases(test=3)
@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
@settings(max_examples=examples(24), suppress_health_check=[HealthCheck.too_slow])
@given(mutations=MUTATIONS)
def test_mutated_checkpoints(originals: dict[str, tuple[Path, Stored]], name: str, mutations: list[Any]) -> None:
    """23 formats by 24 are more than 500 examples."""
    directory, original = originals[name]
    stored = copy.deepcopy(original)
    for mutation in mutations:
        stored.change(*mutation)
    check(directory, stored)


def test_the_originals_are_read(originals: dict[str, tuple[Path, Stored]]) -> None:
    assert all(check(*original) for original in originals.values())


@pytest.mark.parametrize("size", [math.inf, -math.inf, math.nan, 10**400, 0, -128, 1.5, True, None, "128", [128]])
def test_sizes_of_blocks_that_are_none(originals: dict[str, tuple[Path, Stored]], size: Any) -> None:
    directory, original = originals["fp8 in blocks"]
    stored = copy.deepcopy(original)
    stored.quantization["weight_block_size"] = [size, 48]
    assert not check(directory, stored)


@pytest.mark.parametrize("key", ["shape", "blocksize", "nested_blocksize", "nested_offset"])
@pytest.mark.parametrize("value", ["1e999", "9" * 60, "null", "[[]]", "-1e5", "[1,1e999]", "[0,0]"])
def test_states_of_bitsandbytes_that_are_damaged(
    originals: dict[str, tuple[Path, Stored]], key: str, value: str
) -> None:
    directory, original = originals["nf4 nested"]
    stored = copy.deepcopy(original)
    name = next(name for name in stored.header if "quant_state" in name)
    start, end = stored.header[name]["data_offsets"]
    state = json.loads(stored.data[start:end])
    state = {one: state[one] for one in ("blocksize", "shape", "nested_blocksize", "nested_offset") if one != key}
    text = f'{{"{key}":{value},{json.dumps(state)[1:-1]}'.ljust(end - start - 1) + "}"
    stored.data[start:end] = text.encode()
    # Any finite number in FP32 is an offset.
    assert check(directory, stored) == (key == "nested_offset" and value == "-1e5")


def _changed_mxfp4(original: Stored, change: str) -> Stored:
    stored = copy.deepcopy(original)
    names = {
        kind: next(name for name in stored.header if name.endswith(f"down_proj_{kind}"))
        for kind in ("blocks", "scales")
    }
    if change in names:
        stored.header["model.layers.0.other"] = stored.header.pop(names[change])
    elif change == "shape":
        entry = stored.header[names["blocks"]]
        entry["shape"] = [*entry["shape"][:2], entry["shape"][2] * entry["shape"][3]]
    elif change == "dtype":
        stored.header[names["scales"]]["dtype"] = "I8"
    elif change == "other layer":
        for kind, name in names.items():
            stored.header[f"model.layers.0.self_attn.other_{kind}"] = stored.header.pop(name)
    else:
        start, _ = stored.header[names["scales"]]["data_offsets"]
        stored.data[start] = 255
    return stored


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("blocks", "The weights lack 2 of the 28 tensors"),
        ("scales", "down_proj_scales is missing: the weight is quantized"),
        ("shape", "MXFP4 asks for"),
        ("dtype", "its quantization asks for U8"),
        ("other layer", "for experts' weights only"),
        ("value", "which is no number in MXFP4"),
    ],
)
def test_damaged_mxfp4_is_refused_by_its_cause(
    originals: dict[str, tuple[Path, Stored]], change: str, sentence: str
) -> None:
    directory, original = originals["mxfp4"]
    _changed_mxfp4(original, change).write(directory)
    with pytest.raises(CheckpointInvalid, match=sentence):
        load(directory, "float32")
