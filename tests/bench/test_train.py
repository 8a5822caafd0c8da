"""Training steps by backend on a CPU: figures, backends that are wrong, the deadline."""

import dataclasses
import json
import types

import pytest
import torch
from hydra import compose, initialize_config_dir

from bench import train, train_data, train_group, train_rounds
from bench.first_step import is_right, wake
from bench.lost import DeviceLost
from bench.rivals import RIVALS
from bench.rivals.padded import Kernel, Padded
from bench.step import CONF, make_trainer
from gem.attention import backends
from gem.attention.backends import torch_
from gem.train.app import to_config
from gem.train.cli import register
from gem.train.distributed import open_ranks
from tests.bench.test_rivals import cpu_backward, cpu_forward

SMALL = [
    "--models=gem_small",
    "--density=0.3",
    "--batch-size=8",
    "--batches=2",
    "--max-length=16",
    "--warmup=1",
    "--steps=4",
    "--device=cpu",
    "data.dataset.num_users=40",
    "data.dataset.num_items=100",
    "model.d_model=16",
    "model.embedding_dim=8",
    "model.window=4",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return f"paths.cache={tmp_path_factory.mktemp('cache')}"


def without_lse(call, dout, dlse, *rest):
    return torch_.backward(call, dout, None, *rest)


def narrow(call, q, k, v):
    call = dataclasses.replace(call, left=call.left and call.left - 1)
    return torch_.forward(call, q, k, v)


@pytest.fixture
def more_backends(monkeypatch):
    """Right and wrong ones; the names that a run registers are gone afterwards."""

    def like_torch(**other):
        plain = {name: getattr(torch_, name) for name in ("unsupported", "forward", "backward")}
        return types.SimpleNamespace(**plain | other)

    made = {
        "sdpa_cudnn": Padded(Kernel("cpu", cpu_forward, cpu_backward, expands=True)),
        "tlx": like_torch(backward=without_lse),
        "triton": like_torch(forward=narrow),
    }
    load = backends._load
    monkeypatch.setattr(backends, "BY_NAME", dict(backends.BY_NAME))
    monkeypatch.setattr(backends, "_load", lambda name: made.get(name) or load(name))


def test_backends_that_are_right_get_figures_and_others_reasons(
    cache, tmp_path, capsys, more_backends
):
    out = tmp_path / "train.json"
    names = ["torch", "sdpa_cudnn", "tlx", "triton", "fa4_expanded"]
    assert train.main([*SMALL, cache, "--out", str(out), "--backends", *names]) == 0
    written = json.loads(out.read_text())
    assert written["ceilings"]["matmul_tflops"] > 0 and written["machine"]["torch"]
    found = {entry["backend"]: entry for entry in written["entries"]}
    assert list(found) == names
    for name in ("torch", "sdpa_cudnn"):
        entry = found[name]
        assert is_right(entry["errors"]) and entry["mean_length"]["browse"] > 1
        assert entry["examples_per_s"] == pytest.approx(8e3 / entry["ms_per_step"])
        assert 0 < entry["mfu"] < 1 and 0 < entry["attention_share"] < 1
        assert len(entry["steps_ms"]) in (1, 4) and entry["peak_gib"] is None
        assert {"attention", "embedding tables", "optimizer"} < set(entry["parts_ms"])
    assert found["tlx"]["errors"]["gradient_ratio"] > 2 and "ms_per_step" not in found["tlx"]
    assert "further from float32" in found["tlx"]["broken"]
    assert "broken" in found["triton"]
    assert "needs a CUDA device" in found["fa4_expanded"]["skipped"]
    printed = capsys.readouterr().out
    assert "tlx: BROKEN" in printed and "gem_small density 0.3 torch: " in printed
    assert printed.index("tlx: BROKEN") < printed.index("torch: ")  # which waits for its turns


def test_memory_is_what_is_held_and_added_and_slow_ones_take_fewer_steps(
    cache, tmp_path, monkeypatch, more_backends
):
    allocated, added = iter([10.0, 13.0, 13.0, 18.0]), iter([1.0, 2.0, 4.0, 0.5])
    monkeypatch.setattr(train_group, "allocated_gib", lambda device: next(allocated))
    call_with_peak = train_rounds.with_peak

    def with_peak(call, device):
        result, _, launch = call_with_peak(call, device)
        return result, next(added), launch

    def warm_up(self, batches, seconds):
        assert len(list(batches)) == 1 and seconds == 0.5
        self.step_s = {"torch": 0.01, "sdpa_cudnn": 0.3}[self.entry["backend"]]

    monkeypatch.setattr(train_rounds, "with_peak", with_peak)
    monkeypatch.setattr(train_rounds.Runner, "warm_up", warm_up)
    out = tmp_path / "train.json"
    names = ["torch", "sdpa_cudnn"]
    arguments = [*SMALL, cache, "--steps=5", "--rounds=2", "--entry-seconds=1", "--brief"]
    assert train.main([*arguments, "--out", str(out), "--backends", *names]) == 0
    entries = {entry["backend"]: entry for entry in json.loads(out.read_text())["entries"]}
    assert {name: entries[name]["peak_gib"] for name in names} == {"torch": 4, "sdpa_cudnn": 9}
    assert {name: len(entries[name]["steps_ms"]) for name in names} == {"torch": 5, "sdpa_cudnn": 3}


def test_a_lost_gpu_ends_the_run_and_is_named(cache, tmp_path, monkeypatch, capsys, more_backends):
    turn = train_rounds.Runner.turn

    def break_it(self, batches):
        turn(self, batches)
        if self.entry["backend"] == "sdpa_cudnn":
            raise RuntimeError("an illegal memory access")

    def check(device, backend, what):
        if broken:
            raise DeviceLost(backend, what, "no answer")

    broken = []
    monkeypatch.setattr(train_rounds.Runner, "turn", break_it)
    monkeypatch.setattr(train_rounds.Runner, "release", lambda self, device: broken.append(self))
    monkeypatch.setattr(train_rounds, "check_device", check)
    out = tmp_path / "train.json"
    names = ["torch", "sdpa_cudnn", "reference"]
    arguments = [*SMALL, cache, "--models", "gem_small", "gem_base", "--out", str(out)]
    assert train.main([*arguments, "--backends", *names]) == 3
    assert "no answer; leave out sdpa_cudnn" in capsys.readouterr().out
    first, second, third = json.loads(out.read_text())["entries"]
    assert "illegal memory access" in second["skipped"]
    assert first["skipped"] == third["skipped"] == "the GPU was lost to sdpa_cudnn"


def test_nothing_starts_that_would_end_after_the_deadline(cache, tmp_path, capsys, more_backends):
    out = tmp_path / "train.json"
    arguments = [*SMALL, cache, "--out", str(out), "--backends", "torch", "--deadline", "0"]
    assert train.main([*arguments, "--brief"]) == 0
    (entry,) = json.loads(out.read_text())["entries"]
    assert "deadline" in entry["skipped"] and "model" not in capsys.readouterr().out.split("\n")[-2]


def test_batches_are_new_to_schedules_and_weights_are_awake(cache, tmp_path):
    register()
    args = train.parse([*SMALL, cache])
    with initialize_config_dir(str(CONF), version_base="1.3"), open_ranks(torch.device("cpu")) as r:
        overrides = train_data.to_overrides(args, 0.3, str(tmp_path))
        config = to_config(compose("train", overrides=["model=gem_small", *overrides]))
        data = train_data.load(config, r, 2)
        trainer = make_trainer(config, r, data.loaders, tmp_path)
        wake(trainer)
        assert len(data.batches) == 2 and data.check.batch_size == train_data.CHECK_ROWS
        batch = data.batches[0]
        again = train_data.unseen(batch)
        for name, sequence in batch.sequences.items():
            layout, other = sequence.layout, again.sequences[name].layout
            assert other.lengths is not layout.lengths and other.offsets is layout.offsets
            assert torch.equal(other.lengths, layout.lengths)
        assert all(parameter.any() for parameter in trainer.optimizers.dense)


def test_rivals_run_by_default_after_our_kernels():
    args = train.parse([])
    assert args.backends == ["tlx", "triton", *RIVALS, "torch"]
    assert args.models == ["gem_small", "gem_base"]
