"""Reading a text: how it is cut into windows, that steps make no difference, and what a text shows for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.backends.selection import select_backend
from app.engine.calibration import streaming
from app.engine.calibration.streaming import DOCUMENT_SEPARATOR, WindowScorer, read_windows
from app.errors import SettingsInvalid
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.settings import load_settings
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from app.weights.load import load_model
from tiny_checkpoints import write_checkpoint

TEXT = "the cat and the hen\n\nwent there\n---\nanother one\n---\n\n---\nthe last, which is a little longer than the others are"


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("scoring") / "tiny"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer(checkpoint.directory)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def plan_for(checkpoint: Checkpoint) -> ServingPlan:
    settings = load_settings(threads="1", max_running_seqs="2", kv_cache_bytes="16MiB", precision="fp32")[0]
    return make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())


def some_tokens(length: int) -> list[int]:
    return torch.randint(2, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def test_windows_are_documents_in_pieces_that_each_begin_as_texts_do(tokenizer, text, monkeypatch):
    monkeypatch.setattr(streaming, "WINDOW_TOKENS", 9)
    windows = read_windows(tokenizer, text, 256)
    documents = [part.strip("\n") for part in TEXT.split(DOCUMENT_SEPARATOR) if part.strip()]
    assert all(window[0] == tokenizer.bos_token_id and 2 <= len(window) <= 9 for window in windows)
    assert "".join(tokenizer.decode(window) for window in windows) == "".join(documents)
    assert len(windows) == sum(
        -(-len(tokenizer.encode(document, add_special_tokens=False)) // 8) for document in documents
    )
    assert sum(len(window) - 1 for window in read_windows(tokenizer, text, 256, 11)) == 11


def test_a_text_of_nothing_or_no_text_is_refused(tokenizer, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("---\n\n---\n", encoding="utf-8")
    for file in (empty, tmp_path / "absent.txt"):
        with pytest.raises(SettingsInvalid, match=file.name):
            read_windows(tokenizer, file, 256)


def test_a_window_read_in_steps_is_the_window_read_at_once(checkpoint, monkeypatch):
    plan = plan_for(checkpoint)
    backend = select_backend(plan)
    reader = WindowScorer(load_model(checkpoint, plan, backend), checkpoint.model_config, torch.float32, backend)
    window = some_tokens(100)
    with torch.inference_mode():
        nats, likeliest = reader.score(window)
        monkeypatch.setattr(streaming, "LOGITS_TOKENS", 7)
        again, picked = reader.score(window)
    assert len(likeliest) == 99 and torch.equal(likeliest, picked)
    assert again == pytest.approx(nats, rel=1e-5)
    assert nats / 99 == pytest.approx(torch.tensor(320.0).log().item(), rel=0.5)  # random weights know little
