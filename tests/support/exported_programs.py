"""Small exported programs as `torch.export.save` writes them, and damaged archives."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = "program"
MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"


class Recommender(nn.Module):
    """Ids of items and dense features to a score, and the features that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(50, 16)
        self.net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32))
        self.score = nn.Linear(32, 1, bias=False)

    def forward(self, ids: Tensor, dense: Tensor) -> dict[str, Tensor]:
        features = self.net(torch.cat((self.items(ids).mean(1), dense), 1))
        return {"score": torch.sigmoid(self.score(features)), "features": features}


class Vision(nn.Module):
    """A picture to classes: convolutions, batch norm as trained, a mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3))
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(image).mean((2, 3)))
        return logits


class Reader(nn.Module):
    """Sequences of any length through attention; the best of each place as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(x)
        return hidden, hidden.topk(2, -1).indices


class Centred(nn.Module):
    """Of each row what it has beyond the batch's mean: rows are not independent."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Guarded(nn.Module):
    """Gradients off in the midst of it, which exports as a graph within the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        with torch.no_grad():
            scale = hidden.norm(dim=-1, keepdim=True)
        with torch.autocast("cpu", enabled=False):
            scaled: Tensor = hidden / scale
        return scaled


BATCH = {0: torch.export.Dim("batch", min=1, max=64)}
FREE = {**BATCH, 1: torch.export.Dim("length", min=2, max=40)}
# name → model, example, dynamic shapes
PROGRAMS: Mapping[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], tuple[Any, ...]]] = {
    "recommender": (Recommender, (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 8)), (BATCH, BATCH)),
    "vision": (Vision, (torch.zeros(2, 3, 16, 16),), (BATCH,)),
    "reader": (Reader, (torch.zeros(2, 6, 32),), (FREE,)),
    "centred": (Centred, (torch.zeros(2, 4),), (BATCH,)),
    "guarded": (Guarded, (torch.zeros(2, 8),), (BATCH,)),
}


def model_of(name: str) -> nn.Module:
    """The same weights at every call; batch norms have seen something."""
    torch.manual_seed(0)
    model = PROGRAMS[name][0]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def write_program(directory: Path, name: str, *, static: bool = False) -> Path:
    """`static`: exported for two rows alone."""
    path = directory / f"{name}.pt2"
    path.write_bytes(_exported(name, static))
    return path


@cache
def _exported(name: str, static: bool) -> bytes:
    """Exporting takes a second: once for all tests."""
    _, example, shapes = PROGRAMS[name]
    archive = io.BytesIO()
    torch.export.save(torch.export.export(model_of(name), example, dynamic_shapes=None if static else shapes), archive)
    return archive.getvalue()


Change = Callable[[Any], Any]


def tampered(source: Path, target: Path, member: str, change: Change | bytes | None, compress: bool = False) -> Path:
    """A copy in which one member is changed: its JSON by a function, its bytes, or left out. Members that are not there are added."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        names = [name.removeprefix(f"{root}/") for name in old.namelist()]
        for name in dict.fromkeys((*names, member)):
            data = old.read(f"{root}/{name}") if name in names else b""
            if name == member:
                if change is None:
                    continue
                data = change if isinstance(change, bytes) else _changed(data, change)
            new.writestr(f"{ROOT}/{name}", data, zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED)
    return target


def _changed(data: bytes, change: Change) -> bytes:
    values = json.loads(data)
    result = change(values)
    return json.dumps(values if result is None else result).encode()
