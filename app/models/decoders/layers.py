"""Layers of a decoder, described by the values of its `ModelConfig`: attention, MLP, and norms around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.models.decoders.config import ModelConfig
from app.models.decoders.layer_config import (
    AltUpConfig,
    ConvolutionConfig,
    ExpertsConfig,
    HeadNormConfig,
    LatentConfig,
    NormConfig,
    RecurrentConfig,
)
from app.models.decoders.shapes import (
    APART_NORMS,
    Product,
    attention_products,
    filter_kinds,
    state_products,
    up_sources,
)
from armature_kernels.attention.attention import QkvHeads, RopeAngles
from armature_kernels.attention.context import Attend, AttendWithStates, AttentionSpec
from armature_kernels.attention.recurrence import Recurrence, RecurrentInputs
from armature_kernels.elementwise.activations import convert_rows, xielu
from armature_kernels.elementwise.latent import latent_heads
from armature_kernels.elementwise.norms import (
    GatedNorm,
    add_rms_norm,
    contiguous,
    copy_rows,
    gate,
    gate_with,
    gated_norm,
    gather,
    layer_norm,
    layer_norm_in_place,
    rms_norm,
)
from armature_kernels.elementwise.routing import route
from armature_kernels.elementwise.routing_rule import Routing
from armature_kernels.linear.activations import Activations, RowGroups, UnnormedRows, quantize, unquantized
from armature_kernels.linear.experts import DeviceExpertStack, ExpertForms, ExpertStack, run_experts_torch
from armature_kernels.linear.linear import Linear, LinearForm


class Norm(nn.Module):
    """An RMSNorm or a LayerNorm in FP32, times `gain`, in `dtype` or the input format of the product it `feeds`."""

    def __init__(
        self,
        source: str,
        size: int,
        norm: NormConfig,
        dtype: torch.dtype = torch.float32,
        feeds: Linear | None = None,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.source, self.norm, self.dtype, self.feeds, self.gain = source, norm, dtype, feeds, gain
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if norm.has_bias else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its stored tensors, in the order in which `set_weight` takes them."""
        return ("weight",) * self.norm.has_weight + ("bias",) * self.norm.has_bias

    def set_weight(self, *tensors: Tensor) -> None:
        wide = {kind: tensor.to(torch.float32, copy=True) for kind, tensor in zip(self.kinds, tensors, strict=True)}
        self.weight = nn.Parameter((wide["weight"] + self.norm.offset) * self.gain, requires_grad=False)
        if self.bias is not None:
            self.bias = nn.Parameter(wide["bias"] * self.gain, requires_grad=False)

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.weight = nn.Parameter(
            torch.full(self.weight.shape, weight * self.gain, device=device), requires_grad=False
        )
        if self.bias is not None:
            self.bias = nn.Parameter(torch.zeros(self.bias.shape, device=device), requires_grad=False)

    def divide_weight(self, factors: Tensor) -> None:
        """Divide the weight by the smooth scales of the product that it feeds (armature_kernels/linear/smoothing.py)."""
        self.weight.div_(factors)
        if self.bias is not None:
            self.bias.div_(factors)

    def forward(self, x: Tensor, is_read_once: bool = False) -> Activations:
        """Return the norm of x [tokens, size]; without `feeds`, x may have more dimensions.

        `is_read_once`: only `feeds` reads the result, before x changes, so that it may compute the norm itself.
        """
        by_product = is_read_once and self.feeds is not None and self.feeds.takes_unnormed(len(x))
        if by_product and self.norm.kind == "rms":
            return UnnormedRows(x, self.weight, self.norm.eps)
        group = None if self.feeds is None else self.feeds.activation_group(x.shape[0])
        if self.norm.kind == "layer":
            return layer_norm(x, (self.weight, self.bias, self.norm.eps), self.dtype, group)
        return rms_norm(x, self.weight, self.norm.eps, self.dtype, group)

    def overwrite(self, hidden: Tensor) -> None:
        """Overwrite hidden [tokens, size] FP32 by its norm."""
        if self.norm.kind == "rms":
            result = self(hidden)
            assert isinstance(result, Tensor), "a norm that feeds no product returns a tensor"
            copy_rows(hidden, result)
            return
        layer_norm_in_place(hidden, (self.weight, self.bias, self.norm.eps))

    def add_to(self, hidden: Tensor, x: Tensor, factor: float = 1.0) -> None:
        """Add the norm of x [tokens, size] to hidden [tokens, size] FP32, then multiply it. Only an RMSNorm can do that."""
        assert self.norm.kind == "rms", "no family has a LayerNorm after a branch"
        add_rms_norm(hidden, x, self.weight, self.norm.eps, factor)


class HeadNorm(nn.Module):
    """The weights of the norm of queries or keys, FP32; `QkvHeads` says how they are applied."""

    def __init__(self, source: str, norm: HeadNormConfig, heads: int, head_dim: int) -> None:
        super().__init__()
        self.source, self.norm = source, norm
        self.kinds = ("weight",) * norm.has_weight + ("bias",) * norm.has_bias
        self.weight = nn.Parameter(
            torch.empty((1 + norm.has_bias) * norm.num_weights(heads, head_dim)), requires_grad=False
        )

    def set_weight(self, tensor: Tensor, *bias: Tensor) -> None:
        wide = tensor.to(torch.float32, copy=True) + self.norm.offset
        self.weight = nn.Parameter(torch.cat((wide, *bias)), requires_grad=False)

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.weight = nn.Parameter(torch.full(self.weight.shape, weight, device=device), requires_grad=False)


class StoredVector(nn.Module):
    """A stored vector of a layer, or a small matrix, in FP32. Without a `kind` it is not stored and its elements are 1."""

    kinds: tuple[str, ...]

    def __init__(self, source: str, kind: str, *shape: int) -> None:
        super().__init__()
        self.source, self.kinds = source, (kind,) if kind else ()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.weight = nn.Parameter(torch.full(self.weight.shape, weight, device=device), requires_grad=False)

    def set_weight(self, tensor: Tensor) -> None:
        self.weight = nn.Parameter(tensor.to(torch.float32, copy=True), requires_grad=False)


class Rates(StoredVector):
    """Positive numbers whose logarithms are stored."""

    def set_weight(self, tensor: Tensor) -> None:
        self.weight = nn.Parameter(tensor.float().exp(), requires_grad=False)


class Zeros(StoredVector):
    """A vector of zeros, by which rows become zeros in a native operation."""

    def __init__(self, size: int) -> None:
        super().__init__("", "", size)

    def fill(self, weight: float, device: torch.device | None) -> None:
        super().fill(0.0, device)


class LayerFactor(StoredVector):
    """The number by which the result of a layer is multiplied."""

    def __init__(self, source: str) -> None:
        super().__init__(source, "layer_scalar", 1)
        self.value = 1.0

    def set_weight(self, tensor: Tensor) -> None:
        super().set_weight(tensor)
        self.value = float(tensor)


class AlibiSlopes(StoredVector):
    """The slopes of ALiBi, FP32 [heads], which no checkpoint stores."""

    def __init__(self, slopes: Sequence[float]) -> None:
        super().__init__("", "", len(slopes))
        self.slopes = tuple(slopes)

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.weight = nn.Parameter(torch.tensor(self.slopes, device=device or "cpu"), requires_grad=False)


class Filters(nn.Module):
    """The filters of a short convolution, FP32 [width, channels], of which `kinds` are stored."""

    def __init__(self, source: str, width: int, channels: int, kinds: tuple[str, ...] = ("weight",)) -> None:
        super().__init__()
        self.source, self.kinds = source, kinds
        self.weight = nn.Parameter(torch.empty(width, channels), requires_grad=False)

    def set_weight(self, *tensors: Tensor) -> None:
        """Set the filters from the stored ones [channels, 1, width]."""
        self.weight = nn.Parameter(torch.cat(tensors).float().squeeze(1).T.contiguous(), requires_grad=False)

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.weight = nn.Parameter(torch.full(self.weight.shape, weight, device=device), requires_grad=False)


class Xielu(nn.Module):
    """The activation xIELU with the two trained factors of a layer."""

    kinds = ("alpha_p", "alpha_n")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.positive, self.negative = 0.8, 0.8

    def set_weight(self, positive: Tensor, negative: Tensor) -> None:
        """Set the factors from the stored logarithms [1]."""
        self.positive = float(F.softplus(positive.float()))
        self.negative = 0.5 + float(F.softplus(negative.float()))

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.positive = self.negative = weight

    def forward(self, x: Tensor, group: RowGroups | None) -> Activations:
        return xielu(x, self.positive, self.negative, group)


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
        at, sizes = f"model.layers.{layer}", config.heads(layer)
        norm = config.head_norm
        if norm is not None and norm.with_rope and config.ropes[layer] is None:
            norm = None
        self.layer, self.head_dim, self.norm = config.cache_layer(layer), sizes.head_dim, norm
        writes = config.writes_cache(layer)
        self.num_heads, self.num_kv_heads = config.num_heads, sizes.num_kv_heads if writes else 0
        self.read_heads = 0 if writes else sizes.num_kv_heads
        self.qkv, self.out = (linear_of(product, layer) for product in attention_products(config, layer))
        self.query_norm, self.key_norm = (
            None if norm is None or not heads else HeadNorm(f"{at}.self_attn.{name}_norm", norm, heads, sizes.head_dim)
            for name, heads in (("q", self.num_heads), ("k", self.num_kv_heads))
        )
        has_norm = writes and norm is not None and norm.values
        self.value_norm = StoredVector("", "", sizes.head_dim) if has_norm else None  # all weights are 1
        self.spec = AttentionSpec(
            config.attention_scale,
            config.windows[layer],
            config.attention_softcap,
            sees_blocks=config.sees_blocks(layer),
        )
        self.sinks = StoredVector(f"{at}.self_attn", "sinks", config.num_heads) if config.has_sinks else None
        self.slopes = AlibiSlopes(config.alibi_slopes) if config.alibi_slopes else None
        self.gates = config.num_heads * self.head_dim if config.has_output_gate else 0
        self.is_last = layer == config.num_layers - 1  # of its result some rows may be taken, whatever a step computes

    @property
    def first(self) -> Linear:
        """The product that reads the input of attention; the norm before it writes what it reads."""
        return self.qkv

    def forward(self, x: Activations, angles: RopeAngles | None, attend: Attend) -> Activations:
        """Map x [tokens, hidden] to the attention output [tokens, heads * head_dim], as `out` reads it except in the last layer."""
        spec = self.spec
        if self.sinks is not None or self.slopes is not None:
            sinks, slopes = (None if one is None else one.weight for one in (self.sinks, self.slopes))
            spec = replace(spec, sinks=sinks, slopes=slopes)
        product = self.qkv(x)
        if not self.gates:
            return attend(self.layer, self._heads(product, angles), spec)
        mixed = attend(self.layer, self._heads(product[:, self.gates :], angles), spec)
        group = None if self.is_last else self.out.activation_group(len(mixed))
        return gated_norm(mixed, product[:, : self.gates], GatedNorm("sigmoid"), mixed.dtype, group)

    def _heads(self, product: Tensor, angles: RopeAngles | None) -> QkvHeads:
        sizes = (product, self.num_heads, self.num_kv_heads, self.head_dim)
        if self.norm is None or self.query_norm is None:
            return QkvHeads(*sizes, angles=angles, read_heads=self.read_heads)
        return QkvHeads(
            *sizes,
            self.query_norm.weight,
            None if self.key_norm is None else self.key_norm.weight,
            self.norm.eps,
            angles,
            subtracts_mean=self.norm.kind == "layer",
            norm_bias=self.norm.has_bias,
            together=self.norm.scope == "together",
            norm_after_rope=self.norm.after_rope,
            value_norm=None if self.value_norm is None else self.value_norm.weight,
            read_heads=self.read_heads,
        )


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, keys and values come from short rows.

    The cache has the keys and values of all heads, values padded to the size of keys.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at = f"model.layers.{layer}.self_attn"
        self.layer, self.latent, self.heads = layer, latent, latent.heads
        linears = [linear_of(product, layer) for product in attention_products(config, layer)]
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

    Its last inputs are a state, which is elsewhere, so `attend` computes it.
    """

    def __init__(self, config: ModelConfig, convolution: ConvolutionConfig, layer: int) -> None:
        super().__init__()
        self.layer = sum(convolution.layers[:layer])
        self.first, self.out = (linear_of(product, layer) for product in attention_products(config, layer))
        self.filters = Filters(f"model.layers.{layer}.conv.conv", convolution.width, config.hidden_size)

    def forward(self, x: Activations, angles: RopeAngles | None, attend: Attend) -> Tensor:
        """Map x [tokens, hidden] to [tokens, hidden]; there are no positions."""
        assert isinstance(attend, AttendWithStates), "only such a runner has states"
        product = self.first(x)
        return unquantized(convert_rows(attend.convolve(self.layer, product, self.filters.weight), product.dtype))


class RecurrentMixer(nn.Module):
    """A layer with a recurrent state: the gated delta rule, or Mamba-2. The state is elsewhere, so `attend` computes it.

    With the delta rule a product of its own, in FP32, says what the state keeps and takes in.
    """

    def __init__(self, config: ModelConfig, recurrent: RecurrentConfig, layer: int) -> None:
        super().__init__()
        at, sizes = f"model.layers.{layer}.{recurrent.name}", recurrent.sizes
        assert recurrent.layers[layer], "the layer has a state"
        self.layer, self.recurrent, self.sizes = sum(recurrent.layers[:layer]), recurrent, sizes
        products = [linear_of(product, layer) for product in state_products(config)]
        self.first, self.inputs, self.out = products[0], products[-2], products[-1]
        self.is_last = layer == config.num_layers - 1
        source, kinds = filter_kinds(recurrent)
        self.filters = Filters(f"{at}{source}", sizes.width, sizes.channels, kinds)
        self.bias = StoredVector(f"{at}.conv1d", "bias", sizes.channels) if recurrent.conv_bias else None
        self.rates, self.step_bias = Rates(at, "A_log", sizes.heads), StoredVector(at, "dt_bias", sizes.heads)
        self.skips = None if sizes.has_delta else StoredVector(at, "D", sizes.heads)
        self.norm = StoredVector(f"{at}.norm", "weight", recurrent.norm_weights) if recurrent.norm_size else None

    def forward(self, x: Activations, angles: RopeAngles | None, attend: Attend) -> Activations:
        """Map x [tokens, hidden] to [tokens, heads * value_size], as `out` reads it except in the last layer."""
        assert isinstance(attend, AttendWithStates), "only such a runner has states"
        inputs, gates = self._inputs(x)
        weights = (one if one is None else one.weight for one in (self.bias, self.rates, self.step_bias, self.skips))
        bias, rates, step_bias, skips = weights
        assert rates is not None and step_bias is not None, "all layers have them"
        recurrence = Recurrence(
            self.sizes,
            self.filters.weight,
            bias,
            rates,
            step_bias,
            skips,
            self.recurrent.step_limits,
            beta_scale=self.recurrent.beta_scale,
        )
        mixed = attend.recur(self.layer, inputs, recurrence)
        weight, recurrent = None if self.norm is None else self.norm.weight, self.recurrent
        norm = GatedNorm("silu", recurrent.norm_size, weight, recurrent.norm_eps, recurrent.gates_first)
        group = None if self.is_last else self.out.activation_group(len(mixed))
        return gated_norm(mixed, gates, norm, gates.dtype, group)

    def _inputs(self, x: Activations) -> tuple[RecurrentInputs, Tensor]:
        """Return what the recurrence reads, and the gates."""
        heads, channels, values = self.sizes.heads, self.sizes.channels, self.sizes.values
        if not self.sizes.has_delta:
            product = self.first(x)
            gates, end = product[:, :values], values + channels
            return RecurrentInputs(product[:, values:end], product[:, end : end + heads]), gates
        rows = unquantized(x)
        scales, product = self.first.multiply_wide(rows), self.inputs(read_by(self.inputs, rows))
        inputs = RecurrentInputs(product[:, :channels], scales[:, heads : 2 * heads], scales[:, :heads])
        return inputs, product[:, channels : channels + values]


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
        if self.deviations is None:
            gated = self.gate_up.multiply_gated(x, self.activation)
            if gated is not None:
                return gated
        gate_up = self.gate_up(x)
        return gate(gate_up, self.activation, self.down.activation_group(gate_up.shape[0]), self.deviations)


class MixtureOfExperts(nn.Module):
    """The sum of the experts that the router selects for each token, times their weights, and of a shared expert.

    A shared expert that does not count in full is a mixture of one expert, with the sigmoid of a gate or a constant as
    its weight.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, layer: int) -> None:
        super().__init__()
        at, routing = f"model.layers.{layer}.mlp", experts.routing
        self.routing, self.activation, self.scales_inputs = routing, config.activation, experts.scales_inputs
        sources = (f"{at}.gate", *((f"{at}.shared_expert_gate",) if experts.shared_gate else ()))
        rows = (routing.num_experts, 1)[: len(sources)]
        self.router = Linear(sources, config.hidden_size, sum(rows), experts.router_bias, rows)
        self.experts = nn.ModuleList(
            DecoderMLP(config, layer, f"mlp.experts.{number}", experts.size) for number in range(routing.num_experts)
        )
        self.shared = (
            DecoderMLP(config, layer, "mlp.shared_expert", experts.shared_size)
            if experts.shared_size and not experts.apart
            else None
        )
        self.factors = StoredVector(f"{at}.gate", "per_expert_scale", routing.num_experts) if experts.apart else None
        self.zeros = Zeros(config.hidden_size) if config.placement_of(layer) in ("post", "sandwich") else None
        # How the shared expert is weighed, unless it counts in full.
        self.shared_routing: Routing | None = None
        if experts.shared_gate:
            self.shared_routing = Routing(1, 1, "sigmoid", renormalize=False)
        elif experts.shared_scale != 1.0:
            self.shared_routing = Routing(1, 1, scale=experts.shared_scale)
        self.bias = (
            StoredVector(f"{at}.gate", "e_score_correction_bias", routing.num_experts)
            if experts.selection_bias
            else None
        )
        self._stacks: dict[str, tuple[tuple[LinearForm, ...], ExpertStack | DeviceExpertStack | None]] = {}

    @property
    def first(self) -> Linear:
        """The product that reads the input of the MLP; the experts read the same."""
        return self.router

    def forward(self, x: Activations, routed: Activations | None = None) -> Tensor:
        """Map x [tokens, hidden] to [tokens, hidden] FP32; `routed` is the input of the router, if it is another."""
        rows = unquantized(x)
        assert self.zeros is not None, "only with norms after branches the result is needed by itself"
        result = rms_norm(rows, self.zeros.weight, 1.0, torch.float32)
        assert isinstance(result, Tensor), "it is not quantized"
        self.add_to(result, rows, routed)
        return result

    def add_to(self, hidden: Tensor, x: Activations, routed: Activations | None = None) -> None:
        rows = unquantized(x)
        logits = self.router.multiply_wide(rows if routed is None else unquantized(routed))
        bias, factors = (None if one is None else one.weight for one in (self.bias, self.factors))
        ids, weights = route(logits, self.routing, bias, factors)
        self._run("experts", self.experts, hidden, rows, ids, weights)
        if self.shared is not None and self.shared_routing is not None:
            ids, weights = route(logits[:, -1:], self.shared_routing)
            self._run("shared", (self.shared,), hidden, rows, ids, weights)
        elif self.shared is not None:
            self.shared.add_to(hidden, rows)

    def _run(
        self, name: str, experts: Iterable[nn.Module], hidden: Tensor, rows: Tensor, ids: Tensor, weights: Tensor
    ) -> None:
        scales_inputs = self.scales_inputs and name == "experts"
        forms = [
            ExpertForms(one.gate_up.form, one.down.form, one.is_gated, scales_inputs)
            for one in experts
            if isinstance(one, DecoderMLP)
        ]
        known = tuple(form for one in forms for form in (one.gate_up, one.down))
        if name not in self._stacks or self._stacks[name][0] != known:  # forms change while weights are packed
            self._stacks[name] = (known, DeviceExpertStack.of(forms) or ExpertStack.of(forms))
        stack = self._stacks[name][1]
        if stack is not None:
            stack.add_to(hidden, rows, ids, weights, self.activation)
        else:
            run_experts_torch(forms, hidden, rows, ids, weights, self.activation)


class ExpertsApart(nn.Module):
    """Experts beside an MLP: norm(mlp) + norm(experts(norm h)); the router reads another norm of h."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, (router, first, mlp, last) = config.hidden_size, (f"model.layers.{layer}.{name}" for name in APART_NORMS)
        self.experts = MixtureOfExperts(config, experts, layer)
        self.router_norm = Norm(router, size, config.norm, dtype, gain=size**-0.5)
        self.first_norm = Norm(first, size, config.norm, dtype)
        self.mlp_norm, self.last_norm = (Norm(source, size, config.norm) for source in (mlp, last))

    def forward(self, hidden: Tensor, mlp: Tensor) -> Tensor:
        """Return the sum FP32 [tokens, hidden] for the MLP's result."""
        total = self.mlp_norm(mlp)
        assert isinstance(total, Tensor), "a norm that feeds no product returns a tensor"
        self.last_norm.add_to(total, self.experts(self.first_norm(hidden), self.router_norm(hidden)))
        return total


def attention_of(
    config: ModelConfig, layer: int, dtype: torch.dtype
) -> Attention | LatentAttention | ShortConvolution | RecurrentMixer:
    if config.recurrent is not None and config.has_state(layer) and not config.attends_beside:
        return RecurrentMixer(config, config.recurrent, layer)
    if config.convolution is not None and config.has_convolution(layer):
        return ShortConvolution(config, config.convolution, layer)
    if config.latent is None:
        return Attention(config, layer, dtype)
    return LatentAttention(config, config.latent, layer, dtype)


def mlp_of(config: ModelConfig, layer: int) -> DecoderMLP | MixtureOfExperts:
    if config.experts is None or not config.has_experts(layer) or config.experts.apart:
        return DecoderMLP(config, layer)
    return MixtureOfExperts(config, config.experts, layer)


class DecoderLayer(nn.Module):
    """Attention and MLP with the norms of the config's `placement` (layer_config.py).

    Hidden states are followed by the inputs of all layers, if there are any (states).
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at, size, norm = f"model.layers.{layer}", config.hidden_size, config.norm
        self.placement, self.dtype = config.placement_of(layer), dtype
        self.attention, self.mlp = attention_of(config, layer, dtype), mlp_of(config, layer)
        self.attention_norm = self.mlp_norm = self.mixed_norm = self.gated_norm = None
        if self.placement != "post":
            before_mlp = {"sandwich": "pre_feedforward_layernorm"}.get(self.placement, "post_attention_layernorm")
            before_mlp = "input_layernorm" if config.shares_norm else before_mlp
            self.attention_norm = Norm(f"{at}.input_layernorm", size, norm, dtype, self.attention.first)
            self.mlp_norm = Norm(f"{at}.{before_mlp}", size, norm, dtype, self.mlp.first)
        if self.placement in ("post", "sandwich"):
            self.mixed_norm = Norm(f"{at}.post_attention_layernorm", size, norm)
            self.gated_norm = Norm(f"{at}.post_feedforward_layernorm", size, norm)
        self.size, self.factor = size, LayerFactor(at) if config.layer_factors else None
        self.input = None if config.altup is None else LayerInput(config, config.altup, layer)
        self.beside: RecurrentMixer | None = None
        if config.recurrent is not None and config.has_state(layer) and config.attends_beside:
            self.beside = RecurrentMixer(config, config.recurrent, layer)
            assert self.attention_norm is not None, "both read the same norm"
            self.attention_norm.feeds = None  # each product converts what it reads
        self.apart: ExpertsApart | None = None
        if config.experts is not None and config.experts.apart and config.has_experts(layer):
            self.apart = ExpertsApart(config, config.experts, layer, dtype)

    def forward(self, states: Tensor, angles: RopeAngles | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """Run the layer on states [tokens, width], overwritten; `rows` are needed after it (None: all)."""
        hidden = self._hidden(states)
        x = self._input(hidden, self.attention_norm, self.attention.first, isinstance(self.attention, Attention))
        recurred = None
        if self.beside is not None:
            plain = unquantized(x)
            recurred = self.beside(read_by(self.beside.first, plain), angles, attend)
            x = read_by(self.attention.first, plain)
        mixed = self.attention(x, angles, attend)
        if rows is not None:
            states, mixed = gather(states, rows), gather(mixed, rows)
            recurred = None if recurred is None else gather(recurred, rows)
            hidden = self._hidden(states)
        parallel = self._input(hidden, self.mlp_norm, self.mlp.first) if self.placement == "parallel" else None
        if self.mixed_norm is None:
            self.attention.out.add_to(hidden, mixed)
        else:
            self.mixed_norm.add_to(hidden, self.attention.out(mixed))
        if self.beside is not None and recurred is not None:
            self.beside.out.add_to(hidden, recurred)
        if parallel is None:
            x = self._input(hidden, self.mlp_norm, self.mlp.first, isinstance(self.mlp, DecoderMLP))
        else:
            x = parallel
        factor = 1.0 if self.factor is None else self.factor.value
        if self.gated_norm is None:
            self.mlp.add_to(hidden, x)
        else:
            result = self.mlp(x)
            result = result if self.apart is None else self.apart(hidden, result)
            self.gated_norm.add_to(hidden, result, factor if self.input is None else 1.0)
        if self.input is not None:
            group = self.input.gate.activation_group(len(hidden))
            self.input.add_to(states, convert_rows(hidden, self.dtype, group), factor)
        return states

    def _hidden(self, states: Tensor) -> Tensor:
        return states if self.input is None else states[:, : self.size]

    def _input(self, hidden: Tensor, norm: Norm | None, product: Linear, is_read_once: bool = False) -> Activations:
        if norm is None:
            return convert_rows(hidden, self.dtype, product.activation_group(hidden.shape[0]))
        result: Activations = norm(hidden, is_read_once)
        return result


def read_by(product: Linear, rows: Tensor) -> Activations:
    group = product.activation_group(len(rows))
    return rows if group is None else quantize(rows, group)


class BranchLayer(nn.Module):
    """A layer of the placement `single`: attention, a state or an MLP, with a norm before it."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention = attention_of(config, layer, dtype) if config.has_mixer(layer) else None
        self.mlp = mlp_of(config, layer) if self.attention is None else None
        branch = self.attention or self.mlp
        assert branch is not None, "one of both is there"
        self.norm = Norm(f"model.layers.{layer}.input_layernorm", config.hidden_size, config.norm, dtype, branch.first)

    def forward(self, hidden: Tensor, angles: RopeAngles | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """Run the layer on hidden [tokens, hidden], overwritten; `rows` are needed after it (None: all)."""
        mixed = None
        if self.attention is not None:
            mixed = self.attention(self.norm(hidden, isinstance(self.attention, Attention)), angles, attend)
        if rows is not None:
            hidden, mixed = gather(hidden, rows), None if mixed is None else gather(mixed, rows)
        if self.attention is not None and mixed is not None:
            self.attention.out.add_to(hidden, mixed)
        elif self.mlp is not None:
            self.mlp.add_to(hidden, self.norm(hidden, isinstance(self.mlp, DecoderMLP)))
        return hidden


class LayerInput(nn.Module):
    """What a layer reads of its own for each token: gated by the first stream, it is added to the others, if any."""

    def __init__(self, config: ModelConfig, altup: AltUpConfig, layer: int) -> None:
        super().__init__()
        at, size = f"model.layers.{layer}", config.hidden_size
        self.size, self.activation = size, config.activation
        self.streams = range(1, altup.num_streams) if altup.num_streams > 1 else range(1)
        self.begin = altup.num_streams * size + layer * altup.input_size
        self.end = self.begin + altup.input_size
        self.gate = Linear((f"{at}.per_layer_input_gate",), size, altup.input_size)
        self.projection = Linear((f"{at}.per_layer_projection",), altup.input_size, size)
        self.norm = Norm(f"{at}.post_per_layer_input_norm", size, config.norm)

    def add_to(self, states: Tensor, first: Activations, factor: float = 1.0) -> None:
        """Add the input to these streams, then multiply them; `first` is the first one as the gate reads it."""
        own, group = states[:, self.begin : self.end], self.projection.activation_group(len(states))
        product = self.projection(gate_with(self.gate(first), own, self.activation, group))
        for stream in self.streams:
            self.norm.add_to(states[:, stream * self.size : (stream + 1) * self.size], product, factor)
