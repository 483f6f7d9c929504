"""The rows that the law of the layers is made of: where each module stands, and who may import which library."""

from __future__ import annotations

ISLAND = -1  # bench: a client that speaks only HTTP
BESIDE = 4.5  # bench/inside: may look at the engine

# First match wins. What a layer may import: itself and whatever is below it.
LAYERS: tuple[tuple[str, float], ...] = (
    ("errors", 0),
    ("version", 0),
    ("termination", 0),
    ("settings", 0),
    ("messages", 0),
    ("measured", 0),
    ("hardware.facts", 0),
    ("hardware.decision", 0),
    ("hardware.step_seconds", 0),
    ("hardware.tempo", 0),
    ("hardware.*", 1),
    ("metrics", 1),
    ("gauges", 1),
    ("drift", 1),
    ("garbage", 1),
    ("stalls", 1),
    ("step_log", 1),
    ("step_watch", 1),
    ("quantiles", 1),
    ("kernels.calibrate", 3),
    ("models.*", 2),
    ("kernels.*", 2),
    ("backends.*", 3),
    ("weights.*", 3),
    ("engine.*", 4),
    ("text.*", 4),
    ("generation", 4),
    ("encoding", 4),
    ("scores", 4),
    ("bench.inside", BESIDE),
    ("bench.kernels", BESIDE),
    ("bench.attending", BESIDE),
    ("bench.quality", BESIDE),
    ("bench.recorded", BESIDE),
    ("bench.recording", BESIDE),
    ("bench.ceilings", BESIDE),
    ("bench.driver", BESIDE),
    ("bench.floors", BESIDE),
    ("bench.speculation", BESIDE),
    ("bench.texts", BESIDE),
    ("bench.programs", BESIDE),
    ("bench.*", ISLAND),
    ("service", 5),
    ("admission", 5),
    ("turns", 5),
    ("waiting", 5),
    ("answer", 5),
    ("reading", 5),
    ("reading_texts", 5),
    ("served", 5),
    ("post", 5),
    ("desk", 5),
    ("generating", 5),
    ("computing", 5),
    ("api.*", 6),
    ("calibration", 7),
    ("calibrating", 7),
    ("preparation", 7),
    ("spending", 7),
    ("startup", 7),
    ("packing", 7),
    ("report", 7),
    ("explanation", 7),
    ("bench_flags", 7),
    ("arguments", 7),
    ("main", 7.1),
    ("benches", 7.2),
    ("cli", 7.2),
    ("__main__", 7.3),
)

# Parts that decide or translate import in milliseconds, without torch.
TORCH_FREE = (
    "errors", "version", "settings", "messages", "measured", "hardware.*", "drift", "gauges", "metrics", "quantiles", "models.config",
    "garbage", "stalls", "step_log", "step_watch", "termination",
    "models.graph", "models.outputs", "models.encoder_config", "models.encoder_reading", "models.encoder_shapes",
    "weights.checkpoint", "weights.copies", "weights.opening", "weights.sentence_transformers", "weights.renaming", "weights.resident",
    "weights.archive", "weights.program",
    "weights.recipes", "engine.sequence", "engine.slots", "engine.scheduler", "engine.roster", "engine.allowance", "engine.pace",
    "engine.standing", "engine.batch",
    "engine.drafts", "engine.speculation", "engine.row_costs", "engine.texts", "engine.encoder", "engine.encode_pace",
    "engine.encode_room", "engine.encode_device_shapes",
    "calibration", "preparation",
    "text.*", "generation", "service", "admission", "turns", "waiting", "answer", "reading", "reading_texts", "served", "post",
    "desk", "generating", "computing", "encoding",
    "scores", "api.*", "report", "explanation", "arguments", "bench_flags",
    "packing", "spending", "main", "cli",
)  # fmt: skip

# A library and the only places that may import it.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "fastapi": ("api.*", "main"),
    "starlette": ("api.*", "main"),
    "prometheus_client": ("gauges", "metrics"),
    "torchao": ("weights.load", "kernels.*"),
    "transformers": (),
    "triton": ("kernels.gpu.*",),
    "httpx": (),
    "httptools": ("bench.wire",),
    "matplotlib": ("bench.report.*",),
}
DEVICE_WORDS = ("torch.cuda", "torch.mps", "torch.backends", "platform.machine")
DEVICE_PLACES = ("hardware.*", "backends.*", "kernels.*")
BANNED_NAMES = frozenset("manager handler helper util processor data misc common".split())
# The worker's step, the API's last handler, the probe of an optional fact.
CATCH_ALL_PLACES = ("engine.worker", "api.*", "hardware.*")
MAX_CATCH_ALLS = 3
