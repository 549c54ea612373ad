"""Tests of maps.

Maps are computed from exact neighbours, have the same coordinates as those of umap-learn, and are reproducible byte by
byte. They can also be computed for degenerate inputs.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Workspace, write_captured_tokens
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr
from sklearn.manifold import trustworthiness
from threadpoolctl import threadpool_info, threadpool_limits
from umap.distances import named_distances
from umap.umap_ import pynn_named_distances

from attnmix.core.arithmetic.environment import SETTINGS
from attnmix.core.errors import InputError
from attnmix.core.names import ACTIVATIONS, LAYOUTS, METRIC_NAMES, Site
from attnmix.core.settings import UmapParameters
from attnmix.core.store import features as store
from attnmix.core.store.results import components_of
from attnmix.core.store.runs import Run
from attnmix.figures.labels import MAP_MEASURES
from attnmix.maps.aligned import ties, ties_of_places
from attnmix.maps.components import EXTENT, principal_components, two_components
from attnmix.maps.layouts import N_EPOCHS, fit_map, lay_out, lay_out_aligned, neighbourhood
from attnmix.maps.neighbours import METRICS, neighbours
from attnmix.maps.parallel import in_parallel
from attnmix.maps.quality import WITHIN, score_layout, scores, stability
from stages import reduce
from stages.common.parameters import read_parameters

SITES = [Site(0, "embedding_output"), Site(1, "attention_norm"), Site(1, "layer_output")]


def clusters(number: int, seed: int) -> Any:
    """Return five well-separated clusters in 20 dimensions."""
    generator = np.random.default_rng(seed)
    centres = 20 * generator.normal(size=(5, 20))
    return (centres[np.arange(number) % 5] + generator.normal(size=(number, 20))).astype(np.float32)


def all_distances(vectors: Any, metric: str) -> Any:
    if metric == "softmax_hellinger":
        return np.array([[named_distances[metric](a, b) for b in vectors] for a in vectors], dtype=float)
    return cdist(vectors.astype(float), vectors.astype(float), "cityblock" if metric == "manhattan" else metric)


# One name per metric; all other names are aliases.
DISTINCT = ["braycurtis", "canberra", "chebyshev", "correlation", "cosine", "euclidean", "manhattan"]
DISTINCT += ["softmax_hellinger"]


@pytest.mark.parametrize("metric", DISTINCT)
def test_neighbours_match_pairwise_distances(metric: str) -> None:
    vectors = np.random.default_rng(0).normal(size=(90, 12)).astype(np.float32)
    indices, distances = neighbours(vectors, 10, metric, seed=0)
    expected = all_distances(vectors, metric)
    np.fill_diagonal(expected, np.inf)
    order = np.argsort(expected, axis=1, kind="stable")[:, :10]
    assert np.array_equal(indices, order)
    assert np.allclose(distances, np.take_along_axis(expected, order, axis=1), atol=1e-6)
    # Equal vectors have distance 0, and no vector is a neighbour of itself.
    vectors[0] = 0
    indices, distances = neighbours(np.repeat(vectors[:60], 5, axis=0), 5, metric, seed=0)
    assert (indices != np.arange(300)[:, None]).all()
    assert np.array_equal(distances[:, :4], np.zeros((300, 4)))
    assert (distances[:, 4] > 0).all()


@pytest.mark.long  # compilation of nearest-neighbour descent takes half a minute
def test_approximate_neighbours_are_seeded_and_accurate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors = np.random.default_rng(0).normal(size=(400, 12)).astype(np.float32)
    exact, exact_distances = neighbours(vectors, 10, "cosine", seed=0)
    monkeypatch.setattr("attnmix.maps.neighbours.MAX_EXACT_VECTORS", 0)
    indices, distances = neighbours(vectors, 10, "cosine", seed=0)
    again, same = neighbours(vectors, 10, "cosine", seed=0)
    assert np.array_equal(indices, again)
    assert distances.tobytes() == same.tobytes()
    assert np.mean([len(set(a) & set(b)) for a, b in zip(exact, indices, strict=True)]) > 9.5
    right = indices == exact
    assert np.allclose(distances[right], exact_distances[right], rtol=1e-3, atol=1e-3)
    for metric in METRICS.values():  # both search methods use the same distance
        first, second = metric.prepared(vectors[:2])
        expected = cdist(first[None], second[None], "cityblock" if metric.distance == "manhattan" else metric.distance)
        assert pynn_named_distances[metric.distance](first, second) == pytest.approx(expected.item())


def test_metrics_have_distances_and_exist_in_umap() -> None:
    assert set(METRICS) == set(METRIC_NAMES)
    assert set(METRICS) <= set(named_distances)
    assert {id(metric) for metric in METRICS.values()} == {id(METRICS[name]) for name in DISTINCT}


def test_disconnected_graph_has_map() -> None:
    assert np.isfinite(fit_map(clusters(100, seed=0), UmapParameters(metric="cosine", n_neighbors=5))).all()


@pytest.fixture(scope="module")
def chain() -> list[Any]:
    """Return the vectors of 60 tokens at five points: a cloud, with random deviations that grow from point to point."""
    generator = np.random.default_rng(1)
    cloud = generator.normal(size=(60, 8))
    return [(cloud + 0.2 * point * generator.normal(size=(60, 8))).astype(np.float32) for point in range(5)]


# umap.UMAP warns about its own settings; attnmix calls umap's functions instead.
@pytest.mark.filterwarnings("ignore:.*transform will be unavailable", "ignore:n_jobs value 1 overridden")
def test_maps_match_umap_exactly(chain: list[Any]) -> None:
    import umap

    near = neighbourhood(chain[0], "euclidean", 15, seed=2)
    others, distances = neighbours(chain[0], 14, "euclidean", seed=0)
    knn = np.column_stack([np.arange(60), others]), np.pad(distances, ((0, 0), (1, 0)))
    options: Any = {"n_epochs": N_EPOCHS, "init": near.start(7), "random_state": 7, "n_jobs": 1}
    expected = umap.UMAP(15, precomputed_knn=knn, **options).fit(chain[0]).embedding_
    assert np.array_equal(lay_out(near, 0.1, seed=7), expected)


@pytest.mark.parametrize("metric", ["cosine", "manhattan"])
def test_map_graph_connects_nearest_neighbours(chain: list[Any], metric: str) -> None:
    nearest = np.argsort(all_distances(chain[0], metric), axis=1)[:, 1:15]
    connected = np.zeros((60, 60), dtype=bool)
    np.put_along_axis(connected, nearest, True, axis=1)
    graph = neighbourhood(chain[0], metric, 15, seed=2).graph.toarray()
    np.testing.assert_array_equal(graph > 0, connected | connected.T)


@pytest.mark.long  # compilation of AlignedUMAP takes half a minute
def test_aligned_maps_match_umap_graphs_and_quality(chain: list[Any]) -> None:
    from umap import AlignedUMAP

    near = [neighbourhood(vectors, "euclidean", 15, seed=2) for vectors in chain]
    ours = lay_out_aligned(near, 0.1, seed=7)
    itself = {token: token for token in range(60)}
    model = AlignedUMAP(15, n_epochs=N_EPOCHS, init="random", random_state=2, transform_seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = model.fit(chain, relations=[itself] * 4).embeddings_
    for each, mapper in zip(near, model.mappers_, strict=True):
        assert each.graph is not None
        graph = each.graph.toarray()
        pruned = np.where(graph < graph.max() / N_EPOCHS, 0, graph)  # umap-learn removes edges that are never sampled
        assert np.abs(pruned - mapper.graph_.toarray()).max() < 1e-5

    def mean_quality(maps: Any) -> tuple[float, float]:
        """Return the mean trustworthiness, and the mean distance between maps of successive points."""
        kept = np.mean([trustworthiness(x, xy, n_neighbors=15) for x, xy in zip(chain, maps, strict=True)])
        steps = [np.linalg.norm(after - before, axis=1).mean() / before.std() for before, after in pairwise(maps)]
        return float(kept), float(np.mean(steps))

    kept, step = mean_quality(ours)
    their_kept, their_step = mean_quality(theirs)
    assert kept > their_kept - 0.02
    assert step < 1.25 * their_step


def test_ties_follow_shared_neighbours(chain: list[Any]) -> None:
    """A tie is the Jaccard index of a token's neighbours at two points, times a weight that falls with the offset.

    The first axis of `strength` is the signed offset between the points, from -3 to 3.
    """
    graphs: list[Any] = [neighbourhood(vectors, "euclidean", 8, seed=2).graph for vectors in chain]
    strength = ties(graphs).reshape(7, 5, 60)
    for point, other in ((0, 1), (2, 0), (4, 1)):
        jaccard = []
        for row, other_row in zip(graphs[point], graphs[other], strict=True):
            near = set(row.nonzero()[1])
            other_near = set(other_row.nonzero()[1])
            jaccard.append(len(near & other_near) / len(near | other_near))
        expected = 0.01 * np.exp(1 - abs(other - point)) * np.array(jaccard)
        assert strength[3 + other - point, point] == pytest.approx(expected)
    assert not strength[3].any()  # no tie of a point to itself
    assert not strength[4:, 4].any()  # no ties beyond the last point
    assert not strength[:3, 0].any()


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_principal_components_match_svd(metric: str) -> None:
    vectors = clusters(60, 0)
    x_ND = vectors.astype(np.float64)
    if metric == "cosine":
        x_ND /= np.sqrt((x_ND**2).sum(axis=1, keepdims=True))
    left, strengths, directions = np.linalg.svd(x_ND - x_ND.mean(axis=0), full_matrices=False)
    signs = [np.sign(direction[np.argmax(np.abs(direction))]) for direction in directions[:2]]
    expected = left[:, :2] * strengths[:2] * signs
    expected *= EXTENT / np.abs(expected).max()
    np.testing.assert_allclose(principal_components(vectors, metric), expected, atol=1e-5)


def test_component_scale_and_variance_need_euclidean_metric() -> None:
    vectors = clusters(60, 0)
    left, strengths, _ = np.linalg.svd(vectors - vectors.mean(axis=0, dtype=float), full_matrices=False)
    xy = principal_components(vectors, "euclidean")
    known = components_of(vectors, xy)
    assert known is not None
    assert known.scale * np.abs(xy).max() == pytest.approx(np.abs(left[:, :2] * strengths[:2]).max(), rel=1e-5)
    assert known.shares == pytest.approx((strengths[:2] ** 2 / (strengths**2).sum()).tolist(), rel=1e-5)
    assert components_of(vectors, principal_components(vectors, "cosine")) is None
    assert components_of(np.ones((3, 4)), np.zeros((3, 2))) is None


def write_stores(tokens: int) -> dict[Site, Any]:
    """Write random features at three points and a table of tokens, and return the features."""
    plan = store.plan_store(tokens, 20, "float16", 64)
    store.create_stores(ACTIVATIONS, dict.fromkeys(SITES, 20), plan)
    features = {site: clusters(tokens, seed).astype(np.float16) for seed, site in enumerate(SITES)}
    for site, block in features.items():
        store.write_unit(store.open_to_write(ACTIVATIONS, site), slice(0, tokens), block)
    table = pd.DataFrame({"document": [f"test/{i // 30}" for i in range(tokens)], "position": np.arange(tokens) % 30})
    write_captured_tokens(table, dict.fromkeys(table["document"], "a text"))
    return features


def test_stage_writes_maps_and_scores(workspace: Workspace) -> None:
    workspace(umap={"layouts": list(LAYOUTS), "stability_seeds": [3]})
    features = {site: block.astype(np.float32) for site, block in write_stores(60).items()}
    reduce.main(read_parameters())
    run = Run(Path())
    maps = {layout: run.map(layout) for layout in LAYOUTS}
    for table in maps.values():
        assert list(table.columns) == ["document", "position", "layer", "point", "x", "y"]
        assert table["point"].tolist() == [site.point for site in SITES for _ in range(60)]
    assert np.array_equal(maps["joint"][["x", "y"]], fit_map(np.concatenate(list(features.values())), UmapParameters()))
    alone = maps["separate"].loc[120:, ["x", "y"]].to_numpy()
    assert np.array_equal(alone, fit_map(features[SITES[2]], UmapParameters()))

    quality, whole = run.map_quality, run.table("reduce/map_quality")
    assert set(quality["measure"]) == set(MAP_MEASURES)
    values = quality.query("layout == 'separate' and measure == 'trustworthiness'").set_index("point")["value"]
    assert values["layer_output"] == pytest.approx(trustworthiness(features[SITES[2]], alone, n_neighbors=15), abs=1e-6)
    assert values[values.index.isna()].item() == pytest.approx(values[values.index.notna()].mean(), abs=1e-6)
    expected = quality.loc[quality["point"].isna()].drop(columns=["layer", "point"]).reset_index(drop=True)
    pd.testing.assert_frame_equal(whole[expected.columns], expected, check_dtype=False)
    by_name = whole.set_index(["layout", "measure"])
    for layout, numbers in run.metrics("reduce").items():
        with_seeds = [] if layout == "pca" else ["neighbour_overlap"]
        assert list(numbers) == ["trustworthiness", "neighbours_kept", *with_seeds]
        for name, value in numbers.items():
            assert value == pytest.approx(by_name.loc[(layout, name), "value"], rel=1e-5)
            assert value > by_name.loc[(layout, name), "chance"] + 0.1


def test_limit_samples_same_tokens_at_every_point(workspace: Workspace) -> None:
    workspace(umap={"layouts": ["separate"], "stability_seeds": [], "max_points": 100})
    write_stores(60)
    reduce.main(read_parameters())
    run = Run(Path())
    table = run.map("separate")
    assert len({tuple(rows["position"]) for _, rows in table.groupby(["layer", "point"])}) == 1
    assert table.groupby("document").size().tolist() in ([48, 51], [51, 48])
    whole = run.table("reduce/map_quality")
    assert whole[["tokens", "points", "scored_vectors"]].drop_duplicates().to_numpy().tolist() == [[33, 3, 99]]


@pytest.mark.parametrize(
    ("metric", "number"),
    [("euclidean", 200), ("cosine", 200), ("manhattan", 200), *(("euclidean", few) for few in (3, 8, 31, 32))],
)
def test_scores_match_pairwise_distances(metric: str, number: int) -> None:
    vectors = np.random.default_rng(0).normal(size=(number, 6)).astype(np.float32)
    xy = (vectors[:, :2] + np.random.default_rng(1).normal(size=(number, 2))).astype(np.float32)
    k = min(15, (number - 1) // 2)
    measured = scores(vectors, xy, metric)
    full, flat = all_distances(vectors, metric), cdist(xy, xy)
    # Ranks of all vectors by distance from each vector; the vector itself has rank 0.
    full_ranks = np.argsort(np.argsort(full, axis=1), axis=1)
    flat_ranks = np.argsort(np.argsort(flat, axis=1), axis=1)
    near_full = (full_ranks > 0) & (full_ranks <= k)
    near_flat = (flat_ranks > 0) & (flat_ranks <= k)
    scale = 2 / (number * k * (2 * number - 3 * k - 1))
    expected = 1 - scale * np.maximum(full_ranks - k, 0)[near_flat].sum()
    assert measured["trustworthiness"] == pytest.approx(expected)
    if metric != "manhattan":  # scikit-learn would use Euclidean neighbours
        expected = 1 - scale * np.maximum(flat_ranks - k, 0)[near_full].sum()
        assert measured["continuity"] == pytest.approx(expected)
    assert measured["neighbours_kept"] == pytest.approx((near_full & near_flat).sum() / (number * k))
    pairs = np.triu_indices(number, 1)
    assert measured["distance_spearman"] == pytest.approx(spearmanr(full[pairs], flat[pairs]).statistic, abs=1e-6)


def test_stability_of_equal_shapes_and_noise() -> None:
    generator = np.random.default_rng(0)
    flat = generator.normal(size=(200, 2)).astype(np.float32)
    mirrored = (flat * [-3, 3] + 5).astype(np.float32)
    measured = stability([flat, mirrored], seed=0)
    assert measured["procrustes_distance"] == pytest.approx((0, 1), abs=0.05)
    assert measured["neighbour_overlap"] == pytest.approx((1, 15 / 199), abs=0.02)
    noise = generator.normal(size=(200, 2)).astype(np.float32)
    for value, chance in stability([flat, noise], seed=0).values():
        assert value == pytest.approx(chance, abs=0.05)


def map_by_point(heads: float) -> tuple[list[Site], Any, Any]:
    """Return the sites, vectors and maps of 40 tokens at three points.

    The second point is `attention_heads`, whose vectors have a different basis than those of the other points. `heads`
    is added to all components of this point's vectors and to its map coordinates.
    """
    generator = np.random.default_rng(0)
    sites = [Site(0, "embedding_output"), Site(1, "attention_heads"), Site(1, "layer_output")]
    vectors_STD = generator.normal(size=(3, 40, 8)).astype(np.float32)
    maps_ST2 = vectors_STD[..., :2] + 0.3 * generator.normal(size=(3, 40, 2)).astype(np.float32)
    vectors_STD[1] += np.float32(heads)
    maps_ST2[1] += np.float32(heads)
    return sites, vectors_STD, maps_ST2


def score_joint_map(sites: list[Site], vectors_STD: Any, maps_ST2: Any) -> pd.DataFrame:
    """Return the scores of a joint map of the vectors; the map of the second seed differs only in scale.

    The axes of the arrays are sites, tokens and dimensions.
    """
    maps = {seed: dict(zip(sites, maps_ST2 * (1 + seed), strict=True)) for seed in range(2)}
    return score_layout("joint", dict(zip(sites, vectors_STD, strict=True)), maps, "euclidean", 2)


def test_attention_heads_are_excluded_from_joint_scores() -> None:
    near, far = (score_joint_map(*map_by_point(heads)) for heads in (0, 1000))
    pd.testing.assert_frame_equal(near, far, rtol=0, atol=2e-5)
    assert set(near["scored_vectors"]) == {80}
    _, vectors_STD, maps_ST2 = map_by_point(0)
    whole = near[near["point"].isna()].set_index("measure")
    without_heads = [0, 2]
    expected = scores(vectors_STD[without_heads].reshape(80, -1), maps_ST2[without_heads].reshape(80, -1), "euclidean")
    assert whole.loc[list(expected), "value"].to_dict() == pytest.approx(expected, abs=1e-6)
    by_point = [scores(vectors, xy, "euclidean") for vectors, xy in zip(vectors_STD, maps_ST2, strict=True)]
    for name, within in WITHIN.items():
        values, expected_S = near[near["measure"] == within]["value"], [each[name] for each in by_point]
        assert values.tolist() == pytest.approx([np.mean(expected_S), *expected_S], abs=1e-6)
    assert whole.loc["neighbours_kept_within", "chance"] == pytest.approx(15 / 39, abs=0.05)
    assert whole.loc["neighbours_kept", "chance"] == pytest.approx(15 / 79, abs=0.05)


def test_large_maps_are_scored_by_stratified_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = Mock(wraps=scores)
    monkeypatch.setattr("attnmix.maps.quality.MAX_SCORED_VECTORS", 60)
    monkeypatch.setattr("attnmix.maps.quality.scores", scored)
    sites, vectors_STD, maps_ST2 = map_by_point(0)
    assert set(score_joint_map(sites, vectors_STD, maps_ST2)["scored_vectors"]) == {60}
    joint = next(call.args[0] for call in scored.call_args_list if len(call.args[0]) == 60)
    by_point = [sum((row == vectors_TD).all(axis=1).any() for row in joint) for vectors_TD in vectors_STD]
    assert by_point == [30, 0, 30]


def test_maps_of_heads_are_scored_within_points() -> None:
    sites = [Site(1, "attention_heads"), Site(2, "attention_heads")]
    flat_STD = np.random.default_rng(0).normal(size=(2, 40, 2)).astype(np.float32)
    table = score_joint_map(sites, flat_STD, flat_STD)
    whole = table[table["point"].isna()].set_index("measure")["value"]
    assert set(table["scored_vectors"]) == {0}
    assert whole[["trustworthiness", "neighbours_kept", "distance_spearman"]].isna().all()
    assert whole[list(WITHIN.values())].tolist() == [1, 1, 1]


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 19])
def test_fewer_than_twenty_tokens_have_pca_only(workspace: Workspace, tokens: int) -> None:
    workspace(umap={"layouts": ["joint", "aligned", "separate"], "stability_seeds": [3]})
    write_stores(tokens)
    reduce.main(read_parameters())
    run = Run(Path())
    assert run.layouts == ["pca"]
    xy = run.map("pca")[["x", "y"]].to_numpy()
    assert xy.shape == (len(SITES) * tokens, 2)
    assert np.isfinite(xy).all()
    assert list(run.metrics("reduce")) == ["pca"]
    assert (run.metrics("reduce")["pca"]["trustworthiness"] is None) == (tokens < 3)


@pytest.mark.parametrize("different", [1, 4, 25])
def test_equal_vectors_share_a_position_in_every_layout(workspace: Workspace, different: int) -> None:
    workspace(umap={"layouts": ["joint", "aligned", "separate"], "stability_seeds": [3]})
    write_stores(40)
    number_T = np.arange(40) * 7 % different
    drawn = np.random.default_rng(0).normal(size=(different, 20)).astype(np.float16)
    store.write_unit(store.open_to_write(ACTIVATIONS, SITES[1]), slice(0, 40), drawn[number_T])
    reduce.main(read_parameters())
    run = Run(Path())
    assert run.layouts == (["joint", "aligned", "separate"] if different == 25 else list(LAYOUTS))
    for layout in run.layouts:
        by_site = {site: table[["x", "y"]].to_numpy() for site, table in run.map(layout).groupby(["layer", "point"])}
        assert (tuple(SITES[1]) in by_site) == (different == 25 or layout in ("joint", "pca"))
        for site, xy in by_site.items():
            assert np.isfinite(xy).all()
            equal = number_T if site == SITES[1] else np.arange(40)
            assert len(np.unique(xy, axis=0)) == equal.max() + 1
            assert all(len(np.unique(xy[equal == each], axis=0)) == 1 for each in range(equal.max() + 1))
    kept = run.map_quality.query("measure == 'neighbours_kept' and layout == 'separate' and layer.notna()")
    assert kept["value"].mean() > kept["chance"].mean() + 0.1


def test_too_many_neighbours_are_one_error(workspace: Workspace) -> None:
    workspace(umap={"layouts": list(LAYOUTS), "n_neighbors": 40})
    write_stores(40)
    with pytest.raises(InputError, match=r"^umap\.n_neighbors: 40 is too large for 40 vectors; allowed: 2 to 39$"):
        reduce.main(read_parameters())


@pytest.mark.parametrize(("vectors", "width"), [(5, 50_000), (200_000, 8), (40, 1), (30, 30), (2, 7), (1, 3)])
def test_principal_components_match_svd_for_any_shape(vectors: int, width: int) -> None:
    x_ND = np.random.default_rng(0).normal(size=(vectors, width)) * np.linspace(3, 1, width)
    found = two_components(x_ND)
    centred = x_ND - x_ND.mean(axis=0)
    _, strengths, directions = np.linalg.svd(centred, full_matrices=False)
    for axis in range(2):
        expected = np.zeros(vectors)
        if axis < len(strengths) and strengths[axis] > 1e-6:
            largest = directions[axis, np.argmax(np.abs(directions[axis]))]
            expected = centred @ directions[axis] * np.sign(largest)
        np.testing.assert_allclose(found[:, axis], expected, atol=1e-6 * max(strengths[0], 1))


def test_ties_of_equal_vectors_are_averaged() -> None:
    strength = np.zeros((7, 3, 4))
    strength[4, 0], strength[2, 1] = [1, 2, 3, 0], [1, 2, 3, 0]  # ties from the first point to the second, and back
    strength[5, 0] = [4, 4, 4, 4]  # from the first point to the third
    places = [np.array([0, 0, 1, 1]), np.array([2, 3, 4, 5]), np.array([6, 6, 6, 6])]
    expected = np.zeros((7, 7))
    expected[0, [2, 3, 6]] = [0.5, 1, 4]
    expected[1, [4, 6]] = [1.5, 4]
    expected[2, 0], expected[3, 0], expected[4, 1] = 1, 2, 3
    np.testing.assert_array_equal(ties_of_places(strength.reshape(7, -1), places).toarray(), expected)


def outputs() -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for folder in (Run(Path()).maps, Path("reports")) for path in folder.rglob("*.*")
    }


def reduced(workspace: Workspace) -> dict[str, bytes]:
    """Run `reduce` on fixed features with a second seed, and return the output files."""
    workspace(umap={"layouts": list(LAYOUTS), "stability_seeds": [3]})
    write_stores(60)
    reduce.main(read_parameters())
    return outputs()


@pytest.mark.long  # two processes that load umap-learn
def test_bytes_do_not_depend_on_workers(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = reduced(workspace)
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "2")
    reduce.main(read_parameters())
    assert outputs() == alone
    assert len(alone) == len(LAYOUTS) + 4


@pytest.mark.long  # two clusters with workers that load umap-learn
def test_dask_cluster_gives_same_bytes(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import LocalCluster

    alone = reduced(workspace)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # The workers start without the scheduler's address and without a limit to one thread.
    workers = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**workers, env={"OPENBLAS_NUM_THREADS": "2"}) as cluster:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.scheduler_address)
        with pytest.raises(InputError, match=r"arithmetic: is portable, but the Dask workers use different arithmetic"):
            reduce.main(read_parameters())
    with LocalCluster(**workers, env=SETTINGS | {"OMP_NUM_THREADS": "2"}) as cluster:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.scheduler_address)
        before = cluster.scheduler.transition_counter
        reduce.main(read_parameters())
        assert outputs() == alone
        assert cluster.scheduler.transition_counter > before
        assert in_parallel(lambda: {each["num_threads"] for each in threadpool_info()}, [()], "threads") == [{1}]
        assert in_parallel(torch.get_num_threads, [()], "threads") == [1]


def test_parallel_tasks_use_one_thread_and_restore_limits() -> None:
    def threads() -> tuple[set[int], int]:
        return {library["num_threads"] for library in threadpool_info()}, torch.get_num_threads()

    torch.get_num_threads()  # The first call in a thread sets its number of OpenMP threads.
    with threadpool_limits(3):
        before = threads()
        assert in_parallel(threads, [()] * 8, "threads") == [({1}, 1)] * 8
        with pytest.raises(ZeroDivisionError):
            in_parallel(divmod, [(1, 0)], "threads")
        assert threads() == before


def test_unreachable_scheduler_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmix.maps.parallel.CONNECT_TIMEOUT_SECONDS", 1)
    for address in ("tcp://127.0.0.1:9", "nonsense"):
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address)
        with pytest.raises(InputError, match=f"DASK_SCHEDULER_ADDRESS={address}: no Dask scheduler responds"):
            in_parallel(len, [("a",)], "maps")


def test_fewer_vectors_than_points_are_one_error(workspace: Workspace) -> None:
    workspace(umap={"max_points": 4})
    write_stores(30)
    more = [Site(layer, point) for layer in (2, 3) for point in ("ffn_output", "layer_output")]
    store.create_stores(ACTIVATIONS, dict.fromkeys(more, 20), store.plan_store(30, 20, "float16", 64))
    with pytest.raises(InputError, match=r"umap\.max_points: 4 is less than one token at each of the 7 capture points"):
        reduce.main(read_parameters())
