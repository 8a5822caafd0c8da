"""Processes: one by default, as many as torchrun starts; NCCL for GPUs, gloo beside it."""

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_STAMP = "GEM_RUN_STAMP"
_stores: list[dist.Store] = []

# DistributedDataParallel's note on parameters with a dimension of size 1, which costs nothing.
warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
# torchrec's first look-up sets off a notice to users of torch.fx.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Ranks:
    """This process among all.

    Attributes:
        rank, world_size: in the whole run.
        device: where this process computes.
        host: a gloo group for values that live on the host.
    """

    rank: int
    world_size: int
    device: torch.device
    host: dist.ProcessGroup

    @property
    def first(self) -> bool:
        """True in the one process that prints and writes."""
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self.host)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The source rank's value (picklable), on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.host)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value (picklable), on every rank."""
        if self.world_size == 1:
            return [value]
        box: list[Any] = [None] * self.world_size
        dist.all_gather_object(box, value, group=self.host)
        return box

    def gather(self, value: Tensor) -> list[Tensor] | None:
        """Every rank's host tensor [rows of that rank, ...], on the first rank; None elsewhere."""
        if self.world_size == 1:
            return [value]
        value = value.contiguous()
        rows = self.all_gather(value.shape[0])
        # gloo gathers equal shapes only.
        sent = value.new_zeros(max(rows), *value.shape[1:])
        sent[: value.shape[0]] = value
        boxes = [torch.empty_like(sent) for _ in rows] if self.first else None
        dist.gather(sent, boxes, dst=0, group=self.host)
        return [box[:n] for box, n in zip(boxes, rows, strict=True)] if boxes else None

    def sum(self, value: Tensor) -> Tensor:
        """The elementwise sum over ranks of a tensor on `device`, in place."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda`, as this process's device.

    Raises:
        ValueError: `cuda` without a GPU for this process.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda, but PyTorch sees no GPU; give cpu or auto")
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= count:
        raise ValueError(
            f"process {local} of this host has no GPU, there are {count}; start torchrun with "
            f"--nproc-per-node {count}"
        )
    return torch.device("cuda", local)


@contextmanager
def open_ranks(device: torch.device) -> Iterator[Ranks]:
    """Joins the process group that torchrun describes, or a group of one; leaves it at the end."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore() if world_size == 1 else None,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=30),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        world = dist.group.WORLD
        host = dist.new_group(backend="gloo") if device.type == "cuda" else world
        yield Ranks(rank, world_size, device, host)
    finally:
        dist.destroy_process_group()


def run_stamp() -> str:
    """Date and time that name a run's directory; the same on every rank of a torchrun.

    The first rank's clock counts: the ranks meet at torchrun's store before any of them makes a
    directory.
    """
    if _STAMP not in os.environ:
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            store, rank, _ = next(dist.rendezvous("env://"))
            _stores.append(store)  # where this rank serves it, slower ranks still read it
            store = dist.PrefixStore("gem_run_stamp", store)
            if rank == 0:
                store.set("stamp", stamp)
            stamp = store.get("stamp").decode()
        os.environ[_STAMP] = stamp
    return os.environ[_STAMP]
