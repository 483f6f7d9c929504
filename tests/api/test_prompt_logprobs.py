"""Scores of prompts in OpenAI's and vLLM's shapes, gaps and beams on OpenAI's routes, and llama.cpp's /infill."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.messages import Timings
from app.service.requests import ChoiceFinished, Infill, PromptToken, ScoredToken, TextDelta, Usage
from tests.api.scripted_service import ScriptedService, deltas, events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def scored(token_id: int, text: str, logprob: float, *top: ScoredToken) -> ScoredToken:
    return ScoredToken(token_id, text, text.encode(), logprob, top)


PROMPT = (
    PromptToken(1, "On"),
    PromptToken(2, "ce", scored(2, "ce", -1.0, scored(2, "ce", -1.0), scored(3, "e", -2.0)), 1),
    PromptToken(4, "!", scored(4, "!", float("-inf"), scored(3, "e", -0.5), scored(5, "a", -1.5)), 9),
)
GENERATED = scored(6, " up", -0.25, scored(6, " up", -0.25), scored(7, " on", -3.0))
STOP = scored(0, "</s>", -0.75, scored(0, "</s>", -0.75))


def script(stop: ScoredToken | None = None, choice: int = 0) -> list[Any]:
    return [
        TextDelta(choice, "Once!", prompt=PROMPT),
        TextDelta(choice, " up", (6,), (GENERATED,)),
        ChoiceFinished(choice, "stop", Usage(3, 0, 1), 1, Timings(), 0, stop),
    ]


LISTS = {
    "text_offset": [0, 2, 4, 5],
    "token_logprobs": [None, -1.0, -9999.0, -0.25],
    "tokens": ["On", "ce", "!", " up"],
    "top_logprobs": [None, {"ce": -1.0, "e": -2.0}, {"e": -0.5, "a": -1.5}, {" up": -0.25, " on": -3.0}],
}
BY_ID = [
    None,
    {
        "2": {"logprob": -1.0, "rank": 1, "decoded_token": "ce"},
        "3": {"logprob": -2.0, "rank": 2, "decoded_token": "e"},
    },
    {
        "4": {"logprob": -9999.0, "rank": 9, "decoded_token": "!"},
        "3": {"logprob": -0.5, "rank": 1, "decoded_token": "e"},
        "5": {"logprob": -1.5, "rank": 2, "decoded_token": "a"},
    },
]


async def test_an_echo_has_its_scores_before_those_of_the_completion(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.scripts = [script()]
    body = {"prompt": "Once!", "echo": True, "logprobs": 2}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("Once! up", LISTS)
    assert "prompt_logprobs" not in choice
    assert (service.requests[0].params.prompt_logprobs, service.requests[0].params.logprobs) == (2, 2)
    chunks = events(await client.post(COMPLETIONS, json=body | {"stream": True}))[:-1]
    lists = [chunk["choices"][0]["logprobs"] or {} for chunk in chunks]
    assert {name: [entry for one in lists for entry in one.get(name, [])] for name in LISTS} == LISTS


async def test_the_stop_token_is_the_last_entry_of_an_echo(client: httpx.AsyncClient, service: ScriptedService) -> None:
    """A client that scores texts drops the last entry, as the token that was generated."""
    service.scripts = [script(STOP)]
    body = {"prompt": "Once!", "logprobs": 1}
    (echoed,) = (await client.post(COMPLETIONS, json=body | {"echo": True})).json()["choices"]
    assert echoed["logprobs"]["tokens"] == [*LISTS["tokens"], "</s>"]
    assert echoed["logprobs"]["top_logprobs"][1:] == [
        {"ce": -1.0},
        {"e": -0.5},
        {" up": -0.25, " on": -3.0},
        {"</s>": -0.75},
    ]
    (plain,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert plain["logprobs"]["tokens"] == [" up"]


async def test_of_tokens_with_the_same_text_the_likeliest_is_shown(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    parts = [ScoredToken(token_id, "\ufffd", bytes([token_id]), -float(token_id)) for token_id in (200, 201)]
    prompt = (PromptToken(1, "a"), PromptToken(200, "\ufffd", ScoredToken(200, "\ufffd", b"", -200.0, tuple(parts)), 1))
    service.scripts = [[TextDelta(0, "a", prompt=prompt), *deltas("b")]]
    body = {"prompt": "a", "echo": True, "logprobs": 2}
    lists = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert lists["top_logprobs"] == [None, {"\ufffd": -200.0}]


async def test_prompt_logprobs_of_a_completion(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [[*script(), *script(choice=1)]]
    body = {"prompt": ["Once!", "Once!"], "prompt_logprobs": 2, "n": 2}
    choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [BY_ID] * 4
    assert service.requests[0].params.prompt_logprobs == 2 and not service.requests[0].echo
    one = (await client.post(COMPLETIONS, json={"prompt": "Once!", "prompt_logprobs": 0})).json()["choices"][0]
    assert [list(place or ()) for place in one["prompt_logprobs"]] == [[], ["2"], ["4"]]
    both = {"prompt": "Once!", "prompt_logprobs": 1, "echo": True, "logprobs": 2}
    (choice, _) = (await client.post(COMPLETIONS, json=both)).json()["choices"]
    assert len(choice["prompt_logprobs"][2]) == 2 and len(choice["logprobs"]["top_logprobs"][2]) == 2
    assert service.requests[-1].params.prompt_logprobs == 2


async def test_prompt_logprobs_of_a_chat(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [script()]
    answer = (await client.post(CHAT, json=HELLO | {"prompt_logprobs": 2})).json()
    assert answer["prompt_logprobs"] == BY_ID
    assert "prompt_logprobs" not in (await client.post(CHAT, json=HELLO)).json()


async def test_a_completion_may_have_no_tokens_if_the_prompt_is_shown(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.scripts = [[script()[0], ChoiceFinished(0, "length", Usage(3), 0, Timings())]]
    body = {"prompt": "Once!", "max_tokens": 0}
    answer = (await client.post(COMPLETIONS, json=body | {"echo": True, "logprobs": 2})).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("Once!", "length", 0)
    assert choice["logprobs"]["tokens"] == ["On", "ce", "!"]
    silent = (await client.post(COMPLETIONS, json=body | {"echo": True})).json()["choices"][0]
    assert (silent["text"], silent["logprobs"]) == ("Once!", None)
    assert [(one.params.max_tokens, one.params.prompt_logprobs) for one in service.requests] == [(0, 2), (0, 0)]
    assert (await client.post(COMPLETIONS, json=body | {"prompt_logprobs": 1})).status_code == 200
    assert (await client.post(COMPLETIONS, json=body)).json()["error"]["param"] == "max_tokens"


async def test_all_scores_are_shown(client: httpx.AsyncClient, service: ScriptedService) -> None:
    """-1, of which the service makes the size of the vocabulary."""
    service.scripts = [script()]
    body = {"prompt": "Once!", "echo": True, "logprobs": -1, "prompt_logprobs": 1}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["logprobs"] == LISTS
    assert [len(place) for place in choice["prompt_logprobs"][1:]] == [1, 2]  # the token itself, and the likeliest
    assert service.requests[0].params.prompt_logprobs == service.requests[0].params.logprobs == -1
    body = HELLO | {"logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1}
    assert (await client.post(CHAT, json=body)).json()["prompt_logprobs"] == BY_ID
    assert service.requests[1].params.logprobs == -1


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -2}, "prompt_logprobs"),
        (COMPLETIONS, {"length_penalty": 2.0}, "length_penalty"),
        (COMPLETIONS, {"use_beam_search": True, "n": 9}, "n"),
        (COMPLETIONS, {"use_beam_search": True, "n": 2, "best_of": 9}, "n"),
        (CHAT, {"use_beam_search": True, "n": 2, "guided_choice": ["a"]}, "use_beam_search"),
        (CHAT, {"use_beam_search": True, "length_penalty": 11.0}, "length_penalty"),
    ],
)
async def test_refusals(client: httpx.AsyncClient, url: str, body: Any, field: str) -> None:
    response = await client.post(url, json=({"prompt": "x"} if url == COMPLETIONS else HELLO) | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("url", "body", "expected"),
    [
        (COMPLETIONS, {"n": 2}, (2, 2, 1.0)),
        (COMPLETIONS, {"n": 2, "best_of": 4, "length_penalty": 0.5}, (4, 2, 0.5)),
        (COMPLETIONS, {"n": 2, "best_of": 4, "stream": True}, (4, 2, 1.0)),
        (COMPLETIONS, {}, (1, 1, 1.0)),
        (CHAT, {"n": 3}, (3, 3, 1.0)),
    ],
)
async def test_beams(
    client: httpx.AsyncClient, service: ScriptedService, url: str, body: Any, expected: tuple[int, int, float]
) -> None:
    service.scripts = [[step for choice in range(expected[1]) for step in deltas("a", choice=choice)]]
    source = {"prompt": "x"} if url == COMPLETIONS else HELLO
    response = await client.post(url, json=source | body | {"use_beam_search": True, "temperature": 0.7})
    assert response.status_code == 200
    params = service.requests[0].params
    assert (params.beam_width, params.n, params.length_penalty) == expected
    assert params.temperature == 0.0
    if not body.get("stream"):
        assert [choice["index"] for choice in response.json()["choices"]] == list(range(expected[1]))


async def test_a_suffix_makes_a_gap(client: httpx.AsyncClient, service: ScriptedService) -> None:
    assert (await client.post(COMPLETIONS, json={"prompt": "a", "suffix": "b"})).status_code == 200
    assert (await client.post(COMPLETIONS, json={"prompt": "a", "suffix": ""})).status_code == 200
    assert [request.infill for request in service.requests] == [Infill("b"), None]


async def test_infill(client: httpx.AsyncClient, service: ScriptedService) -> None:
    body = {
        "input_prefix": "def f():\n",
        "prompt": "    re",
        "input_suffix": "\n",
        "input_extra": [{"filename": "a.py", "text": "x = 1"}, {"text": "y"}],
        "n_predict": 4,
    }
    answer = (await client.post("/infill", json=body)).json()
    assert (answer["content"], answer["prompt"]) == ("Hello there", "def f():\n    re")
    (request,) = service.requests
    assert (request.prompt, request.params.max_tokens, request.api) == ("def f():\n    re", 4, "llama_cpp")
    assert request.infill == Infill("\n", (("a.py", "x = 1"), ("file", "y")), fits=True)
    told = events(await client.post("/infill", json={"input_prefix": "a", "stream": True}))
    assert [event["content"] for event in told] == ["Hello", " there", ""]
    refused = (await client.post("/infill", json={"input_suffix": 1})).json()["error"]
    assert "input_suffix" in refused["message"]


# ---- vLLM's and llama.cpp's fields of tokens -----------------------------------------------------------------------

TEXT = TextDelta(0, " up", (6,), (GENERATED,))
ENDED = ChoiceFinished(0, "stop", Usage(3, 0, 1), 1, Timings(), 0, None)


async def test_tokens_are_named_by_their_ids(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [script()]
    fields = {"return_tokens_as_token_ids": True}
    body = {"prompt": "Once!", "echo": True, "logprobs": 2} | fields
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:1", "token_id:2", "token_id:4", "token_id:6"]
    assert choice["logprobs"]["text_offset"] == LISTS["text_offset"]
    named = [list(top) for top in choice["logprobs"]["top_logprobs"][1:]]
    assert named == [
        ["token_id:2", "token_id:3"],
        ["token_id:4", "token_id:3", "token_id:5"],
        ["token_id:6", "token_id:7"],
    ]
    service.scripts = [[TEXT, ENDED]]
    body = HELLO | {"logprobs": True, "top_logprobs": 2} | fields
    (chat,) = (await client.post(CHAT, json=body)).json()["choices"]
    (token,) = chat["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("token_id:6", list(b" up"))
    assert [top["token"] for top in token["top_logprobs"]] == ["token_id:6", "token_id:7"]
    chunks = events(await client.post(CHAT, json=body | {"stream": True}))[:-1]
    streamed = [one["token"] for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == ["token_id:6"]


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "x", "logprobs": 1}), (CHAT, HELLO | {"logprobs": True})]
)
async def test_chosen_tokens_and_sides_reach_the_service(
    client: httpx.AsyncClient, service: ScriptedService, path: str, body: dict[str, Any]
) -> None:
    more = {"logprob_token_ids": [5, 9], "truncate_prompt_tokens": 2, "truncation_side": "right"}
    assert (await client.post(path, json=body | more)).status_code == 200
    assert service.requests[0].params.logprob_token_ids == (5, 9)
    assert service.requests[0].truncate_right
    assert (await client.post(path, json=body | {"truncation_side": "left"})).status_code == 200
    assert not service.requests[1].truncate_right


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"logprobs": None, "logprob_token_ids": [1]}, "logprob_token_ids needs logprobs."),
        ({"logprobs": 1, "logprob_token_ids": [1], "use_beam_search": True, "n": 2}, "beam search"),
        ({"logprobs": 1, "logprob_token_ids": [1], "max_tokens": 0, "echo": True}, "no token is generated"),
        ({"logprobs": 1, "logprob_token_ids": [1] * 129}, "at most 128"),
    ],
)
async def test_chosen_tokens_without_scores_are_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], told: str
) -> None:
    answer = await client.post(COMPLETIONS, json={"prompt": "x"} | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "logprob_token_ids" and told in error["message"]


async def test_what_a_request_names_and_does_not_want_is_null(client: httpx.AsyncClient) -> None:
    """Clients of vLLM read these fields whether or not they are wanted; a body without them gets OpenAI's fields."""
    named = {"prompt_logprobs": None, "return_token_ids": False}
    answer = (await client.post(COMPLETIONS, json={"prompt": "x"} | named)).json()
    assert answer["choices"][0].items() >= {"prompt_logprobs": None, "prompt_token_ids": None}.items()
    answer = (await client.post(CHAT, json=HELLO | named)).json()
    assert answer.items() >= {"prompt_logprobs": None, "prompt_token_ids": None}.items()
    answer = (await client.post(CHAT, json=HELLO)).json()
    assert not {"prompt_logprobs", "prompt_token_ids"} & (answer.keys() | answer["choices"][0].keys())


async def test_a_chat_echoes_the_assistants_last_message(client: httpx.AsyncClient) -> None:
    last = {"role": "assistant", "content": [{"type": "text", "text": "An apple"}, {"type": "text", "text": "a day"}]}
    body = {"messages": [*HELLO["messages"], last], "continue_final_message": True, "echo": True}
    answer = (await client.post(CHAT, json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "An apple\na dayHello there"
    chunks = events(await client.post(CHAT, json=body | {"stream": True}))[:-1]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "An apple\na dayHello there"
    for unechoed in (body | {"echo": False}, HELLO | {"echo": True}):
        answer = (await client.post(CHAT, json=unechoed)).json()
        assert answer["choices"][0]["message"]["content"] == "Hello there"


async def test_all_wrong_keys_of_a_bias_are_named(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, json=HELLO | {"logit_bias": {"bad1": 1, "5": 1, "bad2": 1}})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "logit_bias must have token ids as its keys, not 'bad1', 'bad2'."
    many = {f"bad{number}": 1 for number in range(12)}
    answer = await client.post(CHAT, json=HELLO | {"logit_bias": many})
    assert answer.json()["error"]["message"].endswith("'bad9' and 2 more.")


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, HELLO)])
async def test_llama_cpps_name_of_the_limit(
    client: httpx.AsyncClient, service: ScriptedService, path: str, body: dict[str, Any]
) -> None:
    for given, limit in ((7, 7), (-1, None)):
        assert (await client.post(path, json=body | {"n_predict": given})).status_code == 200
        request = service.requests[-1]
        assert (request.params.max_tokens, request.clips_max_tokens) == (limit, True)
    answer = await client.post(path, json=body | {"n_predict": 7, "max_tokens": 8})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
