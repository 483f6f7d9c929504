"""The command imports its own package `app`, whatever package of that name a project has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.version import VERSION

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project's folder with a package `app`, which ends the process that imports it."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit(77)\n")
    return tmp_path


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(project), str(ROOT)])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=project, env=environment)


def test_a_projects_app_is_not_the_command(project: Path) -> None:
    assert run(project, "-m", "app", "--version").returncode == 77  # Python's order of folders
    found = run(project, "-m", "armature", "--version")
    assert (found.stdout, found.stderr, found.returncode) == (f"armature {VERSION}\n", "", 0)


def test_the_process_of_templates_imports_the_same_package(project: Path) -> None:
    script = (
        "from armature.__main__ import import_installed_app\n"
        "import_installed_app()\n"
        "from app.text.chat import TemplateLimits, TemplateProcess\n"
        "print(TemplateProcess('{{ 1 + 1 }}', TemplateLimits(cpu_seconds=5)).render({})[1])\n"
    )
    found = run(project, "-c", script)
    assert (found.stdout, found.returncode) == ("2\n", 0), found.stderr
