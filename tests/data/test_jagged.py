import pickle

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.modules.embedding_configs import EmbeddingConfig, PoolingType

from gem.data import keyed_jagged_tensor
from gem.data.jagged import to_device


def test_slices_of_keys_agree_with_lengths():
    """torchrec#1075: length per key and lengths must give the same slices."""
    lengths = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1, 1, 1])
    ids = keyed_jagged_tensor(["user", "item"], torch.arange(1, 9), lengths)
    assert ids.length_per_key() == [3, 5] and ids.offset_per_key() == [0, 3, 8]
    assert ids["user"].values().tolist() == [1, 2, 3]
    assert ids["item"].values().tolist() == [4, 5, 6, 7, 8]
    assert ids["item"].lengths().tolist() == [1, 1, 1, 1, 1]
    assert ids.stride() == 5


def test_lengths_that_do_not_divide():
    """torchrec#1756: said when it is built, with the numbers."""
    with pytest.raises(ValueError, match=r"5 lengths do not divide into 2 keys \(3 values\)"):
        keyed_jagged_tensor(["a", "b"], torch.arange(3), torch.tensor([1, 1, 1, 0, 0]))
    with pytest.raises(ValueError, match="2 lengths do not divide into 0 keys"):
        keyed_jagged_tensor([], torch.arange(2), torch.tensor([1, 1]))


@pytest.mark.parametrize(
    ("lengths", "per_key", "message"),
    [
        ([5, -2], None, "lengths holds -2"),
        ([1, 1], None, r"lengths per key \[1, 1\] do not cover 2 keys and 3 values"),
        ([2, 1], [1, 1], r"lengths per key \[1, 1\] do not cover"),
        ([2, 1], [3], r"lengths per key \[3\] do not cover 2 keys"),
    ],
)
def test_lengths_that_disagree(lengths, per_key, message):
    with pytest.raises(ValueError, match=message):
        keyed_jagged_tensor(["a", "b"], torch.arange(3), torch.tensor(lengths), per_key)


def check_empty(ids):
    split = ids.to_dict()
    assert list(split) == ["f1", "f2"]
    for key in split:
        assert split[key].values().tolist() == []
        assert split[key].lengths().tolist() == []
        assert split[key].offsets().tolist() == [0]
    assert ids.stride() == 0 and ids.length_per_key() == [0, 0]


def test_batch_of_no_rows():
    """torchrec PR #4638: keys, but a zero-length batch."""
    empty = torch.zeros(0, dtype=torch.int64)
    ids = keyed_jagged_tensor(["f1", "f2"], empty, empty)
    check_empty(ids)
    check_empty(to_device(ids, torch.device("cpu")))
    check_empty(pickle.loads(pickle.dumps(ids)))
    moved = to_device(ids, torch.device("meta"))
    assert all(part.offsets().device.type == "meta" for part in moved.to_dict().values())


def bags(pooling):
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="t",
                embedding_dim=4,
                num_embeddings=6,
                feature_names=["f1", "f2"],
                pooling=pooling,
            )
        ]
    )


@pytest.mark.parametrize("pooling", [PoolingType.MEAN, PoolingType.SUM])
def test_empty_bag_is_zero_with_zero_gradient(pooling):
    """pytorch#4169, #21400: the mean over nothing is zero, not NaN."""
    model = bags(pooling)
    ids = keyed_jagged_tensor(["f1", "f2"], torch.tensor([3]), torch.tensor([0, 1, 0, 0]))
    pooled = model(ids)
    assert torch.equal(pooled["f1"][0], torch.zeros(4))
    assert torch.equal(pooled["f2"], torch.zeros(2, 4))
    pooled.values().sum().backward()
    gradient = model.embedding_bags["t"].weight.grad
    assert torch.equal(gradient[3], torch.ones(4))
    assert gradient.abs().sum() == 4


def test_embeddings_of_a_batch_of_no_rows():
    empty = torch.zeros(0, dtype=torch.int64)
    model = bags(PoolingType.MEAN)
    pooled = model(keyed_jagged_tensor(["f1", "f2"], empty, empty))
    assert pooled.values().shape == (0, 8)
    pooled.values().sum().backward()
    events = EmbeddingCollection(
        tables=[EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=6, feature_names=["f1"])]
    )
    found = events(keyed_jagged_tensor(["f1"], empty, empty))["f1"]
    assert found.values().shape == (0, 4) and found.lengths().tolist() == []


@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_no_keys_or_no_values(lengths):
    lengths = torch.tensor(lengths, dtype=torch.int64)
    ids = keyed_jagged_tensor(["a"], torch.zeros(0, dtype=torch.int64), lengths)
    assert ids["a"].lengths().tolist() == lengths.tolist()
    none = torch.zeros(0, dtype=torch.int64)
    assert keyed_jagged_tensor([], none, none).keys() == []
