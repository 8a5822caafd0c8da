"""Stops or skips a step whose loss or gradient is not finite, and says where it came from."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from gem.data.batch import Batch

log = logging.getLogger(__name__)

_NAMED = 5


class NonFiniteError(ValueError):
    """A loss or gradient became inf or NaN."""


@dataclass
class _Step:
    number: int
    bad: Tensor
    ready: torch.cuda.Event | None
    logits: Tensor
    norms: dict[str, Tensor]
    tables_bad: Tensor
    rows: Tensor


class Guard:
    """Watches every step; what it decides happens on the device, the host reads it a step late.

    A bad step updates nothing: the look-ups' gradients become 0 before the fused optimizer sees
    them, and the dense optimizer is given `bad`.

    Args:
        mode: `error` raises, `skip` logs and counts.
        tasks: names, for messages.
        device: of the model.

    Attributes:
        skipped: steps that were skipped.
    """

    def __init__(self, mode: str, tasks: list[str], device: torch.device) -> None:
        self.mode = mode
        self.tasks = tasks
        self.device = device
        self.skipped = 0
        self._loss_ok = torch.ones((), dtype=torch.bool, device=device)
        self._tables_bad = torch.zeros((), device=device)
        self._pending: _Step | None = None

    def on_loss(self, bad_losses: Tensor) -> None:
        """Takes the number of losses that are not finite over all ranks, before `backward`."""
        self._loss_ok = bad_losses == 0
        self._tables_bad = torch.zeros((), device=self.device)

    def on_table_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of a look-up's output, or zeros if it or the loss is not finite."""
        finite = gradient.sum().isfinite()
        self._tables_bad = self._tables_bad + (~finite).float()
        return torch.where(finite & self._loss_ok, gradient, gradient.new_zeros(()))

    def on_gradients(
        self, step: int, logits: Tensor, norm: Tensor, norms: dict[str, Tensor], batch: Batch
    ) -> Tensor:
        """Judges a step after `backward`.

        Args:
            step: its number, for the message.
            logits: [B, tasks].
            norm: of all dense gradients. norms: of each parameter's.
            batch: the step's; only `rows` is kept.

        Returns:
            float32 0/1 scalar on the device: 1 if the dense update must be skipped.
        """
        bad = (~(norm.isfinite() & self._loss_ok)).float()
        flag, ready = torch.maximum(bad, (self._tables_bad > 0).float()), None
        if self.device.type == "cuda":
            flag = torch.empty((), pin_memory=True).copy_(flag, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        logits = logits.detach()
        self._pending = _Step(step, flag, ready, logits, norms, self._tables_bad, batch.rows)
        return bad

    def check(self) -> None:
        """Reads the flag of the step before.

        Raises:
            NonFiniteError: it was bad and the mode is `error`.
        """
        step, self._pending = self._pending, None
        if step is None:
            return
        if step.ready is not None:
            step.ready.synchronize()
        if not step.bad:
            return
        message = self._describe(step)
        if self.mode == "error":
            raise NonFiniteError(f"{message}; trainer.on_nonfinite=skip leaves such steps out")
        self.skipped += 1
        log.warning("skipped: %s", message)

    def _describe(self, step: _Step) -> str:
        finite = step.logits.isfinite().cpu()
        rows = step.rows
        if not finite.all():
            names = [task for task, ok in zip(self.tasks, finite.all(0), strict=True) if not ok]
            what, rows = f"the loss of {_list(names)}", rows[~finite.all(1)]
        elif not self._loss_ok:
            what = "the loss of another rank"
        else:
            names = [name for name, norm in step.norms.items() if not norm.isfinite()]
            if step.tables_bad > 0:
                names.append("embedding tables")
            what = f"the gradient of {_list(names) if names else 'all parameters together'}"
        return f"step {step.number}: {what} is not finite; rows of its batch: {_spans(rows)}"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _spans(rows: Tensor) -> str:
    """Rows as `file 0: 3-9, 12`, the first few spans of consecutive ones."""
    if not len(rows):
        return "none"
    files, numbers = rows[:, 0], rows[:, 1]
    order = torch.argsort(files * (numbers.max() + 1) + numbers, stable=True)
    files, numbers = files[order].tolist(), numbers[order].tolist()
    spans: list[list[int]] = []
    for file, number in zip(files, numbers, strict=True):
        if spans and spans[-1][0] == file and spans[-1][2] == number - 1:
            spans[-1][2] = number
        else:
            spans.append([file, number, number])
    parts = [
        f"file {file} row {first}" if first == last else f"file {file} rows {first}-{last}"
        for file, first, last in spans[:_NAMED]
    ]
    return ", ".join(parts) + (f" and {len(spans) - _NAMED} more" if len(spans) > _NAMED else "")
