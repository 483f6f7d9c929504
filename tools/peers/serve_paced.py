"""Run `armature serve` with steps of a set time: `python -m tools.peers.serve_paced --speed 0.5 -- FLAGS...`.

Everything is the server's own, the model too, but a step ends only after the time that a machine of that speed would
take: a fixed part, and one for each row and each token of a prompt. The worker sleeps meanwhile, so that several servers
of unequal speed fit on one machine without disturbing each other. Calibration is told these times: it would measure
them, but not in the seconds that a start has for it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from app.engine.calibration.session import TrialSession
from app.engine.calibration.stages import TrialShape, TrialStep
from app.engine.calibration.trials import DecoderTrial
from app.engine.decoder.cpu_runner import CpuDecoderRunner
from app.engine.scheduler.batch import Batch, SampledTokens
from app.hardware.decision import TrialTimes

STEP_SECONDS = 0.016  # of a server of speed 1: the weights are read once for all rows
ROW_SECONDS = 0.001  # of each sequence that decodes
TOKEN_SECONDS = 0.0004  # of each token of a prompt


@dataclass(frozen=True, slots=True)
class Pace:
    """The times of a machine's steps. A machine of speed 0.5 takes twice as long as one of speed 1."""

    speed: float

    def seconds(self, batch: Batch) -> float:
        """Return the time of a step: a span of one token is a row, a longer one a part of a prompt."""
        lengths = [span.num_tokens for span in batch.spans]
        return self._seconds(lengths.count(1), sum(length for length in lengths if length > 1))

    def trial_seconds(self, step: TrialStep, num_layers: int) -> float:
        """Return the time of a step of calibration, some of which have a few of all layers."""
        rows, tokens = (step.size, 0) if step.kind == "decode" else (0, step.size)
        return self._seconds(rows, tokens) * step.layers / num_layers

    def _seconds(self, rows: int, tokens: int) -> float:
        return (STEP_SECONDS + ROW_SECONDS * rows + TOKEN_SECONDS * tokens) / self.speed


def pace_steps(pace: Pace) -> None:
    """Make every CPU runner of this process keep the pace, and tell calibration. Call it before either is used."""
    compute = CpuDecoderRunner.run

    def trials(session: TrialSession, threads: Sequence[int], trial_shape: TrialShape) -> list[TrialTimes]:
        trial = session.model_trial(session._scope(trial_shape))
        assert isinstance(trial, DecoderTrial), "only decoders are paced"
        seconds = {step: pace.trial_seconds(step, trial.decode_layers) for step in trial.trial_steps(trial_shape)}
        found = [trial.summarize(number, seconds) for number in threads]
        return [each for each in found if each is not None]

    def run(runner: CpuDecoderRunner, batch: Batch) -> list[SampledTokens]:
        began = time.perf_counter()
        samples = compute(runner, batch)
        time.sleep(max(0.0, began + pace.seconds(batch) - time.perf_counter()))
        runner.model_seconds = time.perf_counter() - began
        return samples

    CpuDecoderRunner.run = run  # type: ignore[method-assign]
    TrialSession.trials = trials  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--speed", type=float, required=True, help="1 is a step of 16 ms and 1 ms for each row")
    parser.add_argument("flags", nargs="*", help="flags of armature serve, after --")
    arguments = parser.parse_args()
    pace_steps(Pace(arguments.speed))
    from app.cli.main import main as armature

    return armature(["serve", *arguments.flags])


if __name__ == "__main__":
    sys.exit(main())
