"""Models that the library transformers computes: their text is that of its own `generate`, whatever runs beside them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from app.engine.transformers import generation, loading, sequences, trials
from app.engine.transformers.fused import FusedNorm, JoinedProduct, attend_grouped
from app.errors import CheckpointInvalid, RequestError
from app.messages import Abort, Generate, RequestFailed, SamplingParams, SequenceFinished, TokensReady
from app.server.prepare import prepare
from app.settings import Settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from armature_bench.engine import library
from armature_kernels.linear.torchao_config import KLEIDI_INT4
from transformers_checkpoints import (
    PROMPTS,
    beam_ids,
    build_engine,
    completions,
    differing_prompts,
    generated_ids,
    greedy_ids,
    write_transformers_checkpoint,
)

# What the model keeps, and whether its rows are batched and its prompts computed in parts.
CLASSES = {
    "CodeGenForCausalLM": ("padded", True),  # keys and values
    "MistralForCausalLM": ("padded", True),  # of a window
    "RobertaForCausalLM": ("padded", False),  # positions from after the padding token; tokens that see the later ones
    "MambaForCausalLM": ("padded", False),  # states
    "JambaForCausalLM": ("padded", False),  # both, with experts
    "RwkvForCausalLM": ("alone", None),  # states in lists
    "OpenAIGPTLMHeadModel": ("padded", None),  # nothing: every step computes all tokens
    "T5ForConditionalGeneration": ("padded", False),  # an encoder; positions from each other
    "BartForConditionalGeneration": ("padded", False),  # positions that are learned
    "MarianMTModel": ("padded", False),  # sinusoids
    "M2M100ForConditionalGeneration": ("padded", False),  # that begin after the padding token
    "T5GemmaForConditionalGeneration": ("equal", False),  # windows
    "T5Gemma2ForConditionalGeneration": ("equal", False),  # the same, and attention to both in one product
    "ProphetNetForConditionalGeneration": ("equal", False),  # several predictions at a time
    "SwitchTransformersForConditionalGeneration": ("padded", False),  # experts
}
FEW = ("MistralForCausalLM", "MambaForCausalLM", "BartForConditionalGeneration")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes the tiny checkpoint of a class once, and returns its directory and its model."""
    found: dict[str, tuple[Path, Any]] = {}

    def write(architecture: str) -> tuple[Path, Any]:
        if architecture not in found:
            directory = tmp_path_factory.mktemp(architecture) / "model"
            found[architecture] = directory, write_transformers_checkpoint(directory, architecture)
        return found[architecture]

    return write


@pytest.mark.cases(test=1)
@pytest.mark.parametrize(
    "architecture", [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in CLASSES]
)
def test_greedy_text_is_that_of_generate_alone_and_in_a_crowd(architecture: str, written: Any) -> None:
    directory, model = written(architecture)
    engine = build_engine(directory)
    batches, takes_chunks = CLASSES[architecture]
    assert engine.runner.batches == batches
    assert takes_chunks is None or engine.runner.takes_chunks is takes_chunks
    assert differing_prompts(engine, model) == []
    assert engine.snapshot().kv_used_tokens == 0, "nothing is kept of sequences that have ended"


BEAMS: tuple[dict[str, Any], ...] = (
    {},
    {"length_penalty": -1.0},
    {"length_penalty": 2.0, "early_stopping": True},
    {"length_penalty": 0.5, "early_stopping": "never"},
)
RULES = {
    "no_repeat_ngram_size": 2, "forced_bos_token_id": 40, "forced_eos_token_id": 7, "suppress_tokens": [158, 12],
    "bad_words_ids": [[14], [40, 50]], "encoder_no_repeat_ngram_size": 3,
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("rules", [{}, RULES], ids=("free", "rules"))
@pytest.mark.parametrize(
    "architecture",
    ["BartForConditionalGeneration", pytest.param("T5ForConditionalGeneration", marks=pytest.mark.nightly)],
)
def test_beams_are_those_of_generate_alone_and_in_a_crowd(
    architecture: str, rules: dict[str, Any], written: Any, tmp_path: Path
) -> None:
    directory, model = written(architecture)
    copy = tmp_path / "model"
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("cache"))
    config = json.loads((copy / "generation_config.json").read_text())
    rules = dict.fromkeys(RULES) | rules
    (copy / "generation_config.json").write_text(json.dumps(config | rules))
    engine = build_engine(copy)
    ends = list(range(0, 320, 3))
    for options in BEAMS:
        params = SamplingParams(
            max_tokens=12, temperature=0.0, stop_token_ids=tuple(ends), ignore_eos=True, beam_width=3, **options
        )
        wanted = [
            beam_ids(model, prompt, max_new_tokens=12, eos_token_id=ends, **rules, **options) for prompt in PROMPTS
        ]
        assert [completions(engine, [prompt], params)[0] for prompt in PROMPTS] == wanted, options
        assert completions(engine, PROMPTS, params) == wanted, options
    assert engine.snapshot().kv_used_tokens == 0


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("architecture", FEW)
def test_a_prompt_longer_than_a_step_and_a_preempted_sequence_have_the_same_text(
    architecture: str, written: Any
) -> None:
    directory, model = written(architecture)
    engine = build_engine(directory, max_batch_tokens=64, max_running_seqs=4)
    engine.scheduler.pool.capacity_tokens = 190  # less than what the three take at their ends
    preempt, preempted = engine.scheduler.queues.preempt, []
    engine.scheduler.queues.preempt = lambda: preempted.append(1) or preempt()
    prompts = [tuple(range(start, start + 100 - 40 * place)) for place, start in enumerate((5, 20, 30))]
    assert greedy_ids(engine, prompts, 20) == [generated_ids(model, prompt, 20) for prompt in prompts]
    assert preempted


def test_short_rows_are_not_padded_to_the_longest(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_LEAST_LENGTH", 16)
    directory, model = written("MistralForCausalLM")
    engine = build_engine(directory)
    shapes: set[tuple[int, int]] = set()
    advance = engine.runner.steps.advance

    def recorded(rows: Any, token_ids: Any) -> Any:
        logits = advance(rows, token_ids)
        shapes.add(tuple(rows.input_ids.shape))
        return logits

    monkeypatch.setattr(engine.runner.steps, "advance", recorded)
    prompts = [tuple(range(3, 103)), (5, 6), (7, 8, 9)]
    assert greedy_ids(engine, prompts, 20) == [generated_ids(model, prompt, 20) for prompt in prompts]
    assert max(length for rows, length in shapes if rows == 2) == 22, "the two short ones, from 16 tokens on too"
    assert all(rows == 1 for rows, length in shapes if length >= 100)


def test_choices_random_numbers_and_leaving_clients(written: Any) -> None:
    directory, model = written("MambaForCausalLM")
    engine = build_engine(directory)
    params = SamplingParams(max_tokens=6, seed=3, n=2, ignore_eos=True, logprobs=1)

    def texts(others: int) -> dict[int, list[int]]:
        for place in range(others):
            engine.add(Generate(f"other{place}", (9, 8, 7), SamplingParams(max_tokens=40, ignore_eos=True), 0.0))
        engine.add(Generate("request", (5, 6, 7), params, arrived_at=0.0))
        found: dict[int, list[int]] = {0: [], 1: []}
        ended = 0
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokensReady) and event.request_id == "request":
                    assert len(event.logprobs) == len(event.token_ids)
                    found[event.choice] += event.token_ids
                ended += isinstance(event, SequenceFinished) and event.request_id == "request"
            if ended == 2:
                for place in range(others):
                    engine.abort(Abort(f"other{place}"))
        return found

    alone = texts(0)
    assert texts(3) == alone and alone[0] != alone[1]
    assert greedy_ids(engine, PROMPTS[:1]) == [generated_ids(model, PROMPTS[0])]


@pytest.mark.parametrize(
    "field, value, architecture",
    [
        ("prompt_logprobs", 1, "MambaForCausalLM"),
        pytest.param("beam_width", 2, "RwkvForCausalLM", marks=pytest.mark.full),
    ],
)
def test_what_is_not_offered_is_refused_by_its_name(field: str, value: int, architecture: str, written: Any) -> None:
    engine = build_engine(written(architecture)[0])
    params = SamplingParams(**{field: value, "max_tokens": 4})
    (event,) = engine.add(Generate("request", (5, 6), params, arrived_at=0.0))
    assert isinstance(event, RequestFailed) and isinstance(event.error, RequestError)
    assert event.error.field == field and "transformers" in event.error.message
    engine.check()


def test_weights_that_are_missing_are_never_random(written: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source, _ = written("MambaForCausalLM")
    for file in source.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["backbone.layers.1.mixer.in_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointInvalid, match=r"missing in the checkpoint: backbone\.layers\.1\.mixer\.in_proj\.weight"
    ):
        build_engine(tmp_path)


def test_keys_and_values_grow_beyond_their_room(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_ROOM_TOKENS", 4)
    directory, model = written("CodeGenForCausalLM")
    engine = build_engine(directory)
    assert greedy_ids(engine, PROMPTS, 24) == [generated_ids(model, prompt, 24) for prompt in PROMPTS]
    rows, _ = trials.trial_rows(engine.runner.steps, 2, 5)
    with torch.inference_mode():
        for _ in range(7):
            engine.runner.steps.advance(rows, [[5], [6]])
    layer = rows.cache.layers[0]
    assert layer.keys.shape[-2] == 7 and layer.keys.untyped_storage().nbytes() > layer.keys.nbytes


# The largest error of logits, as a part of their size, that each format of weights may cause; these models are tiny.
FORMATS = {
    "bf16": 0.03,
    "int8": 0.08,
    "int4": 0.5,
    "torchao:Int8DynamicActivationInt8WeightConfig": 0.15,
    "torchao:IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(16))": 0.6,
}


@pytest.mark.cases(test=2, ci=5)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("architecture", ["CodeGenForCausalLM", "BartForConditionalGeneration"])
def test_weights_in_other_formats_give_about_the_same_logits(name: str, architecture: str, written: Any) -> None:
    directory, _ = written(architecture)
    exact = build_engine(directory).runner.steps
    chosen = {"quantization": name, "precision": "auto"} if ":" in name else {"precision": name}
    engine = build_engine(directory, **chosen)
    packed = [module for module in engine.runner.steps.model.modules() if isinstance(module, loading.PackedLinear)]
    assert packed and not any(type(module) is torch.nn.Linear for module in engine.runner.steps.model.modules())
    with torch.inference_mode():
        both = (exact, engine.runner.steps)
        wanted, found = (steps.advance(*trials.trial_rows(steps, 2, 12)).float() for steps in both)
    assert float((found - wanted).norm() / wanted.norm()) < FORMATS[name]
    assert all(map(len, greedy_ids(engine, PROMPTS)))


def measured_errors(directory: Path, ways: dict[str, str], patch: pytest.MonkeyPatch) -> tuple[Any, dict[str, float]]:
    patch.setattr(library, "WAYS", ways)
    patch.setattr(library, "STEPS", 2)
    patch.setattr(library, "PROMPT_TOKENS", 12)
    prepared = prepare(Settings(model=str(directory), calibrate="off", engine="transformers"))
    assert isinstance(prepared.checkpoint, Checkpoint)
    job = library.LibraryJob(prepared.checkpoint, prepared.settings, prepared.facts, 1, (1,))
    outcome = library.measure_library_steps(job)
    return outcome, {figure.name.partition(", ")[2]: figure.parts["error %"] for figure in outcome.figures}


@pytest.mark.nightly
def test_a_benchmark_compiles_a_model(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "missing_compiler", lambda: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # graphs, without their code
    ways = {"torch fp32": "fp32", "torch.compile fp32": "fp32"}
    outcome, errors = measured_errors(written("CodeGenForCausalLM")[0], ways, monkeypatch)
    assert outcome.notes == () and 0 <= errors["torch.compile fp32"] < 0.01


def test_a_benchmark_measures_each_way_as_it_says(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"torch fp32": "fp32", "int8": "int8", "torchao int8": "torchao:Int8DynamicActivationInt8WeightConfig"}
    refused = {} if torch.backends.kleidiai.is_available() else {"torchao int4 KleidiAI": KLEIDI_INT4[32]}
    outcome, errors = measured_errors(written("CodeGenForCausalLM")[0], ways | refused, monkeypatch)
    assert [*errors] == [*ways], "each way was measured"
    assert [note.partition(":")[0] for note in outcome.notes] == [*refused]
    assert errors["torch fp32"] == 0 and errors["int8"] > 0 and errors["torchao int8"] > 0


def test_what_was_tried_of_a_model_is_kept_for_the_next_start(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = written("MambaForCausalLM")
    first = build_engine(directory, cache_dir=tmp_path)
    (file,) = (tmp_path / "trials").iterdir()
    monkeypatch.setattr(trials, "_check_batches", lambda steps: pytest.fail("it is known"))
    second = build_engine(directory, cache_dir=tmp_path)
    assert second.runner.batches == first.runner.batches == "padded"
    assert second.scheduler.pool.capacity_tokens == first.scheduler.pool.capacity_tokens
    monkeypatch.undo()
    file.write_text("{}")
    assert differing_prompts(build_engine(directory, cache_dir=tmp_path), model) == []


def test_a_class_that_reads_weights_itself_is_served_with_its_own(
    written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = written("CodeGenForCausalLM")

    def reads_weight(self: Any, hidden: Any) -> Any:
        return torch.nn.functional.linear(hidden, self.fc_out.weight, self.fc_out.bias)

    kind = type(build_engine(directory).runner.steps.model.transformer.h[0].mlp)
    monkeypatch.setattr(kind, "forward", lambda self, hidden: reads_weight(self, self.act(self.fc_in(hidden))))
    exact = build_engine(directory, precision="bf16")
    assert not any(isinstance(one, loading.PackedLinear) for one in exact.runner.steps.model.modules())
    with pytest.raises(CheckpointInvalid, match="cannot generate with it in int8"):
        build_engine(directory, precision="int8")


_START = """
import sys
from pathlib import Path
import torch
from app.engine.transformers.build import import_library
import_library()
import transformers
from app.engine.transformers.loading import load_model
from app.weights.checkpoint import open_checkpoint
load_model(open_checkpoint(Path(sys.argv[1]), "transformers"), torch.float32, torch.device("cpu"))
print([name for name in ("torch._dynamo", "torch.distributed.tensor", "torchao", "triton") if name in sys.modules])
print(torch.compiler.disable(len) is not len, sys.modules["torch._dynamo"].__file__)
"""


def test_a_start_imports_no_compiler_which_is_whole_if_it_is_wanted_later(written: Any) -> None:
    directory, _ = written("MistralForCausalLM")
    run = subprocess.run([sys.executable, "-c", _START, directory], capture_output=True, text=True, check=False)
    imported, compiler, *_ = [*run.stdout.splitlines(), "", ""]
    assert imported == "[]", run.stderr
    assert compiler.startswith("True /") and compiler.endswith("__init__.py"), run.stderr


def test_fused_parts_are_those_of_the_library(written: Any) -> None:
    directory, _ = written("MistralForCausalLM")
    model = loading.load_model(open_checkpoint(directory, "transformers"), torch.float32, torch.device("cpu"))
    norm = model.model.norm
    norm.weight.data.uniform_(0.5, 2.0)
    hidden = torch.randn(2, 3, norm.weight.numel())
    one = FusedNorm.of(norm)
    assert one is not None
    assert torch.allclose(one(hidden), norm(hidden), rtol=1e-5, atol=1e-6)
    norm.forward = lambda hidden_states: hidden_states * norm.weight  # not an RMSNorm, whatever its name
    assert FusedNorm.of(norm) is None

    attention = model.model.layers[0].self_attn
    attention.num_key_value_groups = 3
    query, keys, values = torch.randn(2, 6, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    for mask in (None, torch.tensor([[True] * 5, [False, *[True] * 4]]).view(2, 1, 1, 5)):
        expected, _ = sdpa_attention_forward(attention, query, keys, values, mask, scaling=0.3)
        found, _ = attend_grouped(attention, query, keys, values, mask, scaling=0.3)
        assert torch.allclose(found, expected, atol=1e-6)


def test_layers_of_one_input_share_a_product_which_is_never_an_older_one() -> None:
    products: list[float] = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        products.append(float(x.sum()))
        return torch.cat((x, 2 * x, 3 * x), -1)

    product = JoinedProduct(multiply, (2, 2, 2))
    x, other = torch.ones(1, 2), torch.full((1, 2), 5.0)
    assert [float(product.part(x, number)[0, 0]) for number in (0, 1, 2)] == [1, 2, 3]
    assert len(products) == 1
    assert [float(product.part(one, number)[0, 0]) for one, number in ((x, 0), (other, 1), (other, 2))] == [1, 10, 15]
    x.fill_(7)
    assert float(product.part(x, 1)[0, 0]) == 14, "a changed input has another product"
    x.fill_(8)
    assert float(product.part(x, 1)[0, 0]) == 16, "as has one that is asked for again"
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = torch.ones(1, 2)
            assert float(product.part(x, 0)[0, 0]) == 1
            x[:, :1].add_(3)
            assert float(product.part(x, 1)[0, 0]) == 8, f"written to between two of its layers, in {mode.__name__}"
