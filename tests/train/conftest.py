from collections.abc import Iterator

import pytest
import torch

from gem.train.distributed import Ranks, open_ranks
from tests.train.helpers import RankPool


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """A process group of this process alone."""
    with open_ranks(torch.device("cpu")) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Runs a function on two processes that can form a group."""
    pool = RankPool(2)
    yield pool
    pool.close()
