"""What a family of decoders adds to the values of its config.json: a row of the table in `families.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app.models.config_reader import ConfigReader
from app.models.decoders.layer_config import HeadNormConfig, NormConfig

Fields = dict[str, Any]  # fields of a `ModelConfig`


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFamily:
    """The defaults of an architecture's config.json, and what its values do not say.

    The defaults are those of transformers' configuration classes, which omit default values from a saved config.json.

    - `title`: the models, for the documentation.
    - `aliases`: names of values in this config.json, by the usual name.
    - `text_config`: the section with the decoder's values; None: config.json itself.
    - `defaults`: values that old files of a section leave out.
    - `window`: the default of sliding_window.
    - `head_dim`: its default; None: hidden_size / num_attention_heads.
    - `theta`, `partial`: defaults of the rotary embeddings. `sliding_ropes`: those of sliding layers are separate, with
      `local_theta` as default (None: the theta of the others), and never scaled.
    - `interleaved`: rotary embeddings rotate neighbouring elements.
    - `sections`: the default of mrope_section, if pictures have positions in three axes; `interleaved_axes`: their
      frequencies alternate (`rope_axes`).
    - `attention_biases`: which products of attention have biases. `config`: attention_bias decides about all of them;
      `config_qkv`: about queries, keys and values.
    - `norm`, `norm_eps`, `eps`: the norms, the name of the value with their epsilon, and its default.
    - `activation`: name of the value with the activation, and its default.
    - `slides`: returns True for layers with a sliding window, unless layer_types says it.
    - `read`: returns further fields of the `ModelConfig`, from config.json and the fields so far.
    - `prefixes`, `names`: what differs in the names of tensors: starts of names, and whole names without `.weight`, in
      which `{}` is the layer. Ours are those of Llama (`shapes.py`).
    - `parts`: parts of names of tensors that differ, which are replaced before `names` are looked up.
    - `ignored`: prefixes of tensors that are not part of the text model. `computed`: ends of names of tensors that old
      files hold although they are computed.
    - `has_more_layers`: files hold layers beyond the last one, which predict further tokens and are not used.
    - `expert_layout`: how tensors that hold all experts of a layer are stored (`expert_parts` in `stored.py`).
    - `transposed`: weights of the layers are stored as [in, out].
    - `is_hybrid`: `read` knows the words of layer_types.
    - `embeds`: plain models of this family are served for their vectors.
    - `joins_prompt`: the tokens of a prompt with pictures see each other.
    - `has_draft_head`: files may hold a head that predicts the token after the next one.
    - `reads_pictures`: transformers has the part in front of the decoder that reads pictures.
    """

    model_type: str
    title: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    text_config: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    tie_embeddings: bool = False
    head_dim: int | None = None
    theta: float = 10_000.0
    partial: float = 1.0
    sliding_ropes: bool = False
    local_theta: float | None = None
    interleaved: bool = False
    sections: tuple[int, ...] = ()
    interleaved_axes: bool = False
    attention_biases: Literal["config", "config_qkv", "qkv", "none"] = "config"
    has_mlp_bias: bool = False
    norm: NormConfig = field(default_factory=NormConfig)
    norm_eps: str = "rms_norm_eps"
    eps: float = 1e-6
    head_norm: HeadNormConfig | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    fields: Mapping[str, Any] = field(default_factory=dict)
    slides: Callable[[ConfigReader, int], bool] | None = None
    read: Callable[[ConfigReader, Fields], Fields] | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    has_more_layers: bool = False
    expert_layout: Literal["stacked", "interleaved", "either"] = "stacked"
    computed: tuple[str, ...] = (".rotary_emb.inv_freq",)
    transposed: bool = False
    is_hybrid: bool = False
    embeds: bool = False
    joins_prompt: bool = False
    reads_pictures: bool = False
    has_draft_head: bool = False


def layer_names(stored: str, parts: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the tensors of the layers: `parts` maps names in a layer `stored`.{} to ours."""
    return {f"{stored}.{{}}.{part}": f"model.layers.{{}}.{ours}" for part, ours in parts.items()}
