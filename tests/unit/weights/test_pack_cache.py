"""Weights are packed once: the next load has the same bytes from the file; what is wrong with it is said, and packed again."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_FSIZE, getrlimit, setrlimit
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from app.backends.base import HostBackend
from app.weights import cache_file
from app.weights import load as loading
from app.weights import packs as pack_cache
from app.weights.checkpoint import open_checkpoint
from app.weights.form_choice import CacheableForm
from app.weights.load import Packing, load_model, pack_weights
from app.weights.packs import PackFolder, write_pack
from armature_kernels.linear.linear import Linear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import plan_of
from native_levels import at_level, levels
from reference_attention import PlainAttend, context_of
from tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
LEVELS_AGREE = 0.995  # cosine of logits: levels round activations and sums differently
CPU = cast(HostBackend, SimpleNamespace(device=torch.device("cpu")))


def packs(tmp_path: Path, mapped: bool = False) -> PackFolder:
    return PackFolder(tmp_path / "cache", lambda done, total: None, mapped)


def served(tmp_path: Path, precision: str = "int4", mapped: bool = False, **overrides: Any) -> nn.Module:
    """The checkpoint in tmp_path, through the cache in tmp_path."""
    directory = tmp_path / "tiny"
    if not directory.exists():
        write_checkpoint(directory, **overrides)
        for file in directory.iterdir():
            os.utime(file, (10**9, 10**9))  # old enough for its hash to be noted
    plan = plan_of(precision, 64, int8_copy=precision == "int4")
    return load_model(open_checkpoint(directory), plan, CPU, None, Packing(packs(tmp_path, mapped)))


def files(tmp_path: Path, suffix: str = "pack") -> list[Path]:
    return sorted((tmp_path / "cache" / "packs").glob(f"*.{suffix}"))


@torch.inference_mode()
def logits(model: nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(context_of(list(range(10, 30)), PlainAttend()))
    return result


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the layers that are packed, as they are."""
    told: list[str] = []
    pack = loading._ModelLoader._form
    monkeypatch.setattr(
        loading._ModelLoader,
        "_form",
        lambda self, linear, *others: (told.append(linear.sources[0]), pack(self, linear, *others))[1],
    )
    return told


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Gemma2ForCausalLM"])
def test_the_next_start_has_the_same_bits(
    tmp_path: Path, packings: list[str], architecture: str, precision: str, mapped: bool
) -> None:
    fresh = served(tmp_path, precision, architecture=architecture)
    packed = packings.copy()
    kept = served(tmp_path, precision, mapped)
    assert packed and packings == packed  # nothing was packed again
    assert torch.equal(logits(fresh), logits(kept))
    forms = [[module.form for module in model.modules() if isinstance(module, Linear)] for model in (fresh, kept)]
    for before, after in zip(*forms, strict=True):
        assert isinstance(before, CacheableForm) and isinstance(after, CacheableForm)
        assert all(torch.equal(left, right) for left, right in zip(before.parts, after.parts, strict=True))


def test_each_precision_has_its_own_pack(tmp_path: Path) -> None:
    served(tmp_path, "int4")
    served(tmp_path, "int8")
    assert len(files(tmp_path)) == 2 and len(files(tmp_path, "content")) == 1


def test_what_is_exact_is_not_kept(tmp_path: Path) -> None:
    served(tmp_path, "bfloat16")
    assert not (tmp_path / "cache").exists()


def test_a_damaged_pack_is_packed_again_with_a_warning(
    tmp_path: Path, packings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(served(tmp_path))
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000] + bytes([whole[-1000] ^ 4]) + whole[-999:])
    packings.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(served(tmp_path)), expected)
    assert packings and "cannot be used (the bytes of" in caplog.text and "packing again" in caplog.text
    assert file.read_bytes() == whole


def test_others_weights_are_packed_again(tmp_path: Path, packings: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """A file whose key is right and whose blobs are not can only be our own mistake: it is not multiplied by."""
    served(tmp_path)
    (file,) = files(tmp_path)
    plan = plan_of("int4", 64, int8_copy=True)
    kept = pack_weights(
        open_checkpoint(tmp_path / "tiny"), plan, CPU, lambda done, total: None, Packing(packs(tmp_path))
    )
    assert kept is not None and kept.file == file
    write_pack(file, kept.key, {"other": torch.zeros(9, dtype=torch.uint8)}, lambda done, total: None)
    packings.clear()
    with caplog.at_level(logging.WARNING):
        served(tmp_path)
    assert packings and "it holds other weights" in caplog.text


def test_a_changed_checkpoint_is_packed_again(tmp_path: Path, packings: list[str]) -> None:
    before = logits(served(tmp_path))
    write_checkpoint(tmp_path / "tiny", seed=1)
    packings.clear()
    assert not torch.equal(logits(served(tmp_path)), before)
    assert packings and len(files(tmp_path)) == 2


def test_a_copy_of_a_checkpoint_is_recognised(tmp_path: Path, packings: list[str]) -> None:
    served(tmp_path)
    (tmp_path / "tiny").rename(tmp_path / "old")
    write_checkpoint(tmp_path / "tiny")
    packings.clear()
    served(tmp_path)
    assert not packings and len(files(tmp_path)) == 1


def test_a_checkpoint_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served(tmp_path)
    monkeypatch.setattr(cache_file, "_hash", lambda *given: pytest.fail("hashed again"))
    served(tmp_path)


def test_what_is_noted_of_a_checkpoint_is_believed_only_where_it_is_ours(tmp_path: Path, packings: list[str]) -> None:
    served(tmp_path)
    (note,) = files(tmp_path, "content")
    note.write_text("0" * 64)
    note.chmod(0o666)
    packings.clear()
    served(tmp_path)
    assert not packings  # hashed, and found


def test_another_architectures_and_versions_packs_are_left_alone(
    tmp_path: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both architectures of a fleet, and both versions of an upgrade, may share one volume."""
    for machine in ({"architecture": "arm64"}, {"version": "0.0.9"}, {}):
        packings.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
            patch.setattr(
                pack_cache, "_platform_key", lambda other=machine, own=pack_cache._platform_key: {**own(), **other}
            )
            served(tmp_path)
        assert packings
    assert len(files(tmp_path)) == 3
    told = [message for message in caplog.messages if "are not used" in message]
    assert [message.partition(" differ in ")[2] for message in told] == [
        "architecture, version: they are not used and stay there",
    ] * 2
    before = [file.read_bytes() for file in files(tmp_path)]
    packings.clear()
    served(tmp_path)
    assert not packings and [file.read_bytes() for file in files(tmp_path)] == before


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_a_pack_serves_every_level_of_its_layout(tmp_path: Path, packings: list[str], precision: str) -> None:
    """What the best level of a server packed is used by the levels of smaller machines, with the same weights."""
    blocks: dict[int, torch.Tensor] = {}
    for level in levels():
        with at_level(level) as library:
            packings.clear()
            found = logits(served(tmp_path, precision)).float()
            assert bool(packings) == (library.block not in blocks), f"{level} reads the pack of its layout"
            expected = blocks.setdefault(library.block, found)
            assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).min() > LEVELS_AGREE, level
    assert len(files(tmp_path)) == len(blocks)


def test_a_pack_of_another_layout_is_left_alone(
    tmp_path: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The level i8mm reads 8 adjacent inputs where dotprod reads 4: neither uses the other's pack."""
    served(tmp_path)
    packings.clear()
    own = pack_cache._platform_key()
    monkeypatch.setattr(pack_cache, "_platform_key", lambda: {**own, "block": "8" if own["block"] == "4" else "4"})
    with caplog.at_level(logging.INFO):
        served(tmp_path)
    assert packings and "differ in block: they are not used and stay there" in caplog.text
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("what", ["a file is in the way", "full", "full within"])
def test_where_nothing_can_be_kept_the_model_is_served(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    most = RLIM_INFINITY
    if what == "full":
        monkeypatch.setattr(os, "fsync", _no_space)
    elif what == "full within":
        served(tmp_path)
        (pack,) = files(tmp_path)
        most = pack.stat().st_size // 2
        pack.unlink()
    else:
        (tmp_path / "cache").write_text("")
    with caplog.at_level(logging.WARNING), _files_of_at_most(most):
        assert logits(served(tmp_path)).isfinite().all()
    assert "the packed weights cannot be kept in" in caplog.text and "serving goes on" in caplog.text
    if what != "a file is in the way":
        assert files(tmp_path) == [] and len(list((tmp_path / "cache" / "packs").iterdir())) == 1  # the note


@contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    """Let the kernel refuse what is written beyond this size, as it does on a full disk: half of a pack is there then."""
    before = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        setrlimit(RLIMIT_FSIZE, before)


def _no_space(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def _serve(tmp_path: Path, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    barrier.wait(60)
    results.put(logits(served(tmp_path)).tolist())


@pytest.mark.full
def test_two_that_start_at_once_have_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_serve, args=(tmp_path, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    expected = logits(served(tmp_path)).tolist()
    assert answers == [expected, expected] and len(files(tmp_path)) == 1
    assert not list((tmp_path / "cache" / "packs").glob(".partial-*"))


def test_packing_ahead_says_what_became_of_it(tmp_path: Path) -> None:
    served_by = open_checkpoint(write_checkpoint(tmp_path / "tiny"))
    plan, told = plan_of("int8", 64), list[tuple[int, int]]()
    first = pack_weights(
        served_by,
        plan,
        CPU,
        lambda done, total: None,
        Packing(PackFolder(tmp_path / "cache", lambda *now: told.append(now))),
    )
    again = pack_weights(served_by, plan, CPU, lambda done, total: None, Packing(packs(tmp_path)))
    assert first is not None and again is not None and (first.found, again.found) == (False, True)
    assert first.file == again.file and first.size == again.size == first.file.stat().st_size
    assert told[-1][0] == told[-1][1]
    assert (
        pack_weights(served_by, plan_of("bfloat16", 64), CPU, lambda done, total: None, Packing(packs(tmp_path)))
        is None
    )
