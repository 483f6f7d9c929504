"""The committed demo checkpoint: an ordinary directory, small enough, with a tokenizer that loses nothing and a template that refuses."""

import json
from pathlib import Path

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "app" / "demo" / "llama"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
Messages = list[dict[str, str]]


def read(name: str) -> dict[str, object]:
    """One of the JSON files."""
    content: dict[str, object] = json.loads((DEMO / name).read_text(encoding="utf-8"))
    return content


def render(messages: Messages, add_generation_prompt: bool = True) -> str:
    """The prompt as a server would make it."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    settings = read("tokenizer_config.json")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(str(settings["chat_template"]), globals={"raise_exception": refuse})
    tokens = {name: settings[name] for name in ("bos_token", "eos_token")}
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **tokens)


def test_it_is_complete_and_at_most_ten_megabytes() -> None:
    names = {path.name for path in DEMO.iterdir()}
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == files | {"README.md"}
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 10_000_000


def test_the_weights_are_what_the_config_says() -> None:
    config = read("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(DEMO / "model.safetensors", framework="numpy") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 (not a dict)
        dtypes = {weights.get_slice(name).get_dtype() for name in shapes}
    assert dtypes == {"BF16"}
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], config["hidden_size"]]
    assert len({name.split(".")[2] for name in shapes if ".layers." in name}) == config["num_hidden_layers"]
    assert "lm_head.weight" not in shapes, "the embedding is tied"


def test_special_tokens_agree_everywhere() -> None:
    config, settings, generation = read("config.json"), read("tokenizer_config.json"), read("generation_config.json")
    for name in ("bos", "eos", "pad"):
        number = TOKENIZER.token_to_id(str(settings[f"{name}_token"]))
        assert number == config[f"{name}_token_id"] == generation[f"{name}_token_id"]
    assert TOKENIZER.get_vocab_size() == config["vocab_size"]


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time",
        "naïve café",
        "日本語のテキスト",
        "🦊🏮 \u200d\u00a0",
        "tab\tand\n\n\nlines  ",
        "\x00\x7f",
        "",
    ],
)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids) == text


def test_plain_text_begins_with_the_begin_token() -> None:
    assert TOKENIZER.encode("Once upon a time").tokens[0] == "<|begin|>"
    assert "<|end|>" not in TOKENIZER.encode("Once upon a time").tokens


def test_the_template_marks_each_turn() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello! "},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "A story, please."},
    ]
    turns = "<|system|>Be kind.<|end|><|user|>Hello!<|end|><|assistant|>Hi!<|end|><|user|>A story, please.<|end|>"
    assert render(messages) == f"<|begin|>{turns}<|assistant|>"
    assert render(messages, add_generation_prompt=False) == f"<|begin|>{turns}"


def test_the_template_refuses_roles_it_does_not_know() -> None:
    with pytest.raises(TemplateError, match="Unknown role tool"):
        render([{"role": "tool", "content": "42"}])
