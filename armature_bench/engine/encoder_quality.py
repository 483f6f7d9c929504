"""Accuracy of weight precisions of an encoder: the cosine of each text's vector with its vector in FP32.

Each precision is planned, loaded and run by the engine as for serving. The lowest cosine counts as much as the mean: one
text that is found in the wrong place is an error, however good the others are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.build import BuildRequest, BuiltEngine
from app.engine.calibration.streaming import default_text, read_text
from app.engine.encoder.build import build_encoder_engine
from app.engine.encoder.cpu_runner import EncoderRunner
from app.engine.encoder.engine import EncoderEngine
from app.hardware.plan.plan import ServingPlan
from app.messages import ArraysReady, Encode, Text
from app.models.encoders.encoder import Encoder
from app.text.tokenizer import Tokenizer
from armature_bench.console import AdvanceProgress, BenchOutcome, Figure, MeasurementFailed, progress
from armature_bench.engine.quality import REFERENCE, QualityJob, host_precisions, loaded_weight_bytes, plan_pairs

DEFAULT_TEXTS = 1000
MAX_WORDS = 200  # words of the longest text; the shortest has one
BATCH_TEXTS = 20  # texts of a request
LOWEST_COSINE_TARGETS = {"bf16": 0.999, "int8": 0.998}

_Built = BuiltEngine[EncoderEngine, EncoderRunner, Encoder]


def measure_encoder_quality(job: QualityJob, text: Path | None, num_texts: int | None) -> BenchOutcome:
    """Compare the vectors of every precision that this machine supports with FP32's.

    The texts have 1 to `MAX_WORDS` words and are cut from `text`, or from the default text if None. If the settings
    name a precision, only that one is compared. Ctrl-C keeps the texts read so far. Raises `MeasurementFailed` if the
    model has no vectors, and `SettingsInvalid` if the text cannot be read or has too few words.
    """
    checkpoint = job.checkpoint
    if "embedding" not in checkpoint.encoder.outputs:
        raise MeasurementFailed(f"{checkpoint.name} classifies texts: `bench quality` compares vectors")
    cut = cut_texts(default_text() if text is None else read_text(text), num_texts or DEFAULT_TEXTS)
    config = checkpoint.encoder
    texts = Tokenizer(checkpoint.location, config.lowercases).encode_texts(cut, config.max_model_len)
    plans, refused = plan_pairs(job, {name: (name, "auto") for name in host_precisions()})
    vectors: dict[str, list[Tensor]] = {name: [] for name in plans}
    sizes: dict[str, int] = {}
    with progress(len(plans) * len(texts), "loading") as advance, torch.inference_mode():
        complete = _read_all(job, plans, texts, vectors, sizes, advance)
    num_parameters = checkpoint.needs().num_parameters
    figures = tuple(_figures(vectors, sizes, num_parameters))
    details = {"machine": job.facts.to_json(), "torch": torch.__version__, "texts": len(texts), "refused": refused}
    subject = f"{checkpoint.name}, {len(texts):,} texts of 1 to {MAX_WORDS} words"
    return BenchOutcome("quality", subject, figures, details, complete, value_name="lowest cosine")


def cut_texts(source: str, count: int) -> list[str]:
    """Return `count` runs of consecutive words of the source, from one word to `MAX_WORDS` words, evenly spread.

    Raises `MeasurementFailed` if the source is shorter.
    """
    words = source.split()
    if len(words) < MAX_WORDS:
        raise MeasurementFailed(f"The text has {len(words)} words, but {MAX_WORDS} are needed.")
    lengths = [1 + at * MAX_WORDS // count for at in range(count)]
    starts = [at * (len(words) - length) // count for at, length in enumerate(lengths)]
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def _read_all(
    job: QualityJob,
    plans: dict[str, ServingPlan],
    texts: list[Text],
    vectors: dict[str, list[Tensor]],
    sizes: dict[str, int],
    advance: AdvanceProgress,
) -> bool:
    """Compute the vectors of all texts with one precision after the other; returns False after Ctrl-C."""
    try:
        for name, plan in plans.items():
            built: _Built = build_encoder_engine(BuildRequest(job.checkpoint, plan))
            sizes[name] = loaded_weight_bytes(built.model)
            for start in range(0, len(texts), BATCH_TEXTS):
                batch = texts[start : start + BATCH_TEXTS]
                vectors[name].append(compute_vectors(built.engine, batch))
                advance(name, len(batch))
    except KeyboardInterrupt:
        return False
    return True


def compute_vectors(engine: EncoderEngine, texts: list[Text]) -> Tensor:
    """Return the engine's normalized vectors [texts, size]. Raises `MeasurementFailed`."""
    events = engine.add(Encode("quality", tuple(texts), ("embedding",), time.monotonic(), normalize=True))
    while engine.has_work:
        events += engine.step()
    answer = events[-1]
    if not isinstance(answer, ArraysReady):
        raise MeasurementFailed(f"the texts were not answered: {answer}")
    array = answer.arrays["embedding"]
    return torch.frombuffer(bytearray(array.data), dtype=torch.float32).view(array.shape)


def _figures(vectors: dict[str, list[Tensor]], sizes: dict[str, int], num_parameters: int) -> Iterator[Figure]:
    """Yield the lowest and the mean cosine of each precision, over the texts that it and FP32 have read."""
    read = {name: torch.cat(batches) for name, batches in vectors.items() if batches}
    exact = read.pop(REFERENCE, None)
    if exact is None:
        return
    size = {name: {"bytes": each, "bytes per weight": each / num_parameters} for name, each in sizes.items()}
    yield Figure(REFERENCE, 1.0, "", parts={"mean cosine": 1.0} | size[REFERENCE])
    for name, mine in read.items():
        cosines = F.cosine_similarity(mine, exact[: len(mine)])
        parts = {"mean cosine": float(cosines.mean())} | size[name]
        target = LOWEST_COSINE_TARGETS.get(name)
        yield Figure(name, float(cosines.min()), "", against="FP32", target=target, parts=parts, digits=4)
