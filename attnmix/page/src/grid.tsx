// Tokens by layers: how much of each token comes from others after every layer, and from which the chosen one does.

import { computed, effect, signal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { Changes, ChosenText, layerName, modelTitle, sourceModel, valueText } from "./chosen";
import { shade, strength } from "./colours";
import { checkpoints, data, documentOf, isRead, layerCount, layers, positionOf, range, tokensOf } from "./data";
import { percent, wholePercent } from "./format";
import { type Mark, paintMarks, shapesOf } from "./marks";
import * as measures from "./measures";
import { CHANGE, shownModels } from "./measures";
import type { DrawnCanvas } from "./picture";
import { canChange, dark, hovered, printing, set, state } from "./state";
import { ARROWS, type GLOSSARY, Pane, PRINTED_WIDTH, ScaleRamp, Scroll, Select, Slider, Term, useWidth } from "./ui";
import { nameOf } from "./words";

const LEVELS_WIDTH = 44; // pixels, of the layers' numbers
const CELL_WIDTH = [15, 120]; // pixels, at least and at most
const ROOM = { screen: 0.38, paper: 330 }; // for the rows of all models: of the window's height, and in pixels
const ROW_HEIGHT = [9, 30]; // pixels, at least and at most, with the gap
const GAP = 0.28; // of a row, through which lines go
const TITLE_HEIGHT = 24; // pixels, above the rows of a model
const INDENT = 5; // pixels, left of the first token, into which its name and frame reach
const NAME_SIZE = 12; // pixels
const LETTERS = 13; // of a name
const NAMES_HEIGHT = { level: 24, upright: 92 }; // pixels
const NUMBERED = 56; // pixels, of a cell with its number in it
const MAX_SIDE = 16_000; // pixels of a canvas
const PRINT_SHARPNESS = 3; // pixels of the canvas by CSS pixel
const READ_SIGN = "◆"; // before the name of the token that the classifier reads
const LEAST_SHADED = 0.002; // of the vector, for a source in the row of the input

/** A place in the picture; layer 0 is the input. */
type Cell = { token: number; layer: number; model: string };
const pointed = signal<(Cell & { x: number; y: number }) | null>(null);

/** Where everything stands, for a width of the picture. */
function layoutOf(number: number, models: string[], width: number) {
  const tokens = tokensOf(number);
  const least = printing.value ? 0 : CELL_WIDTH[0];
  const cellWidth = Math.min(CELL_WIDTH[1], Math.max(least, (width - LEVELS_WIDTH - 2 * INDENT) / tokens.length));
  const rowCount = models.length * (layerCount + 1);
  const room = printing.value ? ROOM.paper : ROOM.screen * innerHeight;
  const rowHeight = Math.floor(Math.min(ROW_HEIGHT[1], Math.max(ROW_HEIGHT[0], room / rowCount)));
  const blockHeight = TITLE_HEIGHT + (layerCount + 1) * rowHeight;
  const rightToLeft = data.documents[number].direction === "rtl";
  const ruler = Math.max(...tokens.map((token) => nameOf(token).length));
  const upright = cellWidth < Math.min(ruler, LETTERS) * NAME_SIZE * 0.62;
  const height = models.length * blockHeight + NAMES_HEIGHT[upright ? "upright" : "level"];
  const column = (token: number) => (rightToLeft ? tokens.length - 1 - positionOf(token) : positionOf(token));
  return {
    ...{
      tokens,
      models,
      cellWidth,
      rowHeight,
      blockHeight,
      upright,
      height,
      width: 2 * INDENT + cellWidth * tokens.length,
    },
    x: (token: number) => INDENT + column(token) * cellWidth,
    top: (model: string) => models.indexOf(model) * blockHeight,
    y: (model: string, layer: number) =>
      models.indexOf(model) * blockHeight + TITLE_HEIGHT + (layerCount - layer) * rowHeight,
    cellAt(x: number, y: number): Cell | null {
      const place = Math.floor((x - INDENT) / cellWidth);
      const block = Math.floor(y / blockHeight);
      const level = layerCount - Math.floor((y - block * blockHeight - TITLE_HEIGHT) / rowHeight);
      if (place < 0 || place >= tokens.length || block < 0 || level < 0) return null;
      const token = tokens[rightToLeft ? tokens.length - 1 - place : place];
      if (block >= models.length) return { token, layer: 0, model: models.at(-1)! }; // its name
      return level > layerCount ? null : { token, layer: level, model: models[block] };
    },
  };
}
type Layout = ReturnType<typeof layoutOf>;

const screenWidth = signal(900); // of the picture
const layout = computed(() =>
  layoutOf(state.document.value, shownModels.value, printing.value ? PRINTED_WIDTH : screenWidth.value),
);

/** By model where the chosen token's vector comes from. */
const origins = computed(() => {
  const [token, layer] = [state.token.value, state.layer.value];
  if (token === null) return new Map<string, ReturnType<typeof measures.originsOf>>();
  const least = state.threshold.value / 100;
  return new Map(
    shownModels.value.map((model) => [model, measures.originsOf(token, layer, sourceModel(model), least)]),
  );
});

/** The boxes of all cells, those of one colour together. */
function cellMarks({ tokens, models, cellWidth, rowHeight, x, y }: Layout): Mark[] {
  const height = rowHeight * (1 - GAP);
  const byColour = new Map<string, [number, number, number, number][]>();
  const numbers: Mark[] = [];
  const add = (cell: Cell, place: number, meaning?: "source") => {
    const box: [number, number, number, number] = [x(cell.token), y(cell.model, cell.layer), cellWidth - 1, height];
    const { colour, ink } = shade(place, meaning);
    if (!byColour.has(colour)) byColour.set(colour, []);
    byColour.get(colour)!.push(box);
    return { box, ink };
  };
  const number = (box: [number, number, number, number], ink: string, value: number) => {
    if (cellWidth < NUMBERED || rowHeight < 15) return;
    const [left, top] = box;
    const text = state.change.value ? measures.shareText(value).replace(" points", "") : wholePercent(value);
    numbers.push({
      kind: "text",
      text,
      x: left + 6,
      y: top + height / 2,
      fill: ink,
      size: 11,
      anchor: "start",
    });
  };
  const addShare = (cell: Cell) => {
    const value = measures.valueOf(cell.token, cell.layer, cell.model);
    if (value === null) return;
    const { box, ink } = add(cell, measures.placeOn(measures.shareRange.value, value));
    number(box, ink, value);
  };
  const addSource = (token: number, model: string) => {
    const share = origins.value.get(model)?.input.get(token) ?? 0;
    if (share < LEAST_SHADED) return;
    const { box, ink } = add({ token, layer: 0, model }, strength(share), "source");
    if (!state.change.value) number(box, ink, share);
  };
  for (const model of models)
    for (const token of tokens) {
      for (const layer of layers) addShare({ token, layer, model });
      addSource(token, model);
    }
  return [...[...byColour].map(([fill, boxes]): Mark => ({ kind: "boxes", fill, boxes })), ...numbers];
}

type Colours = Record<"ink" | "soft" | "line" | "mark" | "took" | "paper", string>;

/** The empty places of the input and of what is not known, so that they are seen. */
const emptyMarks = ({ tokens, models, cellWidth, rowHeight, x, y }: Layout, { line }: Colours): Mark[] =>
  models.flatMap((model) =>
    range(layerCount + 1).map((layer): Mark => ({
      kind: "boxes",
      fill: line,
      boxes: tokens.map((token) => [x(token), y(model, layer) + rowHeight * (1 - GAP) - 1, cellWidth - 1, 1]),
    })),
  );

/** The lines from the chosen token to its sources, straight to the input or from layer to layer, each with a halo. */
function flowMarks({ models, cellWidth, rowHeight, x, y }: Layout, colours: Colours): Mark[] {
  const middle = (token: number) => x(token) + (cellWidth - 1) / 2;
  return models.flatMap((model) => {
    const { flows } = origins.value.get(model) ?? { flows: [] };
    return flows
      .toSorted((a, b) => a.share - b.share)
      .flatMap(({ layer, below, from, to, share }): Mark[] => {
        const [start, end] = [y(model, layer) + rowHeight * 0.4, y(model, below) + rowHeight * 0.3];
        const half = (start + end) / 2;
        const bend = measures.sourcesIn.value === "layer" ? `C${middle(to)},${half} ${middle(from)},${half} ` : "L";
        const d = `M${middle(to)},${start}${bend}${middle(from)},${end}`;
        const width = 1.4 + 4 * share;
        return [
          { kind: "path", d, stroke: colours.paper, width: width + 2, opacity: 0.9 },
          { kind: "path", d, stroke: colours.took, width, opacity: 0.4 + 0.6 * strength(share) },
        ];
      });
  });
}

function nameMarks({ tokens, models, cellWidth, upright, blockHeight, x }: Layout, colours: Colours): Mark[] {
  const top = models.length * blockHeight + 2;
  const every = Math.max(1, Math.ceil(NAME_SIZE / cellWidth));
  const input = origins.value.get(wordsBlock())?.input;
  const named = tokens.filter((token, n) => n % every === 0 || token === state.token.value || isRead(token));
  return named.map((token): Mark => {
    const letters = [...nameOf(token)];
    const name = letters.length > LETTERS ? `${letters.slice(0, LETTERS - 1).join("")}…` : letters.join("");
    const text = isRead(token) ? `${READ_SIGN} ${name}` : name;
    const isSource = (input?.get(token) ?? 0) >= state.threshold.value / 100;
    const fill = token === state.token.value ? colours.mark : isSource ? colours.took : colours.ink;
    const bold = token === state.token.value || isSource;
    const place = { x: x(token) + (cellWidth - 1) / 2, y: top + (upright ? 2 : NAME_SIZE) };
    return { kind: "text", text, ...place, fill, size: NAME_SIZE, bold, anchor: upright ? "end" : "middle", upright };
  });
}

/** The block in which the chosen cell is. */
const wordsBlock = () => measures.wordsModel.value;

/** Frames around the chosen cell, and the same cell of the other model. */
function chosenMarks({ models, cellWidth, rowHeight, x, y }: Layout, colours: Colours): Mark[] {
  const { token, layer } = state;
  if (token.value === null) return [];
  const frame = (model: string): Mark => ({
    kind: "frame",
    box: [x(token.value!) - 1, y(model, layer.value) - 1, cellWidth + 1, rowHeight * (1 - GAP) + 2],
    stroke: colours.mark,
    width: model === wordsBlock() ? 3 : 1.5,
  });
  return models.map(frame);
}

const themed = computed((): Colours => {
  void dark.value;
  const names = ["ink", "soft", "line", "mark", "took", "paper"] as const;
  const style = getComputedStyle(document.getElementById("grid-canvas")!);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])) as Colours;
});

const marksOf = (now: Layout): Mark[] => [
  ...emptyMarks(now, themed.value),
  ...cellMarks(now),
  ...flowMarks(now, themed.value),
  ...chosenMarks(now, themed.value),
  ...nameMarks(now, themed.value),
];

const choose = ({ token, layer, model }: Cell) =>
  set({ token, ...(layer > 0 ? { layer } : {}), ...(model === CHANGE ? {} : { checkpoint: model }) });

function cellText({ token, layer, model }: Cell): string {
  const name = `“${nameOf(token)}” (${positionOf(token)})`;
  if (layer > 0)
    return `${name}, ${layerName(layer)}, ${modelTitle(model).toLowerCase()}: ${valueText(measures.valueOf(token, layer, model))} ${measures.shareKind()}`;
  const share = origins.value.get(model)?.input.get(token);
  if (share === undefined) return `${name}, input`;
  const along = measures.sourcesIn.value === "layer" ? ", along the lines" : "";
  return `${name}, input: ${percent(share)} of “${nameOf(state.token.value!)}” after ${layerName(state.layer.value)}${along}`;
}

/** What the picture holds, for who checks it: where each cell's corner is, and the shares of the lines. */
function drawnCells() {
  const { models, tokens, cellWidth, rowHeight, x, y } = layout.value;
  const cells = models.flatMap((model) =>
    range(layerCount + 1).flatMap((layer) =>
      tokens.map((token) => ({ model, layer, token, x: x(token), y: y(model, layer) })),
    ),
  );
  const flows = models.flatMap((model) => (origins.value.get(model)?.flows ?? []).map((flow) => ({ ...flow, model })));
  return { cells, flows, width: cellWidth - 1, height: rowHeight * (1 - GAP) };
}

function paint(canvas: HTMLCanvasElement): void {
  const { width, height } = layout.value;
  const sharpest = MAX_SIDE / Math.max(width, height);
  const sharpness = Math.min(sharpest, printing.value ? PRINT_SHARPNESS : Math.max(1, devicePixelRatio));
  paintMarks(canvas, [width, height], marksOf(layout.value), sharpness);
}

/** Scroll to the chosen token's column, where the text is wider than the picture's place. */
function scrollToChosen(box: Element): void {
  const token = state.token.value;
  const { cellWidth, x } = layout.value;
  if (token === null || box.scrollWidth <= box.clientWidth) return;
  const [left, room] = [x(token), box.clientWidth - LEVELS_WIDTH - cellWidth];
  if (left < box.scrollLeft || left > box.scrollLeft + room) box.scrollLeft = left - room / 2;
}

function Canvas() {
  const canvas = useRef<HTMLCanvasElement>(null);
  const number = state.document.value;
  const { width, height, tokens, models, cellAt: cellOf } = layout.value;
  useEffect(() => {
    const shapes = () => shapesOf(marksOf(layout.peek()));
    const drawn: DrawnCanvas = Object.assign(canvas.current!, { shapes, drawn: drawnCells });
    const stops = [effect(() => paint(drawn)), effect(() => scrollToChosen(drawn.closest(".scroll")!))];
    return () => stops.forEach((stop) => stop());
  }, []);
  const cellAt = (e: MouseEvent) => {
    const { x, y } = canvas.current!.getBoundingClientRect();
    return cellOf(e.clientX - x, e.clientY - y);
  };
  const move = (e: KeyboardEvent) => {
    const [right, down] = ARROWS[e.key] ?? [0, 0];
    if (e.key === "Escape") set({ token: null });
    else if (e.key === "Home" || e.key === "End") set({ token: tokens.at(e.key === "Home" ? 0 : -1) });
    else if (right || down) {
      const along = data.documents[number].direction === "rtl" ? -right : right;
      const place = state.token.value === null ? -1 : tokens.indexOf(state.token.value);
      const next = tokens[Math.min(Math.max(place + along, 0), tokens.length - 1)];
      // Up and down go on in the other model's rows.
      const block = Math.max(0, models.indexOf(wordsBlock()));
      const rowCount = models.length * layerCount;
      const row = Math.min(Math.max(block * layerCount + layerCount - state.layer.value + down, 0), rowCount - 1);
      choose({
        token: next,
        layer: layerCount - (row % layerCount),
        model: models[Math.floor(row / layerCount)],
      });
    } else return;
    e.preventDefault();
  };
  const point = (e: PointerEvent) => {
    const cell = cellAt(e);
    const { x, y } = canvas.current!.closest(".grid")!.getBoundingClientRect();
    pointed.value = cell && { ...cell, x: e.clientX - x, y: e.clientY - y };
    hovered.value = cell?.token ?? null;
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
      aria-label={`${data.documents[number].name}: ${tokens.length} tokens, ${layerCount} layers. Arrow keys choose a token and a layer.`}
      aria-describedby="chosen-text"
      style={`width: ${width}px; height: ${height}px`}
      onKeyDown={move}
      onPointerMove={point}
      onPointerLeave={leave}
      onClick={(e) => {
        const cell = cellAt(e);
        if (cell) choose(cell);
      }}
    />
  );
}

/** The numbers of the layers and the models' names, which stay while the tokens scroll. */
function Levels() {
  const { models, rowHeight, top, y } = layout.value;
  const every = Math.ceil(14 / rowHeight); // so that numbers do not touch
  const named = (layer: number) => layer === 0 || (layerCount - layer) % every === 0;
  return (
    <div class="levels" style={`width: ${LEVELS_WIDTH}px`}>
      {models.map((model) => (
        <>
          <b style={`top: ${top(model)}px`}>{modelTitle(model)}</b>
          {range(layerCount + 1)
            .filter(named)
            .map((layer) => (
              <span
                class={layer === state.layer.value ? "now" : ""}
                style={`top: ${y(model, layer)}px; height: ${rowHeight * (1 - GAP)}px`}
              >
                {layer === 0 ? "input" : layer}
              </span>
            ))}
        </>
      ))}
    </div>
  );
}

/** What the cell under the pointer shows, beside it. */
function PointedText({ width }: { width: number }) {
  // A text that was just chosen has other cells than the one that was pointed at.
  if (pointed.value === null || documentOf[pointed.value.token] !== state.document.value) return null;
  const { x, y } = pointed.value;
  const side = x < width / 2 ? `left: ${x + 14}px` : `right: ${width - x + 14}px`;
  return (
    <p class="pointed noprint" aria-hidden="true" style={`${side}; top: ${y + 16}px`}>
      {cellText(pointed.value)}
    </p>
  );
}

/** The word of the glossary that says what the chosen measure is. */
function shareTerm(): keyof typeof GLOSSARY {
  if (measures.sourcesIn.value === null) return "mixing ratio of one layer";
  return state.share.value === "parts" ? "exact parts" : "share";
}

const Legend = () => (
  <>
    <ScaleRamp range={measures.shareRange.value} said={measures.endText} /> {measures.shareKind()},{" "}
    <Term name={shareTerm()}>{measures.measureName().replace(/^Exact/, "exact")}</Term>
    {state.change.value && ", change by fine-tuning"};{" "}
    {state.stretch.value ? "stretched to what this picture shows" : "one scale for all layers, models and texts"}.
  </>
);

/** Which sources the orange marks show, all by the chosen measure. */
function orangeText(): string {
  const least = `${state.threshold.value}%`;
  if (measures.sourcesIn.value === "input")
    return `where the chosen vector comes from, by ${measures.measureName().replace(/^Exact/, "exact")}: the bottom row has its sources in the input, and straight lines lead to those from ${least} on.`;
  if (measures.sourcesIn.value === "layer")
    return `where the chosen vector comes from, by ${measures.measureName()}: lines lead to its sources in the layer below, to theirs, and so on, as far as a line has ${least} of the vector; the bottom row has what they bring from the input.`;
  return "no marks, as a ratio of one layer names no sources; matrices do.";
}

/** How to read the orange marks. */
const SourcesText = () => (
  <p class="small" id="sources-text">
    A column is a token, a row a layer, the input at the bottom. <span class="took-key">Orange</span>: {orangeText()}{" "}
    {measures.sourcesIn.value !== null && "The larger a share, the stronger its mark (by the square root)."}
    {tokensOf(state.document.value).some(isRead) && ` ${READ_SIGN}: the token whose last vector the classifier reads.`}
  </p>
);

function rows() {
  const tokens = tokensOf(state.document.value);
  return {
    columns: ["model", "layer", "position", "token", measures.shareName()],
    rows: shownModels.value.flatMap((model) =>
      layers.flatMap((layer) =>
        tokens.map((token) => [
          ...[modelTitle(model), layer, positionOf(token)],
          ...[nameOf(token), measures.valueOf(token, layer, model)],
        ]),
      ),
    ),
  };
}

/** Why the picture does not show exact parts, if so. */
function PartsNote() {
  const { name, length } = data.documents[state.document.value];
  const hasParts = checkpoints.some((checkpoint) => data.contributions[name]?.[checkpoint]?.parts);
  const isLong = length > data.partsLimit;
  if (hasParts || (state.share.value !== "parts" && !isLong)) return null;
  return (
    <p class="note" id="parts-note">
      {isLong
        ? `This text has ${length} tokens. Exact parts are taken of texts of at most ${data.partsLimit}, as their time grows with the square of the length. `
        : "The exact parts of this text are not on the page. "}
      {state.share.value === "parts" && "Choose another share."}
    </p>
  );
}

const RECOMMENDED = [data.matrices[0], data.method].filter((name) => name !== undefined);
const SHARE_GROUPS = {
  Recommended: RECOMMENDED,
  "Other measures": [...data.matrices, ...data.ratios.methods].filter((name) => !RECOMMENDED.includes(name)),
};

export function Grid() {
  const { box, width } = useWidth(900);
  useLayoutEffect(() => {
    if (!printing.peek()) screenWidth.value = width;
  }, [width]);
  const { name } = data.documents[state.document.value];
  const shares = { ...data.labels.matrices, ...data.labels.methods };
  return (
    <Pane
      id="grid"
      first
      title={<bdi>{`${name}: what each token takes from others, layer by layer`}</bdi>}
      file={`${name}, ${measures.shareName()}`}
      rows={rows}
    >
      <p class="legend" id="grid-legend">
        <Legend />
      </p>
      <PartsNote />
      <div class="grid" ref={box}>
        <Scroll class="grid-box">
          <Levels />
          <Canvas />
        </Scroll>
        <PointedText width={width} />
      </div>
      <ChosenText />
      <Changes />
      <div class="controls">
        <Select choice="share" label="Share" names={shares} groups={SHARE_GROUPS} />
        <Slider choice="threshold" class="" label={`${state.threshold.value}%`} between={[1, 30]}>
          Sources from <b>{state.threshold.value}%</b>
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
            Change by fine-tuning
          </label>
        )}
      </div>
      <SourcesText />
    </Pane>
  );
}
