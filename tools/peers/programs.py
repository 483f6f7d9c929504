"""Measures exported programs: five models from random weights, by the server's engine and by other runtimes.

`python -m tools.peers.programs [--models NAME,...] [--rows 1,8,32] [--threads 1,2] [--rounds N]` prints the least time of
a step in milliseconds for each runtime that is installed (torch, onnxruntime, openvino), and how many times as fast as
the best of them the engine is. Runtimes take turns, so that other work on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from app.engine.build import BuildRequest
from app.engine.program import build_program_engine
from app.hardware.plan.plan import make_plan
from app.hardware.probe.probe import probe
from app.settings import Settings
from app.weights.forms import RECIPES
from app.weights.open import open_model

Step = Callable[[], object]


class Residual(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        short = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.short = nn.Identity() if inputs == outputs and stride == 1 else nn.Sequential(*short)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(hidden)) + self.short(x))


def resnet18() -> nn.Module:
    """ResNet-18 (He et al., 2015)."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    levels = ((64, 64), (64, 128), (128, 256), (256, 512))
    blocks = [Residual(*each) for one, two in levels for each in ((one, two, 1 + (one < two)), (two, two, 1))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class Vit(nn.Module):
    """ViT-tiny with patches of 16 (Touvron et al., 2021)."""

    def __init__(self, size: int = 192, heads: int = 3, layers: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size, 16, 16)
        self.first, self.places = nn.Parameter(torch.randn(1, 1, size)), nn.Parameter(torch.randn(1, 197, size))
        layer = nn.TransformerEncoderLayer(size, heads, 4 * size, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(size), enable_nested_tensor=False)
        self.head = nn.Linear(size, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), 1) + self.places
        result: Tensor = self.head(self.encoder(x)[:, 0])
        return result


class Dlrm(nn.Module):
    """DLRM (Naumov et al., 2019) with eight tables of 100,000 rows."""

    def __init__(self, tables: int = 8, rows: int = 100_000, size: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, size) for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, size), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(size + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        rows_of, columns_of = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("places", rows_of * (tables + 1) + columns_of)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(ids[:, at]) for at, table in enumerate(self.tables))], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)[:, self.places]
        return torch.sigmoid(self.top(torch.cat((x, products), 1)))


class TextCnn(nn.Module):
    """A classifier of 128 tokens by convolutions of three widths (Kim, 2014)."""

    def __init__(self, vocabulary: int = 30_000, size: int = 300, filters: int = 100) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, size)
        self.convolutions = nn.ModuleList(nn.Conv1d(size, filters, width) for width in (3, 4, 5))
        self.head = nn.Linear(3 * filters, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).transpose(1, 2)
        result: Tensor = self.head(torch.cat([torch.relu(one(x)).amax(2) for one in self.convolutions], 1))
        return result


class Unet(nn.Module):
    """A UNet (Ronneberger et al., 2015) of four levels with half of the paper's channels, for 128 × 128."""

    def __init__(self, channels: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        pairs = zip((3, *channels[:-1]), channels, strict=True)
        self.down = nn.ModuleList(self._double(one, two) for one, two in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in channels[-2::-1])
        self.join = nn.ModuleList(self._double(2 * size, size) for size in channels[-2::-1])
        self.head = nn.Conv2d(channels[0], 2, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        for size in (inputs, outputs):
            layers += [nn.Conv2d(size, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, image: Tensor) -> Tensor:
        x, kept = image, []
        for at, level in enumerate(self.down):
            x = level(nn.functional.max_pool2d(x, 2) if at else x)
            kept.append(x)
        for up, join, beside in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat((up(x), beside), 1))
        result: Tensor = self.head(x)
        return result


def _pictures(side: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda rows: (torch.randn(rows, 3, side, side),)


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "resnet18": (resnet18, _pictures(224)),
    "vit-tiny": (Vit, _pictures(224)),
    "dlrm": (Dlrm, lambda rows: (torch.randint(0, 100_000, (rows, 8)), torch.randn(rows, 13))),
    "text-cnn": (TextCnn, lambda rows: (torch.randint(0, 30_000, (rows, 128)),)),
    "unet": (Unet, _pictures(128)),
}


def _exported(name: str, folder: Path) -> tuple[Path, nn.Module, Any]:
    """Write the program, and its ONNX file if the exporter is there; return the program, the model and the traced one."""
    torch.manual_seed(0)
    model, inputs = MODELS[name][0]().eval(), MODELS[name][1](3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None, "they have statistics"
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    batch = torch.export.Dim("batch", min=1, max=1024)
    traced = torch.export.export(model, inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))
    torch.export.save(traced, folder / f"{name}.pt2")
    if find_spec("onnxscript"):
        torch.onnx.export(traced, f=folder / f"{name}.onnx", dynamo=True, verbose=False)
    return folder / f"{name}.pt2", model, traced


def _ours(path: Path, threads: int, engine: str) -> Callable[[tuple[Tensor, ...]], Step]:
    settings = Settings(model=path, threads=threads, engine=engine, calibrate="off", precision="fp32")
    checkpoint = open_model(path)
    plan = make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())
    served = build_program_engine(BuildRequest(checkpoint, plan)).runner
    names = [spec.name for spec in served.signature.inputs]
    return lambda inputs: lambda: served.run(dict(zip(names, inputs, strict=True)))


def _torch(model: nn.Module) -> Callable[[tuple[Tensor, ...]], Step]:
    forward = torch.inference_mode()(model.forward)
    return lambda inputs: lambda: forward(*inputs)


def _onnxruntime(path: Path, threads: int) -> Callable[[tuple[Tensor, ...]], Step]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda inputs: (
        lambda: session.run(None, {name: one.numpy() for name, one in zip(names, inputs, strict=True)})
    )


def _openvino(path: Path, threads: int) -> Callable[[tuple[Tensor, ...]], Step]:
    import openvino

    config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(str(path), "CPU", config).create_infer_request()
    return lambda inputs: lambda: request.infer([one.numpy() for one in inputs], share_inputs=True)


def _least(steps: Mapping[str, Step], rounds: int, seconds: float) -> dict[str, float]:
    best = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            ends = time.perf_counter() + seconds / rounds
            while True:
                began = time.perf_counter()
                step()
                now = time.perf_counter()
                best[name] = min(best[name], now - began)
                if now > ends:
                    break
    return best


def main() -> None:
    """Print a row for each model, number of threads and rows of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each runtime and number of rows")
    parser.add_argument("--engine", default="auto", choices=("auto", "native", "onnxruntime"))
    parser.add_argument("--export", type=Path, help="only write the programs and their ONNX files to this folder")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warnings.simplefilter("ignore")
    if given.export is not None:
        for model in given.models.split(","):
            _exported(model, given.export)
        return
    with tempfile.TemporaryDirectory() as name:
        for model in given.models.split(","):
            _measure(model, Path(name), given)


def _measure(name: str, folder: Path, given: argparse.Namespace) -> None:
    path, model, _ = _exported(name, folder)
    onnx_file = path.with_suffix(".onnx")
    for threads in map(int, given.threads.split(",")):
        torch.set_num_threads(threads)
        sides = {"armature": _ours(path, threads, given.engine), "torch": _torch(model)}
        if find_spec("onnxruntime") and onnx_file.exists():
            sides["onnxruntime"] = _onnxruntime(onnx_file, threads)
        if find_spec("openvino") and onnx_file.exists():
            sides["openvino"] = _openvino(onnx_file, threads)
        torch.set_num_threads(threads)
        for rows in map(int, given.rows.split(",")):
            inputs = MODELS[name][1](rows)
            best = _least({side: make(inputs) for side, make in sides.items()}, given.rounds, given.seconds)
            ours, peer = best.pop("armature"), min(best.values())
            others = "  ".join(f"{side} {1e3 * seconds:.2f}" for side, seconds in best.items())
            print(
                f"{name:10} {threads} thr ×{rows:<3} armature {1e3 * ours:.2f}  {others}  {peer / ours:.2f}×",
                flush=True,
            )


if __name__ == "__main__":
    main()
