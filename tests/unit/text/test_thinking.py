"""Requests for more, less or no thinking reach the variables that a template reads."""

from __future__ import annotations

from typing import Any

import pytest

from app.text.chat import ChatTemplate

START = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
QWEN = START + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
GRANITE = "{% if thinking %}Think.{% endif %}" + START
MODE = START + "{{ {'enabled': 'E', 'disabled': 'D'}[thinking_mode] if thinking_mode is defined else '' }}"
BUDGET = START + "{% if thinking_budget is defined and thinking_budget == 0 %}none{% endif %}"
GPT_OSS = "Reasoning: {{ reasoning_effort or 'medium' }}\n" + START
STRICT = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['no_think', 'low', 'high'] %}{{ raise_exception('no') }}"
    "{% endif %}{{ {'no_think': '-', 'low': 'L', 'high': 'H'}[reasoning_effort | default('low')] }}" + START
)
BOTH = "{% if thinking %}T{{ reasoning_effort | default('') }}{% endif %}" + START
WORD = "{{ 'off ' if messages[0].role == 'system' and '/no_think' in messages[0].content else 'on ' }}" + START
USER = {"role": "user", "content": "q"}


@pytest.mark.cases(test=2)
@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        (QWEN, {"enable_thinking": False}, "[user]q<think></think>"),
        (QWEN, {"reasoning_effort": "none"}, "[user]q<think></think>"),
        (QWEN, {"reasoning_effort": "low"}, "[user]q"),
        (GRANITE, {"enable_thinking": True}, "Think.[user]q"),
        (GRANITE, {"reasoning_effort": "high"}, "Think.[user]q"),
        (GRANITE, {"enable_thinking": False}, "[user]q"),
        (MODE, {"enable_thinking": False}, "[user]qD"),
        (MODE, {"enable_thinking": False, "thinking_mode": "enabled"}, "[user]qE"),
        (BUDGET, {"enable_thinking": False}, "[user]qnone"),
        (BUDGET, {"enable_thinking": True, "thinking_budget": 0}, "[user]qnone"),
        (GPT_OSS, {"reasoning_effort": "high"}, "Reasoning: high\n[user]q"),
        (GPT_OSS, {"reasoning_effort": "none"}, "Reasoning: medium\n[user]q"),
        (GPT_OSS, {}, "Reasoning: medium\n[user]q"),
        (STRICT, {"reasoning_effort": "medium"}, "H[user]q"),
        (STRICT, {"reasoning_effort": "minimal"}, "L[user]q"),
        (STRICT, {"reasoning_effort": "max"}, "H[user]q"),
        (STRICT, {"reasoning_effort": "none"}, "-[user]q"),
        (STRICT, {"enable_thinking": False}, "-[user]q"),
        (BOTH, {"reasoning_effort": "high"}, "Thigh[user]q"),
        (BOTH, {"reasoning_effort": "none"}, "[user]q"),
        (WORD, {"enable_thinking": False}, "off [system]/no_think[user]q"),
        (WORD, {}, "on [user]q"),
    ],
)
def test_a_request_reaches_the_variable_of_the_template(source: str, given: dict[str, Any], expected: str) -> None:
    template = ChatTemplate(source, {})
    try:
        assert template.render([USER], given) == expected
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (START, ()),
        (QWEN, ("enable_thinking",)),
        (GPT_OSS, ("reasoning_effort",)),
        (BOTH, ("thinking", "reasoning_effort")),
        (WORD, ("/no_think",)),
    ],
)
def test_what_has_an_effect_is_known(source: str, names: tuple[str, ...]) -> None:
    template = ChatTemplate(source, {})
    assert template.form.thinking.names == names
    template.close()
