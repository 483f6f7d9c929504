"""The kernels and their tests without the server: nothing imports `app`, and the README's example and the benchmark run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from armature_kernels import bench
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel

ROOT = Path(__file__).resolve().parents[2]
needs_library = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="no native library here")


def test_no_test_of_the_kernels_imports_the_server() -> None:
    importing = [
        path.relative_to(ROOT)
        for path in (ROOT / "tests" / "kernels").rglob("*.py")
        if re.search(r"^\s*(from|import) app\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert importing == []


@pytest.mark.full
@needs_library
def test_the_readme_has_an_example_that_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "armature_kernels" / "README.md").read_text(), re.DOTALL)
    example += "import sys\nassert not any(name.partition('.')[0] == 'app' for name in sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reason, size, similarity = done.stdout.splitlines()
    assert reason.startswith("native kernels for ")
    assert 0.5 < float(size.split()[0]) < 0.6
    assert "0.99" in similarity


@needs_library
def test_the_benchmark_prints_a_row_for_each_product(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "ROTATED_BYTES", 0)
    assert bench.main(["--outputs", "64", "--inputs", "64", "--rows", "1", "3"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]] == [
        [form, rows] for form in ("bf16", "int8", "int4") for rows in ("1", "3")
    ]
