"""Which of umap-learn's metrics are taken, by name, so that parameters are checked before any work."""

from __future__ import annotations

BY_PRODUCTS = ("correlation", "cosine", "euclidean", "l2", "minkowski", "softmax_hellinger")
"""Computed from one matrix product."""
BY_DIFFERENCES = (
    "braycurtis", "canberra", "chebyshev", "l1", "linf", "linfinity", "linfty", "manhattan", "taxicab",
)  # fmt: skip
METRIC_NAMES = tuple(sorted(BY_PRODUCTS + BY_DIFFERENCES))

_NOT_FOR_FEATURES = {
    "compares discrete or binary data": "categorical count dice hamming hierarchical_categorical jaccard kulsinski "
    "matching myers ordinal rogerstanimoto russellrao sokalmichener sokalsneath string yule",
    "needs parameters of its own": "mahalanobis seuclidean standardised_euclidean weighted_minkowski wminkowski",
    "is not defined for negative values": "hellinger ll_dirichlet symmetric_kl",
    "is defined within the unit ball only": "poincare",
    "is defined for two dimensions only": "haversine",
}
REASONS = {name: reason for reason, names in _NOT_FOR_FEATURES.items() for name in names.split()}
"""Why each other metric of umap-learn is refused."""


def check_metric(metric: str) -> str:
    """The metric itself; `ValueError` for one that is none of `METRIC_NAMES`."""
    if metric not in METRIC_NAMES:
        raise ValueError(
            f"not a metric for dense real vectors, it {REASONS.get(metric, 'is not known to umap-learn')}; "
            f"allowed: {', '.join(METRIC_NAMES)}"
        )
    return metric
