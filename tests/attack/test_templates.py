"""Hostile chat templates: each is refused within its time and memory, and the server serves afterwards."""

from __future__ import annotations

import gc
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from app.errors import CheckpointInvalid, InvalidRequest, ServiceStopping
from app.text import child_process
from app.text.chat import ChatTemplate
from app.text.child_process import COMPILE_FACTOR, TemplateLimits
from app.text.tokenizer import Tokenizer
from tests.attack.hostile_templates import HOSTILE, SOURCE
from tests.live.live_server import LiveServer, server_process, until
from tiny_checkpoints import write_checkpoint

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2}
ENDLESS = HOSTILE["time: nested loops without output"]
START_CPU_SECONDS = 1.0  # Python and jinja2 take 0.1 s; an emulated or old processor takes more
MAX_CHILD_BYTES = 160 * 2**20  # the interpreter, 64 MiB, and what the allocator rounds up
# One in six, and all in `make test-all`.
CASES = [
    pytest.param(source, id=name, marks=[] if place % 6 == 0 else [pytest.mark.nightly])
    for place, (name, source) in enumerate(HOSTILE.items())
]


def children() -> tuple[float, int]:
    """CPU seconds of all ended child processes, and the most memory of one of them in bytes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime, used.ru_maxrss


@pytest.fixture(scope="module")
def good() -> Iterator[ChatTemplate]:
    template = ChatTemplate("{{ messages[0].content }}", {})
    yield template
    template.close()


@pytest.mark.cases(test=3, ci=12)
@pytest.mark.parametrize("source", CASES)
def test_a_hostile_template_is_refused_within_its_limits(
    source: str, good: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limit of CPU time must hold alone: on a busy machine the wait for an answer may be over before it.
    monkeypatch.setattr(child_process, "MIN_WALL_SECONDS", 60.0)
    gc.collect()  # the processes of earlier tests end now, and their CPU time is counted before
    before, _ = children()
    with pytest.raises((CheckpointInvalid, InvalidRequest), match="chat template"):
        template = ChatTemplate(source, {})
        try:
            template.render(MESSAGES)
        finally:
            template.close()
    spent = children()[0] - before
    limits = TemplateLimits()
    # Two processes: the one that ended, and the one that was started for the next request.
    assert spent < 2 * START_CPU_SECONDS + (2 * COMPILE_FACTOR + 1) * limits.cpu_seconds
    assert good.render(MESSAGES) == "hello"


def test_the_list_is_as_long_as_the_first_attack() -> None:
    assert len(HOSTILE) >= 114


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux limits a process's addresses")
def test_no_process_took_more_memory_than_it_may() -> None:
    template = ChatTemplate(HOSTILE["memory: tilde doubling"], {})
    template._process.check()  # waits until the process, which a trial may have ended, has set its limits
    pid = template._process._child._process.pid
    limits = Path(f"/proc/{pid}/limits").read_text()
    with pytest.raises(InvalidRequest, match="needs more memory"):
        template.render(MESSAGES)
    template.close()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max address space"))
    assert int(line.split()[3]) < MAX_CHILD_BYTES


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_the_process_has_no_key_no_file_and_no_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_API_KEYS", '["sekret"]')
    template = ChatTemplate("{{ messages[0].content }}", {})
    process = Path(f"/proc/{template._process._child._process.pid}")
    assert b"ARMATURE" not in (process / "environ").read_bytes()
    assert {each.name for each in (process / "fd").iterdir()} == {"0", "1", "2"}
    limits = {line[:26].strip(): line[26:].split()[:2] for line in (process / "limits").read_text().splitlines()}
    assert limits["Max open files"] == ["3", "3"]
    assert limits["Max processes"] == limits["Max file size"] == limits["Max core file size"] == ["0", "0"]
    assert "torch" not in (process / "maps").read_text()
    template.close()


def test_a_template_that_used_up_its_time_serves_the_next_conversation() -> None:
    source = f"{{% if messages[0].content == 'stop' %}}{ENDLESS}{{% endif %}}{{{{ messages[0].content }}}}"
    template = ChatTemplate(source, {})
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="more than 200 ms of CPU time"):
            template.render([{"role": "user", "content": "stop"}])
        assert template.render(MESSAGES) == "hello"
    template.close()


def test_a_process_that_was_killed_is_started_again() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    child = template._process._child._process
    child.kill()
    child.wait()
    with pytest.raises(InvalidRequest, match="ended with status -9"):
        template.render(MESSAGES)
    assert template.render(MESSAGES) == "hello"
    template.close()


def test_closing_ends_a_rendering_in_another_thread() -> None:
    template = ChatTemplate(ENDLESS, {}, TemplateLimits(cpu_seconds=60.0))
    ended: list[BaseException] = []

    def render() -> None:
        try:
            template.render(MESSAGES)
        except (InvalidRequest, ServiceStopping) as error:
            ended.append(error)

    thread = threading.Thread(target=render, daemon=True)
    thread.start()
    until(template._process._lock.locked)
    closing = threading.Thread(target=template.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive(), "it waits for the rendering"
    thread.join(30)
    assert [type(error) for error in ended] == [ServiceStopping]
    with pytest.raises(ServiceStopping):
        template.render(MESSAGES)


def test_messages_larger_than_the_memory_are_refused_unsent() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, TemplateLimits(memory_bytes=2**20))
    with pytest.raises(InvalidRequest, match="do not fit"):
        template.render([{"role": "user", "content": "a" * 2**19}])
    template.close()


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("name", ["time: fib macro", "memory: percent width", "escape: subclasses"])
def test_a_server_with_a_hostile_template_serves_the_rest(server: LiveServer, name: str) -> None:
    service = server.find_served.service
    model = service.model
    hostile = ChatTemplate(HOSTILE[name], {})
    service._model = replace(model, chat=hostile)  # type: ignore[type-var]
    try:
        for _ in range(3):  # more than there are text threads
            answer = server.client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 400, answer.text
            assert "chat template" in answer.json()["error"]["message"]
        assert server.generate(max_tokens=2).status_code == 200
    finally:
        service._model = model
        hostile.close()
    assert server.client.post("/v1/chat/completions", json=CHAT).status_code == 200


def write_template(directory: Path, source: str) -> Path:
    checkpoint = write_checkpoint(directory)
    (checkpoint / "chat_template.jinja").write_text(source, encoding="utf-8")
    return checkpoint


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["break outside of a loop", *(pytest.param(name, marks=pytest.mark.full) for name in ["5,000 parentheses"])]
)
def test_a_start_with_a_bad_template_ends_with_2_and_names_the_file(tmp_path: Path, name: str) -> None:
    checkpoint = write_template(tmp_path, SOURCE[name])
    with server_process(checkpoint, "--log-level", "debug") as process:
        status, said = process.finish()
    assert status == 2, said
    assert str(checkpoint / "chat_template.jinja") in said.splitlines()[-1]
    assert "its process ended" not in said, "the last line says why"
    assert "Traceback" not in said
    assert "torch imported" not in said


@pytest.mark.full
def test_a_stop_while_templates_run_and_texts_are_read_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both text threads are busy: one with a template that has hours of CPU time, one waits for it."""
    checkpoint = write_template(tmp_path, ENDLESS)
    drain = 1.0
    flags = ("--drain-seconds", str(drain), "--chat-template-cpu-seconds", "3600")
    with server_process(checkpoint, *flags) as process:
        url = process.url()
        until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
        outcomes: list[object] = []

        def chat() -> None:
            try:
                outcomes.append(httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60).status_code)
            except httpx.HTTPError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=chat) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: "armature_requests" in httpx.get(f"{url}/metrics").text)
        process.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        status, said = process.finish()
        took = time.monotonic() - began
        for thread in threads:
            thread.join(60)
    assert status == 0, said
    assert len(outcomes) == 2
    assert took < drain + 5 + 10  # 5 s is promised; 10 s more for a busy machine


# A server whose shutdown hangs for a reason that nobody foresaw.
HANGING = """
import time
from app.server import listeners, process
from app.settings import Settings

async def app(scope, receive, send):
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    time.sleep(600)

process.STOP_SECONDS = 0.5
(listener,) = listeners.listen(["127.0.0.1"], 0).sockets
server = process.PunctualServer(process.server_config(app, Settings(drain_seconds=0)), 0.0)
startup = server.startup

async def start(sockets):
    await startup(sockets)
    print("ready", flush=True)

server.startup = start
server.run(sockets=[listener])
"""


@pytest.mark.full
def test_a_stop_that_hangs_ends_the_process(root: Path) -> None:
    command = [sys.executable, "-c", HANGING]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.terminate()
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert "stopping took longer than expected" in said


def test_a_tokenizer_template_names_its_file(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    tokenizer = Tokenizer(checkpoint)
    from app.text.chat import open_chat_template

    with pytest.raises(CheckpointInvalid, match=r"tokenizer_config\.json\) cannot be used"):
        open_chat_template(checkpoint, {"chat_template": SOURCE["an unclosed block"]}, tokenizer.named_tokens)
