// The view Mixing: a panel for each ratio, over the layers.

import {
  LAYERS,
  axesOf,
  caption,
  columnsOf,
  curveOf,
  keep,
  namesOf,
  niceFrom,
  put,
  scalesOf,
  widthOf,
} from "./charts.js";
import { legible } from "./colours.js";
import { checkpoints, data, nameOf, ratioOf } from "./data.js";
import { byId, drawing, inText, percent } from "./elements.js";
import { register } from "./panes.js";
import { change, state } from "./state.js";

const mixing = byId("mixing-chart");
const PANEL = { least: 245, tall: 212 }; // pixels
const PRINTED_PANEL = { least: 190, tall: 145 };
const EDGE_OF_NAME = 8;
const LETTER_WIDTH = 6.6; // pixels, of a panel's name
const ROOM = { top: 34, right: 78, bottom: 26, left: 12 };
const NUMBERS = 34; // pixels for those of the first column
const BELOW = 20; // pixels under the panels, for what the axis is of

const tenths = (share) => `${(100 * share).toFixed(1)} %`;
const withInterval = (row) =>
  tenths(row.mean) + (row.ci_low === null ? "" : ` (${tenths(row.ci_low)} to ${tenths(row.ci_high)})`);

function lookOf(checkpoint) {
  if (checkpoint === "pretrained") return { colour: legible("#E69F00"), dash: "6 4" };
  return { colour: legible(state.dark ? "#56B4E9" : "#0072B2"), dash: "none" };
}

const rowsOf = (checkpoint, method) =>
  data.curves.filter((row) => row.checkpoint === checkpoint && row.method === method);

/** The means of a checkpoint by one ratio, and the selected token's own values. */
function curvesOf(checkpoint, method) {
  const rows = rowsOf(checkpoint, method);
  const name = data.labels.checkpoints[checkpoint];
  const [points, low, high] = ["mean", "ci_low", "ci_high"].map((key) => rows.map((row) => [row.layer, row[key]]));
  const label = checkpoints.length > 1 ? inText(name) : "mean";
  const mean = { ...lookOf(checkpoint), name, label, method, points, low, high };
  if (state.token === null || rows.length === 0) return [mean];
  const own = rows.map(({ layer }) => [layer, ratioOf(state.token, layer, checkpoint, method)]);
  const looks = { colour: mean.colour, dash: "1.5 3", wide: 1.5, open: true, symbol: d3.symbolDiamond };
  return [mean, { ...looks, name: `${nameOf(state.token)}, ${inText(name)}`, method, points: own }];
}

function titleOf(method, layer) {
  const found = checkpoints.flatMap((checkpoint) => {
    const row = rowsOf(checkpoint, method).find((each) => each.layer === layer);
    return row ? [`${inText(data.labels.checkpoints[checkpoint])} ${withInterval(row)}`] : [];
  });
  return `${data.labels.layers[layer]}: ${found.join(", ")}`;
}

const panelSize = () => (state.printing ? PRINTED_PANEL : PANEL);

/** A name in as many lines as it needs. */
function linesOfName(name, width) {
  const most = Math.floor(width / LETTER_WIDTH);
  const lines = [];
  for (const word of name.split(" ")) {
    const last = lines.at(-1);
    if (last && last.length + 1 + word.length <= most) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
  }
  return lines;
}

/** The parts of one ratio's panel whose corner is at `x` and `y`. */
function panelOf({ method, curves }, { x, y, width, first, last }, domain) {
  const left = x + ROOM.left + (first ? NUMBERS : 0);
  const height = panelSize().tall - ROOM.top - ROOM.bottom;
  const plot = { left, top: y + ROOM.top, width: x + width - ROOM.right - left, height };
  const scales = scalesOf(plot, domain);
  const chosen = method === state.method;
  const looks = { fill: chosen ? state.colours.ink : state.colours.soft, "font-weight": chosen ? 700 : 400 };
  const name = linesOfName(data.labels.methods[method], x + width - plot.left - EDGE_OF_NAME);
  const under = { x: plot.left, y: y + ROOM.top - 7, width: plot.width, height: 2, fill: state.colours.ink };
  return [
    ...name.map((line, n) => caption(line, { x: plot.left, y: y + 20 - 13 * (name.length - 1 - n), ...looks })),
    ...(chosen ? [drawing("rect", { ...under, class: "chosen" })] : []),
    ...columnsOf(plot, scales, (layer) => titleOf(method, layer), { method }),
    ...axesOf(plot, scales, percent, { x: last, y: first }),
    ...curves.flatMap((each) => curveOf(each, scales)),
    ...namesOf(curves, plot, scales),
  ];
}

const panels = () => {
  const methods = data.ratios.methods.filter((method) => data.curves.some((row) => row.method === method));
  return methods.map((method) => ({ method, curves: checkpoints.flatMap((each) => curvesOf(each, method)) }));
};

export function drawMixing() {
  const shown = panels();
  const width = widthOf(mixing);
  const columns = Math.max(1, Math.min(shown.length, Math.floor((width - NUMBERS) / panelSize().least)));
  const wide = (width - NUMBERS) / columns;
  const values = shown.flatMap(({ curves }) => curves.flatMap(({ points, high = [] }) => [...points, ...high]));
  const domain = niceFrom(0, d3.max(values, ([, value]) => value) || 1);
  const parts = shown.flatMap((panel, i) => {
    const [column, row] = [i % columns, Math.floor(i / columns)];
    const at = { x: column * wide + (column > 0 ? NUMBERS : 0), y: row * panelSize().tall };
    const looks = { width: wide + (column > 0 ? 0 : NUMBERS), first: column === 0, last: i + columns >= shown.length };
    return panelOf(panel, { ...at, ...looks }, domain);
  });
  const height = Math.ceil(shown.length / columns) * panelSize().tall + BELOW;
  const axis = caption("layer; length ratio of other tokens upwards", { x: NUMBERS + ROOM.left, y: height - 4 });
  const name = `Mixing ratio by layer, ${shown.length} ratios; by ${data.labels.methods[state.method]}: ${inText(
    LAYERS.map((layer) => titleOf(state.method, layer)).join("; "),
  )}`;
  put(mixing, width, height, name, [...parts, axis]);
  keep(mixing, () => shown.flatMap(({ curves }) => curves));
}

mixing.addEventListener("click", ({ target }) => {
  const { layer, method } = target.dataset;
  if (layer) change({ layer: Number(layer), method });
});

const points = (share) => `${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(1)}`;

export function drawDifference() {
  const row = data.differences.find((each) => each.layer === state.layer && each.method === state.method);
  const [mean, low, high] = row ? [row.difference, row.ci_low, row.ci_high].map(points) : [];
  const words = `${data.labels.layers[state.layer]}, fine-tuned minus pretrained: ${mean} percentage points (95 % interval, for this layer and ratio alone, ${low} to ${high}).`;
  byId("difference").textContent = row ? words : "";
}

/** A table's rows, of curves. */
export const rowsOfCurves = (curves, first) =>
  curves.flatMap((each) =>
    each.points.map(([layer, value], i) => [
      each[first],
      each.name,
      layer,
      value,
      each.low?.[i][1] ?? null,
      each.high?.[i][1] ?? null,
    ]),
  );

register("mixing-chart", () => ({
  columns: ["ratio", "of", "layer", "length ratio of others", "95 % from", "to"],
  rows: rowsOfCurves(
    panels().flatMap(({ curves }) => curves),
    "method",
  ),
}));
