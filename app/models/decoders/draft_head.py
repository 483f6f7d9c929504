"""Heads that draft for a model: each predicts the token after the next one.

They read the hidden state of a position, after the model's last norm, and the model's embedding of the next token.

`DraftHead` is one layer (multi-token prediction, arXiv 2412.19437, as Qwen 3.5 has it) with the model's output layer.
`AssistantHead` of Gemma 4 has some layers, which read the model's keys and values, and an output layer of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Decoder, LayerRopeAngles, output_layer
from app.models.decoders.layers import DecoderLayer, Norm, read_by
from armature_kernels.attention.context import StepContext
from armature_kernels.elementwise.activations import TopLogits, TopLogitsRequest
from armature_kernels.linear.linear import Linear


class DraftHead(nn.Module):
    """Rows of hidden states and the ids of the next tokens to logits. `attach` gives it the model that it drafts for."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config, size = config, config.hidden_size
        self.embedding_norm, self.hidden_norm, self.served_norm, self.own_norm = (
            Norm(f"model.{name}", size, config.norm)
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "served_norm", "norm")
        )
        self.first = Linear(("model.fc",), 2 * size, size)
        self.layer = DecoderLayer(config, 0, dtype)
        self.norm = Norm("model.norm", size, config.norm, dtype, gain=config.logit_scale)
        self.angles = LayerRopeAngles(config.ropes, max_model_len, device)

    @torch.inference_mode()
    def attach(self, served: Decoder) -> None:
        self.embedding, self.outputs = served.embedding, served.outputs
        self.norm.feeds = served.output
        if served.output.input_scales is not None:
            self.norm.divide_weight(served.output.input_scales)

    def inputs(self, hidden: Tensor, is_own: bool) -> Tensor:
        """Return what `hidden` reads, FP32, of hidden states before the last norm: the model's, or the head's own."""
        rows: Tensor = self.own_norm(hidden) if is_own else self.served_norm(hidden)
        return rows

    def hidden(self, context: StepContext) -> Tensor:
        """Compute hidden states FP32 [rows, size] before the last norm; `vectors` of the context has all `inputs`."""
        assert context.vectors is not None, "the head reads hidden states"
        parts = self.embedding_norm(self.embedding(context.token_ids)), self.hidden_norm(context.vectors.values)
        rows = self.first(read_by(self.first, torch.cat(parts, 1))).float()
        (angles,) = self.angles.by_layer(self.angles(context.positions))
        result: Tensor = self.layer(rows, angles, context.attend, context.logit_rows)
        return result

    def logits(self, hidden: Tensor, wanted: TopLogitsRequest | None = None) -> Tensor | TopLogits:
        """Return the logits [rows, vocab] of hidden states before the last norm, or the top ones of each row."""
        return self.outputs(self.norm(hidden), wanted)


class AssistantHead(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config, size, served = config, config.hidden_size, config.served_size
        self.first = Linear(("model.pre_projection",), 2 * served, size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, dtype) for layer in range(config.num_layers))
        self.norm = Norm("model.norm", size, config.norm)
        self.output, self.last = output_layer(config), Linear(("model.post_projection",), size, served)
        self.angles = LayerRopeAngles(config.ropes, max_model_len, device)

    @torch.inference_mode()
    def attach(self, served: Decoder) -> None:
        self.embedding, scales = served.embedding, served.output.input_scales
        self.served_norm = Norm("", self.config.served_size, served.norm.norm)
        weight = served.norm.weight if scales is None else served.norm.weight * scales
        self.served_norm.weight = nn.Parameter(weight.clone(), requires_grad=False)

    def inputs(self, hidden: Tensor, is_own: bool) -> Tensor:
        rows: Tensor
        rows = self.last(read_by(self.last, self.norm(hidden))).float() if is_own else self.served_norm(hidden)
        return rows

    def hidden(self, context: StepContext) -> Tensor:
        assert context.vectors is not None, "the head reads hidden states"
        parts = self.embedding(context.token_ids), context.vectors.values
        rows: Tensor = self.first(read_by(self.first, torch.cat(parts, 1))).float()
        for layer, angles in zip(self.layers, self.angles.by_layer(self.angles(context.positions)), strict=True):
            rows = layer(rows, angles, context.attend, None)
        return rows

    def logits(self, hidden: Tensor, wanted: TopLogitsRequest | None = None) -> Tensor | TopLogits:
        rows = read_by(self.output, self.norm(hidden))
        best = None if wanted is None else self.output.top_logits(rows, wanted, None)
        logits: Tensor | TopLogits = self.output(rows) if best is None else best
        return logits


Head = DraftHead | AssistantHead


def build_draft_head(config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Head:
    """Build a head on `meta` in inference mode, without weights; the loader assigns them."""
    with torch.device("meta"):
        return (AssistantHead if config.served_size else DraftHead)(config, dtype, max_model_len, device).eval()
