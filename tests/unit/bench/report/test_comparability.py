"""What must be known of a result stands on its face, and what must not be compared is not."""

from __future__ import annotations

from typing import Any

import pytest

from armature_bench.compare.result import CompareResult
from armature_bench.console import MeasurementFailed
from armature_bench.report.tables import ReportOrigin, check_comparable, collect_notes, unique_names
from synthetic_results import GRAVITON, XEON, made_decoder, made_encoder

PLAIN = made_encoder()
HERE = ReportOrigin("0.1.0", PLAIN.info["facts"])


def told(
    result: CompareResult, *others: CompareResult, here: ReportOrigin = HERE
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Doubts and remarks of the last one."""
    judged = collect_notes([*others, result], here)[-1]
    return judged.doubts, judged.remarks


def changed(result: CompareResult, part: str, **fields: Any) -> CompareResult:
    return result.model_copy(update={"info": result.info | {part: result.info[part] | fields}})


def test_of_a_result_made_here_and_now_nothing_is_to_be_said() -> None:
    assert told(PLAIN) == ((), ())


def test_doubts_of_the_file_are_reported_as_they_are() -> None:
    doubts = ["Throttled for 3.1 s.", "Others took 9% of the cores."]
    assert told(PLAIN.model_copy(update={"doubts": doubts})) == (tuple(doubts), ())


def test_an_unfinished_result_says_so_even_if_its_file_does_not() -> None:
    ((doubt,), _) = told(PLAIN.model_copy(update={"complete": False}))
    assert "interrupted" in doubt


def test_another_machine_and_another_version_are_named() -> None:
    _, remarks = told(made_encoder(GRAVITON), here=ReportOrigin("0.2.0", HERE.facts))
    assert remarks == (
        "Measured on another machine (Arm Neoverse-V2, 16 cores) than the one that made this report (Intel Xeon Platinum 8488C, 8 cores).",
        "Measured with version 0.1.0; this report was made with 0.2.0.",
    )


@pytest.mark.parametrize("fact", [{"memory_bytes": 28 * 2**30}, {"cores": []}, {"architecture": "arm64"}])
def test_a_machine_is_another_one_by_any_of_its_facts(fact: dict[str, Any]) -> None:
    assert told(changed(PLAIN, "facts", **fact))[1]


def test_a_little_memory_more_or_less_is_the_same_machine() -> None:
    assert told(changed(PLAIN, "facts", memory_bytes=31 * 2**30)) == ((), ())


def test_a_server_that_ran_already_is_named() -> None:
    assert told(PLAIN.model_copy(update={"url": "http://10.0.0.7:8000"}))[1] == (
        "Measured on a server that was already running, at http://10.0.0.7:8000.",
    )


def test_failed_requests_and_forced_kernels_are_doubts() -> None:
    failing = PLAIN.points[0].model_copy(update={"failures": {"429": 3}})
    result = changed(
        PLAIN.model_copy(update={"points": [failing, *PLAIN.points[1:]]}), "facts", native={"forced": "avx2"}
    )
    assert told(result)[0] == (
        "Some of 63 requests failed at 1 client, 1 text of 128: 3 × 429.",
        "Its kernels were forced to avx2, although the processor may support more.",
    )


def test_what_differs_from_the_first_result_is_a_doubt_of_the_other() -> None:
    other = changed(changed(PLAIN, "facts", torch={"version": "2.10.0"}), "model", hidden_size=4096)
    other = other.model_copy(update={"info": other.info | {"version": "0.2.0"}, "points": PLAIN.points[1:]})
    doubts, _ = told(other, PLAIN)
    assert doubts == (
        "Not measured here, but in another result: 1 client, 1 text of 128.",
        "The model differs from that of the first result (hidden size 2048 and 4096): compared because of --force.",
        "The server has version 0.2.0, that of the first result 0.1.0.",
        "It ran with torch 2.10.0, the first result with 2.13.0.",
    )
    assert told(PLAIN, PLAIN) == ((), ())


def test_results_of_different_models_are_refused_unless_forced() -> None:
    same = [made_decoder(XEON, "int4", samples=1), made_decoder(GRAVITON, "int8", samples=1)]
    check_comparable(same, force=False)
    different = [same[0], changed(same[1], "model", hidden_size=4096)]
    with pytest.raises(
        MeasurementFailed, match="xeon-int4 and graviton-int8 are of different models \\(hidden size 2048 and 4096\\)"
    ):
        check_comparable(different, force=False)
    check_comparable(different, force=True)
    check_comparable([same[0], changed(same[1], "model", name="renamed")], force=False)


def test_results_of_one_name_are_distinguished() -> None:
    assert unique_names([PLAIN, made_encoder(GRAVITON), PLAIN]) == ["xeon-int8 (1)", "graviton-int8", "xeon-int8 (2)"]
