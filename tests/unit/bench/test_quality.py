"""The quality bench on a tiny checkpoint: what it cuts a text into, what it holds against FP32, and what Ctrl-C leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.bench import quality
from app.bench.quality import BREAK, Reader, Score, Subject, measure, windows_of
from app.bench.stats import MeasurementFailed, Outcome
from app.hardware.probe import probe
from app.kernels.operations import Code, has
from app.settings import load_settings
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import open_checkpoint
from tiny_checkpoints import write_checkpoint

TEXT = "the cat and the hen\n\nwent there\n---\nanother one\n---\n\n---\nthe last, which is a little longer than the others are"


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("quality") / "tiny"))
    return Subject(checkpoint, load_settings(threads="1", max_running_seqs="2", kv_cache_bytes="16MiB")[0], probe())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def values(outcome: Outcome) -> dict[str, float]:
    return {figure.name: figure.value for figure in outcome.figures}


def test_windows_are_documents_in_pieces_that_each_begin_as_texts_do(subject, text, monkeypatch):
    monkeypatch.setattr(quality, "WINDOW", 9)
    tokenizer = Tokenizer(subject.checkpoint.directory)
    windows = windows_of(tokenizer, text, 256, None)
    documents = [part.strip("\n") for part in TEXT.split(BREAK) if part.strip()]
    assert all(window[0] == tokenizer.bos_token_id and 2 <= len(window) <= 9 for window in windows)
    assert "".join(tokenizer.decode(window) for window in windows) == "".join(documents)
    assert len(windows) == sum(-(-len(tokenizer.encode(document, add_special_tokens=False)) // 8) for document in documents)
    assert sum(len(window) - 1 for window in windows_of(tokenizer, text, 256, 11)) == 11


def test_a_text_of_nothing_or_no_text_is_refused(subject, tmp_path):
    tokenizer, empty = Tokenizer(subject.checkpoint.directory), tmp_path / "empty.txt"
    empty.write_text("---\n\n---\n", encoding="utf-8")
    for file in (empty, tmp_path / "absent.txt"):
        with pytest.raises(MeasurementFailed, match=file.name):
            windows_of(tokenizer, file, 256, None)


def test_a_window_read_in_steps_is_the_window_read_at_once(subject, monkeypatch):
    from app.backends.selection import select_backend

    plan = subject.plan("fp32")
    reader = Reader(subject.checkpoint, plan, select_backend(plan))
    window = torch.randint(2, 300, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        nats, likeliest = reader.read(window)
        monkeypatch.setattr(quality, "STEP", 7)
        again, picked = reader.read(window)
    assert len(likeliest) == 99 and torch.equal(likeliest, picked)
    assert again == pytest.approx(nats, rel=1e-5)
    assert nats / 99 == pytest.approx(torch.tensor(320.0).log().item(), rel=0.5)  # random weights know little


def test_every_precision_is_held_against_the_first(subject, text):
    outcome = measure(subject, text, None)
    found = values(outcome)
    assert outcome.complete and not outcome.details["refused"]
    assert found["bf16, perplexity"] == pytest.approx(found["fp32, perplexity"], rel=0.02)
    assert found["bf16, same likeliest token"] > 80
    assert found["fp32, weights"] == 4.0  # as stored, the embedding too
    assert 2.0 < found["bf16, weights"] < 3.0  # which is not rounded
    if has(Code.LINEAR_INT):
        assert found["int8, perplexity"] == pytest.approx(found["fp32, perplexity"], rel=0.05)
        assert found["int4, perplexity"] == pytest.approx(found["fp32, perplexity"], rel=0.3)
        assert found["int4, perplexity"] != found["int8, perplexity"]


def test_ctrl_c_compares_what_both_have_read(subject, text, monkeypatch):
    read, calls = Reader.read, []

    def interrupted(self, window):
        calls.append(window)
        if len(calls) == 5:  # three windows of FP32, one of BF16
            raise KeyboardInterrupt
        return read(self, window)

    monkeypatch.setattr(Reader, "read", interrupted)
    outcome = measure(subject, text, None)
    assert not outcome.complete
    ratios = {figure.name: figure.ratio for figure in outcome.figures}
    assert ratios["bf16, perplexity"] == pytest.approx(1.0, rel=0.02)
    assert values(outcome)["bf16, perplexity"] != pytest.approx(values(outcome)["fp32, perplexity"], rel=1e-3)
    assert not any(name.startswith("int") for name in values(outcome))


def test_scores_by_hand():
    half, all_wrong = Score(), Score()
    half.hold(2.0, torch.tensor([1, 2]))
    half.hold(1.0, torch.tensor([3, 4]))
    all_wrong.hold(5.0, torch.tensor([1, 9]))
    assert half.perplexity(2) == pytest.approx(2.117, rel=1e-3)
    assert half.perplexity(1) == pytest.approx(2.718, rel=1e-3)
    assert all_wrong.agreement(half) == 0.5
