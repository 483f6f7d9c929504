"""Routers for comparisons: their commands and configurations, the endpoint picker, and servers that keep a pace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.calibration.stages import TrialStep
from tools.peers.routers import envoy
from tools.peers.routers.picker import (
    BLOCK,
    DESTINATION,
    REQUEST_BODY,
    REQUEST_HEADERS,
    Picker,
    Seen,
    answer,
    fields,
    prompt_blocks,
    prompt_of,
    score,
)
from tools.peers.routers.processes import ENVOY, NAMES, Fleet, router_command
from tools.peers.serve_paced import Pace

SERVERS = ["127.0.0.1:8001", "127.0.0.1:8002"]


# ---- processes -----------------------------------------------------------------------------------------------------


def fleet(programs: Path, *names: str) -> Fleet:
    for name in names:
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    return Fleet(SERVERS, [100, 25], str(programs))


def test_a_router_is_started_with_its_policy_and_the_servers(tmp_path: Path) -> None:
    command = router_command("smg", "least_load", fleet(tmp_path, "smg"), 9001, 9002)
    assert command[:2] == [str(tmp_path / "smg"), "launch"]
    assert command[-3:] == ["--worker-urls", "http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    flags = dict(zip(command[2:-3:2], command[3:-3:2], strict=True))
    assert (flags["--policy"], flags["--port"], flags["--load-monitor-interval"]) == ("least_load", "9001", "1")


def test_a_router_that_is_not_installed_is_named_with_its_package(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no-such-router is not installed: pip install no-such-router"):
        fleet(tmp_path).program("no-such-router")


def test_every_name_is_a_program_and_a_policy() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {name.partition(" ")[0] for name in NAMES} == {"nginx", "envoy", "vllm-router", "sglang-router", "smg"}


@pytest.mark.parametrize("name", [name.removesuffix(", weights") for name in ENVOY])
def test_envoys_configuration_is_json_with_one_policy(name: str) -> None:
    told = json.loads(
        json.dumps(envoy.configuration(9001, SERVERS, name, [100, 25], 9002 if name == "picker" else None))
    )
    servers, *more = told["static_resources"]["clusters"]
    (policy,) = servers["load_balancing_policy"]["policies"]
    kind = policy["typed_extension_config"]["typed_config"]["@type"]
    assert kind.startswith("type.googleapis.com/envoy.extensions.load_balancing_policies.")
    weights = [each["load_balancing_weight"] for each in servers["load_assignment"]["endpoints"][0]["lb_endpoints"]]
    assert weights == [100, 25]
    assert [each["name"] for each in more] == ["picker"] * (name == "picker")
    assert json.dumps(told).count("ext_proc") == (name == "picker")


# ---- the endpoint picker -------------------------------------------------------------------------------------------


def test_a_wait_counts_a_second_for_a_second_and_speed_one_at_most() -> None:
    fast, slow = Seen(wait=0.5, speed=40.0), Seen(wait=0.2, speed=10.0)
    sums = score({"fast": fast, "slow": slow}, [])
    assert sums["fast"] - sums["slow"] == pytest.approx(1.0 - 0.3)
    fast.wait = 2.0
    assert max(score({"fast": fast, "slow": slow}, []).items(), key=lambda pair: pair[1])[0] == "slow"


def test_an_idle_server_and_a_cached_prompt_count_one_each() -> None:
    busy, idle = Seen(wait=0.0, num_open=4), Seen(wait=0.0, num_open=0)
    assert score({"busy": busy, "idle": idle}, []) == {"busy": 10.0, "idle": 11.0}
    blocks = prompt_blocks("a" * 2 * BLOCK)
    busy.remember(blocks[:1])
    assert score({"busy": busy, "idle": idle}, blocks)["busy"] == 10.5


def test_a_server_that_is_away_gets_nothing_unless_all_are() -> None:
    away, here = Seen(wait=0.0, is_there=False), Seen(wait=9.0)
    assert list(score({"away": away, "here": here}, [])) == ["here"]
    here.is_there = False
    assert list(score({"away": away, "here": here}, [])) == ["away", "here"]


def test_what_it_reads() -> None:
    seen = Seen()
    seen.read(
        "# TYPE armature_predicted_wait_seconds gauge\narmature_predicted_wait_seconds 0.25\n"
        'armature_capacity_tokens_per_second{phase="decode",rows="1"} 58.8\n'
        'armature_capacity_tokens_per_second{phase="decode",rows="64"} 800.0\n'
    )
    assert (seen.wait, seen.speed) == (0.25, 58.8)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"prompt": "once"}', "once"),
        (b'{"messages": [{"role": "user", "content": "Hi"}]}', "user: Hi"),
        (b'{"prompt": [1, 2]}', ""),
        (b"[]", ""),
        (b"no json", ""),
    ],
)
def test_prompts_are_read_from_openais_bodies(body: bytes, text: str) -> None:
    assert prompt_of(body) == text


def test_blocks_depend_on_all_that_was_before() -> None:
    first, second, other = "a" * BLOCK, "b" * BLOCK, "c" * BLOCK
    assert prompt_blocks(first + second)[:1] == prompt_blocks(first + other)[:1]
    assert prompt_blocks(first + second)[1] != prompt_blocks(other + second)[1]
    assert prompt_blocks("short") == []


def message(kind: int, content: bytes) -> bytes:
    return bytes([kind << 3 | 2, len(content)]) + content


async def test_it_answers_the_body_with_a_destination_and_counts_the_request_until_it_ends() -> None:
    picker = Picker(SERVERS)
    body = b'{"prompt": "a"}'
    messages = [message(REQUEST_HEADERS, b""), message(REQUEST_BODY, message(1, body) + bytes([2 << 3, 1]))]
    answered = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        for each in messages:
            yield each
        await answered.wait()

    answers = picker.process(requests(), None)
    assert dict(fields(await anext(answers))) == {1: b"\x0a\x00"}  # go on
    ((kind, told),) = fields(await anext(answers))
    assert kind == 3
    assert DESTINATION.encode() in told
    assert SERVERS[0].encode() in told
    assert [seen.num_open for seen in picker.servers.values()] == [1, 0]
    answered.set()
    assert [each async for each in answers] == []
    assert [seen.num_open for seen in picker.servers.values()] == [0, 0]


def test_an_answer_without_a_destination_changes_nothing() -> None:
    assert dict(fields(answer(REQUEST_HEADERS, ""))) == {1: b"\x0a\x00"}


# ---- servers that keep a pace --------------------------------------------------------------------------------------


def test_a_step_takes_a_time_for_itself_its_rows_and_its_prompts() -> None:
    spans = [SimpleNamespace(num_tokens=length) for length in (1, 1, 100)]
    batch: Any = SimpleNamespace(spans=spans)
    assert Pace(1.0).seconds(batch) == pytest.approx(0.016 + 2 * 0.001 + 100 * 0.0004)
    assert Pace(0.25).seconds(batch) == pytest.approx(4 * Pace(1.0).seconds(batch))


def test_calibration_is_told_the_same_times() -> None:
    one: Any = SimpleNamespace(spans=[SimpleNamespace(num_tokens=1)] * 8)
    assert Pace(0.5).trial_seconds(TrialStep("decode", 8, 2), num_layers=2) == pytest.approx(Pace(0.5).seconds(one))
    assert Pace(1.0).trial_seconds(TrialStep("prefill", 100, 1), num_layers=4) == pytest.approx(0.056 / 4)
