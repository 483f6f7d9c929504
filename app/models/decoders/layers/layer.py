"""One layer of a decoder, described by the values of its `ModelConfig`: attention, MLP, and norms around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from app.models.decoders.config import ModelConfig
from app.models.decoders.layer_config import ConvolutionConfig, ExpertsConfig, LatentConfig, NormConfig
from app.models.decoders.layers.vectors import AlibiSlopes, Filters, HeadNorm, Norm, StoredVector, Xielu
from app.models.decoders.shapes import Product, mixer_products, up_sources
from armature_kernels.attention.attention import QkvHeads, RopeAngles
from armature_kernels.attention.context import Attend, AttentionSpec
from armature_kernels.attention.convolution import convolved_rows
from armature_kernels.elementwise.activations import convert_rows
from armature_kernels.elementwise.latent import latent_heads
from armature_kernels.elementwise.norms import contiguous, gate, gather
from armature_kernels.elementwise.routing import route
from armature_kernels.elementwise.routing_rule import Routing
from armature_kernels.linear.activations import Activations, unquantized
from armature_kernels.linear.experts import ExpertForms, ExpertStack, run_experts_torch
from armature_kernels.linear.linear import Linear, LinearForm


def linear_of(product: Product, layer: int) -> Linear:
    sources = tuple(f"model.layers.{layer}.{name}" for name in product.sources)
    return Linear(sources, product.inputs, sum(product.rows), product.bias, product.rows)


class Attention(nn.Module):
    """Grouped-query attention: one product for queries, keys and values, then `attend`, which also applies RoPE.

    A layer that reads keys and values of another one has queries alone. The layer calls the product `out`, since it
    knows for which tokens the result is needed and where it is added.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at = f"model.layers.{layer}"
        self.layer, self.head_dim, self.norm = config.cache_layer(layer), config.head_dim, config.head_norm
        writes = layer < config.cache_layers
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads if writes else 0
        self.qkv, self.out = (linear_of(product, layer) for product in mixer_products(config, layer))
        self.query_norm, self.key_norm = (
            None
            if config.head_norm is None or not heads
            else HeadNorm(f"{at}.self_attn.{name}_norm", config.head_norm, heads, config.head_dim)
            for name, heads in (("q", self.num_heads), ("k", self.num_kv_heads))
        )
        has_norm = writes and config.head_norm is not None and config.head_norm.values
        self.value_norm = StoredVector("", "", config.head_dim) if has_norm else None  # all weights are 1
        self.spec = AttentionSpec(config.attention_scale, config.windows[layer], config.attention_softcap)
        self.sinks = StoredVector(f"{at}.self_attn", "sinks", config.num_heads) if config.has_sinks else None
        self.slopes = AlibiSlopes(config.alibi_slopes) if config.alibi_slopes else None

    @property
    def first(self) -> Linear:
        """The product that reads the input of attention; the norm before it writes what it reads."""
        return self.qkv

    def forward(self, x: Activations, angles: RopeAngles | None, attend: Attend) -> Tensor:
        """Map x [tokens, hidden] to the attention output [tokens, heads * head_dim]."""
        spec = self.spec
        if self.sinks is not None or self.slopes is not None:
            sinks, slopes = (None if one is None else one.weight for one in (self.sinks, self.slopes))
            spec = replace(spec, sinks=sinks, slopes=slopes)
        return attend(self.layer, self._heads(self.qkv(x), angles), spec)

    def _heads(self, product: Tensor, angles: RopeAngles | None) -> QkvHeads:
        sizes = (product, self.num_heads, self.num_kv_heads, self.head_dim)
        if self.norm is None or self.query_norm is None:
            return QkvHeads(*sizes, angles=angles)
        return QkvHeads(
            *sizes,
            self.query_norm.weight,
            None if self.key_norm is None else self.key_norm.weight,
            self.norm.eps,
            angles,
            subtracts_mean=self.norm.kind == "layer",
            together=self.norm.scope == "together",
            norm_after_rope=self.norm.after_rope,
            value_norm=None if self.value_norm is None else self.value_norm.weight,
        )


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, keys and values come from short rows.

    The cache has the keys and values of all heads, values padded to the size of keys.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at = f"model.layers.{layer}.self_attn"
        self.layer, self.latent, self.heads = layer, latent, latent.heads
        linears = [linear_of(product, layer) for product in mixer_products(config, layer)]
        self.first, self.others, self.out = linears[0], linears[-2], linears[-1]
        self.queries, self.query_norm, norm = None, None, NormConfig(eps=latent.eps)
        if latent.query_rank is not None:
            self.queries = linears[1]
            self.query_norm = Norm(f"{at}.q_a_layernorm", latent.query_rank, norm, dtype, self.queries)
        self.norm = Norm(f"{at}.kv_a_layernorm", latent.rank, norm, dtype, self.others)
        self.spec = AttentionSpec(config.attention_scale, config.windows[layer], config.attention_softcap)

    def forward(self, x: Activations, angles: RopeAngles | None, attend: Attend) -> Tensor:
        """Map x [tokens, hidden] to the attention output [tokens, heads * value]."""
        sizes, rows = self.heads, self.first(x)
        first = rows.shape[1] - self.latent.rank - sizes.rotated
        queries, row, rotated = rows.tensor_split((first, rows.shape[1] - sizes.rotated), 1)
        if self.queries is not None and self.query_norm is not None:
            queries = self.queries(self.query_norm(queries))
        product = latent_heads(queries, self.others(self.norm(row)), rotated, sizes)
        heads = QkvHeads(product, sizes.heads, sizes.heads, sizes.size, angles=angles)
        mixed = attend(self.layer, heads, self.spec).view(-1, sizes.size)
        return contiguous(mixed[:, : sizes.value]).view(len(rows), sizes.heads * sizes.value)


class ShortConvolution(nn.Module):
    """A convolution over the last positions of each channel, with two gates: out((conv(a * c)) * b), (a, b, c) = in x.

    Its inputs are in the cache, so `attend` computes it.
    """

    def __init__(self, config: ModelConfig, convolution: ConvolutionConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.heads = layer, config.head_dim, config.cache_heads
        self.first, self.out = (linear_of(product, layer) for product in mixer_products(config, layer))
        self.filters = Filters(f"model.layers.{layer}.conv.conv", convolution.width, config.hidden_size)

    def forward(self, x: Activations, angles: RopeAngles | None, attend: Attend) -> Tensor:
        """Map x [tokens, hidden] to [tokens, hidden]; there are no positions."""
        product = convolved_rows(self.first(x))
        blocks = product.shape[1] // (2 * self.head_dim)
        return attend(
            self.layer,
            QkvHeads(product, blocks, blocks // 2, self.head_dim),
            AttentionSpec(1.0, filters=self.filters.weight),
        )


class DecoderMLP(nn.Module):
    """down(act(gate x) * up x), gate and up in one product, or down(act(up x)); deviations make most gates 0."""

    def __init__(self, config: ModelConfig, layer: int, name: str = "mlp", inner: int | None = None) -> None:
        super().__init__()
        at = f"model.layers.{layer}"
        inner = inner or config.inner_size(layer)
        sources = tuple(f"{at}.{source}" for source in up_sources(config, name))
        self.is_gated, self.activation = config.is_gated, config.activation
        self.deviations = config.gate_deviations[layer] if config.gate_deviations else None
        self.gate_up = Linear(sources, config.hidden_size, (2 if self.is_gated else 1) * inner, config.mlp_bias)
        self.xielu = Xielu(f"{at}.mlp.act_fn") if config.activation == "xielu" else None
        self.down = Linear((f"{at}.{name}.down_proj",), inner, config.hidden_size, config.mlp_bias)

    @property
    def first(self) -> Linear:
        """The product that reads the input of the MLP; the norm before it writes what it reads."""
        return self.gate_up

    def forward(self, x: Activations) -> Tensor:
        """Map x [tokens, hidden] to [tokens, hidden]."""
        result: Tensor = self.down(self._activated(x))
        return result

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        self.down.add_to(hidden, self._activated(x))

    def _activated(self, x: Activations) -> Activations:
        if self.xielu is not None:
            product = self.gate_up(x)
            result: Activations = self.xielu(product, self.down.activation_group(product.shape[0]))
            return result
        if not self.is_gated:
            return self.gate_up.multiply_activated(x, self.activation, self.down)
        gate_up = self.gate_up(x)
        return gate(gate_up, self.activation, self.down.activation_group(gate_up.shape[0]), self.deviations)


class MixtureOfExperts(nn.Module):
    """The sum of the experts that the router selects for each token, times their weights, and of a shared expert.

    A shared expert with a gate is a mixture of one expert, whose weight is the sigmoid of the gate.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, layer: int) -> None:
        super().__init__()
        at, routing = f"model.layers.{layer}.mlp", experts.routing
        self.routing, self.activation = routing, config.activation
        sources = (f"{at}.gate", *((f"{at}.shared_expert_gate",) if experts.shared_gate else ()))
        rows = (routing.num_experts, 1)[: len(sources)]
        self.router = Linear(sources, config.hidden_size, sum(rows), experts.router_bias, rows)
        self.experts = nn.ModuleList(
            DecoderMLP(config, layer, f"mlp.experts.{number}", experts.size) for number in range(routing.num_experts)
        )
        self.shared = (
            DecoderMLP(config, layer, "mlp.shared_expert", experts.shared_size) if experts.shared_size else None
        )
        self.has_shared_gate = experts.shared_gate
        self.bias = (
            StoredVector(f"{at}.gate", "e_score_correction_bias", routing.num_experts)
            if experts.selection_bias
            else None
        )
        self._stacks: dict[str, tuple[tuple[LinearForm, ...], ExpertStack | None]] = {}

    @property
    def first(self) -> Linear:
        """The product that reads the input of the MLP; the experts read the same."""
        return self.router

    def forward(self, x: Activations) -> Tensor:
        """Map x [tokens, hidden] to [tokens, hidden] FP32."""
        result = torch.zeros(len(unquantized(x)), self.router.in_features)
        self.add_to(result, x)
        return result

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        rows, number = unquantized(x), self.routing.num_experts
        logits = self.router.multiply_wide(rows)
        ids, weights = route(logits, self.routing, None if self.bias is None else self.bias.weight)
        self._run("experts", self.experts, hidden, rows, ids, weights)
        if self.shared is not None and self.has_shared_gate:
            ids, weights = route(logits[:, number:], _GATE)
            self._run("shared", (self.shared,), hidden, rows, ids, weights)
        elif self.shared is not None:
            self.shared.add_to(hidden, rows)

    def _run(
        self, name: str, experts: Iterable[nn.Module], hidden: Tensor, rows: Tensor, ids: Tensor, weights: Tensor
    ) -> None:
        forms = [ExpertForms(one.gate_up.form, one.down.form) for one in experts if isinstance(one, DecoderMLP)]
        known = tuple(form for one in forms for form in one)
        if name not in self._stacks or self._stacks[name][0] != known:  # forms change while weights are packed
            self._stacks[name] = (known, ExpertStack.of(forms))
        stack = self._stacks[name][1]
        if stack is not None:
            stack.add_to(hidden, rows, ids, weights, self.activation)
        else:
            run_experts_torch(forms, hidden, rows, ids, weights, self.activation)


_GATE = Routing(1, 1, "sigmoid", renormalize=False)


def attention_of(config: ModelConfig, layer: int, dtype: torch.dtype) -> Attention | LatentAttention | ShortConvolution:
    if config.convolution is not None and config.has_convolution(layer):
        return ShortConvolution(config, config.convolution, layer)
    if config.latent is None:
        return Attention(config, layer, dtype)
    return LatentAttention(config, config.latent, layer, dtype)


def mlp_of(config: ModelConfig, layer: int) -> DecoderMLP | MixtureOfExperts:
    if config.experts is None or not config.has_experts(layer):
        return DecoderMLP(config, layer)
    return MixtureOfExperts(config, config.experts, layer)


class DecoderLayer(nn.Module):
    """Attention and MLP with the norms of the config's `placement` (layer_config.py)."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at, size, norm = f"model.layers.{layer}", config.hidden_size, config.norm
        self.placement, self.dtype = config.placement, dtype
        self.attention, self.mlp = attention_of(config, layer, dtype), mlp_of(config, layer)
        self.attention_norm = self.mlp_norm = self.mixed_norm = self.gated_norm = None
        if config.placement != "post":
            before_mlp = {"sandwich": "pre_feedforward_layernorm"}.get(config.placement, "post_attention_layernorm")
            before_mlp = "input_layernorm" if config.shares_norm else before_mlp
            self.attention_norm = Norm(f"{at}.input_layernorm", size, norm, dtype, self.attention.first)
            self.mlp_norm = Norm(f"{at}.{before_mlp}", size, norm, dtype, self.mlp.first)
        if config.placement in ("post", "sandwich"):
            self.mixed_norm = Norm(f"{at}.post_attention_layernorm", size, norm)
            self.gated_norm = Norm(f"{at}.post_feedforward_layernorm", size, norm)

    def forward(self, hidden: Tensor, angles: RopeAngles | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """Run the layer on hidden [tokens, hidden], overwritten; `rows` are needed after it (None: all)."""
        mixed = self.attention(self._input(hidden, self.attention_norm, self.attention.first), angles, attend)
        if rows is not None:
            hidden, mixed = gather(hidden, rows), gather(mixed, rows)
        parallel = self._input(hidden, self.mlp_norm, self.mlp.first) if self.placement == "parallel" else None
        if self.mixed_norm is None:
            self.attention.out.add_to(hidden, mixed)
        else:
            self.mixed_norm.add_to(hidden, self.attention.out(mixed))
        x = self._input(hidden, self.mlp_norm, self.mlp.first) if parallel is None else parallel
        if self.gated_norm is None:
            self.mlp.add_to(hidden, x)
        else:
            self.gated_norm.add_to(hidden, self.mlp(x))
        return hidden

    def _input(self, hidden: Tensor, norm: Norm | None, product: Linear) -> Activations:
        if norm is None:
            return convert_rows(hidden, self.dtype, product.activation_group(hidden.shape[0]))
        result: Activations = norm(hidden)
        return result
