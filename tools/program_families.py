"""Exports one model of each family of torchvision and timm from random weights, and serves it as a program.

`python -m tools.program_families [NAME...]` prints a row for each: equal to torch, or why it is refused; and whether ONNX
Runtime computes it too, or why torch alone does. The status is 1 if a model is neither equal nor refused by name. Needs
torchvision and timm, which belong to no extra; what is not installed is left out and named.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from app.engine import program as programs
from app.engine.onnx.conversion import NotConvertible
from app.engine.program import check_row_independence, served_program
from app.errors import CheckpointInvalid
from app.hardware.plan.plan import make_plan
from app.hardware.probe.probe import probe
from app.settings import Settings
from app.weights.forms import RECIPES
from app.weights.load import ARCHIVE_VALUES, load_program
from app.weights.program import open_program

# The smallest model of each family.
TORCHVISION = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5"
    " mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1"
    " swin_t swin_v2_t vgg11_bn vit_b_16 wide_resnet50_2"
).split()
SEGMENTATION = "deeplabv3_mobilenet_v3_large fcn_resnet50 lraspp_mobilenet_v3_large".split()
TIMM = (
    "beit_base_patch16_224 cait_xxs24_224 coat_tiny convmixer_768_32 crossvit_9_240 deit_tiny_patch16_224 edgenext_xx_small"
    " efficientformer_l1 ghostnet_050 hrnet_w18_small levit_128s mixer_s32_224 mobilevit_xxs nest_tiny poolformer_s12"
    " pvt_v2_b0 repvgg_a0 resmlp_12_224 tf_efficientnetv2_b0 xcit_nano_12_p16_224"
).split()
# Of the library that makes the model, and of torch.export.
_LIBRARY_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError)
EQUAL = 1e-4  # of the largest value: layers of random weights add up their rounding


def _models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    if find_spec("torchvision"):
        try:
            import_module("torchvision")
        except RuntimeError:  # its operators are CUDA's; the import needs their names, and no model here calls them
            for name in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        get = import_module("torchvision.models").get_model
        yield from ((f"torchvision {name}", partial(get, name, weights=None)) for name in TORCHVISION)
        without = {"weights": None, "weights_backbone": None}
        yield from ((f"torchvision {name}", partial(get, name, **without)) for name in SEGMENTATION)
    else:
        print("torchvision is not installed")
    if find_spec("timm"):
        create = import_module("timm").create_model
        yield from ((f"timm {name}", partial(create, name, pretrained=False)) for name in TIMM)
    else:
        print("timm is not installed")


class _OneOutput(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        result = self.model(image)
        result = result["out"] if isinstance(result, dict) else result
        return cast(Tensor, result[0] if isinstance(result, tuple) else result)


def _served(model: nn.Module, path: Path) -> str:
    """Return how the model is served. Raises `CheckpointInvalid` if it is refused."""
    side = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))[1]
    subject = _OneOutput(model.eval())
    for tensor in (*subject.parameters(), *subject.buffers()):  # a new model's zeros would hide what is before them
        if tensor.is_floating_point() and tensor.numel() > 1 and bool(tensor.min() == tensor.max()):
            tensor.data += 0.1 * torch.rand_like(tensor)
    batch = torch.export.Dim("batch", min=1, max=64)
    traced = torch.export.export(subject, (torch.randn(2, 3, side, side),), dynamic_shapes=({0: batch},))
    torch.export.save(traced, path)
    checkpoint = open_program(path)
    plan = make_plan(probe(), None, Settings(precision="fp32", calibrate="off"), checkpoint.needs(), RECIPES.keys())
    native = served_program(checkpoint, load_program(checkpoint, plan, lambda done, total: None))
    check_row_independence(native)
    image = torch.randn(3, 3, side, side)
    with torch.inference_mode():
        wanted = subject(image)
    (result,) = native.run({checkpoint.signature.inputs[0].name: image}).values()
    error = float((result - wanted).abs().max() / wanted.abs().max())
    if not error <= EQUAL:
        return f"DIFFERS by {error:.1e}"
    try:
        programs._converted(checkpoint, plan, ARCHIVE_VALUES)
    except NotConvertible as refusal:
        return f"equal ({error:.0e}); torch alone: {refusal}"
    return f"equal ({error:.0e}); ONNX Runtime equal"


def main() -> int:
    """Print a row for each model and the count."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    wanted, counts = sys.argv[1:], {"equal": 0, "refused": 0, "wrong": 0}
    for name, make in _models():
        if wanted and not any(one in name for one in wanted):
            continue
        torch.manual_seed(0)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = _served(make(), Path(folder) / "model.pt2")
            except CheckpointInvalid as refusal:
                said = f"refused: {refusal.message}"
            except _LIBRARY_ERRORS as error:
                said = f"not exported: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        kind = "equal" if said.startswith("equal") else "wrong" if said.startswith("DIFFERS") else "refused"
        counts[kind] += 1
        print(f"{name:40} {said} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{counts['equal']} equal to torch, {counts['refused']} refused by name, {counts['wrong']} wrong")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
