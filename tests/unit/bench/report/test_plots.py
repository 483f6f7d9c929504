"""What the plots are drawn from: places of percentiles, causes of late tokens, ceilings and what was reached below them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the plots need the extra `bench`")

from matplotlib.figure import Figure

from armature_bench.compare.result import CompareResult, LoadPoint, LoadSpec, StepColumns
from armature_bench.report.plots import (
    CAUSE_COLOURS,
    CSS_VARIABLES,
    RESULT_COLOURS,
    PlotText,
    inline_svg,
    percentile_curve,
    quantile_position,
    render_plot,
    result_colour,
    result_marker,
    short_name,
)
from armature_bench.report.slow_steps import CAUSE_DESCRIPTIONS
from armature_bench.report.timelines import BETWEEN_STEPS, roofline_limits, roofline_plot, roofline_points, token_gaps
from synthetic_results import WEIGHTS, XEON, made_decoder


def test_half_of_the_width_lies_beyond_ninety_percent() -> None:
    assert [quantile_position(share) for share in (0.0, 0.9, 0.99, 0.999)] == pytest.approx([0, 1, 2, 3])


def test_a_curve_ends_where_its_samples_end() -> None:
    places, values = percentile_curve([float(number) for number in range(1, 101)])
    assert values[0] == 1 and values[-1] == 100
    assert places == sorted(places) and places[-1] == pytest.approx(quantile_position(0.995))
    assert all(
        place == pytest.approx(quantile_position((value - 0.5) / 100))
        for place, value in zip(places, values, strict=True)
    )
    assert percentile_curve([7.0]) == ([pytest.approx(quantile_position(0.5))], [7.0])
    assert len(percentile_curve([float(number) for number in range(100_000)])[0]) <= 240


def streamed(gaps: list[tuple[float, float]], steps: list[tuple[float, float, str, str]]) -> LoadPoint:
    """Gaps as end and seconds, steps as begin, seconds, phase and cause; the load began at 100."""
    return LoadPoint(
        load=LoadSpec(kind="generate", clients=1, tokens=8, max_tokens=8),
        began=100,
        seconds=9,
        samples=1,
        gap_at=[at for at, _ in gaps],
        gap_seconds=[seconds for _, seconds in gaps],
        steps=StepColumns(
            at=[at for at, *_ in steps],
            seconds=[seconds for _, seconds, _, _ in steps],
            phase=[phase for *_, phase, _ in steps],
            tokens=[1] * len(steps),
            cause=[cause for *_, cause in steps],
        ),
    )


@pytest.mark.parametrize(
    "steps, cause",
    [
        ([(104.0, 1.0, "decode", "page_fault")], "page_fault"),
        (
            [(103.5, 0.7, "decode", "throttled"), (104.2, 0.8, "decode", "descheduled")],
            "descheduled",
        ),  # the most of the time
        ([(104.0, 0.3, "decode", "compiled"), (104.3, 0.7, "prefill", "")], "compiled"),  # slow before large
        ([(104.0, 0.2, "prefill", ""), (104.2, 0.8, "decode", "")], "prefill"),  # a prompt that took what such take
        ([(104.0, 0.6, "decode", "")], "unknown"),  # a step that nobody called slow
        ([(104.0, 0.4, "decode", ""), (105.0, 1.0, "decode", "throttled")], BETWEEN_STEPS),  # hardly any step ran
        ([], BETWEEN_STEPS),
    ],
)
def test_a_late_token_has_the_cause_of_what_it_waited_for(
    steps: list[tuple[float, float, str, str]], cause: str
) -> None:
    usual = [(101.0 + index / 10, 0.1) for index in range(10)]
    beats = token_gaps(streamed([*usual, (105.0, 1.0)], steps))
    assert [beat.cause for beat in beats] == [""] * 10 + [cause]
    assert beats[-1].at == 5.0 and beats[-1].seconds == 1.0


def test_every_cause_has_a_colour_and_a_name_in_the_page() -> None:
    assert set(CAUSE_COLOURS) == set(CAUSE_DESCRIPTIONS) | {BETWEEN_STEPS}
    assert len(CSS_VARIABLES) == 4 + len(RESULT_COLOURS) + len(CAUSE_COLOURS)  # no two colours are one


def test_further_results_are_distinguished_by_their_marks() -> None:
    looks = [(result_colour(index), result_marker(index)) for index in range(12)]
    assert len(set(looks)) == 12


STEPS = StepColumns(
    at=[0.0] * 11,
    seconds=[0.010] * 5 + [0.5] + [0.200] * 5,
    phase=["decode"] * 6 + ["prefill"] * 5,
    tokens=[4] * 6 + [512] * 5,
    cause=[""] * 5 + ["throttled"] + [""] * 5,
)


def measured(steps: StepColumns = STEPS, **measurements: Any) -> CompareResult:
    result = made_decoder(samples=1)
    calibration = result.info["calibration"]
    changed = calibration | {"measurements": calibration["measurements"] | measurements}
    points = [result.points[0].model_copy(update={"steps": steps})]
    return result.model_copy(update={"points": points, "info": result.info | {"calibration": changed}})


def test_ceilings_are_those_of_the_served_precision() -> None:
    ceilings = roofline_limits(measured())
    assert ceilings is not None
    assert (ceilings.reads, ceilings.products) == (XEON.reads, XEON.products["int4"])
    assert ceilings.bound(1.0) == XEON.reads and ceilings.bound(1e6) == XEON.products["int4"]


@pytest.mark.parametrize(
    "missing",
    [{"fallback": "it was noisy"}, {"read_bytes_per_second": None}, {"trials": []}, {"products_per_second": {}}],
)
def test_without_trusted_ceilings_there_is_no_roofline(missing: dict[str, Any]) -> None:
    result = measured(**missing)
    assert roofline_limits(result) is None
    assert isinstance(roofline_plot([result], ["one"]), str)


def test_what_was_reached_is_the_median_of_steps_that_nothing_slowed() -> None:
    result = measured()
    ceilings = roofline_limits(result)
    assert ceilings is not None
    decode, prefill = roofline_points(result, ceilings)
    assert (decode.phase, decode.tokens, decode.rate) == ("decode", 4, pytest.approx(4 * 2 * WEIGHTS / 0.010))
    assert decode.intensity == pytest.approx(4 * 2 * WEIGHTS / (WEIGHTS / 2))
    assert (prefill.phase, prefill.rate) == ("prefill", pytest.approx(512 * 2 * WEIGHTS / 0.2))
    few = StepColumns(at=[0.0], seconds=[0.1], phase=["decode"], tokens=[1], cause=[""])
    assert roofline_points(measured(few), ceilings) == []


def test_a_copy_in_eight_bits_multiplies_too() -> None:
    result = measured()
    trial = result.info["calibration"]["measurements"]["trials"][0] | {"int8_copy": True}
    ceilings = roofline_limits(measured(trials=[trial]))
    assert ceilings is not None and ceilings.products == XEON.products["int8"]


def test_the_same_figures_make_the_same_drawing() -> None:
    def draw(figure: Figure) -> None:
        figure.subplots().plot([1, 2], [3, 4], color=RESULT_COLOURS[0], marker="o")

    first, second = (render_plot(PlotText("one", "", "", "words"), (3, 2), draw) for _ in range(2))
    assert first == second
    assert first.svg.startswith("<svg viewBox") and "var(--series-0)" in first.svg
    assert first.png.startswith(b"\x89PNG")


def test_colours_become_the_pages_and_names_the_drawings_own() -> None:
    svg = (
        '<?xml version="1.0"?><svg height="1pt" viewBox="0 0 2 1" width="2pt"><metadata>x</metadata><defs><style>*{}</style></defs>'
        '<g id="figure_1"><path id="m1" style="fill: #0072b2; stroke: #123456"/><use xlink:href="#m1"/><g clip-path="url(#p2)"/>'
        '<clipPath id="p2"/></g></svg>'
    )
    assert inline_svg(svg, "plot", 'a "b" <c>') == (
        '<svg viewBox="0 0 2 1" role="img" aria-label="a &quot;b&quot; &lt;c>" xmlns:xlink="http://www.w3.org/1999/xlink">'
        '<g><path id="plot-m1" style="fill: var(--series-0); stroke: #123456"/><use xlink:href="#plot-m1"/>'
        '<g clip-path="url(#plot-p2)"/><clipPath id="plot-p2"/></g></svg>'
    )


def test_long_and_hidden_names_are_shown() -> None:
    assert short_name("a" * 50) == "a" * 35 + "…"
    assert short_name("_a_b") == "‗a_b"
