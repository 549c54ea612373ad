// The marks of the picture of tokens by layers: cells, lines to the sources of the selected token, names and frames.

import { computed } from "@preact/signals";
import {
  type Block,
  blocks,
  chosenBlock,
  chosenColumn,
  GAP,
  type Layout,
  layersOf,
  layout,
  LETTERS,
  NAME_SIZE,
} from "./blocks";
import { shade, strength } from "./colours";
import { columnOf, comparison, differenceOf, differenceRange, unlikeTokens } from "./comparison";
import { isRead, isWord, type Maybe, range } from "./data";
import { inPoints, wholePercent } from "./format";
import type { Mark } from "./marks";
import * as measures from "./measures";
import { dark, state } from "./state";
import { nameOf } from "./words";

const NUMBERED = 56; // pixels, minimum width of a cell with a number
const NUMBERED_ROW = 15; // pixels, minimum height of its row
export const READ_SIGN = "◆"; // before the name of the token that the classifier reads
const EDGE_REACH = 4; // pixels, maximum distance of the pointer from a line
const CURVE_PARTS = 16; // line segments that approximate a curve
const LEAST_SHADED = 0.002; // minimum share of a visible source in the row of the input
type Box = [left: number, top: number, width: number, height: number];

/** The model whose sources are drawn: for changes, the selected model. */
export const sourceModel = (model: string) => (model === measures.CHANGE ? state.checkpoint.value : model);

type Origins = ReturnType<typeof measures.originsOf>;
/** The sources of the selected column's token by block. */
export const origins = computed(() => {
  const column = chosenColumn.value;
  const byBlock = new Map<Block, Origins>();
  if (column === null) return byBlock;
  for (const block of blocks.value) {
    const token = block.tokens[column];
    if (token === null || block.isDifference) continue;
    const least = state.threshold.value / 100;
    byBlock.set(block, measures.originsOf(token, state.layer.value, sourceModel(block.model), least));
  }
  return byBlock;
});

/** The value of a cell; null if it is not known. */
export function valueIn(block: Block, column: number, layer: number): Maybe {
  if (block.isDifference) return differenceOf(comparison.value!.columns[column], layer);
  const token = block.tokens[column];
  return token === null ? null : measures.valueOf(token, layer, block.model);
}

type Painted = { box: Box; colour: string; ink: string; text: string };
/** The colour and number of a cell; null if its value is not known or if a cell of the input row is not a source. */
function paintedCell(block: Block, column: number, layer: number): Omit<Painted, "box"> | null {
  if (layer > 0) {
    const value = valueIn(block, column, layer);
    if (value === null) return null;
    const ends = block.isDifference ? differenceRange.value : measures.shareRange.value;
    const isSigned = block.isDifference || state.change.value;
    return { ...shade(measures.placeOn(ends, value)), text: isSigned ? inPoints(value) : wholePercent(value) };
  }
  const token = block.tokens[column];
  const share = token === null ? 0 : (origins.value.get(block)?.input.get(token) ?? 0);
  if (share < LEAST_SHADED) return null;
  return { ...shade(strength(share), "source"), text: state.change.value ? "" : wholePercent(share) };
}

/** All cells with a value, with their positions. */
function paintedCells({ cellWidth, rowHeight, x, y }: Layout): Painted[] {
  const height = rowHeight * (1 - GAP);
  return blocks.value.flatMap((block) =>
    layersOf(block).flatMap((layer) =>
      [...block.tokens.keys()].flatMap((column): Painted[] => {
        const cell = paintedCell(block, column, layer);
        return cell ? [{ ...cell, box: [x(column), y(block, layer), cellWidth - 1, height] }] : [];
      }),
    ),
  );
}

/** The boxes of cells, grouped by colour. */
function boxMarks(painted: Painted[]): Mark[] {
  const boxes = Map.groupBy(painted, ({ colour }) => colour);
  return [...boxes].map(([fill, all]): Mark => ({ kind: "boxes", fill, boxes: all.map(({ box }) => box) }));
}

/** The numbers of cells, if there is enough space. */
function numberMarks(painted: Painted[], { cellWidth, rowHeight }: Layout): Mark[] {
  if (cellWidth < NUMBERED || rowHeight < NUMBERED_ROW) return [];
  return painted.map(({ box: [left, top, , height], colour, ink, text }): Mark => {
    const place = { x: left + 6, y: top + height / 2 };
    return { kind: "text", text, ...place, fill: ink, halo: colour, size: 11, anchor: "start" };
  });
}

type Colours = Record<"ink" | "soft" | "line" | "mark" | "took" | "paper", string>;
const themed = computed((): Colours => {
  void dark.value;
  const names = ["ink", "soft", "line", "mark", "took", "paper"] as const;
  const style = getComputedStyle(document.getElementById("grid-canvas")!);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])) as Colours;
});

/** Lines at the bottom of all cells, so that empty cells are visible. */
const emptyMarks = ({ cellWidth, rowHeight, x, y }: Layout, { line }: Colours): Mark[] =>
  blocks.value.flatMap((block) =>
    layersOf(block).map((layer): Mark => {
      const columns = [...block.tokens.keys()].filter((column) => block.tokens[column] !== null);
      const top = y(block, layer) + rowHeight * (1 - GAP) - 1;
      return { kind: "boxes", fill: line, boxes: columns.map((column) => [x(column), top, cellWidth - 1, 1]) };
    }),
  );

/** A line from the selected token or one of its sources to a source. */
export type Edge = measures.Flow & { start: Point; end: Point; isBent: boolean };
type Point = [x: number, y: number];

/** The lines to the sources, straight to the input or from layer to layer, in ascending order of their shares. */
const edgesOf = ({ cellWidth, rowHeight, x, y }: Layout): Edge[] =>
  [...origins.value].flatMap(([block, { flows }]) => {
    const middle = (token: number) => x(columnOf(token)) + (cellWidth - 1) / 2;
    return flows
      .toSorted((a, b) => a.share - b.share)
      .map((flow): Edge => {
        const start: Point = [middle(flow.to), y(block, flow.layer) + rowHeight * 0.4];
        const end: Point = [middle(flow.from), y(block, flow.below) + rowHeight * 0.3];
        return { ...flow, start, end, isBent: measures.sourcesIn.value === "layer" };
      });
  });

/** The lines, each with a halo. */
const flowMarks = (drawnLayout: Layout, colours: Colours): Mark[] =>
  edgesOf(drawnLayout).flatMap(({ start, end, isBent, share }): Mark[] => {
    const half = (start[1] + end[1]) / 2;
    const d = `M${start}${isBent ? `C${start[0]},${half} ${end[0]},${half} ` : "L"}${end}`;
    const width = 1.4 + 4 * share;
    // On a dark background, transparent orange would look brown.
    const opacity = dark.value ? 1 : 0.4 + 0.6 * strength(share);
    return [
      { kind: "path", d, stroke: colours.paper, width: width + 2, opacity: 0.9 },
      { kind: "path", d, stroke: colours.took, width, opacity },
    ];
  });

/** The point of a line at a parameter between 0 and 1; bent lines are cubic curves. */
function pointOn({ start: [x0, y0], end: [x1, y1], isBent }: Edge, at: number): Point {
  if (!isBent) return [x0 + at * (x1 - x0), y0 + at * (y1 - y0)];
  const [half, rest] = [(y0 + y1) / 2, 1 - at];
  const ofStart = rest ** 3 + 3 * rest ** 2 * at;
  const ofHalf = 3 * rest ** 2 * at + 3 * rest * at ** 2;
  return [ofStart * x0 + (1 - ofStart) * x1, rest ** 3 * y0 + ofHalf * half + at ** 3 * y1];
}

/** The distance of a point from a line segment. */
function distanceFrom([x, y]: Point, [x0, y0]: Point, [x1, y1]: Point): number {
  const [dx, dy] = [x1 - x0, y1 - y0];
  const along = ((x - x0) * dx + (y - y0) * dy) / (dx ** 2 + dy ** 2 || 1);
  const at = Math.min(Math.max(along, 0), 1);
  return Math.hypot(x - x0 - at * dx, y - y0 - at * dy);
}

/** The line nearest to a point, preferring larger shares; null if no line is within `EDGE_REACH`. */
export function edgeAt(x: number, y: number): Edge | null {
  let [nearest, least]: [Edge | null, number] = [null, EDGE_REACH];
  for (const edge of edgesOf(layout.value)) {
    const points = range((edge.isBent ? CURVE_PARTS : 1) + 1).map((n, _, all) => pointOn(edge, n / (all.length - 1)));
    const distances = points.slice(1).map((point, n) => distanceFrom([x, y], points[n], point));
    const distance = Math.min(...distances);
    if (distance <= least) [nearest, least] = [edge, distance];
  }
  return nearest;
}

/** The columns with visible names: the selected one, the strongest sources among words, and others if they fit. */
function namedColumns(block: Block, { cellWidth }: Layout, input: Map<number, number> | undefined): Set<number> {
  const share = (column: number) => (isWord(block.tokens[column]!) ? (input?.get(block.tokens[column]!) ?? 0) : 0);
  const isForced = (column: number) => column === chosenColumn.value || unlikeTokens.value.has(block.tokens[column]!);
  const rank = (column: number) => (isForced(column) ? 2 : isRead(block.tokens[column]!) ? 1.5 : share(column));
  const least = Math.max(state.threshold.value / 100, LEAST_SHADED);
  const columns = [...block.tokens.keys()].filter((column) => block.tokens[column] !== null);
  const isFirst = (column: number) => rank(column) >= least;
  const first = columns.filter(isFirst).toSorted((a, b) => rank(b) - rank(a));
  const named = new Set<number>();
  const apart = Math.ceil(NAME_SIZE / cellWidth); // columns
  const hasRoom = (column: number) => ![...named].some((other) => Math.abs(other - column) < apart);
  for (const column of [...first, ...columns.filter((each) => !isFirst(each))])
    if (isForced(column) || hasRoom(column)) named.add(column);
  return named;
}

/** The names of tokens below their columns. Names that differ from the other text's token in the column are framed. */
function nameMarks(drawnLayout: Layout, colours: Colours): Mark[] {
  const { cellWidth, upright, x, namesTop, namesHeight } = drawnLayout;
  const marksOfBlock = (block: Block): Mark[] => {
    const input = origins.value.get(comparison.value === null ? chosenBlock.value : block)?.input;
    const named = namedColumns(block, drawnLayout, input);
    return block.tokens.flatMap((token, column): Mark[] => {
      if (token === null || !named.has(column)) return [];
      const [isChosen, isUnlike] = [column === chosenColumn.value, unlikeTokens.value.has(token)];
      const letters = [...nameOf(token)];
      const name = letters.length > LETTERS ? `${letters.slice(0, LETTERS - 1).join("")}…` : letters.join("");
      const text = isRead(token) ? `${READ_SIGN} ${name}` : name;
      const isSource = (input?.get(token) ?? 0) >= state.threshold.value / 100;
      const fill = isChosen ? colours.mark : isSource ? colours.took : colours.ink;
      const top = namesTop(block) + (upright ? 0 : 3);
      const place = { x: x(column) + (cellWidth - 1) / 2, y: top + (upright ? 4 : 11) };
      const looks = { size: NAME_SIZE, bold: isChosen || isSource, anchor: upright ? "end" : "middle" } as const;
      const box: Box = [x(column), top, cellWidth - 1, namesHeight - 4];
      const frame: Mark[] = isUnlike ? [{ kind: "frame", box, stroke: colours.ink, width: 1.5 }] : [];
      return [...frame, { kind: "text", text, ...place, fill, ...looks, upright }];
    });
  };
  return blocks.value.filter(({ hasNames }) => hasNames).flatMap(marksOfBlock);
}

/** Frames around the selected cell, and around the corresponding cells of the other blocks. */
function chosenMarks({ cellWidth, rowHeight, x, y }: Layout, { mark }: Colours): Mark[] {
  const column = chosenColumn.value;
  if (column === null) return [];
  const frame = (block: Block): Mark => ({
    kind: "frame",
    box: [x(column) - 1, y(block, state.layer.value) - 1, cellWidth + 1, rowHeight * (1 - GAP) + 2],
    stroke: mark,
    width: block === chosenBlock.value ? 3 : 1.5,
  });
  return blocks.value.filter(({ tokens }) => tokens[column] !== null).map(frame);
}

export function marksOf(now: Layout): Mark[] {
  const painted = paintedCells(now);
  return [
    ...emptyMarks(now, themed.value),
    ...boxMarks(painted),
    ...flowMarks(now, themed.value),
    ...numberMarks(painted, now), // on top of the lines
    ...chosenMarks(now, themed.value),
    ...nameMarks(now, themed.value),
  ];
}
