import gc
import pickle
import weakref

import pytest
import torch

from gem.attention import JaggedLayout, jagged_attention, schedule


def test_from_lengths_fills_every_field():
    layout = JaggedLayout.from_lengths(torch.tensor([3, 0, 2]))
    assert layout.offsets.dtype == torch.int32
    assert layout.offsets.tolist() == [0, 3, 3, 5]
    assert layout.lengths.dtype == torch.int64 and layout.lengths.device.type == "cpu"
    assert layout.lengths.tolist() == [3, 0, 2]
    assert (layout.batch_size, layout.rows, layout.max_length) == (3, 5, 3)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [5], [2, 0, 7]], ids=str)
def test_a_layout_survives_lengths_and_offsets(lengths):
    a = JaggedLayout.from_lengths(lengths)
    b = JaggedLayout.from_offsets(a.offsets)
    c = JaggedLayout.from_offsets(a.offsets.long(), lengths)
    for layout in (a, b, c):
        assert layout.lengths.tolist() == lengths
        assert layout.offsets.tolist() == a.offsets.tolist()
        assert layout.offsets.dtype == torch.int32
        assert layout.rows == sum(lengths)
        assert layout.max_length == max(lengths, default=0)


def test_layout_is_frozen_and_does_not_follow_the_callers_tensor():
    lengths = torch.tensor([3, 2])
    layout = JaggedLayout.from_lengths(lengths)
    lengths[0] = 9
    assert layout.lengths.tolist() == [3, 2]
    with pytest.raises(AttributeError):
        layout.rows = 7


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor([0, 5, 3]), r"offsets\[2\]=3 follows offsets\[1\]=5"),
        (torch.tensor([1, 5]), "start at 0, but start at 1"),
        (torch.tensor([0.0, 5.0]), "int32 or int64 tensor, but got torch.float32"),
        (torch.tensor([0, 5], dtype=torch.int16), "int32 or int64"),
        (torch.tensor([[0, 5]]), r"shape \[batch_size \+ 1\], but got \[1, 2\]"),
        (torch.tensor([], dtype=torch.int64), r"shape \[batch_size \+ 1\], but got \[0\]"),
        ([0, 5], "int32 or int64 tensor, but got list"),
    ],
    ids=["decreasing", "start", "float", "int16", "2-d", "empty", "list"],
)
def test_bad_offsets_raise(offsets, message):
    with pytest.raises(ValueError, match=message):
        JaggedLayout.from_offsets(offsets)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, -1], "sample 1 has -1"),
        (torch.tensor([1.5]), "integers, but got torch.float32"),
        ([1.5], "integers"),
        ([True], "integers"),
        (torch.tensor([[1]]), r"shape \[batch_size\]"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "on the CPU, but they are on meta"),
        ([2**31 - 1, 1], "at most 2147483647 rows"),
    ],
    ids=["negative", "float", "float list", "bool", "2-d", "device", "too many rows"],
)
def test_bad_lengths_raise(lengths, message):
    with pytest.raises(ValueError, match=message):
        JaggedLayout.from_lengths(lengths)


def test_lengths_that_disagree_with_offsets_raise():
    with pytest.raises(ValueError, match="disagree"):
        JaggedLayout.from_offsets(torch.tensor([0, 3, 5]), [2, 3])
    with pytest.raises(ValueError, match="must have 2 entries"):
        JaggedLayout.from_offsets(torch.tensor([0, 3, 5]), [5])


def test_max_length_below_a_sample_raises_and_above_changes_nothing():
    with pytest.raises(ValueError, match="longest sample, 9, not 4"):
        JaggedLayout.from_lengths([3, 9], max_length=4)
    tight, loose = (JaggedLayout.from_lengths([3, 9], max_length=n) for n in (9, 64))
    q, k, v = torch.randn(3, 12, 2, 8).unbind()
    expected = jagged_attention(q, k, v, tight, tight)
    assert torch.equal(jagged_attention(q, k, v, loose, loose), expected)
    assert loose.max_length == 64


def test_max_length_as_a_tensor_becomes_an_int():
    layout = JaggedLayout.from_lengths([3, 9], max_length=torch.tensor(9), rows=torch.tensor(12))
    assert type(layout.max_length) is int and type(layout.rows) is int


def test_spare_rows():
    assert JaggedLayout.from_lengths([3, 9], rows=20).rows == 20
    with pytest.raises(ValueError, match="at least the sum of the lengths, 12, not 11"):
        JaggedLayout.from_lengths([3, 9], rows=11)


class Jagged:
    """What `from_jagged` needs of a torchrec JaggedTensor."""

    def __init__(self, values, lengths):
        self._values, self._lengths = values, torch.tensor(lengths)

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def offsets(self):
        zero = torch.zeros(1, dtype=torch.int64)
        return torch.cat([zero, self._lengths.cumsum(0)])


@pytest.mark.parametrize("values", [torch.arange(4), torch.rand(4, 8)], ids=["1-d", "2-d"])
def test_from_jagged_takes_anything_shaped_like_a_jagged_tensor(values):
    layout = JaggedLayout.from_jagged(Jagged(values, [1, 3]))
    assert layout.lengths.tolist() == [1, 3] and layout.rows == 4
    assert JaggedLayout.from_jagged(Jagged(values, [1, 3]), [1, 3]).max_length == 3
    with pytest.raises(ValueError, match=r"Tensor has no offsets\(\)"):
        JaggedLayout.from_jagged(values)


def test_from_jagged_takes_torchrecs_jagged_tensor():
    torchrec = pytest.importorskip("torchrec")
    dense = [torch.tensor(x) for x in ([1.0], [], [7.0, 8.0], [10.0, 11.0, 12.0])]
    jagged = torchrec.JaggedTensor.from_dense(dense)
    assert JaggedLayout.from_jagged(jagged).lengths.tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize("lengths", [[], [0, 0], [3, 0, 2]], ids=str)
def test_prepend(lengths):
    layout = JaggedLayout.from_lengths(lengths, rows=sum(lengths) + 1)
    longer = layout.prepend(4)
    assert longer.lengths.tolist() == [n + 4 for n in lengths]
    assert longer.offsets.tolist() == JaggedLayout.from_lengths(longer.lengths).offsets.tolist()
    assert longer.offsets.dtype == torch.int32
    assert longer.rows == layout.rows + 4 * len(lengths)
    assert longer.max_length == layout.max_length + 4
    assert layout.prepend(4) is longer
    assert layout.prepend(0) is layout


@pytest.mark.parametrize("n", [-1, 1.0, True, None])
def test_prepend_of_anything_but_a_count_raises(n):
    with pytest.raises(ValueError, match="at least 0"):
        JaggedLayout.from_lengths([1]).prepend(n)


def test_split_cuts_samples_into_blocks():
    layout = JaggedLayout.from_lengths([5, 0, 4, 1, 9], rows=25)
    blocks = layout.split(4)
    assert blocks.lengths.tolist() == [4, 1, 4, 1, 4, 4, 1]
    assert blocks.rows == 25 and blocks.max_length == 4
    assert layout.split(4) is blocks
    assert JaggedLayout.from_lengths([0, 0]).split(4).batch_size == 0
    with pytest.raises(ValueError, match="at least 1"):
        layout.split(0)


def test_self_attention_on_a_split_layout_is_block_diagonal():
    layout = JaggedLayout.from_lengths([5, 9])
    q, k, v = torch.randn(3, 14, 2, 8, dtype=torch.float64).unbind()
    blocks = layout.split(4)
    out = jagged_attention(q, k, v, blocks, blocks)
    for a, b in ((0, 4), (4, 5), (5, 9), (9, 13), (13, 14)):
        alone = JaggedLayout.from_lengths([b - a])
        expected = jagged_attention(q[a:b], k[a:b], v[a:b], alone, alone)
        torch.testing.assert_close(out[a:b], expected, rtol=1e-12, atol=1e-12)


def test_layouts_travel_between_processes():
    layout = JaggedLayout.from_lengths([3, 0, 2], rows=9)
    layout.prepend(1)
    copy = pickle.loads(pickle.dumps(layout))
    assert copy.offsets.tolist() == [0, 3, 3, 5] and copy.rows == 9
    assert copy.prepend(1).rows == 12


def test_to_a_device():
    layout = JaggedLayout.from_lengths([3, 2])
    assert layout.to("cpu") is layout
    moved = layout.to("meta")
    assert moved.device.type == "meta" and moved.lengths is layout.lengths


@pytest.fixture
def counted(monkeypatch):
    """A kind of schedule that counts how often it is built."""
    monkeypatch.setattr(schedule, "_BUILDERS", dict(schedule._BUILDERS))
    built = []

    @schedule.register("counted")
    def build(lengths, *args):
        built.append(len(args))
        return torch.arange(int(lengths.sum()))

    return built


def test_a_schedule_is_built_once_per_layout_and_arguments(counted):
    layout, other = (JaggedLayout.from_lengths([3, 2]) for _ in range(2))
    first = layout.schedule("counted", 64, 2)
    assert layout.schedule("counted", 64, 2) is first
    assert schedule.schedule("counted", layout.lengths, 64, 2) is first
    assert layout.to("meta").schedule("counted", 64, 2) is first
    layout.schedule("counted", 128, 2)
    layout.schedule("counted", other.lengths)
    layout.schedule("counted", layout.lengths)
    layout.schedule("counted", other.lengths)
    other.schedule("counted", 64, 2)
    assert len(counted) == 5


def test_unknown_and_taken_kinds_of_schedules_raise(counted):
    with pytest.raises(ValueError, match="no schedule of kind 'other'"):
        JaggedLayout.from_lengths([1]).schedule("other")
    with pytest.raises(ValueError, match="already registered"):
        schedule.register("counted")(lambda lengths: None)


def test_a_schedule_dies_with_its_layout(counted):
    layout = JaggedLayout.from_lengths([3, 2])
    made = weakref.ref(layout.schedule("counted", layout.lengths))
    del layout
    gc.collect()
    assert made() is None


def test_every_layer_shares_one_plan():
    layout = JaggedLayout.from_lengths([40, 7])
    q, k, v = (torch.randn(47, 2, 8, requires_grad=True) for _ in range(3))
    out = q
    for _ in range(3):
        out = jagged_attention(out, k, v, layout, layout, window=(3, 0))
    out.sum().backward()
    assert len(schedule._CACHE[layout.lengths]) == 1
