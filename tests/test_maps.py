"""Maps: neighbours are exact, coordinates are the fit's own, same seed same bytes, hard cases give a map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Workspace
from scipy.spatial.distance import cdist
from sklearn.manifold import trustworthiness

from stages import reduce, store
from stages.errors import InputError
from stages.maps.layouts import fit_map
from stages.maps.neighbours import EXACT, METRICS, check_metric, neighbours
from stages.maps.quality import scores
from stages.maps.storage import MAPS, read_map
from stages.models.capture_points import Site
from stages.parameters import UmapParameters, read_parameters

ACTIVATIONS = Path("features/activations")
SCIPY_NAMES = {"manhattan": "cityblock", "l1": "cityblock", "taxicab": "cityblock", "l2": "euclidean"} | dict.fromkeys(
    ("linfinity", "linfty", "linf"), "chebyshev"
)
SITES = [Site(0, "word_embedding"), Site(1, "attention_output"), Site(1, "layer_output")]


def umap_parameters(**changes: Any) -> UmapParameters:
    values: dict[str, Any] = {
        "metric": "euclidean",
        "seed": 2,
        "n_neighbors": 15,
        "min_dist": 0.1,
        "n_epochs": 100,
        "layouts": ["joint", "separate"],
        "max_points": None,
    }
    return UmapParameters(**(values | changes))


def clusters(number: int, seed: int) -> Any:
    """Five well-separated clusters in 20 dimensions, and which vector is in which."""
    generator = np.random.default_rng(seed)
    labels = np.arange(number) % 5
    centres = 20 * generator.normal(size=(5, 20))
    return (centres[labels] + generator.normal(size=(number, 20))).astype(np.float32), labels


@pytest.mark.parametrize("metric", sorted(EXACT))
def test_neighbours_are_those_of_all_pairwise_distances(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.maps.neighbours.BLOCK_DISTANCES", 1000)  # several blocks
    vectors = np.random.default_rng(0).normal(size=(90, 12)).astype(np.float32)
    indices, distances = neighbours(vectors, 10, metric, seed=0)
    expected = cdist(vectors.astype(float), vectors.astype(float), SCIPY_NAMES.get(metric, metric))
    order = np.argsort(expected, axis=1, kind="stable")[:, :10]
    assert np.array_equal(indices, order)
    assert np.allclose(distances, np.take_along_axis(expected, order, axis=1), atol=1e-6)


def test_every_vector_is_its_own_first_neighbour_among_duplicates() -> None:
    vectors = np.repeat(np.random.default_rng(0).normal(size=(8, 5)), 5, axis=0).astype(np.float32)
    indices, distances = neighbours(vectors, 5, "euclidean", seed=0)
    assert np.array_equal(indices[:, 0], np.arange(40))
    assert np.array_equal(distances, np.zeros((40, 5), dtype=np.float32))


def test_unknown_metric_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"umap\.metric: 'cosin' is not a metric.*cosine, .*manhattan"):
        check_metric("cosin")
    assert {"euclidean", "manhattan", "cosine", "correlation", "chebyshev", "canberra", "braycurtis"} <= set(METRICS)


@pytest.fixture(scope="module")
def planted() -> tuple[Any, Any, Any]:
    vectors, labels = clusters(200, seed=0)
    return vectors, labels, fit_map(vectors, umap_parameters(), seed=2)


def test_clusters_stay_together_on_the_map(planted: tuple[Any, Any, Any]) -> None:
    vectors, labels, xy = planted
    distances = cdist(xy, xy)
    np.fill_diagonal(distances, np.inf)
    nearest = distances.argmin(axis=1)
    assert (labels[nearest] == labels).all()
    assert trustworthiness(vectors, xy, n_neighbors=15) > 0.85


@pytest.mark.filterwarnings("ignore:Graph is not fully connected")
def test_map_is_the_one_that_umap_itself_fits(planted: tuple[Any, Any, Any]) -> None:
    import umap

    vectors, _, xy = planted
    fitted = umap.UMAP(n_neighbors=15, min_dist=0.1, n_epochs=100, random_state=2, n_jobs=1).fit(vectors)
    # The same algorithm on the same neighbours; the order of equal sums differs in the last bit.
    ours, theirs = (trustworthiness(vectors, found, n_neighbors=15) for found in (xy, fitted.embedding_))
    assert abs(ours - theirs) < 0.01


def test_same_seed_gives_the_same_bytes_and_another_seed_another_map(planted: tuple[Any, Any, Any]) -> None:
    vectors, _, xy = planted
    assert fit_map(vectors, umap_parameters(), seed=2).tobytes() == xy.tobytes()
    assert fit_map(vectors, umap_parameters(), seed=3).tobytes() != xy.tobytes()


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 14, 16])
def test_few_vectors_give_a_map(number: int) -> None:
    vectors = np.random.default_rng(0).normal(size=(number, 6)).astype(np.float32)
    xy = fit_map(vectors, umap_parameters(), seed=2)
    assert xy.shape == (number, 2)
    assert np.isfinite(xy).all()


def test_constant_and_duplicate_vectors_give_a_finite_map() -> None:
    constant = np.ones((30, 6), dtype=np.float32)
    assert np.isfinite(fit_map(constant, umap_parameters(), seed=2)).all()
    duplicates = np.repeat(np.random.default_rng(0).normal(size=(6, 6)), 10, axis=0).astype(np.float32)
    assert np.isfinite(fit_map(duplicates, umap_parameters(), seed=2)).all()


def write_stores(tokens: int) -> dict[Site, Any]:
    plan = store.plan_store(tokens, 20, "float16")
    store.create_stores(ACTIVATIONS, SITES, plan)
    features = {site: clusters(tokens, seed)[0].astype(np.float16) for seed, site in enumerate(SITES)}
    for site, block in features.items():
        store.write_block(ACTIVATIONS, site, slice(0, tokens), block)
    table = pd.DataFrame({"document": [f"test/{i // 30}" for i in range(tokens)], "position": np.arange(tokens) % 30})
    table.assign(token_id=0, token="a").to_parquet(store.tokens_file(ACTIVATIONS), index=False)
    return features


def test_joint_is_one_fit_of_all_points_and_separate_one_of_each(workspace: Workspace) -> None:
    workspace(umap={"n_epochs": 30})
    features = write_stores(60)
    reduce.main(read_parameters())
    joint, separate = read_map("joint"), read_map("separate")
    for table in (joint, separate):
        assert list(table.columns) == ["document", "position", "layer", "point", "x", "y"]
        assert len(table) == 3 * 60
        assert table["point"].drop_duplicates().tolist() == [site.point for site in SITES]
    umap = read_parameters().umap
    together = fit_map(np.concatenate([f.astype(np.float32) for f in features.values()]), umap, umap.seed)
    assert np.array_equal(joint[["x", "y"]].to_numpy(), together)
    alone = fit_map(features[SITES[1]].astype(np.float32), umap, umap.seed)
    assert np.array_equal(separate.loc[60:119, ["x", "y"]].to_numpy(), alone)


def test_limit_draws_the_same_tokens_of_every_document_at_every_point(workspace: Workspace) -> None:
    workspace(umap={"n_epochs": 10, "max_points": 100, "layouts": ["joint"]})
    write_stores(60)
    reduce.main(read_parameters())
    joint = read_map("joint")
    assert len(joint) == 99
    positions = [tuple(rows["position"]) for _, rows in joint.groupby(["layer", "point"])]
    assert len(set(positions)) == 1
    assert joint.groupby("document").size().tolist() in ([48, 51], [51, 48])
    assert not (MAPS / "separate.parquet").exists()


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "manhattan"])
def test_trustworthiness_and_continuity_are_scikit_learns(planted: tuple[Any, Any, Any], metric: str) -> None:
    vectors, _, xy = planted
    found = scores(vectors, xy, metric, seed=0).mean(axis=0)
    assert found[0] == pytest.approx(trustworthiness(vectors, xy, n_neighbors=15, metric=metric), abs=1e-9)
    if metric == "euclidean":
        assert found[1] == pytest.approx(trustworthiness(xy, vectors, n_neighbors=15), abs=1e-9)
    spaces = ((vectors, SCIPY_NAMES.get(metric, metric)), (xy, "euclidean"))
    full, flat = (np.argsort(cdist(space, space, name), axis=1)[:, 1:16] for space, name in spaces)
    kept = np.mean([len(set(a) & set(b)) / 15 for a, b in zip(full, flat, strict=True)])
    assert found[2] == pytest.approx(kept, abs=1e-9)


def test_a_rigid_motion_scores_full_marks_and_noise_scores_chance() -> None:
    generator = np.random.default_rng(0)
    flat = generator.normal(size=(300, 2)).astype(np.float32)
    angle = np.array([[0.6, -0.8], [0.8, 0.6]], dtype=np.float32)
    moved = flat @ angle * 2 + 7
    assert scores(flat, moved, "euclidean", seed=0).mean(axis=0) == pytest.approx([1, 1, 1], abs=0.01)
    noise = generator.normal(size=(300, 2)).astype(np.float32)
    trust, continuity, kept = scores(flat, noise, "euclidean", seed=0).mean(axis=0)
    assert trust == pytest.approx(0.5, abs=0.05)
    assert continuity == pytest.approx(0.5, abs=0.05)
    assert kept == pytest.approx(15 / 299, abs=0.02)


def test_every_map_carries_its_scores(workspace: Workspace) -> None:
    workspace(umap={"n_epochs": 30})
    features = write_stores(60)
    reduce.main(read_parameters())
    quality = pd.read_parquet(MAPS / "quality.parquet")
    assert set(quality["measure"]) == {"trustworthiness", "continuity", "neighbours_kept"}
    separate = quality[(quality["layout"] == "separate") & (quality["measure"] == "trustworthiness")]
    assert len(separate) == 1 + len(SITES)
    xy = read_map("separate").query("layer == 1 and point == 'layer_output'")[["x", "y"]].to_numpy()
    expected = trustworthiness(features[SITES[2]].astype(np.float32), xy, n_neighbors=15)
    assert separate[separate["point"] == "layer_output"]["value"].item() == pytest.approx(expected, abs=1e-6)
    metrics = json.loads(Path("reports/metrics/maps.json").read_text())
    assert metrics["joint"]["vectors"] == 180
    for layout in ("joint", "separate"):
        assert metrics[layout]["trustworthiness"]["value"] > metrics[layout]["trustworthiness"]["chance"] + 0.2


def test_unknown_metric_stops_the_stage_before_any_work(workspace: Workspace) -> None:
    workspace(umap={"metric": "cosin"})
    with pytest.raises(InputError, match=r"umap\.metric"):
        reduce.main(read_parameters())
