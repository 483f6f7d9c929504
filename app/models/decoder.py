"""The parts around the layers of every decoder: embedding, RoPE angles, last norm and output layer.

They are separate methods, so that a step can be recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.kernels.activations import Activations
from app.kernels.best import Best, Wanted
from app.models.config import ModelConfig
from app.models.context import StepContext
from app.models.layers import Embedding, RMSNorm, output_layer
from app.models.rotary import LayerAngles


class Decoder(nn.Module):
    """Token ids to logits. `layer(config, index, dtype)` makes one layer, which maps hidden rows to hidden rows."""

    def __init__(
        self, layer: type[nn.Module], config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, config.embedding_scale)
        self.layers = nn.ModuleList(layer(config, index, dtype) for index in range(config.num_layers))
        self.output = output_layer(config)
        self.norm = RMSNorm("model.norm", config.hidden_size, config, dtype, self.output)
        self.angles = LayerAngles(config.ropes, max_model_len, device)

    def forward(self, context: StepContext) -> Tensor | Best:
        """Return logits [rows, vocab] of the tokens in `logit_rows`, or the top ones of each row."""
        return self.outputs(self.body(context), context.best)

    def body(self, context: StepContext) -> Activations:
        """Compute the input of the output layer, for the tokens in `logit_rows`.

        For the other tokens, the last layer computes only keys and values.
        """
        hidden, angles = self.embedding(context.token_ids), self.angles.of_layers(self.angles(context.positions))
        wanted: list[Tensor | None] = [None] * len(self.layers)
        wanted[-1] = context.logit_rows
        for layer, own, only in zip(self.layers, angles, wanted, strict=True):
            hidden = layer(hidden, own, context.attend, only)
        result: Activations = self.norm(hidden)
        return result

    def outputs(self, rows: Activations, wanted: Wanted | None) -> Tensor | Best:
        """Return the logits, bounded by cap · tanh(logits / cap) if the config has a cap."""
        cap = self.config.logit_softcap
        best = None if wanted is None else self.output.best(rows, wanted, cap)
        if best is not None:
            return best
        logits: Tensor = self.output(rows)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
