"""Sharded tables: the same numbers as plain ones, whatever the number of ranks."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
)

from gem.config import OptimConfig
from gem.train.distributed import open_ranks
from gem.train.loss import TaskLoss
from gem.train.optim import Optimizers
from gem.train.sharding import Tables, _OneBagPerId, shard
from tests.train.helpers import TinyModel, make_batch, make_schema, take_rows

OPTIM = OptimConfig(lr=0.01, embedding_lr=0.1, warmup_steps=0)


def _weights(model):
    state = model.state_dict()
    return {
        name: torch.cat([s.tensor.detach().clone() for s in value.local_shards()])
        if hasattr(value, "local_shards")
        else value.detach().clone()
        for name, value in state.items()
    }


def test_sharding_keeps_the_initial_weights():
    torch.manual_seed(0)
    model = TinyModel()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with open_ranks(torch.device("cpu")) as ranks:
        after = _weights(shard(model, OPTIM, ranks))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


@pytest.mark.parametrize("rows", [(6,), (6, 4)], ids=["1 table", "2 tables"])
def test_one_bag_per_id_is_the_unpooled_lookup(rows):
    torch.manual_seed(0)

    def make():
        torch.manual_seed(1)
        tables = Tables(
            [(n, 8, EmbeddingLocation.HOST, ComputeDevice.CPU) for n in rows],
            feature_table_map=[0, *range(len(rows))],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.1,
            pooling_mode=PoolingMode.NONE,
            device=torch.device("cpu"),
        )
        tables.init_embedding_weights_uniform(-1, 1)
        return tables

    plain, fast = make(), make()
    fast.forward = _OneBagPerId(fast)
    features = len(rows) + 1
    for step in range(3):
        lengths = torch.randint(0, 4, (features, 5))
        lengths[1] = 0
        ids = torch.cat(
            [
                torch.randint(0, rows[t], (int(n.sum()),))
                for t, n in zip(fast.feature_table_map, lengths, strict=True)
            ]
        )
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        a, b = plain(ids, offsets), fast(ids, offsets)
        torch.testing.assert_close(a, b)
        gradient = torch.randn_like(a)
        for tables, out in ((plain, a), (fast, b)):
            tables.set_learning_rate(0.1 / (step + 1))
            out.backward(gradient)
    for a, b in zip(plain.split_embedding_weights(), fast.split_embedding_weights(), strict=True):
        torch.testing.assert_close(a, b)
    for (a,), (b,) in zip(
        plain.split_optimizer_states(), fast.split_optimizer_states(), strict=True
    ):
        torch.testing.assert_close(a, b)
        assert a.any()


def _train(rank, world_size):
    """Three steps on the same global batches; every table and dense weight afterwards."""
    with open_ranks(torch.device("cpu")) as ranks:
        torch.manual_seed(0)
        model = shard(TinyModel(), OPTIM, ranks)
        optimizers = Optimizers(model, OPTIM, 10)
        loss = TaskLoss(make_schema().tasks, world_size, torch.device("cpu"))
        for step in range(3):
            whole = make_batch(16, seed=step)
            size = 16 // world_size
            own = take_rows(whole, rank * size, (rank + 1) * size)
            optimizers.set_step(step)
            total = ranks.sum(own.weights.sum(0))
            sums = loss.sums(model(own), own.labels, own.weights)
            loss(sums, total).backward()
            optimizers.clip()
            optimizers.step(torch.zeros(()))
        tables = {}
        for name, value in model.state_dict().items():
            if hasattr(value, "local_shards"):
                pieces = [
                    (s.metadata.shard_offsets[0], s.tensor.detach().clone())
                    for s in value.local_shards()
                ]
                gathered = [p for part in ranks.all_gather(pieces) for p in part]
                tables[name] = torch.cat([t for _, t in sorted(gathered, key=lambda p: p[0])])
            else:
                tables[name] = value.detach().clone()
        return {name: value.numpy() for name, value in tables.items()}


def test_two_ranks_learn_what_one_learns(two_ranks):
    one = _train(0, 1)
    for weights in two_ranks(_train, 2):
        assert weights.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(
                torch.from_numpy(weights[name]), torch.from_numpy(value), msg=name
            )


def test_the_schedule_reaches_the_tables(ranks):
    model = shard(TinyModel(), OPTIM, ranks)
    optimizers = Optimizers(model, OPTIM, total_steps=10)
    assert len(optimizers.tables) == 2
    assert optimizers.set_step(0) == OPTIM.lr
    assert [t.get_learning_rate() for t in optimizers.tables] == pytest.approx([0.1, 0.1])
    optimizers.set_step(9)
    last = OPTIM.embedding_lr * OPTIM.final_lr_fraction
    assert [t.get_learning_rate() for t in optimizers.tables] == pytest.approx([last, last])
