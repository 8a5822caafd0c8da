"""The same few batches, again and again: a model that cannot learn them by heart has a bug."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from gem.data.batch import Batch
from gem.data.loader import Loader


class Repeated:
    """A training loader's first batches, as many steps per epoch as the loader has.

    Args:
        loader: read once.
        batches: how many to keep in memory.
    """

    def __init__(self, loader: Loader, batches: int) -> None:
        self.split, self.steps = loader.split, loader.steps
        self.skipped = loader.skipped
        self.batches = [batch for batch in islice(loader, batches) if batch.batch_size]
        loader.reset()
        self.rows = sum(batch.batch_size for batch in self.batches)
        self.epoch = self.step = 0
        if not self.batches:
            raise ValueError("trainer.overfit_batches: the first batches of the data have no rows")

    def __iter__(self) -> Iterator[Batch]:
        while self.step < self.steps:
            self.step += 1
            yield self.batches[(self.step - 1) % len(self.batches)]
        self.epoch, self.step = self.epoch + 1, 0

    def reset(self) -> None:
        """Goes back to the start of the epoch."""
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]
