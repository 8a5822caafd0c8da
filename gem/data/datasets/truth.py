"""Why synthetic users click and buy: the planted probabilities.

With candidate item i of category c, brand b and price p, user u, and history events j of type k_j
that happened a_j days before the impression:

    interest  = sum over browse events of category c of  W[k_j] * exp(-a_j / T[k_j])
    loyalty   = sum over browse events of brand b of     V[k_j] * exp(-a_j / S[k_j])
    satiation = sum over purchases of category c of      exp(-a_j / 4)
    click     = bias + quality_i + context + age bucket x device - 0.25 * sensitivity_u * log p'
                + 5.5 * (1 - exp(-interest)) + 1.2 * (1 - exp(-loyalty))
                - 1.6 * min(satiation, 2)
    conversion (given click) = bias' + 1.6 * log(1 + wanted) - 0.6 * sensitivity_u * log p' + bucket

where p' is the price over the median and `wanted` counts carts and clicks of the same brand and
category with a decay of days. Only events that a row's history holds enter, that is, the newest
`max_length`: a model that reads all of them can in principle reach these probabilities.
"""

from dataclasses import dataclass

import numpy as np

from gem.data.datasets.world import CART, CLICK, DAY, VIEW, World

CLICK_RATE = 0.06
CONVERSION_RATE = 0.25

INTEREST_WEIGHT = np.array([0.3, 1.0, 2.0])
INTEREST_DAYS = np.array([0.5, 2.0, 8.0])
LOYALTY_WEIGHT = np.array([0.3, 1.0, 2.0])
LOYALTY_DAYS = np.array([0.25, 1.0, 4.0])
SATIATION_DAYS = 4.0

INTEREST_GAIN = 5.5
LOYALTY_GAIN = 1.2
SATIATION_GAIN = 1.6

_HOUR = 0.25 * np.sin(2 * np.pi * (np.arange(24) - 14) / 24)
_PLACEMENT = np.array([0.3, 0.1, -0.2, -0.5])
_AGE_DEVICE = np.array(
    [[0.3, 0, -0.2], [0.2, 0, 0], [0.1, 0.1, 0], [0, 0.1, 0.1], [-0.2, 0.1, 0.2], [-0.3, 0, 0.3]]
)
_AGE_CONVERSION = np.array([-0.5, -0.2, 0.0, 0.2, 0.3, 0.2])


@dataclass(frozen=True)
class History:
    """Some rows' events, packed row after row.

    Attributes:
        index: [events] positions in the world's events.
        lengths: [rows].
        age: [events] days before the impression.
        row: [events] which of the rows.
    """

    index: np.ndarray
    lengths: np.ndarray
    age: np.ndarray
    row: np.ndarray


def histories(
    start: np.ndarray, stop: np.ndarray, event_time: np.ndarray, time: np.ndarray, limit: int
) -> History:
    """The newest `limit` of the events start[i] .. stop[i] - 1 for each row i."""
    start = np.maximum(start, stop - limit)
    lengths = stop - start
    row = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(len(row)) + np.repeat(start - (np.cumsum(lengths) - lengths), lengths)
    return History(index, lengths, (time[row] - event_time[index]) / DAY, row)


@dataclass(frozen=True)
class Terms:
    """What the logits are made of, [rows] each; a history term of zero means no such event."""

    static: np.ndarray
    interest: np.ndarray
    loyalty: np.ndarray
    satiation: np.ndarray
    conversion_static: np.ndarray
    wanted: np.ndarray

    def click(self) -> np.ndarray:
        """The click logit without its bias."""
        return (
            self.static
            - INTEREST_GAIN * np.expm1(-self.interest)
            - LOYALTY_GAIN * np.expm1(-self.loyalty)
            - SATIATION_GAIN * np.minimum(self.satiation, 2)
        )

    def conversion(self) -> np.ndarray:
        """The conversion logit without its bias."""
        return self.conversion_static + 1.6 * np.log1p(self.wanted)


def terms(world: World, rows: slice, browse: History, orders: History) -> Terms:
    """The terms of some impressions, from their histories."""
    items, users, shown = world.items, world.users, world.impressions
    item, user = shown.item[rows], shown.user[rows]
    category, brand = items.category[item], items.brand[item]

    def decayed(
        history: History, matches: np.ndarray, weight: np.ndarray, days: np.ndarray
    ) -> np.ndarray:
        chosen = np.flatnonzero(matches)
        value = weight[chosen] * np.exp(-history.age[chosen] / days[chosen])
        return np.bincount(history.row[chosen], weights=value, minlength=len(item))

    event_item = world.browse.item[browse.index]
    kind = world.browse.kind[browse.index]
    same_category = items.category[event_item] == category[browse.row]
    same_brand = items.brand[event_item] == brand[browse.row]
    bought = items.category[world.orders.item[orders.index]] == category[orders.row]
    price = np.log(items.price[item]) - 3.0
    sensitivity = users.sensitivity[user]
    hour = (shown.time[rows] % DAY) // 3600
    age = users.age_bucket[user]
    return Terms(
        static=items.quality[item]
        + _HOUR[hour]
        + _PLACEMENT[shown.placement[rows]]
        + _AGE_DEVICE[age, shown.device[rows]]
        - 0.25 * sensitivity * price,
        interest=decayed(browse, same_category, INTEREST_WEIGHT[kind], INTEREST_DAYS[kind]),
        loyalty=decayed(browse, same_brand, LOYALTY_WEIGHT[kind], LOYALTY_DAYS[kind]),
        satiation=decayed(
            orders,
            bought,
            np.ones(len(orders.row)),
            np.full(len(orders.row), SATIATION_DAYS),
        ),
        conversion_static=_AGE_CONVERSION[age] - 0.6 * sensitivity * price,
        wanted=decayed(
            browse,
            same_category & same_brand & (kind != VIEW),
            np.where(kind == CART, 2.0, 0.5),
            np.where(kind == CLICK, 1.0, 4.0),
        ),
    )


def bias_for(logit: np.ndarray, rate: float, weight: np.ndarray | None = None) -> float:
    """The bias that makes the (weighted) mean of sigmoid(logit + bias) equal to `rate`."""
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = np.average(sigmoid(logit + middle), weights=weight)
        low, high = (middle, high) if mean < rate else (low, middle)
    return (low + high) / 2


def sigmoid(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit))
