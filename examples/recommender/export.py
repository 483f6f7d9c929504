"""Exports a recommender with tables of users and items.

python export.py && armature serve --model recommender.pt2
armature bench http --kind infer --model recommender --url http://127.0.0.1:8000 --batch 32

The last command prints p50 and p99 of 1, 8 and 32 clients, each with 32 candidates in a request.
"""

import torch
from torch import nn

USERS, ITEMS, FEATURES = 10_000, 50_000, 8


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 32), nn.Embedding(ITEMS, 32)
        self.net = nn.Sequential(nn.Linear(64 + FEATURES, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, user, item, context):  # INT64 [batch], INT64 [batch], FP32 [batch, FEATURES]
        x = torch.cat((self.users(user), self.items(item), context), 1)
        return {"score": torch.sigmoid(self.net(x)).squeeze(1)}


torch.manual_seed(0)
# Three tensors: torch.export takes the same one, given twice, for a single input.
example = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), torch.zeros(2, FEATURES)
batch = {0: torch.export.Dim("batch", min=1, max=1024)}
shapes = dict.fromkeys(("user", "item", "context"), batch)
program = torch.export.export(Recommender().eval(), example, dynamic_shapes=shapes)
torch.export.save(program, "recommender.pt2")
