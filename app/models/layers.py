"""The building blocks of decoders. Each names the checkpoint tensors that it needs, and the loader assigns them.

The residual stream [tokens, hidden], RoPE and norms are FP32; the large products are in the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.kernels.activations import Activations
from app.kernels.linear import Linear, TableForm
from app.kernels.rowwise import Angles, add_rms_norm, gate, rms_norm
from app.kernels.table import Factor, add_rows, stored_rows
from app.kernels.turn import Heads
from app.models.config import ModelConfig
from app.models.context import Attend, AttentionSpec


class Embedding(nn.Module):
    """Ids [tokens] to FP32 [tokens, size], times `scale`.

    Ids count from row `first` of the stored table (RoBERTa's positions).

    The table keeps its stored dtype and memory, where only used rows are read. If it is tied to an output layer
    that can return its rows, there is no second table.
    """

    def __init__(self, source: str, rows: int, size: int, scale: float = 1.0, first: int = 0) -> None:
        super().__init__()
        self.source, self.scale, self.first = source, scale, first
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)
        self.form: TableForm | None = None
        self.factor: Factor = self.scale  # multiplied with the rows

    def adopt(self, tensor: Tensor) -> None:
        """Set the table to the stored tensor, without its first rows."""
        self.weight = nn.Parameter(tensor[self.first :], requires_grad=False)

    def share(self, form: TableForm, even: Tensor | None = None) -> None:
        """Read rows from the output layer's packed weight from now on, whose columns are multiplied by `even`."""
        self.form = form
        if even is not None:
            self.factor = self.scale / even

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the scaled rows of token_ids [tokens], FP32 [tokens, size]."""
        if self.form is not None:
            return self.form.rows(token_ids, self.factor)
        return stored_rows(self.weight, token_ids, self.factor)

    def add_to(self, hidden: Tensor, ids: Tensor) -> None:
        """Add the rows of ids [tokens] to hidden [tokens, size] FP32."""
        add_rows(hidden, self.weight, ids, self.factor)


class RMSNorm(nn.Module):
    """x / rms(x) times a weight, in FP32.

    The result is in `dtype`, or in the input format of the product that it `feeds`. Gemma stores the weight minus 1.
    """

    def __init__(self, source: str, size: int, config: ModelConfig, dtype: torch.dtype, feeds: Linear | None = None) -> None:
        super().__init__()
        self.source, self.eps, self.dtype, self.feeds = source, config.norm_eps, dtype, feeds
        self.offset = 1.0 if config.gemma else 0.0
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def adopt(self, tensor: Tensor) -> None:
        """Set the weight [size], converted to FP32."""
        self.weight = nn.Parameter(tensor.to(torch.float32, copy=True) + self.offset, requires_grad=False)

    def divide(self, factors: Tensor) -> None:
        """Divide the weight by the smooth scales of the product that it feeds (kernels/equalise.py)."""
        self.weight.div_(factors)

    def forward(self, x: Tensor) -> Activations:
        """Return the norm of x [tokens, size].

        Without `feeds`, x may have more dimensions and the result is a tensor.
        """
        group = None if self.feeds is None else self.feeds.takes(x.shape[0])
        return rms_norm(x, self.weight, self.eps, self.dtype, group)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """Add the norm of x [tokens, size] to hidden [tokens, size] FP32."""
        add_rms_norm(hidden, x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention: one product for queries, keys and values, then `attend`, which also applies RoPE.

    The layer calls the product `out`, since it knows for which tokens the result is needed and where it is added.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at = f"model.layers.{layer}.self_attn"
        self.layer, self.head_dim, self.eps = layer, config.head_dim, config.norm_eps
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = ("qkv_proj",) if config.fused_weights else ("q_proj", "k_proj", "v_proj")
        sources = tuple(f"{at}.{name}" for name in names)
        self.qkv = Linear(sources, config.hidden_size, queries + 2 * keys, config.qkv_bias)
        self.out = Linear((f"{at}.o_proj",), queries, config.hidden_size, config.output_bias)
        self.query_norm = RMSNorm(f"{at}.q_norm", config.head_dim, config, torch.float32) if config.qk_norm else None
        self.key_norm = RMSNorm(f"{at}.k_norm", config.head_dim, config, torch.float32) if config.qk_norm else None
        self.spec = AttentionSpec(config.attention_scale, config.windows[layer], config.attention_softcap)

    def forward(self, x: Activations, angles: Angles | None, attend: Attend) -> Tensor:
        """Map x [tokens, hidden] to the attention output [tokens, heads * head_dim]."""
        queries, keys = self.query_norm, self.key_norm
        norms = (None if queries is None else queries.weight, None if keys is None else keys.weight)
        heads = Heads(self.qkv(x), self.num_heads, self.num_kv_heads, self.head_dim, *norms, self.eps, angles)
        return attend(self.layer, heads, self.spec)


class GatedMLP(nn.Module):
    """down(act(gate x) * up x), with gate and up in one product."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        at = f"model.layers.{layer}.mlp"
        sources = (f"{at}.gate_up_proj",) if config.fused_weights else (f"{at}.gate_proj", f"{at}.up_proj")
        self.gate_up = Linear(sources, config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down = Linear((f"{at}.down_proj",), config.intermediate_size, config.hidden_size, config.mlp_bias)
        self.activation = config.activation

    def forward(self, x: Activations) -> Tensor:
        """Map x [tokens, hidden] to [tokens, hidden]."""
        result: Tensor = self.down(self._gated(x))
        return result

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the MLP of x to hidden [tokens, hidden]."""
        self.down.add_to(hidden, self._gated(x))

    def _gated(self, x: Activations) -> Activations:
        gate_up = self.gate_up(x)
        return gate(gate_up, self.activation, self.down.takes(gate_up.shape[0]))


def output_layer(config: ModelConfig) -> Linear:
    """Return the layer from hidden rows to logits; with tied embeddings its weight is the embedding's."""
    source = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    return Linear((source,), config.hidden_size, config.vocab_size)
