"""Structured output: every sampled token is allowed, the native masked step equals the plain one, and so does speculation."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy
import pytest
import torch

from app.engine.scheduler.speculation import NgramDrafter, Speculation
from app.messages import Generate, GrammarSource, SamplingParams
from app.text.grammar import CompiledGrammar, GrammarCompiler
from app.text.tokenizer import Tokenizer
from armature_kernels.linear.activations import rows_of
from armature_kernels.native.arguments import OpCode, ProductOutput
from armature_kernels.native.operations import has_kernel
from engine_simulation import FreeRows
from loaded_models import load
from tests.parity.test_speculation_exact import Engine, MakeSpeculation, planted, prompt_of, request_of, tokens_of
from tiny_checkpoints import write_checkpoint

MAX_LEN = 160
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["north", "northern", "south"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", seed=11)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 320)


def structured(name: str, grammar: GrammarSource | None, seed: int, **params: Any) -> Generate:
    settings = {"max_tokens": 110, "seed": seed, **params}
    return Generate(name, tuple(prompt_of(10 + seed, seed)), SamplingParams(**settings), 0.0, (), grammar)


@pytest.fixture(scope="module")
def requests(compiler: GrammarCompiler) -> list[Generate]:
    schema = GrammarSource("json_schema", json.dumps(SCHEMA), "f")
    digits = GrammarSource("regex", "[0-9]{3}(-[a-z]{2,5}){2}", "f")
    choice = GrammarSource("choice", '["maybe yes", "maybe no", "never"]', "f")
    for source in (schema, digits, choice):
        compiler.compile(source)
    return [
        structured("greedy", schema, 1, temperature=0.0),
        structured("random", schema, 2),
        structured("few", schema, 3, top_k=9),
        structured("shaped", schema, 4, top_p=0.8, top_k=40),
        structured("several", schema, 5, top_k=20, n=3),
        structured("penalised", schema, 6, repetition_penalty=1.2),
        structured("biased", digits, 7, logit_bias=((40, 3.0),)),
        structured("regex", digits, 8, temperature=0.0),
        structured("choice", choice, 9),
        structured("rules", None, 10, allowed_token_ids=tuple(range(60, 90)), max_tokens=20, temperature=0.0),
        structured("longer", None, 11, min_tokens=30, stop_token_ids=tuple(range(4, 300)), max_tokens=40, top_k=30),
        request_of("free", prompt_of(30, 12), temperature=0.0, logprobs=None),
    ]


def said_by(
    engine: Engine, requests: list[Generate], make: MakeSpeculation | None = None
) -> dict[tuple[str, int], list[int]]:
    """The tokens, with log-probabilities asked for where the harness reads the tokens from them."""
    return tokens_of(engine.generate([_scored(request) for request in requests], make))


def _scored(request: Generate) -> Generate:
    from msgspec.structs import replace

    return replace(request, params=dataclasses.replace(request.params, logprobs=0))


def lookup() -> Speculation:
    return Speculation(lambda sequence: NgramDrafter(), FreeRows())


def test_every_answer_follows_its_grammar(
    checkpoint: Path, compiler: GrammarCompiler, tokenizer: Tokenizer, requests: list[Generate]
) -> None:
    said = said_by(Engine(load(checkpoint, max_model_len=MAX_LEN), torch.float32, grammars=compiler), requests)
    by_name = {request.request_id: request for request in requests}
    for (name, _), token_ids in said.items():
        request, text = by_name[name], tokenizer.decode(token_ids)
        if request.grammar is not None:
            _check_tokens(compiler.compile(request.grammar), token_ids)
        if name in ("greedy", "random", "few", "shaped", "several", "penalised"):
            jsonschema.validate(json.loads(text), SCHEMA)
        if name == "choice":
            assert text in ("maybe yes", "maybe no", "never")
    assert all(60 <= token < 90 for token in said["rules", 0])
    assert len(said["longer", 0]) > 30
    assert len({tuple(said["several", choice]) for choice in range(3)}) > 1


def _check_tokens(grammar: CompiledGrammar, token_ids: list[int]) -> None:
    """Each token is one of the mask of its place, by a state that is advanced on its own."""
    state, words = grammar.start(), numpy.zeros(10, numpy.uint32)
    for token_id in token_ids:
        state.fill_masks(words.ctypes.data, words.nbytes, ())
        assert words[token_id >> 5] >> (token_id & 31) & 1, (token_id, token_ids)
        state.advance(token_id)
    assert state.finished and not state.error


@pytest.mark.cases(test=1)
@pytest.mark.skipif(not has_kernel(OpCode.TOP_LOGITS), reason="no native kernels here")
@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
def test_the_native_masked_step_equals_the_plain_one(
    checkpoint: Path,
    compiler: GrammarCompiler,
    requests: list[Generate],
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recorded steps select among allowed tokens in the output product; the plain one masks whole rows of logits.

    These rows are in FP32 here, as what the product selects from. Rounded to BF16, near ones would be equal.
    """
    model = load(checkpoint, precision, max_model_len=MAX_LEN)
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    top = [request for request in requests if request.params.temperature == 0.0 or request.params.top_k]
    native, plain = (
        Engine(model, dtype, grammars=compiler),
        Engine(model, dtype, off="for this test", grammars=compiler),
    )
    plain.engine.runner._whole_logits = True  # type: ignore[attr-defined]
    seen = _tokens(native, top)
    if precision != "float32":
        monkeypatch.setattr(model.output, "forward", partial(_fp32_product, model.output.form))
    assert seen == _tokens(plain, top)
    assert native.replay.num_replays > 20


def _fp32_product(form: Any, x: Any) -> torch.Tensor:
    product = torch.empty(rows_of(x), form.outputs)
    form.multiply_into(product, 0, x, ProductOutput.FP32)
    return product


def _tokens(engine: Engine, requests: list[Generate]) -> dict[tuple[str, int], list[int]]:
    """As `said_by`, without log-probabilities, which need whole logits."""
    from app.messages import TokensReady

    said: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        assert engine.engine.add(request) == []
    while engine.engine.has_work:
        for event in engine.engine.step():
            if isinstance(event, TokensReady):
                said.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
    return said


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_whatever_is_drafted_the_text_is_the_same(
    checkpoint: Path, compiler: GrammarCompiler, requests: list[Generate], chance: float
) -> None:
    model = load(checkpoint, max_model_len=MAX_LEN)
    scored = [_scored(request) for request in requests]
    plain = Engine(model, torch.float32, grammars=compiler).generate(scored)
    engine = Engine(model, torch.float32, grammars=compiler)
    assert tokens_of(engine.generate(scored, planted(plain, chance))) == tokens_of(plain)
    assert engine.guessed[1] > 0


def test_forced_tokens_save_steps(checkpoint: Path, compiler: GrammarCompiler, requests: list[Generate]) -> None:
    model = load(checkpoint, max_model_len=MAX_LEN)
    alone = requests[:1]
    without, drafting = Engine(model, torch.float32, grammars=compiler), Engine(model, torch.float32, grammars=compiler)
    assert said_by(without, alone) == said_by(drafting, alone, lookup)
    drafted, accepted = drafting.guessed
    assert accepted > 0.8 * drafted > 5
    assert len(drafting.stats) < 0.8 * len(without.stats)


def test_a_bad_word_is_never_completed(checkpoint: Path, compiler: GrammarCompiler) -> None:
    model = load(checkpoint, max_model_len=MAX_LEN)
    request = structured("bad", None, 3, temperature=0.0, max_tokens=40, ignore_eos=True)
    (free,) = said_by(Engine(model, torch.float32, grammars=compiler), [request]).values()
    pair, one = (free[4], free[5]), free[9]
    banned = Generate("bad", request.token_ids, request.params, 0.0, (pair, (one,)))
    (said,) = said_by(Engine(model, torch.float32, grammars=compiler), [banned]).values()
    assert pair not in pairwise(said) and one not in said
    assert said[:5] == free[:5]
