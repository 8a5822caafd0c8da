"""Ends a run between two steps when it is asked to stop."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from gem.train.distributed import Ranks


class StopSignal:
    """SIGINT or SIGTERM to any rank stops all of them after the same step.

    Attributes:
        number: the signal that came, or SIGINT.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.number = signal.SIGINT
        self._received = False
        self._previous: dict[int, Callable[..., Any] | int | None] = {}
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """True on every rank at the same step; with several ranks a step after the signal."""
        if self.ranks.world_size == 1:
            return self._received
        stop = False
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            stop = bool(flag)
        flag = torch.tensor(int(self._received))
        self._pending = dist.all_reduce(flag, group=self.ranks.host, async_op=True), flag
        return stop

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received, self.number = True, number
