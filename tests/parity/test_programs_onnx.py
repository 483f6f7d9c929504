"""Programs in ONNX Runtime, from `.pt2` and `.onnx`, against torch: results, errors, and what is not converted."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from app.engine import program as programs
from app.engine.onnx import conversion
from app.engine.onnx.conversion import NotConvertible, convert, index_inputs
from app.engine.onnx.session import OnnxProgram
from app.engine.program import load_served, served_program, synthetic_inputs
from app.errors import CheckpointInvalid
from app.models.program import Program
from app.weights.load import ARCHIVE_VALUES, program_states
from app.weights.onnx_file import open_onnx
from app.weights.open import open_model
from app.weights.program import ProgramCheckpoint, open_program
from exported_programs import BATCH, model_of, write_program
from planned_machines import machine, plan

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.full
NAMES = ("recommender", "vision", "reader", "guarded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("programs")
    for name in NAMES:
        write_program(directory, name)
    return directory


def states_of(checkpoint: ProgramCheckpoint) -> dict[str, Tensor]:
    return program_states(checkpoint, lambda done, total: None, ARCHIVE_VALUES)


def converted(checkpoint: ProgramCheckpoint, cache: Path | None = None) -> programs.RunnableProgram:
    example = synthetic_inputs(checkpoint.signature, 3)
    return served_program(checkpoint, convert(checkpoint, states_of(checkpoint), example, cache))


@pytest.mark.cases(test=1, ci=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_program_is_equal_to_torch(folder: Path, name: str, tmp_path: Path) -> None:
    checkpoint = open_program(folder / f"{name}.pt2")
    subject = converted(checkpoint, tmp_path)
    exact = served_program(checkpoint, Program(checkpoint.graph, states_of(checkpoint), {}))
    for rows in (1, 2, 7):
        inputs = synthetic_inputs(checkpoint.signature, rows)
        programs._check_equal(exact, subject, inputs)
    kept = list((tmp_path / "programs").glob("*.onnx"))
    assert len(kept) == 1 and kept[0].stat().st_size < 200_000, "weights are not in it"


def test_the_graph_is_kept_and_used_for_other_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_program(folder / "recommender.pt2")
    converted(checkpoint, tmp_path)
    monkeypatch.setattr(conversion, "_exported", None)  # is not called again
    doubled = {
        name: 2 * tensor if tensor.is_floating_point() else tensor for name, tensor in states_of(checkpoint).items()
    }
    inputs = synthetic_inputs(checkpoint.signature, 2)
    other = served_program(checkpoint, convert(checkpoint, doubled, inputs, tmp_path))
    exact = served_program(checkpoint, Program(checkpoint.graph, doubled, {}))
    programs._check_equal(exact, other, inputs)
    with pytest.raises(NotConvertible, match="differs by"):
        programs._check_equal(converted(checkpoint, tmp_path), other, inputs)


def test_without_a_folder_the_last_graph_is_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement at the first start converts the program, and the server needs the same graph."""
    checkpoint = open_program(folder / "recommender.pt2")
    monkeypatch.setattr(conversion, "_last", {})
    converted(checkpoint)
    monkeypatch.setattr(conversion, "_exported", None)  # is not called again
    converted(checkpoint)
    with pytest.raises(TypeError):
        converted(open_program(folder / "vision.pt2"))


class Stacked(nn.Module):
    """Rows of two tables beside each other, as in a DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([table(ids[:, at]) for at, table in enumerate(self.tables)], 1)


def test_stacked_tables_change_no_shapes(tmp_path: Path) -> None:
    import onnx

    program = torch.export.export(Stacked().eval(), (torch.zeros(3, 2, dtype=torch.long),), dynamic_shapes=(BATCH,))
    torch.export.save(program, tmp_path / "stacked.pt2")
    checkpoint = open_program(tmp_path / "stacked.pt2")
    subject = converted(checkpoint, tmp_path)
    exact = served_program(checkpoint, Program(checkpoint.graph, states_of(checkpoint), {}))
    for rows in (1, 40):  # so few ids, and so many, are searched for negative ones in two ways
        ids = torch.randint(0, 9, (rows, 2))
        programs._check_equal(exact, subject, {"ids": ids})
        ids[-1, -1] = -1
        with pytest.raises(IndexError, match="index out of range"):
            subject.run({"ids": ids})
    (kept,) = (tmp_path / "programs").glob("*.onnx")
    kinds = [node.op_type for node in onnx.load_model(kept, load_external_data=False).graph.node]
    assert kinds.count("Gather") == 2 and "Unsqueeze" not in kinds


@pytest.mark.parametrize("item", [-1, 50])
def test_indices_outside_a_table_are_torchs_errors(folder: Path, item: int) -> None:
    """ONNX would count -1 from the table's end."""
    subject = converted(open_program(folder / "recommender.pt2"))
    inputs = synthetic_inputs(subject.signature, 2)
    inputs["ids"][1, 3] = item
    with pytest.raises(IndexError, match="index out of range"):
        subject.run(inputs)


def test_auto_takes_the_faster_one_and_equal_results_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "app.engine.program")
    checkpoint = open_model(folder / "recommender.pt2")
    assert isinstance(checkpoint, ProgramCheckpoint)
    served_plan = plan(machine(), checkpoint.needs(), precision="fp32")
    assert served_plan.weights.engine == "auto"

    def loaded() -> object:
        return load_served(checkpoint, served_plan, lambda done, total: None).program

    monkeypatch.setattr(programs, "_gain", lambda *_: 2.0)
    assert isinstance(loaded(), OnnxProgram)
    assert "at 2.00 times the speed of torch's operators" in caplog.text
    monkeypatch.setattr(programs, "_gain", lambda *_: 1.0)
    assert isinstance(loaded(), Program)
    monkeypatch.setattr(programs, "_gain", lambda *_: 2.0)
    monkeypatch.setattr(programs, "EQUAL", 1e-15)
    assert isinstance(loaded(), Program)
    assert "differs by" in caplog.text


class Counted(nn.Module):
    """A table, indexed from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x - 9]


class Shifted(nn.Module):
    """A table whose rows belong to two features, the second from row 5 on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.register_buffer("starts", torch.tensor([0, 5]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(x + self.starts).sum(1)
        return found


class Shares(nn.Module):
    """A division of integers, which torch refuses by 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] // x[:, 1]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Counted(), "the indices .* are computed"),
        (Shares(), "the errors of (floor_divide|div) depend on values"),
        (Shifted(), None),
    ],
)
def test_errors_of_values_stay_torchs(model: nn.Module, reason: str | None, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    example = torch.ones(3, 2, dtype=torch.int64)
    torch.export.save(torch.export.export(model.eval(), (example,), dynamic_shapes=(BATCH,)), path)
    checkpoint = open_program(path)
    if reason is None:
        assert index_inputs(checkpoint, states_of(checkpoint)) == ("x",)
        return
    with pytest.raises(NotConvertible, match=reason):
        index_inputs(checkpoint, states_of(checkpoint))


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def onnx_file(folder: Path) -> Path:
    path = folder / "recommender.onnx"
    ids, dense = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            model_of("recommender"), (ids, dense), path, dynamo=True, verbose=False, external_data=False,
            input_names=["ids", "dense"], output_names=["score", "features"], dynamic_shapes=(BATCH, BATCH),
        )  # fmt: skip
    return path


def test_a_file_is_served_as_torch_computes_it(onnx_file: Path) -> None:
    checkpoint = open_onnx(onnx_file)
    assert [(spec.name, spec.datatype, spec.shape) for spec in checkpoint.signature.inputs] == [
        ("ids", "INT64", (-1, 5)),
        ("dense", "FP32", (-1, 8)),
    ]
    assert [spec.name for spec in checkpoint.signature.outputs] == ["score", "features"]
    needs = checkpoint.needs()
    assert needs.operations_per_token == 2 * (24 * 64 + 64 * 32 + 32)
    assert (needs.engine, list(needs.bytes_by_precision)) == ("onnxruntime", ["fp32"])
    served_plan = plan(machine(), needs)
    assert (served_plan.weights.engine, served_plan.weights.precision) == ("onnxruntime", "fp32")
    subject = load_served(checkpoint, served_plan, lambda done, total: None)
    inputs = synthetic_inputs(checkpoint.signature, 3)
    with torch.inference_mode():
        wanted = model_of("recommender")(*inputs.values())
    for name, result in subject.run(inputs).items():
        torch.testing.assert_close(result, wanted[name], rtol=1e-5, atol=1e-6)
    inputs["ids"][0, 0] = 50
    with pytest.raises(RuntimeError, match="out of data bounds"):
        subject.run(inputs)


def small_model(**changes: object) -> object:
    """A file with one product, in which something is changed."""
    from onnx import TensorProto, helper

    shape = changes.get("shape", ["n", 4])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), *changes.get("nodes", [])]  # type: ignore[misc]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 2], [1.0] * 8)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", changes.get("type", TensorProto.FLOAT), shape)],  # type: ignore[arg-type]
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [shape[0], 2])],  # type: ignore[index]
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)])


def written(path: Path, model: object) -> Path:
    import onnx

    onnx.save(model, path)  # type: ignore[arg-type]
    return path


def test_a_file_for_a_fixed_batch_is_served_in_steps_of_it(tmp_path: Path) -> None:
    checkpoint = open_onnx(written(tmp_path / "m.onnx", small_model(shape=[2, 4])))
    assert (checkpoint.min_rows, checkpoint.max_rows) == (2, 2)
    subject = load_served(checkpoint, plan(machine(), checkpoint.needs()), lambda done, total: None)
    assert subject.run({"x": torch.ones(1, 4)})["y"].tolist() == [[4.0, 4.0]]


def test_what_a_file_must_not_have_is_refused(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    def refused(said: str, **changes: object) -> None:
        path = written(tmp_path / "bad.onnx", small_model(**changes))
        with pytest.raises(CheckpointInvalid, match=said):
            open_onnx(path)

    refused(
        r"calls mine\.Run, an operator of another library", nodes=[helper.make_node("Run", ["x"], ["z"], domain="mine")]
    )
    refused("'x' is no tensor of a supported type", type=TensorProto.STRING)
    refused("first dimensions are not the same batch size", shape=[0, 4])
    refused("second dimension that is as large as the batch", shape=["n", "n"])
    (tmp_path / "not.onnx").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointInvalid, match=r"not\.onnx is not an ONNX file"):
        open_onnx(tmp_path / "not.onnx")


@pytest.mark.parametrize(
    ("location", "length", "said"),
    [
        ("../secret", "32", "which is no file of the model's directory"),
        ("/etc/passwd", "32", "which is no file of the model's directory"),
        ("link", "32", "which is no file of the model's directory"),
        ("weights", "64", "weights is too short for 'w'"),
        ("weights", "x", "a place of external weights is damaged"),
        ("weights", "32", None),
    ],
)
def test_weights_in_other_files_are_the_models_own(
    tmp_path: Path, location: str, length: str, said: str | None
) -> None:
    model = small_model()
    (tmp_path / "secret").write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(32))
    (folder / "link").symlink_to(tmp_path / "secret")
    (tensor,) = model.graph.initializer  # type: ignore[attr-defined]
    tensor.ClearField("float_data")
    tensor.data_location = tensor.EXTERNAL
    for key, value in (("location", location), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    path = written(folder / "m.onnx", model)
    if said is None:
        subject = load_served(
            checkpoint := open_onnx(path), plan(machine(), checkpoint.needs()), lambda done, total: None
        )
        assert subject.run({"x": torch.ones(1, 4)})["y"].tolist() == [[0.0, 0.0]]
        return
    with pytest.raises(CheckpointInvalid, match=said):
        open_onnx(path)
