"""Draw the maps and the measures, and write the interactive page.

    python -m stages render

Writes `reports/figures/` and `reports/index.html`.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import joblib

from attnmix.core.draw import TYPICAL_TOKENS
from attnmix.core.names import ONE_PLANE
from attnmix.core.settings import DatasetParameters, ModelParameters, RenderParameters
from attnmix.core.store.runs import Run
from attnmix.figures.maps import draw_atlas, draw_joint, first_text, write_animation, write_joint_pages
from attnmix.figures.mixing import draw_by_layer, draw_controls, draw_own_share, draw_reviews, draw_steps
from attnmix.figures.own_share import draw_main
from attnmix.figures.style import find_fallback_fonts, paper_style, save_figure
from attnmix.figures.text_mixing import draw_matrices, draw_strips
from attnmix.figures.tokens import CapturedTexts, TextLayers, read_captured
from attnmix.measures.matrices import LAYER_MATRICES, ROLLOUTS
from attnmix.page.assembly import write_page
from attnmix.page.sentences import Subject
from stages.common.parameters import Parameters

MACHINE_GENERATED = "machine-generated"
"""The value of `language_creators` in the dataset cards of synthetic texts."""
ANIMATION = "gif"
"""The entry of `render.formats` that requests an animation of a map."""
MAX_PROCESSES = 4  # few, because starting a process takes a second

TYPICAL = (
    "The captured texts were chosen by a rule: one short, correctly classified review of each class, and one short, "
    "misclassified review. The predicted class of each has the median probability among such reviews of at most "
    f"{TYPICAL_TOKENS} tokens or, if there are none, among the shortest ones."
)


class Drawing(NamedTuple):
    """A figure to draw in another process."""

    path: Path | None
    """The path of the figure without suffix; None if `draw` writes its own file."""
    draw: Callable[..., Any]
    """A function that returns a figure (None if there is nothing to draw) or writes its own file."""
    arguments: tuple[Any, ...]
    """The arguments of the function."""


def main(parameters: Parameters) -> None:
    """Draw the figures, and write the page while other processes draw."""
    run = Run(Path())
    shutil.rmtree(run.figures, ignore_errors=True)
    captured = read_captured(run.tokens, run.steps)
    documents = captured.tokens["document"].unique().tolist()
    shown = documents if parameters.render.texts == "all" else [first_text(documents)]
    drawings = [  # the slowest figures are first, so that all processes finish at about the same time
        *text_figures(run, captured, shown),
        *map_figures(run, captured, ANIMATION in parameters.render.formats),
        *mixing_figures(run, captured),
    ]
    drawn = draw_all(drawings, captured, parameters.render)
    try:
        write_page(run, page_subject(parameters, run.metrics("download")))  # while other processes draw
    finally:
        # Wait even after an error; otherwise, joblib warns about drawing jobs that did not finish. The loop also raises
        # errors that occurred in other processes.
        for _ in drawn:
            pass


def page_subject(parameters: Parameters, download: dict[str, Any]) -> Subject:
    """Return the subject of a full run's page. `download` contains the metrics of the stage `download`."""
    model = parameters.model
    dataset = parameters.dataset
    origins = []
    if model.base_model:
        origins.append(_describe_origin("pretrained model comes", model.base_model, download["base_commit"]))
    origins.append(_describe_origin("model comes", model, download["model_commit"]))
    origins.append(_describe_origin("reviews come", dataset, download["dataset_commit"]))
    return Subject(
        model.name,
        revision=model.revision,
        base=model.base,
        dataset=dataset.name,
        finetuned=parameters.finetune.epochs > 0,
        synthetic=MACHINE_GENERATED in download.get("language_creators", "").split(", "),
        changed=changed_parameters(parameters),
        origins=origins,
        selection=TYPICAL if parameters.capture.typical else "",
    )


def _describe_origin(noun_and_verb: str, source: ModelParameters | DatasetParameters, commit: str | None) -> str:
    """Return a sentence on the origin of a model or dataset, including the commit of a hub repository.

    `noun_and_verb` begins the sentence, for example `reviews come`. `commit` is None for local files.
    """
    origin = f"The {noun_and_verb} from {source.name}"
    if not commit:
        return f"{origin}."
    revision = f" ({source.revision})" if source.revision not in (None, commit) else ""
    return f"{origin} of the hub, commit {commit}{revision}."


def changed_parameters(parameters: Parameters) -> list[tuple[str, str, str]]:
    """Return the key, value and default of each parameter with a non-default value, as they are written in YAML."""
    values = _flatten_by_key(parameters)
    defaults = _flatten_by_key(Parameters())
    changed = []
    for key, value in values.items():
        if value != defaults[key]:
            changed.append((key, _format_yaml(value), _format_yaml(defaults[key])))
    return changed


def _flatten_by_key(parameters: Parameters) -> dict[str, Any]:
    """Return all parameter values by key, such as `umap.metric`."""
    values: dict[str, Any] = {}
    for name, content in parameters.model_dump().items():
        if isinstance(content, dict):  # a section
            for key, value in content.items():
                values[f"{name}.{key}"] = value
        else:  # a parameter outside sections, such as `seed`
            values[name] = content
    return values


def _format_yaml(value: Any) -> str:
    """Return a value as it is written in YAML, or `empty` for None."""
    if value is None:
        return "empty"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def draw_all(drawings: list[Drawing], captured: CapturedTexts, figures: RenderParameters) -> Iterator[None]:
    """Draw and save all figures in up to `MAX_PROCESSES` processes, with fonts for the captured texts.

    With several processes, drawing starts at once; iterate over the result to wait until all figures are drawn.
    """
    labels = set[str]()
    for input_tokens in captured.readings:  # the tokens of the encoder and, if any, of the decoder
        labels.update(token.label for token in input_tokens)
    lower_case_labels = {label.lower() for label in labels}
    fonts = find_fallback_fonts(labels | lower_case_labels)
    processes = min(MAX_PROCESSES, joblib.cpu_count())
    parallel = joblib.Parallel(n_jobs=processes, return_as="generator_unordered")
    done: Iterator[None] = parallel(joblib.delayed(_draw_and_save)(fonts, figures, drawing) for drawing in drawings)
    return done


def _draw_and_save(fonts: list[str], figures: RenderParameters, drawing: Drawing) -> None:
    """Draw a figure, and save it in all formats unless the drawing function writes its own file."""
    with paper_style(fonts):
        figure = drawing.draw(*drawing.arguments)
        if drawing.path and figure:
            save_figure(figure, drawing.path, [suffix for suffix in figures.formats if suffix != ANIMATION])


def map_figures(run: Run, captured: CapturedTexts, animated: bool) -> Iterator[Drawing]:
    """Yield the figures of the maps: the joint map, an animation if `animated` is True, and an atlas of small maps.

    Figures of layouts that the run does not contain are omitted and logged.
    """
    layouts = run.layouts
    if "joint" in layouts:
        joint_map = run.map("joint")
        yield Drawing(run.figures / "joint", draw_joint, (joint_map, captured))
        yield Drawing(None, write_joint_pages, (joint_map, captured.encoder, run.figures / "joint_pages.pdf"))
    else:
        logging.info("no figures of the joint map, because umap.layouts does not contain joint or vectors are too few")
    if animated:
        plane = next((layout for layout in ONE_PLANE if layout in layouts), None)
        if plane:
            yield Drawing(None, write_animation, (run.map(plane), captured, run.figures / f"{plane}.gif"))
        else:
            logging.warning("no animation, because umap.layouts contains none of %s", ", ".join(ONE_PLANE))
    # The atlas shows the last layout, which represents single capture points best.
    atlas_layout = layouts[-1]
    yield Drawing(run.figures / "atlas", draw_atlas, (atlas_layout, run.map(atlas_layout), captured))


def mixing_figures(run: Run, captured: CapturedTexts) -> Iterator[Drawing]:
    """Yield the figures of the mixing measures: means over the sampled texts, and the values of single texts."""
    xlabel = "Layer"
    encoder_layers = captured.encoder
    if encoder_layers is not None:
        xlabel = f"Layer, the decoder's from {encoder_layers + 1} on"
    mean_ratios, _differences = run.mixing
    yield Drawing(run.figures / "mixing_by_layer", draw_by_layer, (mean_ratios, xlabel))
    controls = run.table("measure/mixing_controls")
    yield Drawing(run.figures / "mixing_controls", draw_controls, (mean_ratios, controls, xlabel))
    yield Drawing(run.figures / "own_share", draw_own_share, (run.table("measure/exchange"), xlabel))
    reviews = run.table("measure/mixing_by_review")
    weighted = run.table("measure/mixing_weighted")
    yield Drawing(run.figures / "mixing_reviews", draw_reviews, (reviews, weighted, xlabel))
    yield Drawing(run.figures / "mixing_steps", draw_steps, (run.steps, xlabel))


def text_figures(run: Run, captured: CapturedTexts, documents: Sequence[str]) -> Iterator[Drawing]:
    """Yield the figures of single texts: the main figure for one text, and ratios and matrices for all `documents`.

    A model has one stack of layers or, if it is an encoder-decoder model, two: the encoder and the decoder. Each stack
    has separate figures; the names of the decoder's figures end in `_decoder`.
    """
    ratios = run.captured_ratios(list(documents))
    main_text = first_text(documents)
    for name, rows in ratios.groupby("document", sort=False):
        document = str(name)
        for stack in captured.text_layers(document, int(rows["layer"].max())):
            is_decoder = stack.name != ""
            ending = f"_{stack.name}" if is_decoder else ""
            stack_rows = rows[rows["layer"].isin(stack.layers)]
            if document == main_text and not is_decoder:
                exchange = run.table("measure/exchange")
                yield Drawing(run.figures / "main", draw_main, (stack_rows, exchange, document, stack))
            strips_path = run.figures / f"mixing_tokens_{_file_name(document)}{ending}"
            yield Drawing(strips_path, draw_strips, (stack_rows, document, stack))
            for checkpoint in map(str, rows["checkpoint"].unique()):
                yield from _matrix_figures(run, checkpoint, document, stack, ending)


def _matrix_figures(run: Run, checkpoint: str, document: str, stack: TextLayers, ending: str) -> Iterator[Drawing]:
    """Yield the figures of a text's matrices in one stack of layers: matrices of single layers, then rollouts.

    The names of the figures end in `ending`. Matrices that the run does not contain are omitted.
    """
    available = run.matrices(checkpoint, document)
    for kind, names in (("contributions", LAYER_MATRICES), ("rollouts", ROLLOUTS)):
        methods = [method for method in names if method in available]
        if methods:
            path = run.figures / f"mixing_{kind}_{_file_name(document)}_{checkpoint}{ending}"
            yield Drawing(path, draw_matrices, (run, checkpoint, document, stack, methods))


def _file_name(document: str) -> str:
    """Return the name of a text, such as `test/3`, without slashes."""
    return document.replace("/", "_")
