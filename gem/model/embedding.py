"""From ids, times and dense values to tokens: X for the features, S for the events.

Shapes: B batch, E embedding width, D model width, rows all events of one sequence.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)

from gem.data import Batch, Schema
from gem.data.schema import Pooling, SequenceFeature
from gem.model.layers import mlp


class Embeddings(nn.Module):
    """Looks up every id of a batch, in one EmbeddingBagCollection and one EmbeddingCollection.

    A table that no sequence uses is pooled while it is read. A table that a sequence uses lives in
    the EmbeddingCollection alone, so that an event and the candidate share its rows; sparse
    features on it are pooled after the look-up.

    Args:
        schema: the features. dim: E, the width of every table.
        sequences: those in use; the fields of others get no table.
        device: where tables are made; `meta` makes none.
    """

    def __init__(
        self,
        schema: Schema,
        dim: int,
        sequences: list[SequenceFeature],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.sparse = list(schema.sparse)
        self.fields = {s.name: [f"{s.name}.{f.name}" for f in s.fields] for s in sequences}
        features = {feature.name: feature for feature in self.sparse}
        for sequence in sequences:
            features |= zip(self.fields[sequence.name], sequence.fields, strict=True)
        readers: dict[str, list[str]] = {}
        for name, feature in features.items():
            readers.setdefault(schema.table_of(name, feature), []).append(name)
        in_events = {name for fields in self.fields.values() for name in fields}
        bags, rows = {}, {}
        for table, names in readers.items():
            poolings = {features[name].pooling for name in names}
            (bags if in_events.isdisjoint(names) and len(poolings) == 1 else rows)[table] = names
        pooled_in_bag = {name for names in bags.values() for name in names}
        self.in_bag = [i for i, f in enumerate(self.sparse) if f.name in pooled_in_bag]
        self.after = [i for i, f in enumerate(self.sparse) if f.name not in pooled_in_bag]
        sizes = schema.tables()
        self.bags = self.events = None
        if bags:
            self.bags = EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(
                        name=module_name(table),
                        embedding_dim=dim,
                        num_embeddings=sizes[table],
                        feature_names=names,
                        pooling=PoolingType[features[names[0]].pooling.name.upper()],
                    )
                    for table, names in bags.items()
                ],
                device=device,
            )
        if rows:
            self.events = EmbeddingCollection(
                [
                    EmbeddingConfig(
                        name=module_name(table),
                        embedding_dim=dim,
                        num_embeddings=sizes[table],
                        feature_names=names,
                    )
                    for table, names in rows.items()
                ],
                device=device,
            )
        self._init_tables()

    def _init_tables(self) -> None:
        """Rows of root-mean-square length 1: the dot product of equal ids starts near 1."""
        for table in self.parameters():
            if not table.is_meta:
                nn.init.normal_(table, std=self.dim**-0.5)

    def forward(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Looks up a batch.

        Returns:
            pooled: by sparse feature, [B, E].
            events: by sequence, one [rows, E] per field.
        """
        pooled: dict[str, Tensor] = {}
        rows: dict[str, JaggedTensor] = {}
        if self.bags is not None:
            pooled |= _ready(self.bags(batch.sparse.permute(self.in_bag))).to_dict()
        if self.events is not None:
            inputs = [batch.sparse.permute(self.after)] if self.after else []
            inputs += [
                with_keys(batch.sequences[name].ids, fields) for name, fields in self.fields.items()
            ]
            rows = _ready(self.events(KeyedJaggedTensor.concat(inputs)))
        for feature in (self.sparse[i] for i in self.after):
            pooled[feature.name] = pool(rows[feature.name], feature.pooling)
        events = {
            name: [rows[field].values() for field in fields] for name, fields in self.fields.items()
        }
        return pooled, events


def module_name(table: str) -> str:
    """A table's name as a submodule: no dot, and no clash with nn.Module's own `type`, `keys`.."""
    return "table_" + table.replace(".", "_")


def _ready(value):
    """The value of a sharded module's lazy result; an ordinary result as it is."""
    return value.wait() if hasattr(value, "wait") else value


def with_keys(ids: KeyedJaggedTensor, keys: list[str]) -> KeyedJaggedTensor:
    """The same ids under other keys; nothing is copied."""
    return KeyedJaggedTensor(
        keys=keys,
        values=ids.values(),
        lengths=ids.lengths(),
        offsets=ids.offsets_or_none(),
        stride=ids.stride(),
        length_per_key=ids.length_per_key_or_none(),
        offset_per_key=ids.offset_per_key_or_none(),
    )


def pool(rows: JaggedTensor, pooling: Pooling) -> Tensor:
    """Sums or averages each sample's rows: [ids, E] -> [B, E]; an empty list gives zeros."""
    values, lengths = rows.values(), rows.lengths()
    samples = torch.arange(lengths.numel(), device=values.device)
    sample = torch.repeat_interleave(samples, lengths.long(), output_size=values.shape[0])
    total = values.new_zeros(lengths.numel(), values.shape[1]).index_add(0, sample, values)
    if pooling is Pooling.mean:
        total = total / lengths.clamp(min=1).unsqueeze(1)
    return total


class FeatureTokens(nn.Module):
    """X: one token per sparse feature and one for all dense values (InterFormer eq. 5).

    The lengths of the histories (log1p) stand beside the dense values, since softmax pooling
    forgets how many events there were.

    Args:
        schema: the features. dim: E. width: D. lengths: names of the sequences whose lengths count.
    """

    def __init__(self, schema: Schema, dim: int, width: int, lengths: list[str]) -> None:
        super().__init__()
        self.names = [feature.name for feature in schema.sparse]
        self.lengths = lengths
        self.tokens = len(self.names) + 1
        dense = len(schema.dense) + len(lengths)
        self.dense = mlp([max(dense, 1), width, width])
        self.project = nn.Linear(dim, width, bias=False) if dim != width else nn.Identity()
        self.bias = nn.Parameter(torch.randn(self.tokens, width) * 0.1)

    def forward(self, batch: Batch, pooled: dict[str, Tensor]) -> Tensor:
        """-> [B, tokens, D]."""
        lengths = [
            batch.sequences[name].layout.offsets.diff().unsqueeze(1).float().log1p()
            for name in self.lengths
        ]
        dense = torch.cat([batch.dense, *lengths], dim=1)
        if dense.shape[1] == 0:
            dense = dense.new_ones(batch.batch_size, 1)
        tokens = [self.dense(dense).unsqueeze(1)]
        if self.names:
            sparse = torch.stack([pooled[name] for name in self.names], dim=1)
            tokens.append(self.project(sparse))
        return torch.cat(tokens, dim=1) + self.bias


AGE_UNIT = 60.0
AGE_KNOTS = 16


def age_basis(age: Tensor) -> Tensor:
    """Hat functions of log age, so that a linear map of them is piecewise linear in log age.

    Knots lie at `log1p(age / minute)` = 0, 1, .. 15 (6 years); a decay of any scale between a
    minute and years is a few weights away. age [rows] seconds -> [rows, AGE_KNOTS].
    """
    x = (age / AGE_UNIT).log1p().clamp(max=AGE_KNOTS - 1).unsqueeze(1)
    knots = torch.arange(AGE_KNOTS, device=age.device, dtype=x.dtype)
    return F.relu(1 - (x - knots).abs())


class EventTokens(nn.Module):
    """S: each event's fields, dense values and age as one token.

    Concat, MaskNet, linear (InterFormer eq. 6, where it merges sequences): the fields are gated by
    `MLP_mask` of the whole event before `MLP_lce` brings them to D.

    Args:
        sequence: the feature. dim: E. width: D.
    """

    def __init__(self, sequence: SequenceFeature, dim: int, width: int) -> None:
        super().__init__()
        self.fields = nn.Linear(len(sequence.fields) * dim, width, bias=False)
        context = AGE_KNOTS + len(sequence.dense)
        self.context = nn.Linear(context, width)
        self.mask = nn.Linear(width, width)

    def forward(self, fields: list[Tensor], age: Tensor, dense: Tensor) -> Tensor:
        """fields each [rows, E], age [rows], dense [rows, n] -> [rows, D]."""
        context = self.context(torch.cat([age_basis(age), dense], dim=1))
        token = self.fields(torch.cat(fields, dim=1)) + context
        return token * (2 * torch.sigmoid(self.mask(token)))
