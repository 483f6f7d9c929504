"""Calls and reasoning with chat templates of real models: what a model of the family writes is parsed, and may be forced.

Without the family's tokenizer, the marks of its format are tokens of a small one, special or not.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from app.messages import GrammarSource, SamplingParams
from app.service.prompt import read_prompt
from app.service.requests import ChoiceFinished, GenerationRequest, TextDelta, Tool, ToolUse
from app.service.served_model import ServedDecoder, ServingLimits
from app.text.chat import ChatOptions, ChatTemplate
from app.text.grammar import GrammarCompiler
from app.text.reasoning import choose_reasoning_format
from app.text.tokenizer import Tokenizer
from app.text.tool_formats import write_calls
from fake_worker import events_of
from real_formats import real_template, real_tokenizer
from small_tokenizers import byte_level, write_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = (Tool("get_weather", SCHEMA), Tool("get_time", {"type": "object", "properties": {}}))
DESCRIBED = tuple(
    {"type": "function", "function": {"name": tool.name, "description": "d", "parameters": tool.parameters}}
    for tool in TOOLS
)
CALLS: list[tuple[str, Any]] = [("get_weather", {"city": 'Zürich <b> "x"', "days": 3}), ("get_time", {})]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
SMALL = [
    "Apertus-8B-Instruct", "Apriel-1.6-15b-Thinker-fixed", "ByteDance-Seed-OSS", "Cohere2MoE",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "GLM-4.6", "GLM-4.7-Flash", "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "Kimi-K3",
    "google-gemma-4-31B-it",
    "LFM2.5-8B-A1B", "fireworks-ai-llama-3-firefunction-v2", "tencent-Hy3",
    "MiniMax-M1", "MiniMax-M2", "MiniMax-M3", "meetkai-functionary-medium-v3.2", "Mistral-Small-3.2-24B-Instruct-2506",
    "mistralai-Mistral-Nemo-Instruct-2407", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-Nano-v2",
    "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "ibm-granite-granite-4.0",
    "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "moonshotai-Kimi-K2",
    "openai-gpt-oss-120b", "openbmb-MiniCPM5-1B", "upstage-Solar-Open-100B",
]  # fmt: skip
REAL = [
    ("Qwen-Qwen2.5-7B-Instruct", "qwen3"),
    ("Qwen-Qwen3-0.6B", "qwen3"),
    ("Qwen3-Coder", "qwen3"),
    ("meta-llama-Llama-3.1-8B-Instruct", "llama3_1"),
    ("deepseek-ai-DeepSeek-V3.1", "deepseek_v3"),
    ("openai-gpt-oss-120b", "gptoss"),
]


@dataclass
class Answer:
    reasoning: str = ""
    content: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        self.calls: list[tuple[str, str]] = []


def decoder(template: str, tokenizer: Tokenizer) -> ServedDecoder:
    chat = ChatTemplate(template, NAMED)
    limits = ServingLimits(2**17, 1, 1, 60.0, tokenizer.vocab_size + 8)
    assert chat.tool_format is not None
    grammars = GrammarCompiler(tokenizer, limits.vocab_size)
    return ServedDecoder(
        *("demo", limits, tokenizer, chat),
        grammars=grammars,
        tool_format=chat.tool_format,
        reasoning_format=choose_reasoning_format(chat.evidence),
    )


def small(folder: Path, template: str, special: bool) -> ServedDecoder:
    """A decoder whose small tokenizer has the marks of the template's formats as tokens."""
    chat = ChatTemplate(template, NAMED)
    chat.close()
    assert chat.tool_format is not None
    reasoning = choose_reasoning_format(chat.evidence)
    marks = [*chat.tool_format.markers, *(reasoning.markers if reasoning is not None else ())]
    inner = byte_level()
    tokens = [mark for mark in dict.fromkeys(marks) if mark[:1] + mark[-1:] in ("<>", "[]", "◁▷")]
    (inner.add_special_tokens if special else inner.add_tokens)(tokens)
    return decoder(template, Tokenizer(write_tokenizer(folder, inner)))


def ask(**fields: Any) -> GenerationRequest:
    options = ChatOptions(tools=DESCRIBED)
    tools = fields.pop("tools", ToolUse(TOOLS))
    messages = ({"role": "user", "content": "weather?"},)
    return GenerationRequest(
        *(SamplingParams(), "chat", "r"),
        messages=messages,
        tools=tools,
        chat_options=options,
        separates_reasoning=True,
        **fields,
    )


def thoughts(served: ServedDecoder, request: GenerationRequest) -> str:
    """What a model of the family writes before its answer."""
    form = served.reasoning_format
    if form is None:
        return ""
    prompt = served.tokenizer.decode(read_prompt(served, request).token_ids, skip_special_tokens=False).rstrip()
    if prompt.endswith(form.end):
        return ""
    return ("" if prompt.endswith(form.start) or form.is_implied else form.start) + f"I think.{form.end}{form.then}"


def answer(served: ServedDecoder, request: GenerationRequest, text: str) -> Answer:
    """Return what the service makes of a text; its tokens follow the request's grammar."""
    prompt = read_prompt(served, request)
    ids = served.tokenizer.encode(text.removeprefix(prompt.begun), add_special_tokens=False)
    if prompt.grammar is not None:
        assert served.grammars is not None
        state = served.grammars.compile(prompt.grammar).start()
        words = numpy.zeros(-(-served.limits.vocab_size // 32), numpy.uint32)
        for place, token_id in enumerate(ids):
            state.fill_masks(words.ctypes.data, words.nbytes, ())
            assert words[token_id // 32] >> token_id % 32 & 1, served.tokenizer.decode(ids[: place + 1], False)
            state.advance(token_id)
        assert not state.error
    found = Answer()
    for event in events_of(request, served, [(token_id,) for token_id in ids]):
        if isinstance(event, ChoiceFinished):
            found.reason = event.reason
        elif isinstance(event, TextDelta):
            found.reasoning += event.reasoning
            found.content += event.text
            for delta in event.tool_calls:
                if delta.id is not None:
                    found.calls.append((delta.name or "", ""))
                name, arguments = found.calls[-1]
                found.calls[-1] = (name, arguments + delta.arguments)
    return found


def check_family(served: ServedDecoder) -> None:
    assert served.chat is not None and served.grammars is not None
    calls = CALLS[:1] if served.tool_format.is_single else CALLS
    written = write_calls(served.tool_format, calls)
    parallel, single = ToolUse(TOOLS, TOOLS), ToolUse(TOOLS, TOOLS[:1], parallel=False)
    schema = GrammarSource("json_schema", json.dumps(SCHEMA), "response_format")
    for request, text, expected in (
        (ask(), written, calls),
        (ask(tools=parallel), written, calls),
        (ask(tools=single), write_calls(served.tool_format, CALLS[:1]), CALLS[:1]),
        (ask(grammar=schema), written, calls),
    ):
        for before in dict.fromkeys((thoughts(served, request), "")):
            if not before and thoughts(served, request) and is_open(served, request):
                continue
            found = answer(served, request, before + text)
            assert [(name, json.loads(arguments)) for name, arguments in found.calls] == expected
            assert (found.content.strip(), found.reason) == ("", "tool_calls")
            assert found.reasoning == ("I think." if before else "")
    request = ask(grammar=schema)
    header = served.tool_format.answer or (served.reasoning_format.answer if served.reasoning_format else "")
    found = answer(served, request, thoughts(served, request) + header + '{"city": "Bern"}')
    assert (json.loads(found.content), found.calls) == ({"city": "Bern"}, [])
    plain = replace(request, tools=None, grammar=None, chat_options=None)
    assert answer(served, plain, thoughts(served, plain) + header + "Hello.").content == "Hello."


def is_open(served: ServedDecoder, request: GenerationRequest) -> bool:
    return read_prompt(served, request).opens_reasoning


@pytest.mark.cases(test=6, ci=20)
@pytest.mark.parametrize(
    ("name", "special"),
    [
        *((name, True) for name in SMALL),
        *(pytest.param(name, False, marks=[pytest.mark.nightly] if at % 9 else []) for at, name in enumerate(SMALL)),
    ],
)
def test_a_family_calls_tools_as_its_template_writes_them(name: str, special: bool, tmp_path: Path) -> None:
    served = small(tmp_path, real_template(name), special)
    try:
        check_family(served)
    finally:
        served.close()


@pytest.mark.cases(ci=3)
@pytest.mark.full
@pytest.mark.parametrize(("template", "tokenizer"), REAL)
def test_real_tokenizers(template: str, tokenizer: str) -> None:
    served = decoder(real_template(template), Tokenizer(real_tokenizer(tokenizer)))
    try:
        check_family(served)
    finally:
        served.close()


def test_ids_are_as_long_as_the_template_demands(tmp_path: Path) -> None:
    served = small(tmp_path, real_template("mistralai-Mistral-Nemo-Instruct-2407"), True)
    text = write_calls(served.tool_format, CALLS)
    events = events_of(ask(), served, [served.tokenizer.encode(text, add_special_tokens=False)])
    deltas = [event for event in events if isinstance(event, TextDelta)]
    ids = list(itertools.chain(*([call.id for call in delta.tool_calls] for delta in deltas)))
    assert all(one is not None and len(one) == 9 and one.isalnum() for one in ids)
    served.close()
