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
from gem.model.layers import Gate, mlp


class Embeddings(nn.Module):
    """Every id of a batch as a token, from an EmbeddingBagCollection and an EmbeddingCollection.

    A table that no sequence uses is pooled while it is read. A table that a sequence uses lives in
    the EmbeddingCollection alone, so that an event and the candidate share its rows; sparse
    features on it are pooled after the look-up. Each table has one projection to D, so that an
    event's category and the candidate's are the same vector wherever they meet.

    Args:
        schema: the features. dim: E, the width of every table. width: D.
        sequences: those in use; the fields of others get no table.
        device: where tables are made; `meta` makes none.
    """

    def __init__(
        self,
        schema: Schema,
        dim: int,
        width: int,
        sequences: list[SequenceFeature],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
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
        # On the device: a permutation made from a list would be copied there, and waited for.
        for name in ("in_bag", "after"):
            order = torch.tensor(getattr(self, name), dtype=torch.int32)
            self.register_buffer(f"_{name}", order, persistent=False)
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
        self.table_of = {
            name: module_name(schema.table_of(name, feature)) for name, feature in features.items()
        }
        self.project = nn.ParameterDict(
            {table: torch.empty(width, dim) for table in dict.fromkeys(self.table_of.values())}
        )
        self._init_weights()

    def _init_weights(self) -> None:
        """Tokens start at root-mean-square 1, so that those of equal ids have product D."""
        for weight in self.project.values():
            nn.init.orthogonal_(weight, gain=max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)
        for module in (self.bags, self.events):
            for table in module.parameters() if module is not None else ():
                if not table.is_meta:
                    nn.init.normal_(table)

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Looks up a batch.

        Returns:
            features: [B, sparse features, D].
            events: by sequence, [rows, D], the sum of its fields' tokens.
        """
        pooled: dict[str, Tensor] = {}
        rows: dict[str, JaggedTensor] = {}
        if self.bags is not None:
            ids = batch.sparse.permute(self.in_bag, self._in_bag)
            pooled |= _ready(self.bags(ids)).to_dict()
        if self.events is not None:
            inputs = [batch.sparse.permute(self.after, self._after)] if self.after else []
            inputs += [
                with_keys(batch.sequences[name].ids, fields) for name, fields in self.fields.items()
            ]
            rows = _ready(self.events(KeyedJaggedTensor.concat(inputs)))
        after = [self.sparse[i] for i in self.after]
        for pooling in Pooling:
            names = [feature.name for feature in after if feature.pooling is pooling]
            if names:
                pooled |= zip(names, pool([rows[name] for name in names], pooling), strict=True)
        events = {
            name: F.linear(
                torch.cat([rows[field].values() for field in fields], dim=1),
                torch.cat(self._projections(fields), dim=1),
            )
            for name, fields in self.fields.items()
        }
        names = [feature.name for feature in self.sparse]
        if not names:
            width = next(iter(self.project.values())).shape[0] if self.project else 0
            return batch.dense.new_zeros(batch.batch_size, 0, width), events
        weights = torch.stack(self._projections(names))
        features = torch.stack([pooled[name] for name in names]) @ weights.transpose(1, 2)
        return features.transpose(0, 1), events

    def _projections(self, names: list[str]) -> list[Tensor]:
        """The projection [D, E] of each field's or feature's table."""
        return [self.project[self.table_of[name]] for name in names]


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


def pool(rows: list[JaggedTensor], pooling: Pooling) -> Tensor:
    """Sums or averages each sample's rows, feature by feature; an empty list gives zeros.

    rows: of each feature [ids, E] -> [features, B, E].
    """
    values = torch.cat([feature.values() for feature in rows])
    lengths = torch.cat([feature.lengths() for feature in rows])
    samples = torch.arange(lengths.numel(), device=values.device)
    sample = torch.repeat_interleave(samples, lengths.long(), output_size=values.shape[0])
    total = values.new_zeros(lengths.numel(), values.shape[1]).index_add(0, sample, values)
    if pooling is Pooling.mean:
        total = total / lengths.clamp(min=1).unsqueeze(1)
    return total.view(len(rows), lengths.numel() // len(rows), values.shape[1])


class FeatureTokens(nn.Module):
    """X: one token per sparse feature and one for all dense values (InterFormer eq. 5).

    The lengths of the histories (log1p) stand beside the dense values, since softmax pooling
    forgets how many events there were.

    Args:
        schema: the features. width: D. lengths: names of the sequences whose lengths count.
    """

    def __init__(self, schema: Schema, width: int, lengths: list[str]) -> None:
        super().__init__()
        self.lengths = lengths
        self.tokens = len(schema.sparse) + 1
        dense = len(schema.dense) + len(lengths)
        self.dense = mlp([max(dense, 1), width, width])
        self.bias = nn.Parameter(torch.randn(self.tokens, width) * 0.1)

    def forward(self, batch: Batch, sparse: Tensor) -> Tensor:
        """sparse [B, sparse features, D] -> [B, tokens, D]."""
        lengths = [
            batch.sequences[name].layout.offsets.diff().unsqueeze(1).float().log1p()
            for name in self.lengths
        ]
        dense = torch.cat([batch.dense, *lengths], dim=1)
        if dense.shape[1] == 0:
            dense = dense.new_ones(batch.batch_size, 1)
        return torch.cat([self.dense(dense).unsqueeze(1), sparse], dim=1) + self.bias


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

    The fields' tokens and a linear map of age and dense values are added, then gated by the whole
    event as MaskNet does (InterFormer eq. 6): `S * 2 sigmoid(MLP_mask(S))`.

    Args:
        sequence: the feature. width: D.
    """

    def __init__(self, sequence: SequenceFeature, width: int) -> None:
        super().__init__()
        self.context = nn.Linear(AGE_KNOTS + len(sequence.dense), width)
        with torch.no_grad():  # an age weighs as much as a field
            nn.init.normal_(self.context.weight[:, :AGE_KNOTS])
        self.gate = Gate(width)

    def forward(self, fields: Tensor, age: Tensor, dense: Tensor) -> Tensor:
        """fields [rows, D], age [rows], dense [rows, n] -> [rows, D]."""
        context = self.context(torch.cat([age_basis(age), dense], dim=1))
        return self.gate(fields + context)
