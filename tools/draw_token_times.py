"""Draw the time of each token of one completion, from the steps that a running server logged.

    armature serve --model DIR --precision int4 &
    python -m tools.draw_token_times http://127.0.0.1:8000 token-times.svg --tokens 1000

Slow steps have the colour of their cause, as in a report. Run it while nobody else uses the server. Needs matplotlib
(the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armature_bench.console import percentile

PROMPT = "Once upon a time"
SECONDS = 600.0  # time limit of a request
INK, BACKGROUND, USUAL = "#1f2328", "#ffffff", "#57606b"


@dataclass(frozen=True, slots=True)
class TokenStep:
    """A decode step: its seconds, and its cause if it was slow."""

    seconds: float
    cause: str = ""


def generate(url: str, tokens: int) -> list[TokenStep]:
    """Let the server generate so many tokens, and return the decode steps that it logged meanwhile."""
    after = _ask(f"{url}/info/steps?after={10**9}")["next"]
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    _ask(f"{url}/generate", body)
    steps: list[TokenStep] = []
    while (reply := _ask(f"{url}/info/steps?after={after}"))["steps"]["at"]:
        steps += decode_steps(reply["steps"])
        after = reply["next"]
    return steps


def decode_steps(columns: Mapping[str, Sequence[Any]]) -> list[TokenStep]:
    """Return the decode steps among the columns of `GET /info/steps`."""
    rows = zip(columns["seconds"], columns["phase"], columns["cause"], strict=True)
    return [TokenStep(seconds, cause) for seconds, phase, cause in rows if phase == "decode"]


def describe(steps: Sequence[TokenStep]) -> str:
    """Return the figures that the picture shows, as one line."""
    seconds = [step.seconds for step in steps]
    middle, late = statistics.median(seconds), percentile(seconds, 0.99)
    causes = [step.cause for step in steps if step.cause]
    slow = ", ".join(f"{causes.count(cause)} {cause.replace('_', ' ')}" for cause in dict.fromkeys(causes)) or "none"
    return (
        f"{len(seconds):,} tokens: median {middle * 1e3:.2f} ms, p99 {late * 1e3:.2f} ms, {late / middle:.2f} times; "
        f"slow: {slow}"
    )


def draw(steps: Sequence[TokenStep], title: str, file: Path) -> None:
    """Draw one point for each token, in the order of tokens; the suffix of `file` says the format."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from armature_bench.report.plots import cause_colour, cause_marker

    style = {"svg.hashsalt": "token-times", "svg.fonttype": "none", "font.size": 10, "text.color": INK}
    with rc_context(style):
        figure = Figure(figsize=(9.4, 3.6), layout="constrained", facecolor=BACKGROUND)
        axes = figure.subplots()
        for cause in ["", *dict.fromkeys(step.cause for step in steps if step.cause)]:
            places = [place for place, step in enumerate(steps) if step.cause == cause]
            axes.plot(
                places,
                [steps[place].seconds * 1e3 for place in places],
                color=cause_colour(cause) if cause else USUAL,
                marker=cause_marker(cause) if cause else ".",
                markersize=5 if cause else 3.5,
                linestyle="",
                markeredgewidth=0,
                label=cause.replace("_", " ") or "as usual",
            )
        axes.axhline(statistics.median(step.seconds for step in steps) * 1e3, color=INK, linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, len(steps))
        axes.set_xlabel("token")
        axes.set_ylabel("milliseconds")
        axes.set_title(f"{title}\n{describe(steps)}", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=5, loc="upper right")
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=120)


def _ask(url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as reply:
        return dict(json.load(reply))


def main() -> None:
    """Generate, draw, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of the server")
    parser.add_argument("files", type=Path, nargs="+", help="pictures to write: .svg or .png")
    parser.add_argument("--tokens", type=int, default=1000)
    given = parser.parse_args()
    steps = generate(given.url.rstrip("/"), given.tokens)
    info = _ask(f"{given.url.rstrip('/')}/info")
    plan = {name: info["plan"][name]["value"] for name in ("precision", "threads")}
    threads = "one thread" if plan["threads"] == 1 else f"{plan['threads']} threads"
    title = f"{info['model']['name']}, {plan['precision']}, {threads}, one stream"
    for file in given.files:
        draw(steps, title, file)
    print(describe(steps))


if __name__ == "__main__":
    main()
