"""System messages are written in every place, whatever the template does with them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from app.text.chat import ChatTemplate
from app.text.template_form import SystemRules, fold_system_messages

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SILENT = "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
NEVER = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
PICKY = "{% if not flag %}{{ raise_exception('flag') }}{% endif %}" + FIRST_ONLY


def message(text: str) -> dict[str, Any]:
    role = {"S": "system", "U": "user", "A": "assistant"}[text[0]]
    return {"role": role, "content": text}


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        (PLAIN, SystemRules()),
        (FIRST_ONLY, SystemRules(True, False, False)),
        (SILENT, SystemRules(True, False, False)),
        (NEVER, SystemRules(False, False, False)),
        (PICKY, SystemRules()),
    ],
)
def test_the_rules_are_found_at_load(source: str, rules: SystemRules) -> None:
    assert ChatTemplate(source, {}).form.system == rules


@pytest.mark.cases(test=3)
@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        (PLAIN, "S1 S2 U1 A1 S3 U2", "[system]S1[system]S2[user]U1[assistant]A1[system]S3[user]U2"),
        (FIRST_ONLY, "S1 S2 U1", "[system]S1\n\nS2[user]U1"),
        (FIRST_ONLY, "S1 U1 A1 S2 S3 U2", "[system]S1[user]U1[assistant]A1[user]S2\n\nS3\n\nU2"),
        (FIRST_ONLY, "U1 A1 S1 U2", "[user]U1[assistant]A1[user]S1\n\nU2"),
        (SILENT, "U1 S1", "[user]U1\n\nS1"),
        (SILENT, "U1 S1 A1 U2", "[user]U1\n\nS1[assistant]A1[user]U2"),
        (SILENT, "U1 A1 S1", "[user]U1[assistant]A1[user]S1"),
        (NEVER, "S1 U1 A1 U2", "[user]S1\n\nU1[assistant]A1[user]U2"),
        (NEVER, "S1 A1 U1", "[user]S1[assistant]A1[user]U1"),
        (NEVER, "S1 S2", "[user]S1\n\nS2"),
    ],
)
def test_every_message_is_written(source: str, given: str, expected: str) -> None:
    messages = [message(text) for text in given.split()]
    assert ChatTemplate(source, {}).render(messages) == expected
    assert [one["content"] for one in messages] == given.split(), "the conversation itself does not change"


@pytest.mark.parametrize("later", [False, True])
def test_no_content_is_lost_and_users_do_not_repeat(later: bool) -> None:
    texts = [f"{'SUA'[number % 3]}{place}" for number in range(27) for place in range(number // 9, number // 9 + 2)]
    folded = fold_system_messages([message(text) for text in texts], SystemRules(False, False, later))
    written = " ".join(one["content"] for one in folded).split()
    assert written == texts
    asked = [one["role"] for one in folded]
    if not later:
        assert "system" not in asked
        given = [message(text)["role"] for text in texts]
        repeated = sum(pair == ("user", "user") for pair in pairwise(given))
        assert sum(pair == ("user", "user") for pair in pairwise(asked)) <= repeated
