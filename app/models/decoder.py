"""What all decoders are around their layers: embedding, angles, last norm, output layer. In parts, so that a step can be recorded."""

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
        """Logits [rows, vocab] of the tokens in `logit_rows`, or the best of them."""
        return self.outputs(self.body(context), context.best)

    def body(self, context: StepContext) -> Activations:
        """From token ids to what the output layer takes, of the tokens in `logit_rows`.

        Of the other tokens the last layer needs no more than keys and values.
        """
        hidden, angles = self.embedding(context.token_ids), self.angles.of_layers(self.angles(context.positions))
        wanted: list[Tensor | None] = [None] * len(self.layers)
        wanted[-1] = context.logit_rows
        for layer, own, only in zip(self.layers, angles, wanted, strict=True):
            hidden = layer(hidden, own, context.attend, only)
        result: Activations = self.norm(hidden)
        return result

    def outputs(self, rows: Activations, wanted: Wanted | None) -> Tensor | Best:
        """Bounded by cap · tanh(logits / cap) where the config has a cap."""
        cap = self.config.logit_softcap
        best = None if wanted is None else self.output.best(rows, wanted, cap)
        if best is not None:
            return best
        logits: Tensor = self.output(rows)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
