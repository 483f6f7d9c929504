"""A plain BERT for the demo encoder and its teacher.

It has word, position and type embeddings, post-norm layers, exact GELU and mean pooling. Parameters have the names of
a Hugging Face checkpoint, so they are saved as they are. The server does not use this module.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of config.json; the defaults are the demo's."""

    vocab_size: int = 6144
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 3
    num_heads: int = 6
    max_positions: int = 256
    num_types: int = 2
    eps: float = 1e-12


class Embeddings(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.position_embeddings = nn.Embedding(shape.max_positions, shape.hidden_size)
        self.token_type_embeddings = nn.Embedding(shape.num_types, shape.hidden_size)
        self.LayerNorm = nn.LayerNorm(shape.hidden_size, shape.eps)

    def forward(self, token_ids: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: token_ids.shape[1]]
        normed: Tensor = self.LayerNorm(
            self.word_embeddings(token_ids) + positions + self.token_type_embeddings.weight[0]
        )
        return normed


class SelfAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.query = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.key = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.value = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], self.num_heads, -1).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x)), attn_mask=seen
        )
        return mixed.transpose(1, 2).flatten(2)


class Output(nn.Module):
    """The output projection of a sublayer, with the norm after the residual connection."""

    def __init__(self, size: int, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(size, shape.hidden_size)
        self.LayerNorm = nn.LayerNorm(shape.hidden_size, shape.eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dense(x) + residual)
        return normed


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self = SelfAttention(shape)
        self.output = Output(shape.hidden_size, shape)


class Intermediate(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.hidden_size, shape.intermediate_size)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.intermediate = Intermediate(shape)
        self.output = Output(shape.intermediate_size, shape)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = self.attention.output(self.attention.self(x, seen), x)
        out: Tensor = self.output(F.gelu(self.intermediate.dense(x)), x)
        return out


class Layers(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))


class Bert(nn.Module):
    """Maps token ids and their mask, both [texts, tokens], to each text's mean over tokens, [texts, hidden_size]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = Embeddings(shape)
        self.encoder = Layers(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # At first a layer adds almost nothing to the residual stream.
                nn.init.normal_(parameter, std=0.01 if "output.dense" in name else 0.04)

    def forward(self, token_ids: Tensor, present: Tensor) -> Tensor:
        x = self.embeddings(token_ids)
        for layer in self.encoder.layer:
            x = layer(x, present[:, None, None, :])
        share = present.float() / present.sum(1, keepdim=True)
        return torch.einsum("btd,bt->bd", x.float(), share)
