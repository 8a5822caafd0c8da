"""One step's rows as tensors: the only thing that passes from data to model and trainer."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from gem.attention import JaggedLayout
from gem.data.jagged import pin_memory, to_device


@dataclass(frozen=True)
class JaggedSequence:
    """The events of one sequence feature, packed: sample after sample, oldest event first.

    Attributes:
        ids: keys are the fields' names; every key has the same lengths [B], `events` values.
        age: [events] float32, seconds between the event and the impression, >= 0.
        dense: [events, dense fields] float32; zero columns when there are none.
        layout: where each sample's events lie; lengths on the host, offsets on the device.
    """

    ids: KeyedJaggedTensor
    age: Tensor
    dense: Tensor
    layout: JaggedLayout

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return replace(
            self,
            ids=to_device(self.ids, device, non_blocking),
            age=self.age.to(device, non_blocking=non_blocking),
            dense=self.dense.to(device, non_blocking=non_blocking),
            layout=self.layout.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Self:
        return replace(
            self,
            ids=pin_memory(self.ids),
            age=self.age.pin_memory(),
            dense=self.dense.pin_memory(),
            layout=self.layout.pin_memory(),
        )


@dataclass(frozen=True)
class Batch:
    """B impressions.

    Attributes:
        dense: [B, dense features] float32.
        sparse: keys are the sparse features' names; ids are rows of their tables.
        sequences: by sequence name.
        labels: [B, tasks] float32; 0 where the task's weight is 0.
        weights: [B, tasks] float32; 0 where a label is not given (a conversion without a click).
        probabilities: [B, tasks] float32 true probabilities, NaN where unknown; None if no task
            names a column. On the host.
        users: [B] int64, the user's id (a string is hashed). On the host.
        times: [B] int64, the impression's time in seconds. On the host.
        rows: [B, 2] int64: file index and row within the file. On the host; names a row in errors.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    sequences: dict[str, JaggedSequence]
    labels: Tensor
    weights: Tensor
    probabilities: Tensor | None
    users: Tensor
    times: Tensor
    rows: Tensor

    @property
    def batch_size(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Moves what the model reads; what only metrics and errors read stays on the host."""
        return replace(
            self,
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=to_device(self.sparse, device, non_blocking),
            sequences={
                name: sequence.to(device, non_blocking) for name, sequence in self.sequences.items()
            },
            labels=self.labels.to(device, non_blocking=non_blocking),
            weights=self.weights.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Self:
        return replace(
            self,
            dense=self.dense.pin_memory(),
            sparse=pin_memory(self.sparse),
            sequences={name: sequence.pin_memory() for name, sequence in self.sequences.items()},
            labels=self.labels.pin_memory(),
            weights=self.weights.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the device memory alive for work queued on `stream`."""
        tensors = [self.dense, self.labels, self.weights]
        for sequence in self.sequences.values():
            tensors += [sequence.age, sequence.dense, sequence.layout.offsets]
            sequence.ids.record_stream(stream)
        for tensor in tensors:
            tensor.record_stream(stream)
        self.sparse.record_stream(stream)
