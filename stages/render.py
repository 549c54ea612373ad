"""Draw the maps and the measures, and write the interactive page.

    python -m stages render

Writes `reports/figures/` and `reports/index.html`.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import joblib
import pandas as pd

from attnmix.core.draw import TYPICAL_TOKENS
from attnmix.core.names import ONE_PLANE
from attnmix.core.settings import DatasetParameters, ModelParameters, RenderParameters
from attnmix.core.store.runs import Run
from attnmix.figures.maps import draw_atlas, draw_joint, first_text, write_animation, write_joint_pages
from attnmix.figures.mixing import draw_by_layer, draw_controls, draw_own_share, draw_reviews, draw_steps
from attnmix.figures.own_share import draw_main
from attnmix.figures.style import find_fallback_fonts, paper_style, save_figure
from attnmix.figures.text_mixing import draw_matrices, draw_strips
from attnmix.figures.tokens import CapturedTexts, read_captured
from attnmix.measures.matrices import LAYER_MATRICES, ROLLOUTS
from attnmix.page.assembly import write_page
from attnmix.page.sentences import Subject
from stages.common.parameters import Parameters

MACHINE_GENERATED = "machine-generated"
"""The value of `language_creators` for synthetic texts in dataset cards."""
ANIMATION = "gif"
"""The entry of `render.formats` that adds an animation of the map."""
MAX_PROCESSES = 4  # few, because starting a process takes a second

TYPICAL = (
    "The captured texts were chosen by a rule: one short, correctly classified review of each class, and one short, "
    "misclassified review. The predicted class of each has the median probability among such reviews of at most "
    f"{TYPICAL_TOKENS} tokens or, if there are none, among the shortest ones."
)

Drawing = tuple[Any, ...]
"""A path without suffix (None if the function saves its own files), a drawing function, and its arguments."""


def main(parameters: Parameters) -> None:
    """Draw the figures, and write the page while other processes draw."""
    run = Run(Path())
    shutil.rmtree(run.figures, ignore_errors=True)
    captured = read_captured(run.tokens, run.steps)
    documents = captured.tokens["document"].unique().tolist()
    shown = documents if parameters.render.texts == "all" else [first_text(documents)]
    drawings = [  # the slowest first, so that all processes finish at about the same time
        *text_figures(run, captured, shown),
        *map_figures(run, captured, ANIMATION in parameters.render.formats),
        *mixing_figures(run, captured),
    ]
    drawn = draw_all(drawings, captured, parameters.render)
    write_page(run, page_subject(parameters, run.metrics("download")))  # while other processes draw
    for _ in drawn:  # raises errors of the drawing processes
        pass


def page_subject(parameters: Parameters, download: dict[str, Any]) -> Subject:
    """Return the subject of the page of a full run. `download` contains the metrics of the stage `download`."""
    model, dataset, finetuned = parameters.model, parameters.dataset, parameters.finetune.epochs > 0
    sources = [
        ("pretrained model comes", model.base_model, "base_commit"),
        ("model comes", model, "model_commit"),
        ("reviews come", dataset, "dataset_commit"),
    ]
    origins = []
    for noun_and_verb, source, key in sources:
        if source:
            origins.append(_describe_origin(noun_and_verb, source, download[key]))
    return Subject(
        model.name,
        revision=model.revision,
        base=model.base,
        dataset=dataset.name,
        finetuned=finetuned,
        synthetic=MACHINE_GENERATED in download.get("language_creators", "").split(", "),
        changed=changed_parameters(parameters),
        origins=origins,
        selection=TYPICAL if parameters.capture.typical else "",
    )


def _describe_origin(noun_and_verb: str, source: ModelParameters | DatasetParameters, commit: str | None) -> str:
    """Return a sentence on the origin of a model or dataset, including the commit of a hub repository."""
    origin = f"The {noun_and_verb} from {source.name}"
    if not commit:
        return f"{origin}."
    revision = f" ({source.revision})" if source.revision not in (None, commit) else ""
    return f"{origin} of the hub, commit {commit}{revision}."


def changed_parameters(parameters: Parameters) -> list[tuple[str, str, str]]:
    """Return the key, value and default of each parameter with a non-default value, formatted as in YAML."""
    values, defaults = _flatten_by_key(parameters), _flatten_by_key(Parameters())
    changed = []
    for key, value in values.items():
        if value != defaults[key]:
            changed.append((key, _format_yaml(value), _format_yaml(defaults[key])))
    return changed


def _flatten_by_key(parameters: Parameters) -> dict[str, Any]:
    """Return all parameter values by key, such as `umap.metric`."""
    (row,) = pd.json_normalize(parameters.model_dump()).to_dict("records")
    return {str(key): value for key, value in row.items()}


def _format_yaml(value: Any) -> str:
    """Return a value as in YAML; `empty` for None."""
    if value is None:
        return "empty"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def draw_all(drawings: list[Drawing], captured: CapturedTexts, figures: RenderParameters) -> Iterator[None]:
    """Draw and save all figures in up to `MAX_PROCESSES` processes, with fonts for the captured texts.

    With several processes, drawing starts at once; iterate over the result to wait for its end.
    """
    labels = {token.label for reading in captured.readings for token in reading}
    fonts = find_fallback_fonts(labels | set(map(str.lower, labels)))
    processes = min(MAX_PROCESSES, joblib.cpu_count())
    parallel = joblib.Parallel(n_jobs=processes, return_as="generator_unordered")
    done: Iterator[None] = parallel(joblib.delayed(_draw_and_save)(fonts, figures, *drawing) for drawing in drawings)
    return done


def _draw_and_save(fonts: list[str], figures: RenderParameters, path: Path | None, draw: Any, *arguments: Any) -> None:
    """Draw a figure and save it in all formats; functions without a `path` write their own file."""
    with paper_style(fonts):
        figure = draw(*arguments)
        if path and figure:
            save_figure(figure, path, [suffix for suffix in figures.formats if suffix != ANIMATION])


def map_figures(run: Run, captured: CapturedTexts, animated: bool) -> Iterator[Drawing]:
    """Yield the figures of the maps."""
    layouts = run.layouts
    if "joint" in layouts:
        yield run.figures / "joint", draw_joint, run.map("joint"), captured
        yield None, write_joint_pages, run.map("joint"), captured.encoder, run.figures / "joint_pages.pdf"
    else:
        logging.info("no figures of the joint map, because umap.layouts does not contain joint or vectors are too few")
    if animated:
        plane = next((layout for layout in ONE_PLANE if layout in layouts), None)
        if plane:
            yield None, write_animation, run.map(plane), captured, run.figures / f"{plane}.gif"
        else:
            logging.warning("no animation, because umap.layouts contains none of %s", ", ".join(ONE_PLANE))
    # The atlas shows the last layout, which represents single capture points best.
    yield run.figures / "atlas", draw_atlas, layouts[-1], run.map(layouts[-1]), captured


def mixing_figures(run: Run, captured: CapturedTexts) -> Iterator[Drawing]:
    """Yield the figures of the mixing measures of the sampled texts."""
    xlabel = "Layer" if captured.encoder is None else f"Layer, the decoder's from {captured.encoder + 1} on"
    yield run.figures / "mixing_by_layer", draw_by_layer, run.mixing[0], xlabel
    controls = run.table("measure/mixing_controls")
    yield run.figures / "mixing_controls", draw_controls, run.mixing[0], controls, xlabel
    yield run.figures / "own_share", draw_own_share, run.table("measure/exchange"), xlabel
    reviews, weighted = (run.table(f"measure/mixing_{name}") for name in ("by_review", "weighted"))
    yield run.figures / "mixing_reviews", draw_reviews, reviews, weighted, xlabel
    yield run.figures / "mixing_steps", draw_steps, run.steps, xlabel


def text_figures(run: Run, captured: CapturedTexts, documents: Sequence[str]) -> Iterator[Drawing]:
    """Yield the figures of single texts; in encoder-decoder models, the names of decoder figures end in `_decoder`."""
    ratios = run.captured_ratios(list(documents))
    main_text = first_text(documents)
    for document, rows in ratios.groupby("document", sort=False):
        for text in captured.text_layers(str(document), int(rows["layer"].max())):
            name = str(document).replace("/", "_")
            ending = f"_{text.name}" if text.name else ""
            text_rows = rows[rows["layer"].isin(text.layers)]
            if document == main_text and not text.name:
                yield run.figures / "main", draw_main, text_rows, run.table("measure/exchange"), document, text
            yield run.figures / f"mixing_tokens_{name}{ending}", draw_strips, text_rows, document, text
            for checkpoint in map(str, rows["checkpoint"].unique()):
                stored = run.matrices(checkpoint, str(document))
                for kind, declared in (("contributions", LAYER_MATRICES), ("rollouts", ROLLOUTS)):
                    path = run.figures / f"mixing_{kind}_{name}_{checkpoint}{ending}"
                    methods = [method for method in declared if method in stored]
                    if methods:
                        yield path, draw_matrices, run, checkpoint, document, text, methods
