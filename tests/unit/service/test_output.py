"""What the service gives to every dialect: reasoning, content and calls apart, grammars and bad words compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.messages import GrammarSource, SamplingParams
from app.service.prompt import read_prompt
from app.service.requests import GenerationRequest, TextDelta, Tool, ToolUse
from app.service.served_model import ServedDecoder
from app.text.chat import ChatOptions, ChatTemplate
from app.text.grammar import GrammarCompiler
from app.text.reasoning import REASONING_FORMATS
from fake_worker import LIMITS, events_of, tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL = Tool("f", {"type": "object", "properties": {}})


def model(**fields: Any) -> ServedDecoder:
    inner = tokenizer()
    compiler = GrammarCompiler(inner, LIMITS.vocab_size)
    return ServedDecoder("demo", LIMITS, inner, ChatTemplate(TEMPLATE, {}), grammars=compiler, **fields)


def chat(content: str = "the fox", **fields: Any) -> GenerationRequest:
    params = fields.pop("params", SamplingParams())
    return GenerationRequest(params, "chat", "r", messages=({"role": "user", "content": content},), **fields)


def events(request: GenerationRequest, served: ServedDecoder, *texts: str, reason: Any = "stop") -> list[Any]:
    return events_of(
        request, served, [served.tokenizer.encode(text, add_special_tokens=False) for text in texts], reason
    )


def test_reasoning_then_content_then_calls() -> None:
    served = model(reasoning_format=REASONING_FORMATS["qwen3"])
    request = chat(tools=ToolUse((TOOL,)), separates_reasoning=True)
    texts = ("<think>a</th", "ink>b <tool_", 'call>{"name": "f", "arg', 'uments": {}}</tool_call>')
    found = events(request, served, *texts)
    deltas = [event for event in found if isinstance(event, TextDelta)]
    assert "".join(delta.reasoning for delta in deltas) == "a"
    assert "".join(delta.text for delta in deltas) == "b"
    assert next(call.name for delta in deltas for call in delta.tool_calls) == "f"
    assert served.tokenizer.decode([one for delta in deltas for one in delta.token_ids]) == "".join(texts)
    assert found[-1].reason == "tool_calls"


def test_a_call_that_was_cut_off_keeps_its_reason() -> None:
    found = events(chat(tools=ToolUse((TOOL,))), model(), '<tool_call>{"name": "f", "arguments": {', reason="length")
    assert found[-1].reason == "length"


def test_a_prompt_that_opens_the_reasoning() -> None:
    served = model(reasoning_format=REASONING_FORMATS["qwen3"])
    found = events(chat("go <think>\n", separates_reasoning=True), served, "a</think>b")
    assert (found[0].reasoning, found[0].text) == ("a", "b")


def test_without_tools_and_reasoning_events_pass() -> None:
    found = events(chat(), model(), "<think><tool_call>")
    assert found[0].text == "<think><tool_call>"


def test_forced_calls_and_answers_of_either_kind_are_grammars() -> None:
    served = model()
    source = GrammarSource("json_schema", '{"type": "object"}', "response_format")
    for request, text in (
        (chat(tools=ToolUse((TOOL,), (TOOL,))), '<tool_call>\n{"name": "f", "arguments": {'),
        (chat(tools=ToolUse((TOOL,)), grammar=source), '<tool_call>\n{"name": "f"'),
        (chat(tools=ToolUse((TOOL,)), grammar=source), '{"a"'),
    ):
        given = read_prompt(served, request).grammar
        assert given is not None and served.grammars is not None
        grammar = served.grammars.compile(given)
        ids = served.tokenizer.encode(text, add_special_tokens=False)
        assert grammar.start().count_valid(ids) == len(ids), text


@pytest.mark.parametrize(
    ("prompt", "opening", "after"),
    [("go", "<think>", "</think>"), ("go <think>\n", "", "</think>"), ("go <think>\n\n</think>\n\n", "", "")],
)
def test_a_grammar_begins_after_the_reasoning_that_there_may_be(prompt: str, opening: str, after: str) -> None:
    served = model(reasoning_format=REASONING_FORMATS["qwen3"])
    source = GrammarSource("json_schema", '{"type": "object"}', "response_format")
    for request in (chat(prompt, grammar=source), chat(prompt, tools=ToolUse((TOOL,), (TOOL,)))):
        given = read_prompt(served, replace(request, separates_reasoning=True)).grammar
        assert given is not None and (given.opening, given.after) == (opening, after)
        shown = read_prompt(served, request).grammar
        assert shown is not None and shown.after == "", "reasoning that is not separated would be part of the JSON"


def test_bad_words_are_banned_with_and_without_a_space() -> None:
    served = model()
    words = read_prompt(served, chat(params=SamplingParams(bad_words=("fox",)))).bad_word_ids
    assert {served.tokenizer.decode(ids) for ids in words} == {"fox", " fox"}


def test_the_end_of_a_long_prompt_is_kept() -> None:
    served = model()
    request = chat("the fox and the hen said hello")
    whole = read_prompt(served, request).token_ids
    assert read_prompt(served, replace(request, truncate_prompt_tokens=3)).token_ids == whole[-3:]
    first = replace(request, truncate_prompt_tokens=3, truncate_right=True)
    assert read_prompt(served, first).token_ids == whole[:3]
    assert read_prompt(served, replace(request, truncate_prompt_tokens=-1)).token_ids == whole
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
        read_prompt(served, replace(request, truncate_prompt_tokens=0))


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"allowed_token_ids": (10**6,)}, "allowed_token_ids"),
        ({"logit_bias": ((10**6, 1.0),)}, "logit_bias"),
        ({"logprobs": 0, "logprob_token_ids": (10**6,)}, "logprob_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_prompt(model(), chat(params=SamplingParams(**params)))
    assert refused.value.field == field


def test_options_reach_the_template() -> None:
    request = chat(chat_options=ChatOptions(continue_final_message=True))
    assert read_prompt(model(), request).token_ids
