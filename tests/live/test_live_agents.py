"""Agents and SDKs, unchanged and as docs/clients.md sets them up: each calls a tool and reads its result.

The server has no flags that concern clients. Its model is scripted, so that every agent gets a call of the tool that
it has for commands. `make clients` installs the agents and runs this file; an agent that is not installed is skipped by
its name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripted_checkpoint import CALLS, CONTENT, CONTEXT, DONE, EDIT, FILE, write_scripted_checkpoint
from tests.live.live_server import server_process, until

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
PAGE, EXAMPLES = ROOT / "docs" / "clients.md", ROOT / "examples" / "clients"
TASK = f"Write {CONTENT} into {FILE}."
SECONDS = 240  # of one client on a busy machine
# A section of the page, its program, and what makes the program do one task without questions.
AGENTS: Mapping[str, Sequence[str]] = {
    "Codex": ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
    "Claude Code": ("claude", "--allowedTools", "Bash", "-p"),
    "opencode": ("opencode", "run"),
    "qwen-code": ("qwen", "--yolo", "-p"),
    "pi": ("pi", "-p"),
    "Continue": ("cn", "--auto", "-p"),
    "Cline": ("cline",),
    "llm": ("llm", "--functions", "notes.py"),
}
NOTES = f'def write_note(text: str) -> str:\n    open("{FILE}", "w").write(text)\n    return "It is written."\n'
# The agents ask nothing of other hosts that they can do without.
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENCODE_DISABLE_AUTOUPDATE": "true",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "true",
    "OPENCODE_DISABLE_MODELS_FETCH": "true",
    "PI_OFFLINE": "1",
}


def modules() -> Path:
    """Return the folder of npm's packages that `make clients` names."""
    return Path(os.environ.get("CLIENTS_NODE_MODULES") or "node_modules").absolute()


def programs() -> str:
    """Return where the agents' programs are."""
    folders = [str(modules() / ".bin"), os.environ.get("CLIENTS_PROGRAMS", ""), os.environ.get("PATH", "")]
    return os.pathsep.join(filter(None, folders))


class Desk:
    """A client's own home and folder to work in. `url` is the server's address."""

    def __init__(self, folder: Path, url: str) -> None:
        self.home, self.work, self._url = folder / "home", folder / "work", url
        self._log = folder / "log"
        self.home.mkdir()
        self.work.mkdir()
        self.environment = QUIET | {"HOME": str(self.home), "PATH": programs(), "PYTHONPATH": ""}

    def blocks(self, section: str, language: str) -> list[str]:
        """Return the section's blocks in that language, for this server."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self._section(section), re.MULTILINE | re.DOTALL)

    def write_settings(self, section: str) -> None:
        """Write the files that the section names into the home."""
        files = r"^In `~/([^`]+)`[^`]*?:\n\n```\w+\n(.*?)^```$"
        for name, content in re.findall(files, self._section(section), re.MULTILINE | re.DOTALL):
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")

    def _section(self, title: str) -> str:
        """Return a section of the page, adapted as an example is."""
        page = PAGE.read_text(encoding="utf-8")
        found = re.search(rf"^## {re.escape(title)}\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
        assert found, f"docs/clients.md has no section {title}"
        return self._adapted(found[1])

    def example(self, name: str) -> str:
        """Return a program of the examples with this server's address, and this model's context."""
        return self._adapted((EXAMPLES / name).read_text(encoding="utf-8"))

    def _adapted(self, text: str) -> str:
        return text.replace("http://127.0.0.1:8000", self._url).replace("32768", str(CONTEXT))

    def run(self, command: Sequence[str | Path]) -> str:
        """Return what a command printed. It must end with 0, and nothing that it started lives longer."""
        with self._log.open("w") as log:
            process = subprocess.Popen(
                list(command), cwd=self.work, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            with suppress(subprocess.TimeoutExpired):  # its status is then that of the kill
                process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._end_daemons()
            process.wait()
        said = self._log.read_text(encoding="utf-8", errors="replace")
        assert process.returncode == 0, said[-3000:]
        return said

    def _end_daemons(self) -> None:
        """End what left the process group, as Cline's hub does: processes with this home."""
        mark = f"HOME={self.home}\0".encode()
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is not ours
                if mark in file.read_bytes():
                    os.kill(int(file.parent.name), signal.SIGKILL)

    @property
    def written(self) -> str:
        """The content of the file that the tool writes."""
        file = self.work / FILE
        return file.read_text(encoding="utf-8").strip() if file.exists() else ""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    checkpoint = write_scripted_checkpoint(tmp_path_factory.mktemp("checkpoints") / "scripted")
    with server_process(checkpoint, "--calibrate", "off") as server:
        address = server.url()
        until(lambda: httpx.get(f"{address}/readyz").status_code == 200)
        yield address


@pytest.fixture
def desk(tmp_path: Path, url: str) -> Desk:
    return Desk(tmp_path, url)


@pytest.mark.parametrize("tool", CALLS)
def test_the_scripted_model_calls_a_tool_and_ends_after_its_result(url: str, tool: str) -> None:
    def answer(*results: dict[str, Any], tools: Sequence[str]) -> dict[str, Any]:
        listed = [{"type": "function", "function": {"name": name}} for name in tools]
        messages = [{"role": "user", "content": TASK}, *results]
        sent = httpx.post(f"{url}/v1/chat/completions", json={"model": "any", "messages": messages, "tools": listed})
        message: dict[str, Any] = sent.json()["choices"][0]["message"]
        return message

    first = answer(tools=["unknown", tool])
    (call,) = first["tool_calls"]
    assert call["function"]["name"] == tool
    assert json.loads(call["function"]["arguments"]) == CALLS[tool]
    result = {"role": "tool", "tool_call_id": call["id"], "content": ""}
    assert answer(first, result, tools=[tool])["content"] == DONE
    assert answer(tools=["unknown"])["content"] == answer(tools=[])["content"] == EDIT


def needs(program: str) -> None:
    """Skip the test if a program is not installed."""
    if shutil.which(program, path=programs()) is None:
        pytest.skip(f"{program} is not installed: make clients")


@pytest.mark.parametrize("section", AGENTS)
def test_an_agent_calls_a_tool_and_reads_its_result(desk: Desk, section: str) -> None:
    program, *options = AGENTS[section]
    needs(program)
    desk.write_settings(section)
    (desk.work / "notes.py").write_text(NOTES, encoding="utf-8")
    (setup,) = desk.blocks(section, "bash")
    said = desk.run(["bash", "-ec", f'{setup.rstrip()} "$@"', program, *options, TASK])
    assert desk.written == CONTENT
    assert DONE in said


def test_aider_edits_a_file(desk: Desk) -> None:
    needs("aider")
    (setup,) = desk.blocks("aider", "bash")
    options = "--no-check-update --no-analytics --no-show-model-warnings --no-git --yes-always --message".split()
    said = desk.run(["bash", "-ec", f'{setup.rstrip()} "$@"', "aider", FILE, *options, TASK])
    assert desk.written == CONTENT
    assert EDIT.partition("\n")[0] in said


# A program of the examples, the module that it imports, and the package of pip. The newest client of OpenAI excludes
# other packages.
LIBRARIES = {
    "openai_sdk": ("openai", "openai-agents"),
    "openai_agents": ("agents", "openai-agents"),
    "anthropic_sdk": ("anthropic", "anthropic"),
    "ollama_client": ("ollama", "ollama"),
    "langchain_chat": ("langchain_openai", "langchain-openai"),
    "llama_index_llm": ("llama_index.llms.openai_like", "llama-index-llms-openai-like"),
    "litellm_completion": ("litellm", "litellm"),
}
WITH_TOOL = ("openai_agents", "anthropic_sdk")


def interpreter_of(package: str) -> str:
    """Return the interpreter of the environment that `make clients` made for a package, or else this one."""
    folders = map(Path, os.environ.get("CLIENTS_PROGRAMS", "").split(os.pathsep))
    return str(next((folder / "python" for folder in folders if folder.parent.name == package), sys.executable))


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_python_library(desk: Desk, name: str) -> None:
    module, package = LIBRARIES[name]
    python = interpreter_of(package)
    found = f"import sys, importlib.util as u; sys.exit(u.find_spec('{module.partition('.')[0]}') is None)"
    if subprocess.run([python, "-c", found], cwd=desk.work, check=False).returncode:
        pytest.skip(f"{package} is not installed: make clients")
    check_library(desk, name, desk.run([python, "-c", desk.example(f"{name}.py")]))


@pytest.mark.parametrize(("name", "package"), [("openai_sdk", "openai"), ("anthropic_sdk", "@anthropic-ai/sdk")])
def test_a_javascript_library(desk: Desk, name: str, package: str) -> None:
    needs("node")
    if not (modules() / package).is_dir():
        pytest.skip(f"npm's {package} is not installed: make clients")
    (desk.work / "node_modules").symlink_to(modules())
    (desk.work / "client.mjs").write_text(desk.example(f"{name}.mjs"), encoding="utf-8")
    check_library(desk, name, desk.run(["node", "client.mjs"]))


def check_library(desk: Desk, name: str, said: str) -> None:
    """Agents and tool runners call a tool; the others get a text."""
    assert desk.written == (CONTENT if name in WITH_TOOL else "")
    assert (DONE if name in WITH_TOOL else EDIT.partition("\n")[0]) in said
