// The picture of tokens by layers: the selected measure of each token, and the sources of the selected vector.

import { effect, signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import {
  type Block,
  blocks,
  type Cell,
  chosenBlock,
  chosenColumn,
  GAP,
  layersOf,
  layout,
  LEVELS_WIDTH,
} from "./blocks";
import { modelTitle, screenWidth, textTitle, titleInText } from "./blocks";
import { type Edge, edgeAt, marksOf, origins, READ_SIGN, valueIn } from "./cells";
import { Changes, ChosenText, layerName, valueText } from "./chosen";
import { Differences } from "./compared";
import { type Comparison, comparison, differenceOf, differenceRange } from "./comparison";
import { data, isRead, layerCount, layers, type Maybe, OWN_SHARE, positionOf, tokensOf } from "./data";
import { percent, signed } from "./format";
import { paintMarks, shapesOf } from "./marks";
import * as measures from "./measures";
import { CHANGE, drawnModels, wordsModel } from "./measures";
import { Margin, MeansText } from "./means";
import { emptyCellsText } from "./missing";
import type { DrawnCanvas } from "./picture";
import { Prediction } from "./prediction";
import { shareGroups, shareText } from "./shares";
import { canChange, hovered, printing, set, state } from "./state";
import { ARROWS, type GLOSSARY, Pane, ScaleRamp, Scroll, Select, Slider, Term, useWidth } from "./ui";
import { nameOf, SourcesName } from "./words";

const MAX_SIDE = 16_000; // pixels of a canvas
const PRINT_SHARPNESS = 3; // canvas pixels per CSS pixel

const pointed = signal<(Cell & { edge: Edge | null; x: number; y: number }) | null>(null);

function choose({ block, column, layer }: Cell): void {
  const model = block.model === CHANGE || block.isDifference ? {} : { checkpoint: block.model };
  set({ token: tokenToChoose(block, column), ...(layer > 0 ? { layer } : {}), ...model });
}

/** The token of a cell; in a block of differences, the token of the selected text, if it has one in this column. */
const tokenToChoose = (block: Block, column: number): Maybe =>
  (block.isDifference ? chosenBlock.value.tokens[column] : null) ?? block.tokens[column];

function cellText({ block, column, layer }: Cell): string {
  const token = block.tokens[column]!;
  const name = `“${nameOf(token)}” (${positionOf(token)})`;
  const value = valueText(valueIn(block, column, layer), block.isDifference, token);
  if (layer > 0) return `${name}, ${layerName(layer)}, ${titleInText(block)}: ${measures.shareKind()} ${value}`;
  const share = origins.value.get(block)?.input.get(token);
  if (share === undefined) return `${name}, input`;
  const along = measures.sourcesIn.value === "layer" ? ", along the lines" : "";
  const chosen = nameOf(block.tokens[chosenColumn.value!]!);
  return `${name}, input: ${percent(share)} of “${chosen}” after ${layerName(state.layer.value)}${along}`;
}

/** The contents of the picture for tests: the corners of cells, and the shares of lines. */
function drawnCells() {
  const { cellWidth, rowHeight, x, y } = layout.value;
  const cells = blocks.value.flatMap((block) =>
    layersOf(block).flatMap((layer) =>
      block.tokens.flatMap((token, column) => {
        const { model, isDifference } = block;
        return token === null ? [] : { model, isDifference, layer, token, x: x(column), y: y(block, layer) };
      }),
    ),
  );
  const flows = [...origins.value].flatMap(([{ model }, each]) => each.flows.map((flow) => ({ ...flow, model })));
  return { cells, flows, width: cellWidth - 1, height: rowHeight * (1 - GAP) };
}

function paint(canvas: HTMLCanvasElement): void {
  const { width, height } = layout.value;
  const sharpest = MAX_SIDE / Math.max(width, height);
  const sharpness = Math.min(sharpest, printing.value ? PRINT_SHARPNESS : Math.max(1, devicePixelRatio));
  paintMarks(canvas, [width, height], marksOf(layout.value), sharpness);
}

/** Scroll to the column of the selected token if the picture is wider than its box. */
function scrollToChosen(box: Element): void {
  const column = chosenColumn.value;
  const { cellWidth, x } = layout.value;
  if (column === null || box.scrollWidth <= box.clientWidth) return;
  const [left, room] = [x(column), box.clientWidth - LEVELS_WIDTH - cellWidth];
  if (left < box.scrollLeft || left > box.scrollLeft + room) box.scrollLeft = left - room / 2;
}

/** The next column with a token of a block in a direction; texts in a comparison have empty columns. */
function nextColumn({ tokens }: Block, from: number, step: number): number {
  const places = [...tokens.keys()].filter((column) => tokens[column] !== null);
  if (step === 0) return places.toSorted((a, b) => Math.abs(a - from) - Math.abs(b - from))[0];
  const ahead = places.filter((column) => (column - from) * step > 0);
  return (step > 0 ? ahead[0] : ahead.at(-1)) ?? (step > 0 ? places.at(-1)! : places[0]);
}

/** The cell that an arrow key selects: along the tokens of a text, and through the layers of all blocks. */
function cellBeside(right: number, down: number): Cell {
  const walked = blocks.value.filter(({ isDifference }) => !isDifference);
  const row = walked.indexOf(chosenBlock.value) * layerCount + layerCount - state.layer.value + down;
  const next = Math.min(Math.max(row, 0), walked.length * layerCount - 1);
  const block = walked[Math.floor(next / layerCount)];
  const column = nextColumn(block, chosenColumn.value ?? -1, layout.value.rightToLeft ? -right : right);
  return { block, column, layer: layerCount - (next % layerCount) };
}

function canvasLabel(): string {
  const name = (text: number) => data.documents[text].title;
  const texts = comparison.value ? [comparison.value.first, comparison.value.second] : [state.document.value];
  const sizes = texts.map((text) => `${name(text)}: ${data.documents[text].length} tokens`);
  return `${sizes.join("; ")}; ${layerCount} layers. Arrow keys select a token and a layer.`;
}

function Canvas() {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { width, height, cellAt: cellOf } = layout.value;
  useLayoutEffect(() => {
    const shapes = () => shapesOf(marksOf(layout.peek()));
    const drawn: DrawnCanvas = Object.assign(canvas.current!, { shapes, drawn: drawnCells, isWhole: true });
    const stops = [effect(() => paint(drawn)), effect(() => scrollToChosen(drawn.closest(".scroll")!))];
    return () => stops.forEach((stop) => stop());
  }, []);
  const placeOf = (e: MouseEvent): [x: number, y: number] => {
    const { x, y } = canvas.current!.getBoundingClientRect();
    return [e.clientX - x, e.clientY - y];
  };
  const cellAt = (e: MouseEvent) => cellOf(...placeOf(e));
  const move = (e: KeyboardEvent) => {
    const [right, down] = ARROWS[e.key] ?? [0, 0];
    const { tokens } = chosenBlock.value;
    const known = tokens.filter((token) => token !== null);
    pointed.value = null; // the pointer may be on another cell
    if (e.key === "Escape") set({ token: null });
    else if (e.key === "Home" || e.key === "End") set({ token: known.at(e.key === "Home" ? 0 : -1) });
    else if (right || down) choose(cellBeside(right, down));
    else return;
    e.preventDefault();
  };
  const point = (e: PointerEvent) => {
    const cell = cellAt(e);
    const { x, y } = canvas.current!.closest(".grid")!.getBoundingClientRect();
    pointed.value = cell && { ...cell, edge: edgeAt(...placeOf(e)), x: e.clientX - x, y: e.clientY - y };
    hovered.value = cell && tokenToChoose(cell.block, cell.column);
  };
  const leave = () => {
    pointed.value = null;
    hovered.value = null;
  };
  return (
    <canvas
      ref={canvas}
      id="grid-canvas"
      tabIndex={0}
      role="application"
      aria-roledescription="tokens by layers"
      aria-label={canvasLabel()}
      aria-describedby="chosen-text"
      style={`width: ${width}px; height: ${height}px`}
      onKeyDown={move}
      onPointerMove={point}
      onPointerLeave={leave}
      onClick={(e) => {
        const cell = cellAt(e);
        if (cell) choose(cell);
        pointed.value = null; // the lines under the pointer change
      }}
    />
  );
}

/** The layer numbers and the titles of the blocks, which do not scroll with the tokens. */
function Levels() {
  const { rowHeight, top, y } = layout.value;
  const every = Math.ceil(14 / rowHeight); // keeps numbers apart
  const named = (layer: number) => layer === 0 || (layerCount - layer) % every === 0;
  return (
    <div class="levels" style={`width: ${LEVELS_WIDTH}px`}>
      {blocks.value.map((block) => (
        <>
          <b style={`top: ${top(block)}px`}>
            <bdi>{block.title}</bdi>
          </b>
          {layersOf(block)
            .filter(named)
            .map((layer) => (
              <span
                class={layer === state.layer.value ? "now" : ""}
                style={`top: ${y(block, layer)}px; height: ${rowHeight * (1 - GAP)}px`}
              >
                {layer === 0 ? "input" : layer}
              </span>
            ))}
        </>
      ))}
    </div>
  );
}

/** A description of a line: its source, its target, and its share of the selected vector. */
function edgeText({ layer, below, from, to, share }: Edge): string {
  const source = `“${nameOf(from)}” (${positionOf(from)}) ${below === 0 ? "in the input" : `after ${layerName(below)}`}`;
  const target = `“${nameOf(to)}” (${positionOf(to)}) after ${layerName(layer)}`;
  return `Line from ${source} to ${target}: ${percent(share)} of the selected vector`;
}

/** A description of the cell and the line under the pointer, next to the pointer. */
function PointedText({ width }: { width: number }) {
  // After a change of text, the hovered cell no longer exists.
  if (pointed.value === null || !blocks.value.includes(pointed.value.block)) return null;
  const { x, y } = pointed.value;
  const side = x < width / 2 ? `left: ${x + 14}px` : `right: ${width - x + 14}px`;
  return (
    <p class="pointed noprint" aria-hidden="true" style={`${side}; top: ${y + 16}px`}>
      {cellText(pointed.value)}
      {pointed.value.edge && (
        <>
          <br />
          {edgeText(pointed.value.edge)}
        </>
      )}
    </p>
  );
}

/** The glossary entry of the selected measure. */
function shareTerm(): keyof typeof GLOSSARY {
  if (state.share.value === OWN_SHARE) return "own share";
  if (measures.sourcesIn.value === null) return "mixing ratio of one layer";
  return state.share.value === "parts" ? "exact parts" : "share";
}

const Legend = () => (
  <>
    <ScaleRamp range={measures.shareRange.value} said={measures.endText} /> {measures.scaleUnit()}
    {measures.shareKind()},{" "}
    <Term name={shareTerm()} withoutNote>
      {measures.measureName().replace(/^Exact/, "exact")}
    </Term>
    {state.change.value && `, change ${data.wording.by_change}`};{" "}
    {state.stretch.value ? "stretched to the values in this picture" : "one scale for all texts"}.{" "}
    {measures.hasOtherSources() && measures.sourcesIn.value !== null && (
      <>
        <span class="took-key">Orange</span>: sources by <SourcesName />.
      </>
    )}
  </>
);

/** The label of an end of the scale of differences. */
const differenceEnd = (value: number) => signed(100 * value, state.stretch.value ? 1 : 0);

function DifferenceLegend({ first, second }: Comparison) {
  const [one, other] = [first, second].map((text) => data.documents[text].title);
  return (
    <p class="legend" id="difference-legend">
      <ScaleRamp range={differenceRange.value} said={differenceEnd} /> percentage points; left end: larger in {one};
      right end: larger in {other}
      {!state.stretch.value && " (full colour at 25 or more)"}.
    </p>
  );
}

/** The end of a sentence on the orange marks, which show sources by the selected measure. */
function OrangeText() {
  const least = `${state.threshold.value}%`;
  if (measures.sourcesIn.value === null)
    return "marks are not shown, because a ratio of one layer has no sources. Measures with sources, such as ALTI, can be selected under “Share”.";
  return (
    <>
      marks show the sources of the selected vector, by <SourcesName />.{" "}
      {measures.sourcesIn.value === "input"
        ? `The bottom row shows the shares of the input tokens, and straight lines lead to the sources with ${least} or more.`
        : `Lines lead to its sources in the layer below, to their sources, and so on, as long as a line's share of the selected vector is ${least} or more. The bottom row shows the sums of these shares by input token.`}{" "}
      In the bottom row, the strength of the orange is the square root of a source's share, so that small shares are
      visible; the scale above the picture does not apply to it. The wider a line, the larger its share.
    </>
  );
}

/** An explanation of the picture and its marks. */
const SourcesText = () => (
  <p class="small" id="sources-text">
    Columns are tokens and rows are layers, with the input at the bottom.{" "}
    <span class="key-line">
      <span class="took-key">Orange</span> <OrangeText />
    </span>{" "}
    The number after a token's name is its position in the text; positions start at 0.{" "}
    {comparison.value && "Framed names are tokens that the other text does not have in the same column. "}
    {tokensOf(state.document.value).some(isRead) &&
      `${READ_SIGN} marks the token whose last vector the classifier reads.`}
  </p>
);

function textRows() {
  const tokens = tokensOf(state.document.value);
  return {
    columns: ["model", "layer", "position", "token", measures.shareName()],
    rows: drawnModels.value.flatMap((model) =>
      layers.flatMap((layer) =>
        tokens.map((token) => [
          ...[modelTitle(model), layer, positionOf(token)],
          ...[nameOf(token), measures.valueOf(token, layer, model)],
        ]),
      ),
    ),
  };
}

/** One row for each layer and column of a comparison; texts are named as in the tables of attnmix. */
function comparedRows({ first, second, columns }: Comparison) {
  const [one, other] = [first, second].map((text) => data.documents[text].name);
  const model = wordsModel.value;
  const cells = (token: Maybe, layer: number) =>
    token === null ? [null, null, null] : [positionOf(token), nameOf(token), measures.valueOf(token, layer, model)];
  const names = (text: string) => [`position in ${text}`, `token in ${text}`, `${measures.shareName()} in ${text}`];
  return {
    columns: ["model", "layer", ...names(one), ...names(other), `${other} minus ${one}`],
    rows: layers.flatMap((layer) =>
      columns.map((column) => [
        ...[modelTitle(model), layer, ...cells(column.first, layer), ...cells(column.second, layer)],
        differenceOf(column, layer),
      ]),
    ),
  };
}

/** A note on the reason if a shown text has no exact parts. */
function PartsNote() {
  const texts = [state.document.value, state.compare.value].filter((text) => text !== null);
  const hasParts = (text: number) => "parts" in (data.contributions[data.documents[text].name] ?? {});
  const text = texts.find((each) => !hasParts(each));
  if (text === undefined) return null;
  const { title: name, length } = data.documents[text];
  const isLong = length > data.partsLimit;
  if (state.share.value !== "parts" && !isLong) return null;
  const subject = texts.length > 1 ? `The text ${name}` : "This text";
  return (
    <p class="note" id="parts-note">
      {isLong
        ? `${subject} has ${length} tokens. Exact parts, the contributions of the input tokens to a vector, are computed only for texts of at most ${data.partsLimit} tokens, because the time grows with the square of the length. `
        : `The exact parts of ${texts.length > 1 ? `the text ${name}` : "this text"}, the contributions of the input tokens to its vectors, are not on the page. `}
      {state.share.value === "parts" && "Select another measure under “Share”."}
    </p>
  );
}

const texts = [...data.documents.keys()];

/** The title of the picture, without the texts. */
function pictureText(): string {
  const model = comparison.value && !state.change.value && canChange ? `, ${modelTitle(wordsModel.value)}` : "";
  const change = state.change.value ? `, change ${data.wording.by_change}` : "";
  const where = measures.isOfOneLayer() ? "in each layer" : "after each layer";
  return `${measures.shareKind()} of each token's vector, ${where}${change}${model}`;
}

/** Notes on unknown tokens and single letters in the texts, if there are any. */
const Cautions = (props: { texts: number[] }) => (
  <>
    {props.texts
      .filter((text) => data.documents[text].caution)
      .map((text) => (
        <p class="note caution">
          <bdi>{data.documents[text].title}</bdi>: {data.documents[text].caution}
        </p>
      ))}
  </>
);

/** The title of the picture: the texts with their predictions, and the quantity. */
const PictureTitle = (props: { texts: number[] }) => (
  <>
    {props.texts.map((text, n) => (
      <>
        {n > 0 && "; "}
        <bdi>{data.documents[text].title}</bdi> <Prediction text={text} />
      </>
    ))}
    : {pictureText()}
  </>
);

export function Grid() {
  const { box, width } = useWidth(screenWidth.peek());
  useLayoutEffect(() => {
    if (!printing.peek()) screenWidth.value = width;
  }, [width]);
  const shown = comparison.value ? [comparison.value.first, comparison.value.second] : [state.document.value];
  const name = shown.map((text) => data.documents[text].title).join(" and ");
  const others = [null, ...texts.filter((text) => text !== state.document.value)];
  const names = Object.fromEntries(
    others.map((text) => [String(text), text === null ? "no other text" : textTitle(text)]),
  );
  const shareNames = { ...data.labels.matrices, ...data.labels.methods };
  return (
    <Pane
      id="grid"
      first
      title={<PictureTitle texts={shown} />}
      file={`${name}, ${measures.shareName()}`}
      rows={() => (comparison.value ? comparedRows(comparison.value) : textRows())}
    >
      <div class="above">
        <p class="legend" id="grid-legend">
          <Legend />
        </p>
        {texts.length > 1 && <Select choice="compare" label="Compare with" names={names} options={others} />}
        {comparison.value && <DifferenceLegend {...comparison.value} />}
      </div>
      <PartsNote />
      <div class="grid" ref={box}>
        <Scroll class="grid-box">
          <Levels />
          <Canvas />
        </Scroll>
        <Margin />
        <PointedText width={width} />
      </div>
      {comparison.value && <Differences />}
      <Cautions texts={shown} />
      <MeansText />
      <p class="small" id="empty-text">
        {emptyCellsText(shown)}
      </p>
      <ChosenText />
      {!comparison.value && <Changes />}
      <div class="controls">
        <Select choice="share" label="Share" names={shareNames} groups={shareGroups} />
        <Slider choice="threshold" class="" label={`${state.threshold.value}%`} between={[1, 30]}>
          Sources of at least <b>{state.threshold.value}%</b>
        </Slider>
        <label class="check">
          <input
            type="checkbox"
            id="stretch"
            checked={state.stretch.value}
            onChange={(e) => set({ stretch: e.currentTarget.checked })}
          />
          Stretch colours
        </label>
        {canChange && (
          <label class="check">
            <input
              type="checkbox"
              checked={state.change.value}
              onChange={(e) => set({ change: e.currentTarget.checked })}
            />
            Change {data.wording.by_change}
          </label>
        )}
      </div>
      <p class="small" id="share-text">
        {shareText()}
      </p>
      <SourcesText />
    </Pane>
  );
}
