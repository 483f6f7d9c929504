"""The script that checks and measures a device: its checkpoints are ones that we open, and its table says what was found, or why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.weights.checkpoint import open_checkpoint
from armature_bench.published.models import PublishedModel, model_folder
from tools.hardware.__main__ import SMALL_BERT, SMALL_LLAMA
from tools.hardware.table import BEGIN, END, Asked, Row, markdown, placed, rows_of
from tools.install import ROOT


@pytest.mark.parametrize("shape", [SMALL_LLAMA, SMALL_BERT], ids=lambda shape: shape.name)
def test_the_checkpoint_of_a_dry_run_is_opened_like_any(shape: PublishedModel, tmp_path: Path) -> None:
    assert open_checkpoint(model_folder(shape, tmp_path)[0]).needs().num_layers == 2


def bench(**parts: float) -> dict[str, object]:
    return {"figures": [{"name": "decode ×1", "value": 1.5, "parts": parts}]}


def test_a_figure_is_found_and_held_against_what_is_asked() -> None:
    asked = Asked("decode", "tok/s", "llama", "decode ×1", "tok/s", least=1000)
    found = asked.found({"llama": bench(**{"tok/s": 1200.0})})
    assert (found.value, found.holds) == (1200.0, True)
    assert asked.found({"llama": bench(**{"tok/s": 900.0})}).holds is False
    assert asked.found({}, "no time was left") == Row("decode", "tok/s", None, 1000, None, "no time was left")
    assert Asked("step", "s", "llama", "decode ×1", scale=1e-3).found({"llama": bench()}).value == 0.0015


def test_a_missing_figure_is_never_a_number() -> None:
    rows = rows_of({}, {"steps": "there is no device"})
    cells = [row.cells() for row in rows]
    assert {found for _, _, found in cells} == {"not measured", "there is no device"}
    assert [row.holds for row in rows] == [None] * len(rows)


def test_four_bits_are_held_against_sixteen() -> None:
    benches = {"llama-8b bf16": bench(**{"tok/s": 200.0, "of read": 0.7}), "llama-8b int4": bench(**{"tok/s": 430.0})}
    rows = {row.name: row for row in rows_of(benches, {})}
    assert rows["llama-8b int4 over BF16, decode ×1"].value == pytest.approx(2.15)
    assert rows["llama-8b BF16 decode ×1, of the copy bandwidth"].holds is False
    assert "**missed**" in rows["llama-8b BF16 decode ×1, of the copy bandwidth"].cells()[2]


def test_steps_with_rules_are_held_against_greedy_ones() -> None:
    found = {
        "rules": {"log-probabilities": 1.1, "min_tokens": 1.3},
        "first_token_seconds": 0.004,
        "sampling_seconds": {"64": 6e-5},
    }
    rows = rows_of({"steps": found}, {})
    holds = {row.name: row.holds for row in rows}
    assert [row.value for row in rows if row.name == "top_k and top_p of 64 rows of logits"] == [pytest.approx(60)]
    assert holds["a step of 64, one with log-probabilities, over greedy ones"] is True
    assert holds["a step of 64, one with min_tokens, over greedy ones"] is False
    assert holds["first token of 512, of the engine"] is True


def test_idleness_is_asked_to_be_small() -> None:
    (row,) = [row for row in rows_of({"steps": {"idle": 0.04}}, {}) if row.name.startswith("device idle")]
    assert row.holds is True
    (row,) = [row for row in rows_of({"steps": {"idle": 0.2}}, {}) if row.name.startswith("device idle")]
    assert row.holds is False


def test_the_table_takes_its_place_and_leaves_the_rest() -> None:
    table = markdown(["today"], [Row("a", "s", 1.0, most=2.0)])
    assert table.splitlines()[-1] == "| a (s) | ≤ 2 | 1 |"
    assert placed(f"before {BEGIN} old {END} after", table) == f"before {BEGIN}\n\n{table}\n\n{END} after"
    with pytest.raises(ValueError, match="no markers for the table"):
        placed("nothing", table)


def test_the_document_has_the_place() -> None:
    assert placed((ROOT / "docs" / "hardware.md").read_text(encoding="utf-8"), "x")
