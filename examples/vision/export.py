"""Exports a classifier of pictures, with its description and labels.

python export.py && armature serve --model vision.pt2
armature bench http --kind infer --model vision --url http://127.0.0.1:8000

`Preprocessed` holds the scaling and the normalization inside the program, so that clients send bytes. Put your own model
and labels in place of the small network, for example torchvision's `resnet18(weights="DEFAULT")` with a side of 224.
"""

from pathlib import Path

import torch
from torch import nn

SIDE = 64
LABELS = ["cat", "dog", "fox", "owl"]


class Preprocessed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, image):  # UINT8 [batch, 3, SIDE, SIDE]
        return {"logits": self.model((image.float() / 255 - self.mean) / self.std)}


torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(LABELS)),
)  # fmt: skip
batch = {0: torch.export.Dim("batch", min=1, max=256)}
example = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8)
program = torch.export.export(Preprocessed(network).eval(), (example,), dynamic_shapes={"image": batch})
torch.export.save(program, "vision.pt2")
Path("labels.txt").write_text("\n".join(LABELS) + "\n")
Path("vision.toml").write_text(f'[pictures.image]\nresize = {SIDE * 256 // 224}\n\n[labels]\nlogits = "labels.txt"\n')
