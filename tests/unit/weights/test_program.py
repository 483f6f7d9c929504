"""An exported program is judged without torch's loader: what can run code, or cannot be batched, is refused by name."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import CheckpointInvalid
from app.messages import TensorSpec
from app.weights.program import open_program
from exported_programs import MODEL, WEIGHTS, tampered, write_program
from hypothesis_examples import examples


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("programs")
    for name in ("recommender", "reader"):
        write_program(directory, name)
    return directory


@pytest.fixture
def recommender(programs: Path) -> Path:
    return programs / "recommender.pt2"


def test_names_types_and_shapes_are_the_models_own(recommender: Path) -> None:
    checkpoint = open_program(recommender)
    assert checkpoint.signature.inputs == (
        TensorSpec("ids", "INT64", (-1, 5), (5,)),
        TensorSpec("dense", "FP32", (-1, 8), (8,)),
    )
    assert checkpoint.signature.outputs == (
        TensorSpec("score", "FP32", (-1, 1)),
        TensorSpec("features", "FP32", (-1, 32)),
    )
    assert (checkpoint.min_rows, checkpoint.max_rows) == (1, 64)
    assert (checkpoint.name, checkpoint.kind) == ("recommender", "program")


def test_a_tuples_outputs_are_numbered_and_a_second_dimension_may_be_free(programs: Path) -> None:
    checkpoint = open_program(programs / "reader.pt2")
    assert checkpoint.signature.inputs[0].shape == (-1, -1, 32)
    assert [(spec.name, spec.datatype, spec.shape) for spec in checkpoint.signature.outputs] == [
        ("output_0", "FP32", (-1, -1, 32)),
        ("output_1", "INT64", (-1, -1, 2)),
    ]


def test_needs_count_products_in_the_precision_served(recommender: Path) -> None:
    needs = open_program(recommender).needs()
    products, rest = 24 * 64 + 64 * 32 + 32, 50 * 16 + 64 + 32
    assert needs.num_parameters == products + rest
    assert needs.bytes_by_precision == {
        "fp32": 4 * (products + rest),
        "bf16": 2 * products + 4 * rest,
        "int8": products + 4 * rest,
    }


def test_a_fixed_batch_is_refused_with_how_to_export(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"input 'ids' is not the free size of a batch.*torch\.export\.Dim"):
        open_program(write_program(tmp_path, "recommender", static=True))


# ---- what could run code -------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was read",))


def test_a_pickled_weight_is_refused_unread(recommender: Path, tmp_path: Path) -> None:
    def pickled(values: Any) -> None:
        values["config"]["score.weight"]["use_pickle"] = True

    bad = tampered(recommender, tmp_path / "bad.pt2", WEIGHTS, pickled)
    with pytest.raises(CheckpointInvalid, match=r"score\.weight is stored as a pickle, which can run code"):
        open_program(bad)


def test_weights_of_the_older_format_are_refused_unread(recommender: Path, tmp_path: Path) -> None:
    bad = tampered(recommender, tmp_path / "bad.pt2", "data/weights/model.pt", pickle.dumps(Bomb()))
    with pytest.raises(CheckpointInvalid, match="its weights are a pickle"):
        open_program(bad)


def test_sample_inputs_are_never_read(recommender: Path, tmp_path: Path) -> None:
    bomb = tampered(recommender, tmp_path / "bomb.pt2", "data/sample_inputs/model.pt", pickle.dumps(Bomb()))
    assert open_program(bomb).signature == open_program(recommender).signature


def test_compiled_code_is_refused(recommender: Path, tmp_path: Path) -> None:
    bad = tampered(recommender, tmp_path / "bad.pt2", "data/aotinductor/model/code.so", b"\x7fELF")
    with pytest.raises(CheckpointInvalid, match="holds compiled code"):
        open_program(bad)


def test_a_custom_object_is_refused(recommender: Path, tmp_path: Path) -> None:
    def custom(values: Any) -> None:
        spec = {"custom_obj": {"arg": {"name": "dense", "class_fqn": "x.Y"}, "custom_obj_name": "y"}}
        values["graph_module"]["signature"]["input_specs"][-1] = spec

    with pytest.raises(CheckpointInvalid, match="has an input that is not a tensor"):
        open_program(tampered(recommender, tmp_path / "bad.pt2", MODEL, custom))


def test_an_expression_is_never_evaluated(recommender: Path, tmp_path: Path) -> None:
    """torch's loader would do that."""

    def hostile(values: Any) -> None:
        sizes = values["graph_module"]["graph"]["tensor_values"]["dense"]["sizes"]
        sizes[1] = {"as_expr": {"expr_str": "__import__('pytest').fail('evaluated')", "hint": None}}

    with pytest.raises(CheckpointInvalid, match="Input 'dense' has a dimension of the size"):
        open_program(tampered(recommender, tmp_path / "odd.pt2", MODEL, hostile))


# ---- what is damaged or not served ---------------------------------------------------------------------------------


def test_no_archive(tmp_path: Path) -> None:
    (tmp_path / "no.pt2").write_bytes(b"not a zip")
    with pytest.raises(CheckpointInvalid, match=r"no\.pt2 is not an archive"):
        open_program(tmp_path / "no.pt2")


def test_a_compressed_archive(recommender: Path, tmp_path: Path) -> None:
    bad = tampered(recommender, tmp_path / "bad.pt2", MODEL, lambda values: None, compress=True)
    with pytest.raises(CheckpointInvalid, match="is compressed"):
        open_program(bad)


def test_two_programs(recommender: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="holds 2 programs"):
        open_program(tampered(recommender, tmp_path / "bad.pt2", "models/other.json", b"{}"))


def test_another_schema(recommender: Path, tmp_path: Path) -> None:
    def newer(values: Any) -> None:
        values["schema_version"]["major"] = 9

    with pytest.raises(CheckpointInvalid, match=r"version 9 of torch.export's schema; 8 is supported"):
        open_program(tampered(recommender, tmp_path / "bad.pt2", MODEL, newer))


def test_weights_that_are_too_short(recommender: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="weight_1 is missing, or too short"):
        open_program(tampered(recommender, tmp_path / "bad.pt2", "data/weights/weight_1", b"1234"))


def test_a_weight_that_is_not_there(recommender: Path, tmp_path: Path) -> None:
    def without(values: Any) -> None:
        del values["config"]["items.weight"]

    with pytest.raises(CheckpointInvalid, match=r"has no tensor for 'items\.weight'"):
        open_program(tampered(recommender, tmp_path / "bad.pt2", WEIGHTS, without))


def test_a_program_that_writes_into_its_weights(recommender: Path, tmp_path: Path) -> None:
    def writes(values: Any) -> None:
        nodes = values["graph_module"]["graph"]["nodes"]
        arg = {"as_tensor": {"name": "p_score_weight"}}
        nodes.append(
            {
                "target": "torch.ops.aten.relu_.default",
                "inputs": [{"name": "self", "arg": arg, "kind": 1}],
                "outputs": [],
            }
        )

    with pytest.raises(CheckpointInvalid, match=r"writes into its own tensor 'p_score_weight'.*eval\(\)"):
        open_program(tampered(recommender, tmp_path / "bad.pt2", MODEL, writes))


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """A path to everything in a JSON value."""
    if path:
        yield path
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_whatever_is_changed_is_opened_or_refused_in_a_sentence(
    recommender_json: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    source, values = recommender_json
    path = data.draw(st.sampled_from(list(places(values))))
    junk = data.draw(
        st.one_of(st.none(), st.integers(-3, 40), st.text(max_size=4), st.lists(st.none(), max_size=2), st.just({}))
    )
    values = json.loads(json.dumps(values))
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    target = tmp_path_factory.mktemp("changed", numbered=True) / "changed.pt2"
    tampered(source, target, MODEL, json.dumps(values).encode())
    try:
        open_program(target).needs()
    except CheckpointInvalid as error:
        assert error.message
    finally:
        target.unlink()


@pytest.fixture(scope="module")
def recommender_json(programs: Path) -> tuple[Path, Any]:
    path = programs / "recommender.pt2"
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        return path, json.loads(archive.read(f"{root}/{MODEL}"))


@given(
    flips=st.lists(st.tuples(st.booleans(), st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=8),
    shorter=st.integers(0, 40),
)
@settings(max_examples=examples(150), deadline=None)
def test_whatever_is_damaged_is_opened_or_refused_in_a_sentence(
    programs: Path, flips: list[tuple[bool, int, int]], shorter: int
) -> None:
    """Bytes anywhere: the archive's list of members stands at its end, so many of them there."""
    whole = bytearray((programs / "recommender.pt2").read_bytes())
    for at_end, place, octet in flips:
        whole[-1 - place if at_end else place * 7 % len(whole)] = octet
    damaged = programs / "damaged.pt2"
    damaged.write_bytes(whole[: len(whole) - shorter])
    try:
        open_program(damaged)
    except CheckpointInvalid as error:
        assert str(error).strip()
