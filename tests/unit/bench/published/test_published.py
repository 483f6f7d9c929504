"""The documents' figures beside ours: rows and their runs, the models' files, and what is left out and named."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cli.parser import parse_arguments
from app.settings import load_settings
from app.weights.open import open_model
from armature_bench.console import MeasurementFailed
from armature_bench.published import command, models, runs
from armature_bench.published.command import PublishedJob, markdown_table, measure_published
from armature_bench.published.models import (
    BERT_LARGE,
    GEMMA_1B,
    GEMMA_270M,
    LARGE_LLAMAS,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_110M,
    model_folder,
)
from armature_bench.published.rows import QUICK_TOPICS, TOPICS, graph_run, published_rows
from armature_bench.published.runs import PublishedRun, RunFailed, RunResult, measure_run, obstacle
from armature_bench.published.sources import PAPER_NEON, TALK_FP32, likeness
from armature_bench.run import run_bench

X86_LEVELS = ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "portable")
HERE = {
    "architecture": "x86_64",
    "cores": [{}, {}],
    "cpu": {"vendor": "Intel", "name": "Intel Xeon", "microarchitecture": "Sapphire Rapids", "product": None},
}
TINY_LLAMA = replace(
    LLAMA_110M,
    config={**LLAMA_110M.config, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300,
            "num_attention_heads": 2, "num_key_value_heads": 2},
)  # fmt: skip
TINY_BERT = replace(
    BERT_LARGE,
    config={**BERT_LARGE.config, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "vocab_size": 300},
)  # fmt: skip


TINY_GEMMA = replace(
    GEMMA_1B,
    config={**GEMMA_1B.config, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300,
            "num_attention_heads": 2, "head_dim": 32},
)  # fmt: skip


def result(threads: int = 2, **milliseconds: float) -> RunResult:
    """A run with these figures, whose plan chose this many threads."""
    plan = {name: {"value": value} for name, value in (("threads", threads), ("precision", "x"), ("kernels", "amx"))}
    return RunResult({name: {"name": name, "value": value} for name, value in milliseconds.items()}, plan)


def job(**given: Any) -> PublishedJob:
    return PublishedJob(**({"facts": HERE, "usable_bytes": 1e12, "levels": X86_LEVELS} | given))


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        (BERT_LARGE, 334e6), (LLAMA_110M, 110e6), (LLAMA_1B, 1.24e9), (LLAMA_8B, 8.03e9), (GEMMA_1B, 1.0e9),
        (GEMMA_270M, 268e6),
    ],
    ids=lambda one: str(getattr(one, "name", "")),
)  # fmt: skip
def test_models_have_the_published_sizes(model: models.PublishedModel, weights: float) -> None:
    assert model.num_weights == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize("model", [TINY_LLAMA, TINY_BERT, TINY_GEMMA], ids=["llama", "bert", "gemma"])
def test_a_written_model_can_be_opened_and_is_written_once(model: models.PublishedModel, tmp_path: Path) -> None:
    directory, was_there = model_folder(model, tmp_path)
    assert not was_there
    opened = open_model(directory)
    assert opened.needs().num_parameters == model.num_weights
    weights = directory / models.WEIGHTS
    weights.write_bytes(b"untouched")
    assert model_folder(model, tmp_path) == (directory, True)
    assert weights.read_bytes() == b"untouched"


def test_random_values_are_ordinary_numbers_of_both_signs() -> None:
    block = models._random_block()
    assert {block[place] for place in range(1, 2001, 2)} == {0x3C, 0xBC}
    assert len(set(block[0:2000:2])) > 200


def test_an_interrupted_folder_is_written_again(tmp_path: Path) -> None:
    (tmp_path / TINY_LLAMA.name).mkdir()
    (tmp_path / TINY_LLAMA.name / models.WEIGHTS).write_bytes(b"half")
    directory, was_there = model_folder(TINY_LLAMA, tmp_path)
    assert not was_there
    assert open_model(directory).needs().num_parameters == TINY_LLAMA.num_weights


def test_every_topic_has_rows_and_every_figure_of_the_documents_is_in_one() -> None:
    rows = published_rows(tuple(TOPICS), X86_LEVELS, LLAMA_8B, is_quick=False)
    assert {row.topic for row in rows} == set(TOPICS)
    assert set(QUICK_TOPICS) < set(TOPICS)
    theirs = [row.theirs.value for row in rows if row.theirs is not None]
    for value in (165.0, 120.0, 24.0, 61.3, 298.7, 2.5, 13.0, 68.0, 5.2, 18.0, 14.0):
        assert value in theirs


def test_one_thread_runs_have_one_thread_and_plain_c_its_level() -> None:
    plain, best, *_ = published_rows(["llama-110m"], X86_LEVELS, LLAMA_1B, is_quick=False)
    assert (plain.runs[0].threads, plain.runs[0].level, plain.runs[0].precision) == (1, "portable", "fp32")
    assert (best.runs[0].threads, best.runs[0].level, best.runs[0].precision) == (1, None, "fp32")


def test_the_newest_level_is_compared_with_the_one_below() -> None:
    for levels in (X86_LEVELS, ("i8mm", "dotprod", "neon")):
        rows = published_rows(["levels"], levels, LLAMA_1B, is_quick=False)
        assert [run.level for run in rows[0].runs] == list(levels[:2])
    assert published_rows(["levels"], ("neon",), LLAMA_1B, is_quick=False) == []


def test_rates_and_ratios_are_of_the_medians() -> None:
    plain, best, over, *_ = published_rows(["llama-110m"], X86_LEVELS, LLAMA_1B, is_quick=False)
    results = {plain.runs[0]: result(**{"decode ×1": 50.0}), best.runs[0]: result(**{"decode ×1": 10.0})}
    assert (plain.ours(results), best.ours(results), over.ours(results)) == (20.0, 100.0, 5.0)
    assert over.ours({}) is None


def test_the_gemma_is_compared_with_the_eager_steps_of_torch() -> None:
    rows = published_rows(["graph"], X86_LEVELS, LLAMA_8B, is_quick=False)
    row = next(row for row in rows if row.name == "Gemma 3 1B, int4 recorded over torch's eager FP32")
    times = {"decode ×1, int4, recorded": 40.0, "step ×1, fp32, torch eager": 400.0}
    assert row.ours({row.runs[0]: result(**times)}) == 10.0
    assert row.theirs is not None and row.theirs.value == 14.0


def test_the_memory_of_eager_steps_is_that_of_two_engines() -> None:
    assert graph_run(GEMMA_1B).memory_bytes == pytest.approx(1.5e9 + 4.6 * 1e9, rel=0.01)


def test_a_smaller_gemma_replaces_one_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    outcome = measure_published(job(topics=("graph",), usable_bytes=5e9))
    assert [run.model.name for run in measured.runs] == ["llama-110m", "gemma-3-270m"]
    assert outcome.notes == ("Gemma 3 1B in FP32 was left out: it takes 6.1 GB of memory, and 5.0 are available.",)


def test_a_run_drops_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARMATURE_PRECISION", "int8")
    monkeypatch.setenv("ARMATURE_CACHE_DIR", str(tmp_path))
    run = PublishedRun(LLAMA_110M, "fp32", threads=1, level="avx2")
    environment = run.environment()
    assert "ARMATURE_PRECISION" not in environment
    assert environment["ARMATURE_CACHE_DIR"] == str(tmp_path)
    assert (environment["ARMATURE_ISA"], environment["ARMATURE_CALIBRATE"]) == ("avx2", "off")
    words = run.command(tmp_path, tmp_path / "out")
    parse_arguments(words[words.index("bench") :])
    assert run.name == "Llama 110M, fp32, avx2, 1 thread"


@pytest.mark.full
def test_the_flags_of_every_run_are_known(tmp_path: Path) -> None:
    for is_quick in (False, True):
        for row in published_rows(tuple(TOPICS), X86_LEVELS, LLAMA_8B, is_quick):
            for run in row.runs:
                words = run.command(tmp_path, tmp_path / "out")
                parse_arguments(words[words.index("bench") :])


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = PublishedRun(LLAMA_8B, "fp32")
    assert obstacle(run, 20e9, tmp_path) == "it takes 33.6 GB of memory, and 20.0 are available"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2 * 10**10, 10**10, 10**10))
    assert "its weights take 16.1 GB in" in obstacle(run, 40e9, tmp_path)
    (tmp_path / LLAMA_8B.name).mkdir()  # a model that is there needs no further space
    assert obstacle(run, 40e9, tmp_path) == ""


class Measured:
    """In place of processes: which runs were started, and their results."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fails: str = "", interrupts: str = "", reads: bool = False
    ) -> None:
        self.runs: list[PublishedRun] = []
        self._fails, self._interrupts, self._reads_memory = fails, interrupts, reads
        monkeypatch.setattr(command, "measure_run", self._measure)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**13, 0, 10**13))
        monkeypatch.setattr(command, "model_folder", lambda model, folder: (folder / model.name, False))

    def _measure(self, run: PublishedRun, directory: Path, seconds: float) -> RunResult:
        if self._interrupts and self._interrupts in run.name:
            raise KeyboardInterrupt
        if self._fails and self._fails in run.name:
            raise RunFailed("it took longer than 1 s (--seconds)")
        self.runs.append(run)
        is_exact = run.precision == "fp32"
        times = {"decode ×1": 20.0 if is_exact else 5.0}
        return result(run.threads or 2, **times, **({"memory read": 15.0 + is_exact} if self._reads_memory else {}))


def test_the_table_has_theirs_ours_the_ratio_and_how_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    Measured(monkeypatch, reads=True)
    outcome = measure_published(job(topics=("int4", "llama-110m")))
    by_name = {figure.name: figure for figure in outcome.figures}
    exact = by_name["Llama 8B FP32, decode"]
    assert (exact.value, exact.parts["theirs"]) == (50.0, 13.0)
    assert exact.ratio == pytest.approx(50 / 13)
    assert exact.parts["ratio per core"] == pytest.approx(50 / 13 * 16)
    assert exact.against == "the talk, Neoverse V2, compiled: arm64, not x86_64; 32 cores, not 2"
    assert by_name["Llama 8B, int4 over FP32"].value == 4.0
    alone = by_name["Llama 110M FP32, decode, one thread"]
    assert alone.against == "the paper, M2 Pro: arm64, not x86_64; one core each"
    assert "ratio per core" not in alone.parts
    assert outcome.notes == ("Memory was read at 15 to 16 GB/s in these runs.",)
    page = markdown_table(outcome)
    assert "| Llama 8B FP32, decode | 13 | 50 tok/s | 3.85; 61.5 per core | the talk, Neoverse V2" in page
    assert "### Intel Xeon, 2 cores, x86_64, amx" in page


def test_another_model_has_no_ratio_of_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    Measured(monkeypatch)
    outcome = measure_published(job(topics=("int4",), usable_bytes=15e9))
    assert outcome.notes == ("Llama 8B in FP32 was left out: it takes 33.6 GB of memory, and 15.0 are available.",)
    exact, _, over = outcome.figures
    assert (exact.name, exact.ratio) == ("Llama 3B FP32, decode", None)
    assert "another model" in exact.against
    assert over.ratio == pytest.approx(4 / 5.2)


def test_a_run_that_fails_is_named_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    Measured(monkeypatch, fails="portable")
    outcome = measure_published(job(topics=("llama-110m",)))
    assert outcome.notes == ("Llama 110M, fp32, portable, 1 thread was left out: it took longer than 1 s (--seconds).",)
    assert next(figure.name for figure in outcome.figures) == "Llama 110M FP32, decode, one thread"
    assert outcome.complete


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    Measured(monkeypatch, interrupts="int4")
    outcome = measure_published(job(topics=("int4",)))
    assert [figure.name for figure in outcome.figures] == ["Llama 8B FP32, decode"]
    assert not outcome.complete


def test_sigterm_ends_like_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    Measured(monkeypatch)
    monkeypatch.setattr(command, "measure_run", lambda run, directory, seconds: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert not measure_published(job(topics=("int4",))).complete
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_quick_run_takes_the_smallest_models(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    outcome = measure_published(job(is_quick=True, usable_bytes=15e9))
    assert {run.model.name for run in measured.runs} == {"bert-large", "llama-110m", "gemma-3-270m", "llama-1b"}
    assert outcome.notes == ()


def test_a_temporary_folder_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    Measured(monkeypatch)
    monkeypatch.setattr(command, "model_folder", lambda model, folder: (seen.append(folder) or folder, False))
    measure_published(job(topics=("llama-110m",)))
    assert seen and not seen[0].exists()


def test_a_topic_that_is_unknown_is_refused() -> None:
    with pytest.raises(MeasurementFailed, match="--only speed: there is bert-128, bert-512, llama-110m"):
        measure_published(job(topics=("speed",)))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasurementFailed, match="file/models cannot be written"):
        measure_published(job(folder=tmp_path / "file" / "models"))


def test_settings_are_refused() -> None:
    arguments = parse_arguments(["bench", "published", "--precision", "int4"])
    with pytest.raises(MeasurementFailed, match="--precision does not apply"):
        run_bench(load_settings()[0], arguments)


def test_the_same_cores_are_said_to_be_the_same() -> None:
    arm = HERE | {"architecture": "arm64", "cpu": {"microarchitecture": "Neoverse V2", "product": "Graviton4"}}
    assert likeness(TALK_FP32.machine, arm, 32) == "the same cores (Neoverse V2); 32 cores each"
    assert likeness(PAPER_NEON.machine, arm, 1) == "arm64 too, other cores; one core each"


def fake_bench(monkeypatch: pytest.MonkeyPatch, script: str) -> PublishedRun:
    """A run whose process is this script; its first argument is the result file."""
    monkeypatch.setattr(PublishedRun, "command", lambda run, directory, out: [sys.executable, "-c", script, str(out)])
    return PublishedRun(LLAMA_110M, "fp32")


def test_a_process_gives_its_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = {"figures": [{"name": "decode ×1", "value": 8.0}], "details": {"plan": {"threads": {"value": 2}}}}
    run = fake_bench(monkeypatch, f"import sys; open(sys.argv[1], 'w').write({json.dumps(written)!r})")
    found = measure_run(run, tmp_path, 60.0)
    assert found.seconds("decode ×1") == pytest.approx(0.008)
    assert found.decided("threads") == 2
    assert found.seconds("decode ×8") is None


def test_a_process_that_fails_gives_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = fake_bench(monkeypatch, "import sys; sys.exit('armature: there is no recipe.')")
    with pytest.raises(RunFailed, match=r"^armature: there is no recipe$"):
        measure_run(run, tmp_path, 60.0)


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = fake_bench(monkeypatch, "import time; time.sleep(600)")
    started: list[Any] = []
    popen = runs.subprocess.Popen
    monkeypatch.setattr(
        runs.subprocess, "Popen", lambda *args, **named: started.append(popen(*args, **named)) or started[0]
    )
    with pytest.raises(RunFailed, match=r"longer than 0\.2 s"):
        measure_run(run, tmp_path, 0.2)
    assert started[0].poll() is not None


def test_the_models_for_int4_are_in_order() -> None:
    assert [model.num_weights for model in LARGE_LLAMAS] == sorted((m.num_weights for m in LARGE_LLAMAS), reverse=True)
