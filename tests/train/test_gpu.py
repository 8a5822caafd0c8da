"""The same loop on a GPU."""

import pytest
import torch

from gem.train.distributed import open_ranks
from gem.train.guard import NonFiniteError
from gem.train.progress import read_rows
from tests.train.helpers import make_batch
from tests.train.test_guard import poisoned
from tests.train.test_resume import interrupt_after, make_trainer

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu():
    with open_ranks(torch.device("cuda", 0)) as ranks:
        yield ranks


def test_it_learns_on_a_gpu_and_resumes(tmp_path, gpu):
    first = make_trainer(tmp_path, gpu, dropout=0.0, epochs=15, log_every=6)
    interrupt_after(first, 40)
    first.fit()
    second = make_trainer(tmp_path, gpu, dropout=0.0, epochs=15, log_every=6)
    second.load(first.checkpoints.path("last"))
    second.fit()
    rows = [r for r in read_rows(tmp_path / "metrics.jsonl") if r["split"] == "train"]
    assert [row["step"] for row in rows] == list(range(6, 91, 6))
    assert rows[-1]["ne"]["click"] < 0.5 < rows[0]["ne"]["click"]


def test_a_bad_step_on_a_gpu_is_named_and_changes_nothing(tmp_path, gpu):
    trainer = make_trainer(tmp_path, gpu, dropout=0.0)
    trainer.step(make_batch(8, 0))
    before = [p.detach().clone() for p in trainer.optimizers.dense]
    before += [w.clone() for t in trainer.optimizers.tables for w in t.split_embedding_weights()]
    trainer.step(poisoned(make_batch(8, 1, first_row=40), 3))
    after = [p.detach() for p in trainer.optimizers.dense]
    after += [w for t in trainer.optimizers.tables for w in t.split_embedding_weights()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(NonFiniteError, match="step 2: the loss of .* file 0 row 43"):
        trainer.step(make_batch(8, 2))
