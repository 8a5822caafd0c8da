"""NE, AUC, calibration and GAUC: exact, vectorised, in float64.

Every function takes flat arrays: scores are logits or any increasing function of them, labels are
0/1, weights are >= 0 and a row of weight 0 does not exist. A metric that its rows do not define
(AUC of one class, NE of a constant label, anything of no rows) is NaN, never an exception and
never a made-up 0.5 that would read as "ranks at random".
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NAN = float("nan")


@dataclass(frozen=True)
class TaskMetrics:
    """The metrics of one task over a set of rows; NaN where undefined.

    `rows` is the number of rows with weight > 0, `base_rate` their weighted mean label.
    """

    ne: float
    auc: float
    gauc: float
    calibration: float
    rows: int
    base_rate: float


def cross_entropy(logits: NDArray, labels: NDArray) -> Array:
    """Binary cross-entropy per row from logits, natural log: log(1 + e^z) - y z."""
    z = np.asarray(logits, np.float64)
    return np.logaddexp(0.0, z) - np.asarray(labels, np.float64) * z


def entropy(rate: float) -> float:
    """-(p ln p + (1 - p) ln(1 - p)); 0 at p = 0 and 1, NaN for NaN."""
    if rate in (0.0, 1.0):
        return 0.0
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def base_rate(labels: NDArray, weights: NDArray | None = None) -> float:
    """Weighted mean label; NaN without rows."""
    labels, weights = _rows(labels, weights)
    total = weights.sum()
    return float((labels * weights).sum() / total) if total > 0 else NAN


def normalized_entropy(logits: NDArray, labels: NDArray, weights: NDArray | None = None) -> float:
    """Mean cross-entropy over the entropy of the rows' own base rate (He et al. 2014, eq. 1).

    Below 1 beats predicting the base rate everywhere; lower is better.
    """
    labels, weights = _rows(labels, weights)
    total = weights.sum()
    base = entropy(base_rate(labels, weights))
    if not total > 0 or not base > 0:
        return NAN
    counted = weights > 0
    rows = cross_entropy(np.asarray(logits)[counted], labels[counted])
    return float((rows * weights[counted]).sum() / total / base)


def calibration(logits: NDArray, labels: NDArray, weights: NDArray | None = None) -> float:
    """Sum of predicted probabilities over sum of labels; 1 is calibrated, NaN if no positive."""
    labels, weights = _rows(labels, weights)
    counted = weights > 0
    observed = (labels * weights).sum()
    predicted = (sigmoid(np.asarray(logits)[counted]) * weights[counted]).sum()
    return float(predicted / observed) if observed > 0 else NAN


def auc(scores: NDArray, labels: NDArray, weights: NDArray | None = None) -> float:
    """Area under the ROC curve, exact: a tied pair of a positive and a negative counts half."""
    return float(_group_aucs(scores, labels, weights, np.zeros(len(scores), np.int64))[0])


def gauc(scores: NDArray, labels: NDArray, users: NDArray, weights: NDArray | None = None) -> float:
    """AUC within each user, averaged with the users' weights (Zhou et al. 2018, eq. 9).

    Users without both labels have no AUC and are left out; a user's weight is the sum of the
    weights of the user's rows (its number of impressions). NaN if no user remains.
    """
    aucs, sizes = _group_aucs_and_weights(scores, labels, weights, users)
    valid = ~np.isnan(aucs)
    total = sizes[valid].sum()
    return float((aucs[valid] * sizes[valid]).sum() / total) if total > 0 else NAN


def task_metrics(
    logits: NDArray,
    labels: NDArray,
    weights: NDArray | None = None,
    users: NDArray | None = None,
) -> TaskMetrics:
    """All metrics of one task; `gauc` is NaN without users."""
    labels, weights = _rows(labels, weights)
    return TaskMetrics(
        ne=normalized_entropy(logits, labels, weights),
        auc=auc(logits, labels, weights),
        gauc=NAN if users is None else gauc(logits, labels, users, weights),
        calibration=calibration(logits, labels, weights),
        rows=int((weights > 0).sum()),
        base_rate=base_rate(labels, weights),
    )


def sigmoid(logits: NDArray) -> Array:
    """1 / (1 + e^-z) without overflow."""
    z = np.asarray(logits, np.float64)
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, e) / (1.0 + e)


def logit(probabilities: NDArray) -> Array:
    """ln(p / (1 - p)), with p kept within 1e-12 of 0 and 1."""
    p = np.clip(np.asarray(probabilities, np.float64), 1e-12, 1 - 1e-12)
    return np.log(p) - np.log1p(-p)


def _rows(labels: NDArray, weights: NDArray | None) -> tuple[Array, Array]:
    labels = np.asarray(labels, np.float64)
    weights = np.ones_like(labels) if weights is None else np.asarray(weights, np.float64)
    return labels, weights


def _group_aucs(
    scores: NDArray, labels: NDArray, weights: NDArray | None, groups: NDArray
) -> Array:
    """AUC per group, NaN for a group with one label; [NaN] without rows."""
    return _group_aucs_and_weights(scores, labels, weights, groups)[0]


def _group_aucs_and_weights(
    scores: NDArray, labels: NDArray, weights: NDArray | None, groups: NDArray
) -> tuple[Array, Array]:
    labels, weights = _rows(labels, weights)
    counted = weights > 0
    scores, groups = np.asarray(scores)[counted], np.asarray(groups)[counted]
    labels, weights = labels[counted], weights[counted]
    if not len(scores):
        return np.array([NAN]), np.array([0.0])
    order = np.lexsort((scores, groups))
    scores, groups = scores[order], groups[order]
    positive = (labels * weights)[order]
    negative = ((1 - labels) * weights)[order]

    new_group = np.r_[True, groups[1:] != groups[:-1]]
    ties = np.flatnonzero(new_group | np.r_[True, scores[1:] != scores[:-1]])
    starts = np.flatnonzero(new_group)
    tie_positive = np.add.reduceat(positive, ties)
    tie_negative = np.add.reduceat(negative, ties)
    group_positive = np.add.reduceat(positive, starts)
    group_negative = np.add.reduceat(negative, starts)

    # Negatives ranked below a tie: those before it, less those of earlier groups.
    group_of_tie = np.searchsorted(starts, ties, side="right") - 1
    before_tie = np.cumsum(tie_negative) - tie_negative
    before_group = np.cumsum(group_negative) - group_negative
    below = before_tie - before_group[group_of_tie]
    won = tie_positive * (below + 0.5 * tie_negative)
    first_tie = np.searchsorted(ties, starts)
    wins = np.add.reduceat(won, first_tie)
    pairs = group_positive * group_negative
    with np.errstate(invalid="ignore", divide="ignore"):
        aucs = np.where(pairs > 0, wins / pairs, NAN)
    return aucs, group_positive + group_negative
