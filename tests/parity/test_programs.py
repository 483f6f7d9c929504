"""Exported programs against the models that they were exported from, in every precision, and whatever company a row has."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree

from app.engine.program import RunnableProgram, check_row_independence, synthetic_inputs
from app.errors import CheckpointInvalid, InvalidRequest
from app.models.program_graph import ProgramSizes
from app.weights.load import load_program
from app.weights.program import open_program
from exported_programs import MODEL, model_of, tampered, write_program
from planned_machines import machine, plan

CLOSE = {"fp32": 1e-5, "bf16": 0.03, "int8": 0.03}  # of the largest value


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("programs")
    for name in ("recommender", "vision", "reader", "centred", "guarded"):
        write_program(directory, name)
    return directory


def served(path: Path, precision: str = "fp32") -> RunnableProgram:
    checkpoint = open_program(path)
    told: list[tuple[int, int]] = []
    program = load_program(
        checkpoint, plan(machine(), precision=precision), lambda done, total: told.append((done, total))
    )
    assert told and told[-1][0] == told[-1][1]
    return RunnableProgram(program, checkpoint.signature, checkpoint.output_indices, checkpoint.min_rows)


def expected(name: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    with torch.inference_mode():
        return _pytree.tree_leaves(model_of(name)(*inputs.values()))


@pytest.mark.cases(test=2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["recommender", "vision", "reader", "guarded"])
def test_as_the_model_itself(programs: Path, name: str, precision: str) -> None:
    subject = served(programs / f"{name}.pt2", precision)
    inputs = synthetic_inputs(subject.signature, 3)
    results = subject.run(inputs)
    for result, wanted in zip(results.values(), expected(name, inputs), strict=True):
        assert result.shape == wanted.shape
        if wanted.is_floating_point():
            assert (result.float() - wanted).abs().max() <= CLOSE[precision] * wanted.abs().max()
        elif precision == "fp32":
            assert torch.equal(result, wanted)


@pytest.mark.parametrize("name", ["recommender", "vision", "reader"])
def test_a_row_is_what_it_is_alone(programs: Path, name: str) -> None:
    subject = served(programs / f"{name}.pt2")
    check_row_independence(subject)
    inputs = synthetic_inputs(subject.signature, 5)
    together = subject.run(inputs)
    for row in range(5):
        alone = subject.run({key: tensor[row : row + 1] for key, tensor in inputs.items()})
        for key, result in alone.items():
            torch.testing.assert_close(result[0], together[key][row], rtol=1e-4, atol=1e-5)


def test_rows_that_change_each_other_are_refused(programs: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="'output' of a row depends on the other rows"):
        check_row_independence(served(programs / "centred.pt2"))


def test_a_program_exported_for_two_rows_or_more_serves_one(programs: Path) -> None:
    subject = served(programs / "recommender.pt2")
    wants_two = RunnableProgram(subject.program, subject.signature, subject.output_indices, min_rows=2)
    inputs = synthetic_inputs(subject.signature, 1)
    for name, result in wants_two.run(inputs).items():
        torch.testing.assert_close(result, subject.run(inputs)[name], rtol=1e-4, atol=1e-6)
        assert len(result) == 1


def test_linear_layers_are_held_in_our_forms(programs: Path) -> None:
    checkpoint = open_program(programs / "recommender.pt2")
    assert checkpoint.linears == {
        "p_net_0_weight": "p_net_0_bias",
        "p_net_2_weight": "p_net_2_bias",
        "p_score_weight": None,
    }


@pytest.mark.parametrize(
    "target", ["torch.load", "torch.ops.aten.from_file.default", "torch.os.system", "torch.ops.prim.device.default"]
)
def test_nothing_but_operators_is_called(programs: Path, tmp_path: Path, target: str) -> None:
    def calls(values: dict[str, dict[str, dict[str, list[dict[str, object]]]]]) -> None:
        values["graph_module"]["graph"]["nodes"][0]["target"] = target

    bad = tampered(programs / "recommender.pt2", tmp_path / "bad.pt2", MODEL, calls)
    with pytest.raises(CheckpointInvalid, match=f"calls '{target}', which is not one of torch's own operators"):
        served(bad)


def test_an_operator_that_this_torch_lacks_is_named(programs: Path, tmp_path: Path) -> None:
    def calls(values: dict[str, dict[str, dict[str, list[dict[str, object]]]]]) -> None:
        values["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.aten.of_tomorrow.default"

    bad = tampered(programs / "recommender.pt2", tmp_path / "bad.pt2", MODEL, calls)
    with pytest.raises(
        CheckpointInvalid, match=f"of_tomorrow.default', which torch {torch.__version__}".replace("+", r"\+")
    ):
        served(bad)


class Branches(nn.Module):
    """Another result for short rows, which the export leaves out: its range says that none is short."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) if x.shape[1] >= 20 else -x.sum(1)


class Sums(nn.Module):
    """Adds inputs of one size; a single place would be repeated."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y).sum(1)


class Halves(nn.Module):
    """Reads every second element of x, one for each of y."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x[:, ::2] * y).sum(1)


class Steps(nn.Module):
    """Reads differences of x, one for each of y."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.diff() * y).sum(1)


class Eights(nn.Module):
    """Groups of eight."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, 8).prod(-1).sum(1)


class Long(nn.Module):
    """A convolution over 24 places, which needs as many."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 4, 24)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.convolution(x).mean(-1)
        return result


ROWS = Dim("rows", min=1, max=64)
HALF, EIGHT, SHARED = Dim("half", min=3, max=20), Dim("eight", min=2, max=5), Dim("shared", min=1, max=90)
SIZED = {
    "branches": (Branches(), (torch.ones(3, 30),), ({0: ROWS, 1: Dim("n", min=20, max=60)},)),
    "sums": (Sums(), (torch.ones(3, 20), torch.ones(3, 20)), ({0: ROWS, 1: SHARED}, {0: ROWS, 1: SHARED})),
    "halves": (Halves(), (torch.ones(3, 20), torch.ones(3, 10)), ({0: ROWS, 1: 2 * HALF}, {0: ROWS, 1: HALF})),
    "steps": (Steps(), (torch.ones(3, 21), torch.ones(3, 20)), ({0: ROWS, 1: HALF + 1}, {0: ROWS, 1: HALF})),
    "eights": (Eights(), (torch.ones(3, 24),), ({0: ROWS, 1: 8 * EIGHT},)),
    "long": (Long(), (torch.ones(3, 3, 80),), ({0: ROWS, 2: Dim("length", min=64, max=90)},)),
    "inferred": (Long(), (torch.ones(3, 3, 100),), ({0: ROWS, 2: Dim.AUTO},)),
}


@cache
def sized(name: str) -> tuple[RunnableProgram, ProgramSizes, nn.Module]:
    """Return the program as it is served, what its archive says of sizes, and torch's own module."""
    model, examples, dynamic = SIZED[name]
    exported = torch.export.export(model.eval(), examples, dynamic_shapes=dynamic)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sized.pt2"
        torch.export.save(exported, path)
        subject, sizes = served(path), open_program(path).sizes
    check_row_independence(subject)  # it starts, whatever the least size of a dimension is
    return subject, sizes, exported.module()


def agrees(name: str, size: int, other: int) -> bool:
    """Return whether the program takes these sizes, after comparing the decision and the result with torch's."""
    (subject, sizes, reference), examples = sized(name), SIZED[name][1]
    inputs = [torch.randn(2, *examples[0].shape[1:-1], size), torch.randn(2, other)][: len(examples)]
    named = dict(zip(sizes.dimensions, inputs, strict=True))
    shapes = {key: tuple(tensor.shape) for key, tensor in named.items()}
    try:
        wanted = reference(*inputs)
    except (RuntimeError, AssertionError):
        with pytest.raises(InvalidRequest):
            sizes.check(shapes)
        return False
    sizes.check(shapes)
    torch.testing.assert_close(subject.run(named)["output"], wanted, rtol=1e-4, atol=1e-4)
    return True


@pytest.mark.parametrize("name", SIZED)
def test_the_sizes_that_are_accepted_are_those_of_torchs_own_module(name: str) -> None:
    """At the borders of each range; sizes beyond it, and pairs of sizes that do not belong together, are refused."""
    sizes = (1, 3, 6, 7, 10, 16, 19, 20, 23, 24, 25, 26, 40, 42, 48, 60, 61, 63, 64, 90, 91)
    found = {agrees(name, size, other) for size in sizes for other in (size, size // 2, size - 1, 1)}
    assert found == {True, False}


@given(st.sampled_from(sorted(SIZED)), st.integers(1, 100), st.integers(1, 100))
def test_any_size_is_accepted_or_refused_as_by_torchs_own_module(name: str, size: int, other: int) -> None:
    agrees(name, size, other)


def test_an_exchanged_operator_is_a_refusal(programs: Path, tmp_path: Path) -> None:
    """Not an error of Python, whichever call of the graph it is."""
    for node in range(7):
        for target in ("linear.default", "conv2d.default", "cat.default", "relu.default", "item.default", "t.default"):

            def exchange(values: dict[str, dict[str, dict[str, list[dict[str, object]]]]]) -> None:
                nodes = values["graph_module"]["graph"]["nodes"]
                nodes[node % len(nodes)]["target"] = f"torch.ops.aten.{target}"  # noqa: B023  # called at once

            try:
                check_row_independence(
                    served(tampered(programs / "recommender.pt2", tmp_path / "bad.pt2", MODEL, exchange))
                )
            except CheckpointInvalid:
                continue
