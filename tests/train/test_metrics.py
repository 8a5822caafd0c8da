"""Metrics against scikit-learn, their definitions, and the inputs that have no answer."""

import math

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from gem.train.metrics import (
    auc,
    base_rate,
    calibration,
    entropy,
    gauc,
    logit,
    normalized_entropy,
    sigmoid,
    task_metrics,
)


def sample(n, seed, levels=None):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=n)
    if levels is not None:
        scores = np.round(scores * levels) / levels
    labels = (rng.random(n) < sigmoid(scores)).astype(np.float64)
    return scores, labels, rng.random(n) * 2


@pytest.mark.parametrize("levels", [None, 1, 3], ids=["no ties", "many ties", "some ties"])
@pytest.mark.parametrize("seed", range(3))
def test_auc_is_sklearns(seed, levels):
    scores, labels, weights = sample(500, seed, levels)
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    assert auc(scores, labels, weights) == pytest.approx(expected, abs=1e-12)


def test_auc_takes_pairs_of_the_weighted_rows_only():
    scores, labels = np.array([0.1, 0.9, 0.5, 0.4]), np.array([0.0, 0.0, 1.0, 1.0])
    assert auc(scores, labels, np.array([1.0, 0.0, 1.0, 1.0])) == 1.0
    assert auc(scores, labels) == 0.5


@pytest.mark.parametrize(
    ("labels", "weights"),
    [
        ([1, 1, 1], [1, 1, 1]),
        ([0, 0, 0], [1, 1, 1]),
        ([0, 1, 1], [0, 0, 0]),
        ([0, 1, 1], [0, 1, 1]),
        ([], []),
    ],
    ids=["positives", "negatives", "no weight", "one class has weight", "no rows"],
)
def test_one_class_or_nothing_is_undefined_and_never_an_error(labels, weights):
    """torchmetrics and Lightning raised here; torchrec answers 0.5."""
    scores = np.array([0.2, 0.7, 0.9])[: len(labels)]
    labels, weights = np.array(labels, float), np.array(weights, float)
    assert math.isnan(auc(scores, labels, weights))
    assert math.isnan(gauc(scores, labels, np.zeros(len(labels), int), weights))
    assert math.isnan(normalized_entropy(scores, labels, weights))
    metrics = task_metrics(scores, labels, weights, np.zeros(len(labels), int))
    assert metrics.rows == int((weights > 0).sum())


def test_all_scores_tied_is_half():
    """Nothing is 0/0 where one tie group holds every row."""
    assert auc(np.zeros(3), np.array([0.0, 0.0, 1.0])) == 0.5


def test_normalized_entropy():
    scores, labels, weights = sample(400, 0)
    rate = labels.mean()
    expected = log_loss(labels, sigmoid(scores)) / entropy(rate)
    assert normalized_entropy(scores, labels) == pytest.approx(expected, rel=1e-12)
    constant = np.full(400, logit(np.array([rate]))[0])
    assert normalized_entropy(constant, labels) == pytest.approx(1.0, rel=1e-12)
    expected = log_loss(labels, sigmoid(scores), sample_weight=weights)
    expected /= entropy((labels * weights).sum() / weights.sum())
    assert normalized_entropy(scores, labels, weights) == pytest.approx(expected, rel=1e-12)


def test_normalized_entropy_of_extreme_logits_is_exact():
    """Probabilities would round to 0 and 1 and make it infinite."""
    z, y = np.array([-800.0, 800.0, 3.0]), np.array([0.0, 1.0, 0.0])
    expected = math.log1p(math.exp(3.0)) / 3 / entropy(1 / 3)
    assert normalized_entropy(z, y) == pytest.approx(expected, rel=1e-14)


def test_a_row_without_weight_may_hold_anything():
    z, y, w = np.array([0.5, np.nan, -1.0]), np.array([1.0, 0.0, 0.0]), np.array([1.0, 0.0, 1.0])
    users = np.array([1, 1, 1])
    assert task_metrics(z, y, w, users) == task_metrics(z[w > 0], y[w > 0], None, users[w > 0])


def test_calibration_and_base_rate():
    z, y = np.zeros(4), np.array([1.0, 0.0, 0.0, 0.0])
    assert calibration(z, y) == pytest.approx(2.0)
    assert base_rate(y) == 0.25
    assert math.isnan(calibration(z, np.zeros(4)))
    assert math.isnan(base_rate(np.zeros(0)))


def test_gauc_is_the_row_weighted_mean_over_users_with_both_labels():
    rng = np.random.default_rng(0)
    users = rng.integers(0, 40, 600) * 10**15
    scores = np.round(rng.normal(size=600), 1)
    labels = (rng.random(600) < np.where(users % 2, 0.05, 0.3)).astype(float)
    total = rows = 0.0
    for user in np.unique(users):
        mine = users == user
        if 0 < labels[mine].sum() < mine.sum():
            total += roc_auc_score(labels[mine], scores[mine]) * mine.sum()
            rows += mine.sum()
    assert 0 < rows
    assert gauc(scores, labels, users) == pytest.approx(total / rows, abs=1e-12)
    shuffled = rng.permutation(600)
    again = gauc(scores[shuffled], labels[shuffled], users[shuffled])
    assert again == pytest.approx(total / rows, abs=1e-12)


def test_gauc_differs_from_auc():
    """A model that knows users but not items: perfect overall, blind within users."""
    users = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    labels = np.array([1, 1, 1, 0, 0, 0, 0, 1], float)
    scores = np.where(users == 0, 1.0, 0.0)
    assert auc(scores, labels) == 0.75
    assert gauc(scores, labels, users) == 0.5
