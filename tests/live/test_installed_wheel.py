"""A wheel that pip installed: the command serves and talks from any folder, without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest

from app.version import VERSION
from tests.live.live_server import PATIENCE, until

ROOT = Path(__file__).resolve().parents[2]
# The virtual environment's cmake and ninja, where the machine has none.
SEARCH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("cmake", path=SEARCH) is None, reason="there is no cmake, which builds the wheel"),
]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed command, in an environment that has the packages of this one but not its checkout.

    The wheel is built without a compiler, which takes seconds instead of minutes; torch's products serve.
    """
    folder = tmp_path_factory.mktemp("installed")
    tools = folder / "tools"
    tools.mkdir()
    for name in ("cmake", "ninja", "make"):
        found = shutil.which(name, path=SEARCH)
        if found:
            (tools / name).symlink_to(found)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    building = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(building, check=True, env={**os.environ, "PATH": str(tools)}, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A folder that a .pth file names comes after the environment's own, and its .pth files are not read, so the
    # checkout that is installed there is not found.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    python = environment / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    return environment / "bin" / "armature"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with a package `app` of its own, which ends the process that imports it."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit(77)\n")
    return tmp_path


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(command: Path, folder: Path, *flags: str, piped: str = "") -> str:
    ran = subprocess.run(
        [command, *flags], cwd=folder, env=environment(), input=piped, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_it_is_the_installed_package(command: Path, elsewhere: Path) -> None:
    assert run(command, elsewhere, "--version") == f"armature {VERSION}\n"
    script = (
        "from armature.__main__ import import_installed_app; import_installed_app(); import app; print(app.__file__)"
    )
    python = command.with_name("python")
    found = subprocess.run([python, "-c", script], cwd=elsewhere, env=environment(), capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(command.parent.parent), found.stderr
    assert not Path(found.stdout.strip()).is_relative_to(ROOT)


def test_it_serves_the_demo_and_the_page(command: Path, elsewhere: Path) -> None:
    started = [command, "serve", "--port", "0", "--threads", "1"]
    with subprocess.Popen(
        started, cwd=elsewhere, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("listening on ").strip()
            until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
            body = {"messages": [{"role": "user", "content": "A fox."}], "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)
            assert answer.json()["choices"][0]["message"]["content"]
            for path in ("/", "/web/now.js", "/docs", "/metrics"):
                assert httpx.get(url + path).status_code == 200, path
            assert "Armature" in run(command, elsewhere, "top", "--url", url, "--once")
        finally:
            server.terminate()
            server.communicate(timeout=PATIENCE)
    assert server.returncode == 0


def test_it_talks_to_a_server_of_its_own(command: Path, elsewhere: Path) -> None:
    flags = ["--model", str(demo_of(command)), "--threads", "1", "--max-tokens", "4"]
    assert run(command, elsewhere, "chat", *flags, piped="A fox.\n").strip()


def test_what_is_beside_the_modules_is_there(command: Path, elsewhere: Path) -> None:
    assert "BERT" in run(command, elsewhere, "tco", "--published")
    assert "_armature" in run(command, elsewhere, "completion", "bash")
    assert (demo_of(command).parents[2] / "armature_bench" / "report" / "page.html").is_file()


def demo_of(command: Path) -> Path:
    (demo,) = command.parent.parent.glob("lib/python*/site-packages/app/demo/llama")
    return demo
