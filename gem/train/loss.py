"""The training loss: cross-entropy per task over the rows where its label is given."""

import torch
from torch import Tensor
from torch.nn import functional as F

from gem.data.schema import Task


class TaskLoss:
    """Sum over tasks of loss_weight times the mean cross-entropy of the task's rows.

    The mean runs over the rows of all ranks. Gradients are averaged over ranks afterwards, so that
    a rank's share is its own sum times the number of ranks over the global weight.

    Args:
        tasks: the schema's.
        world_size: number of ranks.
        device: of the logits.
    """

    def __init__(self, tasks: list[Task], world_size: int, device: torch.device) -> None:
        self.names = [task.name for task in tasks]
        self.task_weights = torch.tensor([task.loss_weight for task in tasks], device=device)
        self.world_size = world_size

    def sums(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Weighted cross-entropy of this rank's rows, all [B, tasks] float32 -> [tasks]."""
        losses = F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="none")
        return losses.sum(0)

    def __call__(self, sums: Tensor, total_weights: Tensor) -> Tensor:
        """This rank's loss from its sums and the weights summed over all ranks, each [tasks].

        A task without a row in the whole batch adds 0.
        """
        means = sums / total_weights.clamp(min=torch.finfo(sums.dtype).tiny)
        return (means * self.task_weights).sum() * self.world_size
