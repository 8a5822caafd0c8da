"""What MovieLens-100K gives without a model: logistic regression on smoothed means of past labels.

`running` means use every strictly earlier rating, as gem_small's dense features do. `frozen` ones
stop where the test split begins, as a model does that is not updated.
"""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from gem.data.datasets.movielens import MovieLens, earlier

SMOOTHING = 5.0
TEST_FRACTION = 0.1


def movielens_baselines(cache: str | None = None) -> dict[str, dict[str, float]]:
    """Test NE and AUC of both, on the last 10% of the ratings by time."""
    cache = cache or str(Path(".cache"))
    (file,) = MovieLens(cache=cache).prepare()
    table = pq.read_table(file, columns=["user", "item", "time", "label"])
    user, item, time, label = (table[name].to_numpy() for name in table.column_names)
    cut = np.sort(time)[int(len(time) * (1 - TEST_FRACTION))]
    test = time >= cut
    result = {}
    for name, clock in (("frozen", np.minimum(time, cut)), ("running", time)):
        features = np.stack(
            [smoothed_log_odds(key, clock, time, label) for key in (user, item)], axis=1
        )
        model = LogisticRegression(C=np.inf).fit(features[~test], label[~test])
        score = model.predict_proba(features[test])[:, 1]
        rate = label[test].mean()
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        result[name] = {
            "ne": float(log_loss(label[test], score) / entropy),
            "auc": float(roc_auc_score(label[test], score)),
            "rows": int(test.sum()),
        }
    return result


def smoothed_log_odds(
    key: np.ndarray, clock: np.ndarray, time: np.ndarray, label: np.ndarray
) -> np.ndarray:
    """Log odds of each row's key from labels strictly before the row's clock."""
    both = np.concatenate([key, key])
    weight = np.concatenate([np.ones(len(key)), np.zeros(len(key))])
    moments = np.concatenate([time, clock])
    _, count = earlier(both, moments, weight)
    _, total = earlier(both, moments, weight * np.concatenate([label, label]))
    count, total = count[len(key) :], total[len(key) :]
    prior = label.mean()
    rate = (total + SMOOTHING * prior) / (count + SMOOTHING)
    return np.log(rate / (1 - rate))
