"""The pure parts of the proofs: what is judged how, what is kept, and the page that is made of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import prove
from tools.proofs import refusals, start
from tools.proofs.containers import ContainerEnded, Image
from tools.proofs.findings import OLDER, ROOT, Findings, Section, code_digest, page
from tools.proofs.quota import THROTTLED, Load, Measured, judge, said, sample
from tools.prove import Part, Subject

FACTS = {"machine": "a small one"}


def test_findings_are_kept_as_they_were() -> None:
    findings = Findings(
        notes=["a note"], skipped=["a thing"], began="2026-11-22 09:00 UTC", seconds=1.5, machine="a small one"
    )
    findings.check("a|b", False, {"lines": "two\nlines"}, 3)
    findings.table("T", ("a", "b"), [(1, "x\ny")])
    again = Findings.of_json(json.loads(json.dumps(findings.to_json())))
    assert again == findings
    assert again.failed[0].found == "{'lines': 'two\\nlines'}"
    assert again.tables[0].rows == (("1", "x y"),)


def test_a_failed_check_is_named_first_and_what_was_not_run_is_said() -> None:
    findings = Findings(began="today")
    findings.check("size", True, "1 GB")
    findings.check("us|er", False, "root", "10001")
    text = page(FACTS, [Section("Image", "It is read.", findings), Section("Quota", "It is loaded.", None)])
    assert "**1 of 2 checks passed.** Failed: 1." in text
    assert "- **failed**: us|er: root (wanted: 10001)" in text
    assert "| us\\|er | **failed** | root | 10001 |" in text
    assert "Not run: Quota." in text
    assert text.count("Not run.") == 1
    assert text.index("**failed**") < text.index("## Image")


def test_a_page_of_passed_checks_names_no_failure() -> None:
    findings = Findings()
    findings.check("size", True, "1 GB")
    text = page(FACTS, [Section("Image", "It is read.", findings)])
    assert "**1 of 1 checks passed.**" in text
    assert "failed" not in text.partition("Each section")[2]


def test_each_section_names_its_machine_if_it_was_recorded() -> None:
    recorded, earlier = Findings(began="today", seconds=2, machine="two cores"), Findings(began="before", seconds=3)
    sections = [Section("Image", "It is read.", recorded), Section("Start", "It is timed.", earlier)]
    text = page(FACTS, sections)
    assert "today, 2 s, on two cores.\n" in text
    assert "before, 3 s.\n" in text


def test_findings_of_a_file_that_names_no_machine_are_read() -> None:
    kept = Findings(began="today").to_json()
    del kept["machine"]
    assert Findings.of_json(kept) == Findings(began="today")


@pytest.mark.parametrize(
    "cores, throttled, passed", [(2.0, 0.019, [True]), (1.5, 0.021, [False]), (0.5, 0.7, []), (1.0, 0.7, [])]
)
def test_a_quota_is_judged_by_its_full_load_where_threads_fit_into_it(
    cores: float, throttled: float, passed: list[bool]
) -> None:
    findings = Findings()
    judge(findings, cores, {1: Measured([100.0], [0.5], [1.0]), 8: Measured([200.0], [throttled], [cores])})
    assert [check.passed for check in findings.checks] == passed
    assert findings.tables[0].rows[0][:3] == ("×1", "100.0", f"{100 / cores:.1f}")


@pytest.mark.parametrize(
    "said, fault",
    [
        ("The model folder /models/model is empty.\n", None),
        ("", "has 0 lines"),
        ("one\n/models/model", "has 2 lines"),
        ("nothing is here", "does not say '/models/model'"),
        ("/models/model " * 400, "bytes"),
        ("Traceback (most recent call last): /models/model", "stack trace"),
    ],
)
def test_a_reason_is_one_line_that_says_what_is_wrong(said: str, fault: str | None) -> None:
    passed, found, wanted = refusals.judged(said, ("/models/model",))
    assert passed is (fault is None)
    assert (fault or "one line") in found
    assert "/models/model" in wanted


def test_what_a_case_mounts_is_broken_as_its_name_says(tmp_path: Path) -> None:
    made = {}
    for case in refusals.cases(None):
        folder = tmp_path / case.name.replace(" ", "-")
        folder.mkdir()
        made[case.name] = folder, case.make(folder)
    whole = (refusals.DEMO / refusals.WEIGHTS).stat().st_size
    half, options = made["half-copied weights"]
    assert (half / refusals.WEIGHTS).stat().st_size == whole // 2
    assert options == ("--env=ARMATURE_MODEL=/models/model", f"--volume={half}:/models/model:ro")
    assert (made["a copy under way"][0] / "model.safetensors.incomplete").exists()
    assert not (made["a copy under way"][0] / refusals.WEIGHTS).exists()
    assert (made["unreadable weights"][0] / refusals.WEIGHTS).stat().st_mode & 0o077 == 0
    assert made["no model volume"][1] == ("--env=ARMATURE_MODEL=/models/model",)
    assert [case.name for case in refusals.cases(tmp_path)][-1] == "memory limit too small"


def test_a_start_is_held_against_the_bare_one_of_its_round() -> None:
    for later, passed in ((0.9, True), (1.1, False)):
        findings = Findings()
        start.judge(findings, [3.0, 4.0, 3.2], [3.0 + later, 4.0 + later, 3.2 + later])
        assert findings.checks[0].passed is passed


def test_who_is_emulated_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.proofs.containers.host_platform.machine", lambda: "x86_64")
    amd64, arm64 = Image("a:b", "linux/amd64"), Image("a:b", "linux/arm64")
    assert (amd64.emulated, amd64.options) == (False, ())
    assert arm64.emulated
    assert "--env=ARMATURE_CALIBRATE=off" in arm64.options
    monkeypatch.setattr("tools.proofs.containers.host_platform.machine", lambda: "aarch64")
    assert amd64.emulated
    assert not arm64.emulated


def test_parts_are_named_or_refused() -> None:
    assert prove._parts("quota,image") == ("quota", "image")
    with pytest.raises(argparse.ArgumentTypeError, match="quotas: there are image, serving"):
        prove._parts("quotas")


def _gives_up(findings: Findings, subject: Subject) -> None:
    findings.check("before", True, "well")
    raise SystemExit("no control group can be made")


def _breaks(findings: Findings, subject: Subject) -> None:
    raise ContainerEnded("not ready after 9 s")


@pytest.mark.parametrize(
    "run, said", [(_gives_up, "no control group can be made"), (_breaks, "ContainerEnded: not ready after 9 s")]
)
def test_a_part_that_cannot_go_on_has_failed_and_the_others_are_kept(
    run: Callable[[Findings, Subject], None], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        prove, "PARTS", {"one": Part("One", "It breaks.", 1, run), "two": Part("Two", "It was well.", 1, run)}
    )
    monkeypatch.setattr(prove, "_facts", lambda subject: FACTS)
    arguments = argparse.Namespace(json=tmp_path / "build" / "proofs.json", report=tmp_path / "proofs.md")
    earlier = Findings()
    earlier.check("kept", True, "well")
    kept = {"parts": {"two": earlier.to_json()}}
    assert not prove._proved("one", Subject((), arguments), kept)
    text = arguments.report.read_text()
    assert f"- **failed**: the part ran to its end: {said}" in text
    assert "| kept | yes | well |" in text
    parts = json.loads(arguments.json.read_text())["parts"]
    assert {name: each["machine"] for name, each in parts.items()} == {"one": FACTS["machine"], "two": ""}


def test_a_signal_ends_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(findings: Findings, subject: Subject) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(prove, "PARTS", {"one": Part("One", "It is ended.", 1, ended)})
    with pytest.raises(SystemExit, match="143"):
        prove._proved("one", Subject((), argparse.Namespace()), {"parts": {}})


class Scraped:
    """A container, as far as its metrics are read."""

    def __init__(self, metrics: str) -> None:
        self._metrics = metrics

    def get(self, path: str) -> str:
        assert path == "/metrics"
        return self._metrics


def test_throttling_that_is_not_reported_is_not_taken_for_none() -> None:
    def throttled(metrics: str) -> float:
        return sample(Scraped(metrics), THROTTLED)  # type: ignore[arg-type]

    assert throttled(f"# HELP {THROTTLED} Time.\n{THROTTLED} 1.5\n") == 1.5
    with pytest.raises(RuntimeError, match=f"the server has no metric {THROTTLED}"):
        throttled("process_cpu_seconds_total 3.0\n")


def test_a_quota_says_what_was_served_and_names_no_folder() -> None:
    assert said(Load(Path("/a/tiny"), ("--precision", "int4"), 2)) == (
        "Medians of 2 rounds of 10 s; the server has tiny with `--precision int4`."
    )
    assert said(Load(Path("/a/tiny"), (), 3)) == "Medians of 3 rounds of 10 s; the server has tiny."


def is_current(text: str, part: Part) -> bool:
    """Return whether the page has this code's digest in the part's section, or says that it is older."""
    section = text.partition(f"## {part.title}\n")[2].partition("\n## ")[0]
    return OLDER in section or f"code `{code_digest(part.code)}`" in section


def test_the_page_says_which_proof_is_older_than_its_code() -> None:
    """If this fails, run `make prove ARGS="--only PART"`, or without Docker add `OLDER` after the section's date."""
    text = (ROOT / "docs" / "proofs.md").read_text()
    proved = [part for part in prove.PARTS.values() if part.code]
    assert proved and all(code_digest(part.code) for part in proved)
    assert [part.title for part in proved if not is_current(text, part)] == []


def test_a_proof_of_other_code_is_called_older() -> None:
    code = ("tools/proofs/kernels.py",)
    part = Part("int4", "Levels.", 1, lambda findings, subject: None, code)
    for digest, older in ((code_digest(code), False), ("0" * 12, True), ("", True)):
        text = page(FACTS, [Section(part.title, part.about, Findings(began="today", code=digest), code)])
        assert (OLDER in text) is older and is_current(text, part)
        assert is_current(text.replace(OLDER, ""), part) is not older
