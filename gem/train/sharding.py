"""Embedding tables over the ranks, by torchrec; their number changes no initial weight.

Tables are updated in the backward pass by fbgemm's fused row-wise Adagrad.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError

from gem.config import OptimConfig
from gem.train.distributed import Ranks

Tables = SplitTableBatchedEmbeddingBagsCodegen

# Of a GPU's memory, kept free for the dense part and activations when tables are placed.
_RESERVED = 0.3


def shard(model: nn.Module, optim: OptimConfig, ranks: Ranks) -> DistributedModelParallel:
    """Spreads the model's embedding tables over the ranks and copies the rest to each.

    The model is made on the CPU; its initial weights are kept bit for bit, whatever the number of
    ranks. Table gradients, like the dense ones, are averaged over ranks.

    Raises:
        ValueError: the tables do not fit the devices.
    """
    configs = []
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection):
            configs += module.embedding_bag_configs()
        elif isinstance(module, EmbeddingCollection):
            configs += module.embedding_configs()
    fused = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": optim.embedding_lr,
        "eps": optim.embedding_eps,
    }
    sharders = [EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)]
    # One rank has nothing to split, and row-wise would still bucket its ids.
    kinds = ["table_wise"] if ranks.world_size == 1 else ["table_wise", "row_wise"]
    constraints = {
        config.name: ParameterConstraints(sharding_types=kinds, compute_kernels=["fused"])
        for config in configs
    }
    initial = {name: weight.detach().clone() for name, weight in _table_weights(model)}
    with _quiet():
        planner = EmbeddingShardingPlanner(
            topology=_topology(ranks),
            constraints=constraints,
            storage_reservation=FixedPercentageStorageReservation(_RESERVED),
        )
        try:
            plan = planner.collective_plan(model, sharders, torch.distributed.group.WORLD)
        except PlannerError as error:
            cause = str(error).strip().splitlines()[0]
            raise ValueError(f"the embedding tables cannot be placed: {cause}") from error
        wrapper = _OneRank() if ranks.world_size == 1 else DefaultDataParallelWrapper()
        sharded = DistributedModelParallel(
            model, device=ranks.device, plan=plan, sharders=sharders, data_parallel_wrapper=wrapper
        )
    _restore(sharded, initial)
    if ranks.device.type == "cpu":
        for module in list(lookups(sharded)):
            if module.pooling_mode == PoolingMode.NONE and len(set(module.dims)) == 1:
                module.forward = _OneBagPerId(module)
    return sharded


def lookups(model: nn.Module) -> Iterator[Tables]:
    """The fbgemm modules that hold this rank's tables."""
    for module in model.modules():
        # A sharded collection keeps its look-ups in a list, out of `modules()`.
        for lookup in getattr(module, "_lookups", ()):
            yield from (part for part in lookup.modules() if isinstance(part, Tables))


def on_table_gradient(model: nn.Module, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Calls `hook` with the gradient of each look-up's output before its tables are updated."""

    def watch(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(hook)

    for module in lookups(model):
        module.register_forward_hook(watch)


class _OneRank(DataParallelWrapper):
    """No gradients to average: DistributedDataParallel would only cost time."""

    def wrap(self, dmp: DistributedModelParallel, env, device: torch.device) -> None:
        dmp._dmp_wrapped_module.to(device)


class _OneBagPerId:
    """Runs an unpooled CPU look-up as a pooled one with one id per bag: the same numbers.

    fbgemm's unpooled CPU backward takes about four times as long as its pooled one (84 ms against
    20 ms for 60,000 ids of width 32 on one core), and dominated the training step.

    Args:
        tables: an unpooled look-up over tables of one width.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        rows = [spec[0] for spec in tables.embedding_specs]
        width = tables.embedding_specs[0][1]
        starts = torch.tensor([0, *rows]).cumsum(0)[:-1]
        self.start = starts[torch.tensor(tables.feature_table_map)]
        self.pooled = Tables(
            [(sum(rows), width, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            eps=tables.optimizer_args.eps,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=torch.device("cpu"),
        )
        # One storage for both: state dicts go on reading the tables' own.
        for name in ("weights_host", "momentum1_host"):
            setattr(self.pooled, name, getattr(tables, name))
        self.pooled.learning_rate_tensor = tables.learning_rate_tensor

    def __call__(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """indices [ids], offsets [features * batch + 1] -> [ids, width]."""
        batch = (offsets.numel() - 1) // len(self.start)
        counts = offsets[::batch].diff()
        linear = indices + self.start.repeat_interleave(counts, output_size=indices.numel())
        return self.pooled(linear, torch.arange(indices.numel() + 1))


def _table_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            for name, weight in module.named_parameters():
                yield f"{path}.{name}" if path else name, weight


def _restore(model: DistributedModelParallel, initial: dict[str, Tensor]) -> None:
    """Copies each table's initial rows and columns into this rank's shards."""
    state = model.state_dict()
    for name, weight in initial.items():
        for piece in state[name].local_shards():
            (row, column), (rows, columns) = piece.metadata.shard_offsets, piece.tensor.shape
            piece.tensor.copy_(weight[row : row + rows, column : column + columns])


def _topology(ranks: Ranks) -> Topology:
    sizes = partial(
        Topology,
        world_size=ranks.world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)),
        compute_device=ranks.device.type,
    )
    if ranks.device.type == "cuda":
        return sizes(hbm_cap=torch.cuda.get_device_properties(ranks.device).total_memory)
    return sizes()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides torchrec's advice to its own developers."""
    logger = logging.getLogger("torchrec")
    level, root = logger.level, logging.getLogger().level
    logger.setLevel(logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
        logging.getLogger().setLevel(root)
