"""Metrics of a whole split, and predictions written row by row."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gem.data.batch import Batch
from gem.data.loader import Loader
from gem.data.schema import Task
from gem.train.distributed import Ranks
from gem.train.metrics import auc, cross_entropy, logit, normalized_entropy, task_metrics


def scored(
    model: nn.Module, loader: Loader, ranks: Ranks, precision: torch.dtype, limit: int | None = None
) -> Iterator[tuple[Batch, Tensor]]:
    """This rank's batches of a split from its start, with logits [B, tasks] on the host.

    Every rank takes part in every step, since look-ups cross ranks; a rank whose rows have ended
    repeats a batch and drops its logits. Empty batches are not yielded.
    """
    loader.reset()
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(False), torch.no_grad():
            for batch, real in filled(loader, ranks, limit):
                with autocast(ranks.device, precision):
                    logits = model(batch.to(ranks.device, non_blocking=True))
                if real:
                    yield batch, logits.float().cpu()
    finally:
        model.train(was_training)


def filled(loader: Loader, ranks: Ranks, limit: int | None = None) -> Iterator[tuple[Batch, bool]]:
    """A loader's batches; for an empty one a stand-in and False, so that ranks stay in step.

    torchrec's look-ups fail on a batch without rows, and every rank must join them. A single
    process just leaves empty batches out.
    """
    last: Batch | None = None
    agreed = False
    for number, batch in enumerate(loader):
        if limit is not None and number >= limit:
            return
        if batch.batch_size:
            last = batch
        if ranks.world_size == 1:
            if batch.batch_size:
                yield batch, True
            continue
        if not agreed:
            # This rank's first batch may be the empty one: another rank lends its own.
            seen = ranks.all_gather(last is not None)
            if not any(seen):
                continue
            if not all(seen):
                lent = ranks.broadcast(last, seen.index(True))
                last = last if last is not None else lent
            agreed = True
        yield (batch, True) if batch.batch_size else (last, False)


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """Autocast to bfloat16, or nothing for float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == torch.bfloat16)


def evaluate(
    model: nn.Module,
    loader: Loader,
    tasks: list[Task],
    ranks: Ranks,
    precision: torch.dtype,
    limit: int | None = None,
) -> dict[str, dict[str, Any]] | None:
    """Metrics of each task over the rows of all ranks, on the first rank; None on the others.

    The scores of the evaluated rows are gathered on the first rank (28 bytes per row and task), so
    that AUC and GAUC are exact and a user's rows count together wherever they were read.

    Returns:
        By task: the fields of `TaskMetrics`, `loss` (mean cross-entropy) and, where the data has
        true probabilities, `oracle_ne` and `oracle_auc`. NaN where undefined.
    """
    columns: dict[str, list[Tensor]] = {}
    for batch, logits in scored(model, loader, ranks, precision, limit):
        values = {
            "logits": logits,
            "labels": batch.labels,
            "weights": batch.weights,
            "users": batch.users,
        }
        if batch.probabilities is not None:
            values["probabilities"] = batch.probabilities
        for name, value in values.items():
            columns.setdefault(name, []).append(value.cpu())
    gathered = _gather(columns, len(tasks), ranks)
    if gathered is None:
        return None
    return {task.name: _of_task(i, task, gathered) for i, task in enumerate(tasks)}


def _gather(
    columns: dict[str, list[Tensor]], tasks: int, ranks: Ranks
) -> dict[str, np.ndarray] | None:
    own = {name: torch.cat(parts) for name, parts in columns.items()}
    # A rank without a row does not know which columns there are.
    known = {name: value.dtype for name, value in own.items()}
    for other in ranks.all_gather(known):
        known |= other
    gathered = {}
    for name in sorted(known):
        shape = (0,) if name == "users" else (0, tasks)
        parts = ranks.gather(own.get(name, torch.zeros(shape, dtype=known[name])))
        if parts is not None:
            gathered[name] = torch.cat(parts).numpy()
    return gathered if ranks.first else None


def _of_task(index: int, task: Task, columns: dict[str, np.ndarray]) -> dict[str, Any]:
    empty = np.zeros((0, index + 1), np.float32)
    z, y, w = (columns.get(n, empty)[:, index] for n in ("logits", "labels", "weights"))
    users = columns.get("users", np.zeros(0, np.int64))
    counted = w > 0
    z, y, w, users = z[counted], y[counted], w[counted], users[counted]
    result = asdict(task_metrics(z, y, w, users))
    total = float(w.sum(dtype=np.float64))
    losses = cross_entropy(z, y) * w
    result["loss"] = float(losses.sum() / total) if total else float("nan")
    if task.probability is not None and "probabilities" in columns:
        truth = logit(columns["probabilities"][:, index][counted])
        result["oracle_ne"] = normalized_entropy(truth, y, w)
        result["oracle_auc"] = auc(truth, y, w)
    return result


def predict(
    model: nn.Module,
    loader: Loader,
    tasks: list[Task],
    ranks: Ranks,
    precision: torch.dtype,
    directory: Path,
) -> int:
    """Writes each row's scores to parquet, a file per rank, as they are made.

    Columns: `file` and `row` (where the row was read), `user`, `time`, and for each task its
    probability `<task>` and `<task>_label`, null where the label is not given.

    Returns:
        Rows written by all ranks.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [("file", pa.int64()), ("row", pa.int64()), ("user", pa.int64()), ("time", pa.int64())]
    for task in tasks:
        fields += [(task.name, pa.float32()), (f"{task.name}_label", pa.float32())]
    schema = pa.schema(fields)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"part-{ranks.rank:05d}-of-{ranks.world_size:05d}.parquet"
    written = 0
    with pq.ParquetWriter(path, schema) as writer:
        for batch, logits in scored(model, loader, ranks, precision):
            columns = [batch.rows[:, 0], batch.rows[:, 1], batch.users, batch.times]
            arrays = [pa.array(column.numpy()) for column in columns]
            scores, labels = logits.sigmoid(), batch.labels.cpu()
            missing = (batch.weights.cpu() == 0).numpy()
            for i in range(len(tasks)):
                arrays.append(pa.array(scores[:, i].numpy()))
                arrays.append(pa.array(labels[:, i].numpy(), mask=missing[:, i]))
            writer.write_table(pa.table(arrays, schema=schema))
            written += batch.batch_size
    return sum(ranks.all_gather(written))
