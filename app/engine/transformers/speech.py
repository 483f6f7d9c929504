"""Speech to text: sounds are read, resampled and cut into windows, which clients' requests share as other items."""

from __future__ import annotations

import io
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import AutoFeatureExtractor, AutoTokenizer, PreTrainedModel, pipeline
from transformers.pipelines.automatic_speech_recognition import rescale_stride

from app.engine.transformers.fused import share_sources
from app.engine.transformers.tasks import Item, Parameters, Task
from app.errors import InvalidRequest, UnsupportedParameter
from app.models.transformers_config import INSTALL

_MAX_FRAMES = 2**26  # of a file, and at the model's rate: 256 MiB as one channel; 70 minutes at 16 kHz
_MAX_CHANNELS = 8
_BLOCK_FRAMES = 2**20
_MOST_PHASES = 2_000  # of a resampler: 441 for 44,100 Hz
_ZEROS, _ROLLOFF = 16, 0.95  # zero crossings of the resampler's filter on each side, and where its band ends
WINDOW_SECONDS = 30.0
_ITEM_TOKENS = 1_500  # positions of a window in Whisper's encoder
_STEP_ITEMS = 8  # windows of a step, even if they are more than its tokens: the decoder reads its weights once for all
_LENGTH_BITS = (
    3  # of a sound's length: those with the same leading bits are padded to the longest, by a quarter at most
)
_PROMPT_TOKENS = 200
Samples = NDArray[numpy.float32]


def read_sound(data: bytes, rate: int, field: str = "inputs") -> Samples:
    """Return the mean of all channels at `rate`. Raises `InvalidRequest`."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise UnsupportedParameter(f"This server cannot read sounds; its operator can: {INSTALL}.", field) from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            seconds, longest = file.frames / max(1, file.samplerate), _MAX_FRAMES // rate
            if file.channels > _MAX_CHANNELS or file.frames > _MAX_FRAMES or seconds > longest:
                raise InvalidRequest(
                    f"{field} has {seconds:,.0f} s in {file.frames:,} samples and {file.channels} channels; it may have"
                    f" {longest:,} s, {_MAX_FRAMES:,} samples and {_MAX_CHANNELS} channels.",
                    field,
                )
            blocks, left = [], _MAX_FRAMES
            for block in file.blocks(_BLOCK_FRAMES, dtype="float32", always_2d=True):
                blocks.append(block.mean(1))
                left -= len(block)
                if left < 0:  # more than its head says
                    raise InvalidRequest(f"{field} has more than {_MAX_FRAMES:,} samples.", field)
            own_rate = file.samplerate
    except soundfile.LibsndfileError as error:
        raise InvalidRequest(
            f"{field} is not a sound that is known here: send WAV, FLAC, OGG or MP3.", field
        ) from error
    samples = numpy.concatenate(blocks) if blocks else numpy.zeros(0, numpy.float32)
    if not len(samples):
        raise InvalidRequest(f"{field} has no samples.", field)
    if not numpy.isfinite(samples).all():
        raise InvalidRequest(f"{field} has samples that are not finite.", field)
    return samples if own_rate == rate else resample(samples, own_rate, rate, field)


def resample(samples: Samples, own_rate: int, rate: int, field: str = "inputs") -> Samples:
    """Return the samples at another rate, by a low-pass filter of windowed sinc functions, one for each phase."""
    common = math.gcd(own_rate, rate)
    step, phases = own_rate // common, rate // common
    if max(step, phases) > _MOST_PHASES:
        raise InvalidRequest(f"{field} has {own_rate} samples a second, which is not a usual rate: send {rate}.", field)
    band = min(1.0, phases / step) * _ROLLOFF
    reach = math.ceil(_ZEROS / band)
    # The filter of phase p is centred at the place p * step / phases of the samples.
    at = torch.arange(-reach, reach + step + 1, dtype=torch.float64)[None] - (
        torch.arange(phases, dtype=torch.float64)[:, None] * step / phases
    )
    window = torch.cos((at * band / _ZEROS).clamp(-1, 1) * math.pi / 2) ** 2
    filters = (torch.sinc(at * band) * window * band).float()
    number = math.ceil(len(samples) * phases / step)
    padded = torch.nn.functional.pad(torch.from_numpy(samples)[None, None], (reach, reach + 2 * step))
    found = torch.nn.functional.conv1d(padded, filters[:, None], stride=step)[0].T.reshape(-1)[:number]
    return found.numpy()


def check_sound() -> bytes:
    """Return the file of a second of silence, which needs no library to write."""
    head = (
        b"RIFF\x24\x7d\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00\x80\x3e\x00\x00\x00\x7d\x00\x00\x02\x00\x10\x00"
    )
    return head + b"data\x00\x7d\x00\x00" + bytes(32_000)


class SpeechModel:
    """A model that writes what is said, through the library's pipeline."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self.extractor = AutoFeatureExtractor.from_pretrained(directory, local_files_only=True)
        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.pipe: Any = pipeline(
            "automatic-speech-recognition",
            model=model,
            tokenizer=self.tokenizer,
            feature_extractor=self.extractor,
            device=model.device,
        )
        self.is_whisper = self.pipe.type == "seq2seq_whisper"
        # Others normalize a sound over its whole length, so that what pads it would change its text.
        self._pads = self.pipe.type == "ctc" and getattr(model.config, "feat_extract_norm", "") == "layer"
        self._languages = getattr(getattr(model, "generation_config", None), "lang_to_id", None) or {}

    def task(self) -> Task:
        check = {"max_new_tokens": 4} if self.pipe.type.startswith("seq2seq") else {}
        return Task(
            *(self._split, self._finish, check_sound()),
            call=self._call,
            key=self._key,
            least_items=_STEP_ITEMS,
            check_parameters=check,
        )

    def _options(self, parameters: Parameters) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the pipeline's options of its three parts."""
        given: dict[str, Any] = {}
        if parameters.get("return_timestamps"):
            given["return_timestamps"] = parameters["return_timestamps"]
        generation = {name: parameters[name] for name in ("language", "task", "max_new_tokens") if name in parameters}
        if parameters.get("temperature"):
            generation |= {"temperature": parameters["temperature"], "do_sample": True}
        if parameters.get("prompt"):
            ids = self.tokenizer.get_prompt_ids(parameters["prompt"], return_tensors="pt")
            generation["prompt_ids"] = torch.cat((ids[:1], ids[1:][-_PROMPT_TOKENS:])).to(self.pipe.device)
        if generation:
            given["generate_kwargs"] = generation
        options: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = self.pipe._sanitize_parameters(**given)
        return options

    def _check(self, parameters: Parameters) -> None:
        for name in ("language", "task", "prompt"):
            asks = parameters.get(name) not in (None, "transcribe", "")
            if asks and not (self.is_whisper and (self._languages or name == "prompt")):
                raise UnsupportedParameter(f"{name} is not offered for this model.", f"parameters.{name}")
        for name in ("temperature", "max_new_tokens"):
            if parameters.get(name) and not self.pipe.type.startswith("seq2seq"):
                raise UnsupportedParameter(f"{name} is not offered for a CTC model.", f"parameters.{name}")
        language = parameters.get("language")
        if language is not None and f"<|{language}|>" not in self._languages:
            known = ", ".join(sorted(name.strip("<|>") for name in self._languages))
            raise InvalidRequest(f"language must be one of {known}.", "parameters.language")
        wanted = parameters.get("return_timestamps")
        offered: tuple[object, ...] = (False, None, True, "word")
        offered = (
            offered
            if self.is_whisper
            else (False, None)
            if self.pipe.type == "seq2seq"
            else (False, None, "word", "char")
        )
        if wanted not in offered:
            raise UnsupportedParameter(
                f"return_timestamps {wanted} is not offered for this model.", "parameters.return_timestamps"
            )

    def _split(self, data: bytes, parameters: Parameters) -> Sequence[Item]:
        self._check(parameters)
        samples = read_sound(data, self.extractor.sampling_rate)
        seconds = len(samples) / self.extractor.sampling_rate
        windows = {"chunk_length_s": WINDOW_SECONDS} if seconds > WINDOW_SECONDS else {}
        made = [dict(item) for item in self.pipe.preprocess(samples, **windows)]
        return [{**item, "size": _ITEM_TOKENS, "seconds": seconds / len(made)} for item in made]

    def _key(self, item: Item) -> Hashable:
        """Return what items have in common that are computed together: their sizes, or lengths that differ little."""
        shape = tuple(item[self.pipe.model.main_input_name].shape)
        shift = max(0, shape[-1].bit_length() - _LENGTH_BITS)
        return (shape[-1] >> shift, shift) if self._pads else shape

    def _call(self, items: Sequence[Item], parameters: Parameters) -> Sequence[Item]:
        if self.is_whisper and parameters.get("return_timestamps") == "word":  # padding tokens would have times too
            return [output for item in items for output in self._compute([item], parameters)]
        return self._compute(items, parameters)

    def _compute(self, items: Sequence[Item], parameters: Parameters) -> Sequence[Item]:
        main = self.pipe.model.main_input_name
        longest = max(item[main].shape[-1] for item in items)
        joined = {
            name: torch.cat([functional.pad(item[name], (0, longest - item[main].shape[-1])) for item in items])
            for name in (main, "attention_mask")
            if isinstance(items[0].get(name), Tensor)
        }
        if self.is_whisper:
            config = self.pipe.model.generation_config
            share_sources(
                self.pipe.model, len(items), config.num_beams or self.pipe._default_generation_config.num_beams or 1
            )
        found = self.pipe.forward({**joined, "is_last": True}, **self._options(parameters)[1])
        outputs = []
        for row, item in enumerate(items):
            output = {name: found[name][row : row + 1] for name in ("tokens", "token_timestamps") if name in found}
            if self._pads:
                own = int(self.pipe.model._get_feat_extract_output_lengths(item[main].shape[-1]))
                output["tokens"] = output["tokens"][:, :own]
            if item.get("stride") is not None:
                is_ctc = self.pipe.type == "ctc"
                scaled = rescale_stride([item["stride"]], 1 / self.pipe._align_to)[0] if is_ctc else item["stride"]
                output["stride"] = scaled
            outputs.append({**output, "is_last": item["is_last"], "seconds": item["seconds"]})
        return outputs

    def _finish(self, outputs: list[Item], parameters: Parameters) -> Any:
        plain = [{name: value for name, value in item.items() if name != "seconds"} for item in outputs]
        found = self.pipe.postprocess(plain, **self._options(parameters)[2])
        return found | ({"duration": sum(item["seconds"] for item in outputs)} if parameters.get("details") else {})
