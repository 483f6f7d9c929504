"""The answers of several precisions stand in one row of a Markdown table, whatever characters they have."""

from __future__ import annotations

import json

import httpx
import pytest

from tools.measure import answers


def test_one_row_for_each_question() -> None:
    found = answers.table(("a?", "b?"), ("fp32", "int8"), (["yes\n\nor no", "1 | 2"], ["yes", "3 "]))
    assert found.splitlines() == [
        "|  | fp32 | int8 |",
        "| --- | --- | --- |",
        "| a? | yes<br><br>or no | yes |",
        "| b? | 1 \\| 2 | 3 |",
    ]


@pytest.mark.parametrize(("reason", "expected"), [("stop", "Paris."), ("length", "Paris. …")])
def test_an_answer_that_was_cut_off_is_marked(reason: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def post(url: str, json: object, timeout: float) -> httpx.Response:
        asked.append((url, json))
        choice = {"message": {"content": "Paris."}, "finish_reason": reason}
        return httpx.Response(200, json={"choices": [choice]}, request=httpx.Request("POST", url))

    monkeypatch.setattr(httpx, "post", post)
    assert answers.ask("http://here", "Where?", 7) == expected
    assert asked[0][0] == "http://here/v1/chat/completions"
    assert json.loads(json.dumps(asked[0][1])) == {
        "messages": [{"role": "user", "content": "Where?"}],
        "max_tokens": 7,
        "temperature": 0,
    }
