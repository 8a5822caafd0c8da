"""A small schema, batches in memory and a small model for the trainer's tests."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from gem.attention import JaggedLayout
from gem.data.batch import Batch, JaggedSequence
from gem.data.schema import DenseFeature, IdFeature, Schema, SequenceFeature, Task

ITEMS, KINDS, COUNTRIES, USERS = 50, 5, 7, 6


def make_schema() -> Schema:
    return Schema(
        user="user",
        time="time",
        tasks=[
            Task("click", probability="p"),
            Task("conversion", given="click", loss_weight=0.5),
        ],
        dense=[DenseFeature("price")],
        sparse=[IdFeature("country", COUNTRIES), IdFeature("item", ITEMS, table="item")],
        sequences=[
            SequenceFeature(
                "clicks", [IdFeature("item", ITEMS, table="item"), IdFeature("kind", KINDS)]
            )
        ],
    )


def make_batch(rows: int, seed: int, first_row: int = 0) -> Batch:
    """Rows whose click depends on whether the candidate lies in the history."""
    g = torch.Generator().manual_seed(seed)

    def ids(high: int, n: int) -> Tensor:
        return torch.randint(0, high, (n,), generator=g)

    lengths = ids(9, rows) * (torch.rand(rows, generator=g) > 0.2)
    events = int(lengths.sum())
    items, candidates = ids(ITEMS, events), ids(ITEMS, rows)
    owner = torch.repeat_interleave(torch.arange(rows), lengths)
    seen = torch.zeros(rows).index_add(0, owner, (items % 5 == candidates[owner] % 5).float())
    p = torch.sigmoid(-1.5 + 1.2 * seen)
    click = (torch.rand(rows, generator=g) < p).float()
    conversion = (torch.rand(rows, generator=g) < 0.4).float() * click
    return Batch(
        dense=torch.rand(rows, 1, generator=g),
        sparse=KeyedJaggedTensor(
            keys=["country", "item"],
            values=torch.cat([ids(COUNTRIES, rows), candidates]),
            lengths=torch.ones(2 * rows, dtype=torch.int32),
        ),
        sequences={
            "clicks": JaggedSequence(
                ids=KeyedJaggedTensor(
                    keys=["item", "kind"],
                    values=torch.cat([items, ids(KINDS, events)]),
                    lengths=torch.cat([lengths, lengths]).int(),
                ),
                age=torch.rand(events, generator=g) * 1000,
                dense=torch.zeros(events, 0),
                layout=JaggedLayout.from_lengths(lengths),
            )
        },
        labels=torch.stack([click, conversion], 1),
        weights=torch.stack([torch.ones(rows), click], 1),
        probabilities=torch.stack([p, torch.full((rows,), float("nan"))], 1),
        users=ids(USERS, rows),
        times=torch.arange(first_row, first_row + rows),
        rows=torch.stack(
            [torch.zeros(rows, dtype=torch.int64), torch.arange(first_row, first_row + rows)], 1
        ),
    )


def take_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start .. stop - 1 of a batch."""

    def cut(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        parts = [ids[key] for key in ids.keys()]
        return KeyedJaggedTensor(
            keys=ids.keys(),
            values=torch.cat([p.values()[p.offsets()[start] : p.offsets()[stop]] for p in parts]),
            lengths=torch.cat([p.lengths()[start:stop] for p in parts]),
        )

    sequence = batch.sequences["clicks"]
    events = slice(int(sequence.layout.offsets[start]), int(sequence.layout.offsets[stop]))
    names = ("dense", "labels", "weights", "probabilities", "users", "times", "rows")
    return Batch(
        sparse=cut(batch.sparse),
        sequences={
            "clicks": JaggedSequence(
                ids=cut(sequence.ids),
                age=sequence.age[events],
                dense=sequence.dense[events],
                layout=JaggedLayout.from_lengths(sequence.layout.lengths[start:stop]),
            )
        },
        **{name: getattr(batch, name)[start:stop] for name in names},
    )


class MemoryLoader:
    """Batches of a split held in memory, in an order that depends on the epoch."""

    def __init__(self, batches: list[Batch], split: str = "train") -> None:
        self.batches, self.split = batches, split
        self.steps, self.rows = len(batches), sum(b.batch_size for b in batches)
        self.skipped: dict[str, int] = {}
        self.epoch = self.step = 0

    def __iter__(self) -> Iterator[Batch]:
        order = torch.arange(self.steps)
        if self.split == "train":
            order = torch.randperm(self.steps, generator=torch.Generator().manual_seed(self.epoch))
        while self.step < self.steps:
            self.step += 1
            yield self.batches[order[self.step - 1]]
        self.epoch, self.step = self.epoch + 1, 0

    def reset(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


class TinyModel(nn.Module):
    """Mean-pooled history, candidate and features through an MLP."""

    def __init__(self, dim: int = 8, dropout: float = 0.0) -> None:
        super().__init__()

        def table(config: type, name: str, rows: int, features: list[str]) -> Any:
            return config(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=features)

        self.bags = EmbeddingBagCollection(
            [table(EmbeddingBagConfig, "country", COUNTRIES, ["country"])]
        )
        self.events = EmbeddingCollection(
            [
                table(EmbeddingConfig, "item", ITEMS, ["candidate", "item"]),
                table(EmbeddingConfig, "kind", KINDS, ["kind"]),
            ]
        )
        self.mlp = nn.Sequential(
            nn.Linear(3 * dim + 1, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2)
        )

    def forward(self, batch: Batch) -> Tensor:
        rows = batch.batch_size
        country = self.bags(batch.sparse.permute([0])).values()
        candidate, history = batch.sparse.permute([1]), batch.sequences["clicks"]
        found = self.events(
            KeyedJaggedTensor.concat(
                [
                    KeyedJaggedTensor(
                        ["candidate"], candidate.values(), lengths=candidate.lengths()
                    ),
                    history.ids,
                ]
            )
        )
        events = found["item"].values() + found["kind"].values()
        lengths = history.layout.lengths
        owner = torch.repeat_interleave(torch.arange(rows), lengths)
        owner = owner.to(events.device)
        mean = events.new_zeros(rows, events.shape[1]).index_add(0, owner, events)
        mean = mean / lengths.clamp(min=1).to(events.device)[:, None]
        match = mean * found["candidate"].values()
        x = torch.cat([batch.dense, country, mean, match], 1)
        return self.mlp(x).float()

    def flops(self, lengths: dict[str, Tensor], batch_size: int) -> dict[str, float]:
        linear = sum(2 * m.weight.numel() for m in self.mlp if isinstance(m, nn.Linear))
        return {"heads": float(linear * batch_size), "attention": float(lengths["clicks"].sum())}


class RankPool:
    """Processes that are ranks of a group; importing takes them seconds, so tests share them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("spawn")
        self.results = context.Queue()
        self.inboxes = [context.Queue() for _ in range(world_size)]
        self.processes = [
            context.Process(
                target=_serve, args=(rank, world_size, inbox, self.results), daemon=True
            )
            for rank, inbox in enumerate(self.inboxes)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(rank, *args)` on every rank; its results by rank."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for inbox in self.inboxes:
            inbox.put((function, port, args))
        results: dict[int, Any] = {}
        for _ in self.inboxes:
            rank, result, error = self.results.get(timeout=240)
            assert error is None, f"rank {rank}:\n{error}"
            results[rank] = result
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, world_size: int, inbox: Any, results: Any) -> None:
    torch.set_num_threads(1)
    while True:
        function, port, args = inbox.get()
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        try:
            results.put((rank, function(rank, *args), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
