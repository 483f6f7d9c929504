"""A decoder on several GPUs: each rank is a process with a part of all layers, and rank 0 leads.

Rank 0 has the scheduler and samples. It tells the other ranks, over a pipe each, what they must do to their memory and
which step to compute; the sums of partial products, and the sampled ids, go through torch.distributed, in the queues of
the devices. If a rank ends, the engine's process ends, and the server starts it again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from app.backends.base import DeviceBackend
from app.engine.build import BuildRequest, SelectDevice, load_on_device
from app.engine.decoder.cuda_graphs import GraphShape
from app.engine.decoder.device_inputs import StepSizes
from app.engine.decoder.device_runner import DeviceDecoderRunner, StepBounds
from app.engine.decoder.picture_rows import StepPictures
from app.models.decoders.decoder import Decoder
from app.models.decoders.layers import DecoderLayer, DecoderMLP
from app.weights.checkpoint import Checkpoint
from app.weights.shards import shard
from armature_kernels.linear.activations import Activations, RowGroups
from armature_kernels.linear.linear import LinearForm

log = logging.getLogger(__name__)


class SummedForm:
    """A weight of which each rank has some columns: the results of all ranks are added up."""

    def __init__(self, form: LinearForm) -> None:
        self._form = form

    @property
    def nbytes(self) -> int:
        return self._form.nbytes

    def activation_group(self, rows: int) -> RowGroups | None:
        return self._form.activation_group(rows)

    def multiply(self, x: Activations) -> Tensor:
        product = self._form.multiply(x)
        dist.all_reduce(product)
        return product

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        hidden += self.multiply(x)


def sum_over_ranks(model: Decoder) -> None:
    """Let the products that are split by columns add up the results of all ranks."""
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer) and isinstance(layer.mlp, DecoderMLP), "the model can be split"
        for product in (layer.attention.out, layer.mlp.down):
            product.form = SummedForm(product.form)


# ---- what rank 0 tells -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowsMoved:
    sources: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class BlockSent:
    """The input block from word `begin` on, and changes of the page tables: cells and their pages."""

    begin: int
    words: bytes
    cells: list[int]
    pages: list[int]


@dataclass(frozen=True, slots=True)
class ShapeCaptured:
    shape: GraphShape


@dataclass(frozen=True, slots=True)
class ShapeComputed:
    shape: GraphShape


@dataclass(frozen=True, slots=True)
class StepComputed:
    """An eager step. `is_whole`: hidden states of all tokens are computed."""

    sizes: StepSizes
    bounds: StepBounds
    pictures: StepPictures
    is_whole: bool


@dataclass(frozen=True, slots=True)
class IdsSampled:
    num_rows: int


RankMessage = RowsMoved | BlockSent | ShapeCaptured | ShapeComputed | StepComputed | IdsSampled


class RankLeader:
    """The other ranks, as rank 0 sees them. It implements `DeviceObserver`."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def tell(self, message: RankMessage) -> None:
        for connection in self._connections:
            connection.send(message)

    def moved(self, sources: list[int], targets: list[int]) -> None:
        self.tell(RowsMoved(sources, targets))

    def sent(self, begin: int, words: Tensor, cells: list[int], pages: list[int]) -> None:
        self.tell(BlockSent(begin, words.numpy().tobytes(), cells, pages))

    def captures(self, shape: GraphShape) -> None:
        self.tell(ShapeCaptured(shape))

    def replays(self, shape: GraphShape) -> None:
        self.tell(ShapeComputed(shape))

    def computes(self, sizes: StepSizes, bounds: StepBounds, pictures: StepPictures, is_whole: bool) -> None:
        self.tell(StepComputed(sizes, bounds, pictures, is_whole))

    def sampled(self, ids: Tensor) -> None:
        self.tell(IdsSampled(len(ids)))
        dist.broadcast(ids, 0)


def follow(runner: DeviceDecoderRunner, connection: Connection) -> None:
    """Do what rank 0 tells, until it closes the pipe."""
    with torch.inference_mode(), suppress(EOFError, OSError):
        while True:
            _follow(runner, connection.recv())


def _follow(runner: DeviceDecoderRunner, message: RankMessage) -> None:
    match message:
        case RowsMoved(sources, targets):
            runner.kv_cache.move_rows((sources, targets))
        case BlockSent(begin, words, cells, pages):
            runner.follow_block(begin, torch.frombuffer(bytearray(words), dtype=torch.int64), cells, pages)
        case ShapeCaptured(shape):
            runner.graphs.capture(shape)
        case ShapeComputed(shape):
            runner.follow_shape(shape)
        case StepComputed(sizes, bounds, pictures, is_whole):
            runner.follow_step(sizes, bounds, pictures, is_whole)
        case IdsSampled(num_rows):
            dist.broadcast(runner.sampled_ids(num_rows), 0)


def all_ranks_agree(value: bool, device: torch.device) -> bool:
    least = torch.tensor(int(value), device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(least)


# ---- processes -------------------------------------------------------------------------------------------------------


class MakeRunner(Protocol):
    def __call__(
        self, request: BuildRequest[Checkpoint], model: Decoder, backend: DeviceBackend
    ) -> DeviceDecoderRunner: ...


@dataclass(frozen=True, slots=True)
class RankRecipe:
    """How a rank makes its runner. `device` is the value of CUDA_VISIBLE_DEVICES; None: it is left as it is."""

    rank: int
    ranks: int
    store: str
    request: BuildRequest[Checkpoint] = field(repr=False)
    select: SelectDevice[DeviceBackend]
    make_runner: MakeRunner
    device: str | None = None

    def make(self) -> DeviceDecoderRunner:
        """Join the other ranks, load the rank's part of the weights, and make the runner."""
        request = replace(self.request, checkpoint=shard(self.request.checkpoint, self.rank, self.ranks))
        model, backend = load_on_device(request, self.select)
        assert isinstance(model, Decoder), "a decoder's checkpoint"
        join_ranks(self.rank, self.ranks, self.store, backend.device)
        sum_over_ranks(model)
        runner = self.make_runner(request, model, backend)
        runner.graphs.agree = lambda fits: all_ranks_agree(fits, backend.device)
        dist.barrier()
        return runner


def join_ranks(rank: int, ranks: int, store: str, device: torch.device) -> None:
    """Connect the ranks of this machine. The file `store` does not exist before."""
    kind = "nccl" if device.type == "cuda" else "gloo"
    if kind == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device_id = device if kind == "nccl" else None
    dist.init_process_group(kind, f"file://{store}", rank=rank, world_size=ranks, device_id=device_id)


def _run_rank(recipe: RankRecipe, connection: Connection) -> None:
    if recipe.device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = recipe.device  # CUDA reads it at its first use
    torch.set_num_threads(recipe.request.plan.cpu.threads)
    follow(recipe.make(), connection)
    os._exit(0)  # a collective of ranks that have ended would be waited for


def lead(
    request: BuildRequest[Checkpoint],
    devices: Sequence[str | None],
    select: SelectDevice[DeviceBackend],
    make_runner: MakeRunner,
    on_end: Callable[[], None],
) -> DeviceDecoderRunner:
    """Start the other ranks, one for each of `devices` after the first, and return the runner of rank 0.

    `on_end` is called on a thread when another rank has ended.
    """
    context, ranks = multiprocessing.get_context("spawn"), len(devices)
    plan = request.plan.changed(pack_folder=None)  # packs are of whole weights
    request = replace(request, plan=plan)
    quiet = BuildRequest(request.checkpoint, plan)
    with TemporaryDirectory(prefix="armature-ranks-") as folder:
        recipe = RankRecipe(0, ranks, str(Path(folder) / "store"), quiet, select, make_runner)
        connections: list[Connection] = []
        processes = []
        for rank in range(1, ranks):
            ours, theirs = context.Pipe()
            other = replace(recipe, rank=rank, device=devices[rank])
            process = context.Process(target=_run_rank, args=(other, theirs), name=f"armature-rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)

        def watch() -> None:
            wait([process.sentinel for process in processes])
            on_end()

        threading.Thread(target=watch, name="armature-ranks", daemon=True).start()
        runner = replace(recipe, request=request).make()
    runner.lead(RankLeader(connections))
    return runner


def end_with_ranks() -> None:
    log.error("a GPU's process has ended, and the engine with it")
    logging.shutdown()
    os._exit(1)
