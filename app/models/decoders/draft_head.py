"""A head of multi-token prediction, as Qwen 3.5 has it (arXiv 2412.19437): one layer that predicts the token after the next one.

It reads the hidden state of a position, after the model's last norm, and the embedding of the next token. Embedding and output
layer are the model's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Decoder, LayerRopeAngles
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


def build_draft_head(config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> DraftHead:
    """Build a head on `meta` in inference mode, without weights; the loader assigns them."""
    with torch.device("meta"):
        return DraftHead(config, dtype, max_model_len, device).eval()
