"""KeyedJaggedTensors whose lengths the host knows, also when there is nothing in them."""

import logging
from itertools import accumulate

import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

# torchrec makes each KeyedJaggedTensor through torch.fx, which has advice for authors of tracers.
logging.getLogger("torch.fx._symbolic_trace").addFilter(
    lambda record: "is_fx_tracing" not in record.getMessage()
)


def keyed_jagged_tensor(
    keys: list[str], values: Tensor, lengths: Tensor, length_per_key: list[int] | None = None
) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor that never asks the device for what the host knows.

    Its stride, `length_per_key` and `offset_per_key` are set, so no later call copies lengths to
    the host. With a batch of zero rows every key has no values, no lengths and offsets [0].

    Args:
        keys: the features' names.
        values: [sum of lengths], the first key's values for all samples, then the next key's.
        lengths: [keys * B] integers on the host, key after key.
        length_per_key: values of each key, if known.

    Raises:
        ValueError: `lengths` do not divide into the keys, are negative, or disagree with `values`
            or `length_per_key`.
    """
    count = lengths.numel()
    if count % len(keys) if keys else count:
        raise ValueError(
            f"{count} lengths do not divide into {len(keys)} keys ({values.numel()} values)"
        )
    if count and int(lengths.min()) < 0:
        raise ValueError(f"lengths holds {int(lengths.min())}; a length is 0 or more")
    stride = count // len(keys) if keys else 0
    if length_per_key is None:
        length_per_key = lengths.view(len(keys), stride).sum(1).tolist() if keys else []
    offset_per_key = list(accumulate(length_per_key, initial=0))
    if len(length_per_key) != len(keys) or offset_per_key[-1] != values.numel():
        raise ValueError(
            f"lengths per key {length_per_key} do not cover {len(keys)} keys and "
            f"{values.numel()} values"
        )
    return _with_split(
        KeyedJaggedTensor(
            keys,
            values,
            lengths=lengths,
            stride=stride,
            length_per_key=length_per_key,
            offset_per_key=offset_per_key,
        )
    )


def to_device(
    ids: KeyedJaggedTensor, device: torch.device, non_blocking: bool = False
) -> KeyedJaggedTensor:
    """The same on a device."""
    return _with_split(ids.to(device, non_blocking=non_blocking))


def pin_memory(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same in pinned memory."""
    return _with_split(ids.pin_memory())


def _with_split(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Adds the split by key where torchrec fails to make it (1.8: a batch of zero rows)."""
    if ids.stride() == 0:
        values, lengths = ids.values(), ids.lengths()
        offsets = torch.zeros(1, dtype=lengths.dtype, device=lengths.device)
        ids._jt_dict = {
            key: JaggedTensor(values, lengths=lengths, offsets=offsets) for key in ids.keys()
        }
    return ids
