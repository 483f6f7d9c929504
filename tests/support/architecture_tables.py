"""Tables of the architecture rules: the layer of each folder, and the libraries that folders may import."""

from __future__ import annotations

# The packages of a checkout.
PACKAGES = ("app", "armature_bench", "armature_kernels")
# Layer of each folder of app/, of a file at its top, and of the kernels, which import nothing of app/.
# A folder may import its own layer and lower ones. First match wins.
LAYERS: tuple[tuple[str, int], ...] = (
    ("armature_kernels", -1),
    ("errors", 0),
    ("version", 0),
    ("settings", 0),
    ("messages", 0),
    ("hardware", 1),
    ("metrics", 2),
    ("tracing", 2),
    ("models", 3),
    ("backends", 4),
    ("weights", 5),
    ("text", 5),
    ("engine", 6),
    ("service", 7),
    ("api", 8),
    ("server", 9),
    ("cli", 10),
    ("__main__", 11),
)
# The package of the benchmarks. It is an HTTP client and imports nothing of the server; some of its modules measure inside
# the process or prepare a server, so they may import layers up to a number. Only the command line imports the package.
CLIENT = "armature_bench"
CLIENT_LAYERS = (("armature_bench.engine", 6), ("armature_bench.http.simulated", 10), ("armature_bench.run", 10))
CLIENT_IMPORTERS = ("cli",)

# Folders that decide or translate; importing them must not import torch, which takes seconds.
TORCH_FREE = (
    "errors", "version", "settings", "messages", "hardware.*", "metrics.*", "text.*", "engine.scheduler.*", "service.*", "api.*",
    "server.*", "cli.*", "models.decoders.config", "models.encoders.config", "weights.checkpoint", "weights.program", "weights.onnx_file",
    "weights.program_description", "engine.picture_files",
    "tracing.request_trace", "tracing.start",
)  # fmt: skip

# A library and the only modules that may import it.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "fastapi": ("api.openapi",),
    "starlette": ("api.*", "server.process"),
    "prometheus_client": ("metrics.*",),
    "torchao": ("weights.*", "armature_kernels.*"),
    "transformers": ("engine.transformers.*",),
    "soundfile": ("engine.transformers.*",),
    "PIL": ("engine.transformers.*", "engine.picture_files", "service.program_pictures"),
    "onnx": ("weights.onnx_file", "engine.onnx.*"),
    "onnx_ir": ("engine.onnx.*",),
    "onnxruntime": ("engine.onnx.*",),
    "triton": ("armature_kernels.triton.*",),
    "httpx": (),
    "httptools": ("armature_bench.http.*", "api.http_protocol"),
    "llguidance": ("text.*",),
    "msgspec": ("messages", "engine.scheduler.*", "server.channel"),
    "huggingface_hub": ("weights.hub.*",),
    "httpx2": ("weights.hub.*", "service.image_urls"),
    "matplotlib": ("armature_bench.report.*",),
    "opentelemetry": ("tracing.*",),
}
DEVICE_NAMES = ("torch.cuda", "torch.mps", "torch.backends", "platform.machine")
DEVICE_FOLDERS = ("hardware.*", "backends.*", "armature_kernels.*")
# The worker's step, the API's last handler, the probe of an optional fact.
CATCH_ALL_MODULES = ("engine.worker", "api.*", "hardware.*")
MAX_CATCH_ALLS = 3

MAX_FILE_LINES = 800
