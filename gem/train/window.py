"""What the steps since the last report add up to; also the counters behind its rates."""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gem.data.batch import Batch
from gem.train.distributed import Ranks
from gem.train.flops import peak_flops, step_flops
from gem.train.metrics import NAN, auc, normalized_entropy

_KEPT = ("logits", "labels", "weights", "losses", "norms")


class Window:
    """Collects steps on the device; copies to the host only when it reports.

    Memory: three [rows, tasks] float32 tensors over the steps of one interval.

    Args:
        tasks: names.
        ranks: this process among all.
        model: asked for its FLOPs, if it counts them.
    """

    def __init__(self, tasks: list[str], ranks: Ranks, model: nn.Module) -> None:
        self.tasks = tasks
        self.ranks = ranks
        self.model = model
        self.peak = peak_flops(ranks.device)
        self.clear()

    def clear(self) -> None:
        """Forgets everything and starts the clock."""
        self._kept: dict[str, list[Tensor]] = {name: [] for name in _KEPT}
        self._lengths: dict[str, list[Tensor]] = {}
        self._examples = self._tokens = 0
        self._waited = 0.0
        self._start = time.perf_counter()

    def restart(self) -> None:
        """Starts the clock now."""
        self._start = time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Takes time that was not training (validation, saving) out of the rates."""
        self._start += seconds

    def wait(self, seconds: float) -> None:
        """Adds time spent waiting for a batch."""
        self._waited += seconds

    def add(
        self, batch: Batch, logits: Tensor, weights: Tensor, loss: Tensor, norm: Tensor
    ) -> None:
        """Adds a step: logits and weights [B, tasks], this rank's loss, the gradient norm."""
        values = (logits.detach(), batch.labels, weights, loss.detach()[None], norm.detach()[None])
        for name, value in zip(_KEPT, values, strict=True):
            self._kept[name].append(value)
        self._examples += batch.batch_size
        for name, sequence in batch.sequences.items():
            self._tokens += sequence.layout.rows
            self._lengths.setdefault(name, []).append(sequence.layout.lengths)

    @property
    def steps(self) -> int:
        return len(self._kept["losses"])

    def report(self) -> dict[str, Any] | None:
        """Metrics and rates of the window over all ranks, on the first rank; then clears it.

        Every rank must call it. NaN where a metric is undefined.
        """
        kept = {name: torch.cat(values).cpu() for name, values in self._kept.items()}
        seconds = time.perf_counter() - self._start
        flops = self._flops()
        logits, labels, weights = (
            self.ranks.gather(kept[name]) for name in ("logits", "labels", "weights")
        )
        own = [kept["losses"].double().mean().item(), self._examples, self._tokens, flops or 0.0]
        shares = np.array(self.ranks.all_gather([*own, self._waited / seconds]))
        self.clear()
        if logits is None:
            return None
        z, y, w = (torch.cat(parts).double().numpy() for parts in (logits, labels, weights))
        tflops = shares[:, 3].sum() / seconds / 1e12 if flops is not None else NAN
        peak = self.peak * self.ranks.world_size / 1e12 if self.peak else NAN
        return {
            "loss": float(shares[:, 0].mean()),
            "ne": {t: normalized_entropy(z[:, i], y[:, i], w[:, i]) for i, t in self._numbered()},
            "auc": {t: auc(z[:, i], y[:, i], w[:, i]) for i, t in self._numbered()},
            "grad_norm": kept["norms"].double().mean().item(),
            "examples_per_s": float(shares[:, 1].sum() / seconds),
            "tokens_per_s": float(shares[:, 2].sum() / seconds),
            "tflops": float(tflops),
            "mfu": float(tflops / peak),
            "memory_gib": memory_gib(self.ranks.device),
            "data_wait": float(shares[:, 4].mean()),
        }

    def state_dict(self) -> dict[str, Any]:
        """The steps collected so far, on the host; rates are not part of it."""
        kept = {name: torch.cat(v).cpu() for name, v in self._kept.items() if v}
        return {"kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; rates count from now."""
        self.clear()
        for name, value in state["kept"].items():
            self._kept[name] = [value.to(self.ranks.device)]

    def _numbered(self) -> enumerate:
        return enumerate(self.tasks)

    def _flops(self) -> float | None:
        lengths = {name: torch.cat(parts) for name, parts in self._lengths.items()}
        return step_flops(self.model, lengths, self._examples)


def memory_gib(device: torch.device) -> float:
    """Peak memory: of the GPU's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
