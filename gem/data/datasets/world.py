"""The world behind the synthetic data set: items, users, what they did, what they were shown.

Everything is drawn from one seeded generator and held as flat arrays; events are sorted by user and
time. Times are seconds, with impressions from `START` on and history before and between them.
"""

from dataclasses import dataclass

import numpy as np

START = 1_700_000_000
DAY = 86_400

CATEGORIES = 24
BRANDS = 100
TAGS = 200
AGE_BUCKETS = 6
SPEND_LEVELS = 5
DEVICES = 3
PLACEMENTS = 4
VIEW, CLICK, CART = range(3)

_SLOTS = 3
_SLOT_SHARE = np.array([0.5, 0.3, 0.2])
_DRIFT_DAYS = 45.0
_SESSION_EVENTS = 8
_SIGMA = 1.0
_NEW_USERS = 0.02
_ORDERS_MEAN = 22.0
_ORDERS_MAX = 256
_NO_ORDERS = 0.15


@dataclass(frozen=True)
class Items:
    """Sorted by (category, brand); `cumulative` is the running sum of popularity."""

    category: np.ndarray
    brand: np.ndarray
    price: np.ndarray
    quality: np.ndarray
    first_seen: np.ndarray
    tags: np.ndarray
    num_tags: np.ndarray
    cumulative: np.ndarray

    def draw(
        self, rng: np.random.Generator, category: np.ndarray, brand: np.ndarray | None = None
    ) -> np.ndarray:
        """An item by popularity for each category; of the brand, if >= 0 and in that category."""
        key = self.category * BRANDS + self.brand
        low = np.searchsorted(self.category, category, side="left")
        high = np.searchsorted(self.category, category, side="right")
        if brand is not None:
            pair = np.where(brand >= 0, category * BRANDS + brand, -1)
            first = np.searchsorted(key, pair, side="left")
            last = np.searchsorted(key, pair, side="right")
            low, high = np.where(last > first, first, low), np.where(last > first, last, high)
        edge = np.concatenate([[0.0], self.cumulative])
        point = edge[low] + rng.random(len(category)) * (edge[high] - edge[low])
        return np.clip(np.searchsorted(self.cumulative, point, side="right"), low, high - 1)


@dataclass(frozen=True)
class Users:
    """Age bucket, price sensitivity and its noisy trace `spend_level`, and what they like when.

    `changes` [users, slots, k] are the sorted times at which a slot's interest is replaced (+inf
    where there is no more), `category` and `brand` [users, slots, k + 1] the interests between.
    """

    age_bucket: np.ndarray
    sensitivity: np.ndarray
    spend_level: np.ndarray
    activity: np.ndarray
    changes: np.ndarray
    category: np.ndarray
    brand: np.ndarray

    def interest(
        self, rng: np.random.Generator, user: np.ndarray, time: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A (category, brand) that each user is interested in at that time."""
        slot = rng.choice(_SLOTS, size=len(user), p=_SLOT_SHARE)
        phase = (self.changes[user, slot] <= time[:, None]).sum(1)
        return self.category[user, slot, phase], self.brand[user, slot, phase]


@dataclass(frozen=True)
class Events:
    """Events sorted by (user, time)."""

    user: np.ndarray
    time: np.ndarray
    item: np.ndarray
    kind: np.ndarray

    def before(self, user: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each (user, time): the range [start, stop) of the user's events strictly before."""
        span = np.int64(1) << 33
        keys = self.user * span + self.time
        start = np.searchsorted(keys, user * span, side="left")
        return start, np.searchsorted(keys, user * span + time, side="left")


@dataclass(frozen=True)
class Impressions:
    """Sorted by time."""

    user: np.ndarray
    time: np.ndarray
    item: np.ndarray
    device: np.ndarray
    placement: np.ndarray


@dataclass(frozen=True)
class World:
    items: Items
    users: Users
    browse: Events
    orders: Events
    impressions: Impressions


def make_world(
    rng: np.random.Generator,
    *,
    num_rows: int,
    num_users: int,
    num_items: int,
    mean_length: float,
    max_length: int,
    days: int,
    history_days: int,
) -> World:
    """Draws a world in which a row's browse history is `mean_length` long on average."""
    items = _make_items(rng, num_items)
    users = _make_users(rng, items, num_users, days, history_days)
    user = rng.choice(num_users, size=num_rows, p=_shares(users.activity))
    time = START + _clock(rng, rng.random(num_rows) * days)
    count = _browse_counts(rng, users, user, time, mean_length, max_length, days, history_days)
    browse, session_user, session_time = _make_browse(rng, items, users, count, days, history_days)
    orders = _make_orders(rng, items, users, session_user, session_time, days, history_days)
    time = _join_sessions(rng, user, time, session_user, session_time, days)
    order = np.argsort(time, kind="stable")
    impressions = _make_impressions(rng, items, users, user[order], time[order])
    return World(items, users, browse, orders, impressions)


def _shares(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()


def _clock(rng: np.random.Generator, day: np.ndarray) -> np.ndarray:
    """Seconds for fractional days, with few of them at night."""
    hour = np.clip(rng.normal(15.0, 5.0, size=len(day)), 0, 23.999)
    return (np.floor(day) * DAY + hour * 3600).astype(np.int64)


def _make_items(rng: np.random.Generator, count: int) -> Items:
    category = rng.choice(CATEGORIES, size=count, p=_shares(rng.lognormal(0, 0.5, CATEGORIES)))
    # Every category has a dozen brands, so that a brand is at home in two or three categories.
    homes = np.stack([rng.choice(BRANDS, size=12, replace=False) for _ in range(CATEGORIES)])
    share = _shares(1.0 / (1 + np.arange(12)))
    brand = homes[category, rng.choice(12, size=count, p=share)]
    order = np.lexsort((brand, category))
    category, brand = category[order], brand[order]
    num_tags = rng.integers(0, 5, size=count)
    tags = rng.integers(0, TAGS, size=(count, 4))
    effect = rng.normal(0, 0.25, size=TAGS)
    tagged = np.where(np.arange(4) < num_tags[:, None], effect[tags], 0).sum(1)
    level = rng.normal(0, 0.7, size=CATEGORIES)
    return Items(
        category=category,
        brand=brand,
        price=np.exp(3.0 + level[category] + rng.normal(0, 0.6, size=count)).round(2),
        quality=tagged + rng.normal(0, 0.25, size=count),
        first_seen=rng.uniform(-400, 0, size=count),
        tags=tags,
        num_tags=num_tags,
        cumulative=np.cumsum(_shares(rng.lognormal(0, 1.0, size=count))),
    )


def _make_users(
    rng: np.random.Generator, items: Items, count: int, days: int, history_days: int
) -> Users:
    sensitivity = rng.normal(0, 1, size=count)
    trace = sensitivity + rng.normal(0, 0.5, size=count)
    level = np.digitize(trace, np.quantile(trace, np.arange(1, SPEND_LEVELS) / SPEND_LEVELS))
    span = days + history_days
    phases = max(2, int(np.ceil(span / _DRIFT_DAYS * 2.5)))
    gaps = rng.exponential(_DRIFT_DAYS, size=(count, _SLOTS, phases))
    changes = START + (gaps.cumsum(-1) - history_days) * DAY
    liked = rng.integers(0, len(items.category), size=(count, _SLOTS, phases + 1))
    return Users(
        age_bucket=rng.choice(AGE_BUCKETS, size=count, p=[0.1, 0.22, 0.24, 0.2, 0.14, 0.1]),
        sensitivity=sensitivity,
        spend_level=level,
        activity=rng.lognormal(0, 0.5, size=count),
        changes=changes,
        category=items.category[liked],
        brand=items.brand[liked],
    )


def _browse_counts(
    rng: np.random.Generator,
    users: Users,
    row_user: np.ndarray,
    row_time: np.ndarray,
    mean_length: float,
    max_length: int,
    days: int,
    history_days: int,
) -> np.ndarray:
    """Events of each user, log-normal, so that rows see `mean_length` of them on average."""
    spread = np.exp(_SIGMA * rng.normal(size=len(users.activity)))
    spread[rng.random(len(spread)) < _NEW_USERS] = 0
    seen = ((row_time - START) / DAY + history_days) / (days + history_days)
    low, high = 0.0, 1e9
    for _ in range(80):
        scale = (low + high) / 2
        length = np.minimum(spread[row_user] * scale * seen, max_length)
        low, high = (scale, high) if length.mean() < mean_length else (low, scale)
    return np.minimum(rng.poisson(np.minimum(spread * low, 1e6)), 4 * max_length)


def _make_browse(
    rng: np.random.Generator,
    items: Items,
    users: Users,
    count: np.ndarray,
    days: int,
    history_days: int,
) -> tuple[Events, np.ndarray, np.ndarray]:
    """The browse events, and the users and start times of the sessions in which they happened."""
    sessions = -(-count // _SESSION_EVENTS)
    session_user = np.repeat(np.arange(len(count)), sessions)
    day = rng.random(len(session_user)) * (days + history_days) - history_days
    session_time = START + _clock(rng, day)
    session_category, session_brand = users.interest(rng, session_user, session_time)
    user = np.repeat(np.arange(len(count)), count)
    first = np.cumsum(sessions) - sessions
    session = first[user] + (rng.random(len(user)) * sessions[user]).astype(np.int64)
    time = session_time[session] + rng.exponential(900, size=len(user)).astype(np.int64)
    wander = rng.random(len(user)) < 0.2
    category = np.where(
        wander,
        items.category[rng.integers(0, len(items.category), size=len(user))],
        session_category[session],
    )
    loyal = ~wander & (rng.random(len(user)) < 0.5)
    brand = np.where(loyal, session_brand[session], -1)
    item = items.draw(rng, category, brand)
    kind = rng.choice(3, size=len(user), p=[0.72, 0.2, 0.08])
    order = np.lexsort((time, user))
    browse = Events(user[order], time[order], item[order], kind[order])
    return browse, session_user, session_time


def _make_orders(
    rng: np.random.Generator,
    items: Items,
    users: Users,
    session_user: np.ndarray,
    session_time: np.ndarray,
    days: int,
    history_days: int,
) -> Events:
    """Purchases, most of them at the end of a browse session and in line with interests."""
    num_users = len(users.activity)
    sigma = 1.1
    mean = _ORDERS_MEAN / (1 - _NO_ORDERS)
    count = rng.poisson(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, size=num_users))
    count = np.minimum(count, _ORDERS_MAX)
    count[rng.random(num_users) < _NO_ORDERS] = 0
    user = np.repeat(np.arange(num_users), count)
    day = rng.random(len(user)) * (days + history_days) - history_days
    time = START + _clock(rng, day)
    sessions = np.bincount(session_user, minlength=num_users)
    has = sessions[user] > 0
    first = np.cumsum(sessions) - sessions
    pick = first[user] + (rng.random(len(user)) * sessions[user]).astype(np.int64)
    time[has] = session_time[pick[has]] + rng.exponential(3600, size=has.sum()).astype(np.int64)
    category, brand = users.interest(rng, user, time)
    item = items.draw(rng, category, np.where(rng.random(len(user)) < 0.5, brand, -1))
    order = np.lexsort((time, user))
    return Events(user[order], time[order], item[order], np.zeros(len(user), dtype=np.int64))


def _join_sessions(
    rng: np.random.Generator,
    user: np.ndarray,
    time: np.ndarray,
    session_user: np.ndarray,
    session_time: np.ndarray,
    days: int,
) -> np.ndarray:
    """Moves most impressions into a session of their user, if there is one in the period."""
    live = session_time >= START
    session_user, session_time = session_user[live], session_time[live]
    sessions = np.bincount(session_user, minlength=int(user.max(initial=0)) + 1)
    first = np.cumsum(sessions) - sessions
    joins = (sessions[user] > 0) & (rng.random(len(user)) < 0.7)
    pick = first[user] + (rng.random(len(user)) * sessions[user]).astype(np.int64)
    joined = session_time[pick[joins]] + rng.exponential(1200, size=joins.sum()).astype(np.int64)
    time = time.copy()
    time[joins] = np.minimum(joined, START + days * DAY - 1)
    return time


def _make_impressions(
    rng: np.random.Generator, items: Items, users: Users, user: np.ndarray, time: np.ndarray
) -> Impressions:
    """What was shown: half by popularity, half near the user's interests."""
    popular = np.searchsorted(items.cumulative, rng.random(len(user)) * items.cumulative[-1])
    category, brand = users.interest(rng, user, time)
    near = items.draw(rng, category, np.where(rng.random(len(user)) < 0.4, brand, -1))
    return Impressions(
        user=user,
        time=time,
        item=np.where(rng.random(len(user)) < 0.5, popular, near),
        device=rng.choice(DEVICES, size=len(user), p=[0.6, 0.3, 0.1]),
        placement=rng.choice(PLACEMENTS, size=len(user), p=[0.4, 0.3, 0.2, 0.1]),
    )
