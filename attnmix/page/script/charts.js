// What the charts have in common: their size, panels of curves over the layers, and names that do not lie on each other.

import { legible } from "./colours.js";
import { data } from "./data.js";
import { drawing } from "./elements.js";
import { state } from "./state.js";

export const FONT = "system-ui, DejaVu Sans, sans-serif";
export const PRINTED = { width: 640, tall: 480 }; // pixels, as in the style sheet
const NAME_LINE = 14; // pixels between names
export const LETTER = 12; // pixels
const TICKS = 5;
export const BESIDE_CURVES = 9; // pixels before their names

export const LAYERS = d3.range(1, data.ratios.layers + 1);

const ruler = document.createElement("canvas").getContext("2d");
/** How wide a name beside a curve is, in pixels. */
export function widthOfName(name) {
  ruler.font = `600 ${LETTER}px ${FONT}`;
  return ruler.measureText(name).width;
}

/** The width of a chart's element, in pixels. */
export const widthOf = (box) => (state.printing ? PRINTED.width : Math.max(box.clientWidth, 240));

/** A drawing of a size as what an element shows, with its description for who does not see it. */
export function put(box, width, height, name, parts) {
  const size = { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": name };
  box.replaceChildren(drawing("svg", { ...size, "font-family": FONT, "font-size": LETTER }, ...parts));
}

/** Text of a chart; what it says may be anyone's. */
export function caption(text, attributes) {
  return drawing("text", { fill: state.colours.soft, ...attributes }, text);
}

/** Heights for names beside places, in the order given, moved apart where they would lie on one another. */
export function apart(heights, low, high) {
  const order = d3.range(heights.length).toSorted((a, b) => heights[a] - heights[b]);
  const found = [];
  let free = low;
  for (const i of order) {
    found[i] = Math.max(free, heights[i]);
    free = found[i] + NAME_LINE;
  }
  let end = high; // back from below, if they went past it
  for (const i of order.toReversed()) {
    found[i] = Math.min(found[i], end);
    end = found[i] - NAME_LINE;
  }
  return found;
}

/** Round limits of values. */
export const niceFrom = (low, high) => d3.scaleLinear().domain([low, high]).nice(TICKS).domain();

/** Scales of a panel whose plot is `left`, `top`, `width`, `height`, for values in `domain`. */
export function scalesOf({ left, top, width, height }, domain) {
  const step = width / LAYERS.length;
  return {
    step,
    x: (layer) => left + (layer - 0.5) * step,
    y: d3
      .scaleLinear()
      .domain(domain)
      .range([top + height, top]),
  };
}

/** Lines and numbers of a panel's axes; `labels` says which of the two have numbers. */
export function axesOf(plot, { x, y, step }, format, labels) {
  const { left, top, width, height } = plot;
  const every = Math.ceil(22 / step) === 1 ? 1 : 2 ** Math.ceil(Math.log2(22 / step));
  const ticks = y.ticks(TICKS);
  const parts = ticks.map((value) =>
    drawing("line", { x1: left, x2: left + width, y1: y(value), y2: y(value), stroke: state.colours.line }),
  );
  if (labels.y) {
    const at = { x: left - 6, "text-anchor": "end" };
    parts.push(...ticks.map((value) => caption(format(value), Object.assign({ y: y(value) + 4 }, at))));
  }
  if (labels.x) {
    const shown = LAYERS.filter((layer) => (layer - 1) % every === 0);
    const at = { y: top + height + 16, "text-anchor": "middle" };
    parts.push(...shown.map((layer) => caption(layer, Object.assign({ x: x(layer) }, at))));
  }
  return parts;
}

const measuredOf = (points) => points.filter(([, value]) => value !== null);

function bandOf({ low, high, colour }, { x, y }) {
  if (!low || measuredOf(low).length === 0) return [];
  const d = d3
    .area()
    .x(([layer]) => x(layer))
    .y0(([, value], i) => y(value ?? high[i][1]))
    .y1((_, i) => y(high[i][1]))(measuredOf(low));
  return [drawing("path", { d, fill: colour, "fill-opacity": 0.2 })];
}

/** A curve with its interval and marks: `{ name, colour, points: [[layer, value], ...], low, high, dash, symbol }`. */
export function curveOf(series, scales) {
  const { points, colour, dash = "none", symbol, wide = 2, open = false } = series;
  const { x, y } = scales;
  const there = measuredOf(points);
  const d = d3
    .line()
    .x(([layer]) => x(layer))
    .y(([, value]) => y(value))(there);
  const line = { d, fill: "none", stroke: colour, "stroke-width": wide, "stroke-dasharray": dash };
  const mark = {
    d: d3
      .symbol()
      .type(symbol || d3.symbolCircle)
      .size(open ? 46 : 30)(),
    stroke: colour,
  };
  const looks = open ? { fill: state.colours.paper, "stroke-width": 1.6 } : { fill: colour };
  const marks = there.map(([layer, value]) =>
    drawing("path", { ...mark, ...looks, transform: `translate(${x(layer).toFixed(1)} ${y(value).toFixed(1)})` }),
  );
  return [...bandOf(series, scales), drawing("path", { ...line, class: "curve" }), ...marks];
}

/** Names at the ends of curves, in their colours. */
export function namesOf(curves, plot, { x, y }) {
  const named = curves.filter(({ label, points }) => label && measuredOf(points).length > 0);
  const heights = named.map(({ points }) => y(measuredOf(points).at(-1)[1]) + 4);
  const places = apart(heights, plot.top + 4, plot.top + plot.height + 4);
  const at = x(LAYERS.length) + BESIDE_CURVES;
  return named.map(({ label, colour }, i) =>
    caption(label, { x: at, y: places[i].toFixed(1), fill: legible(colour, 4.5), "font-weight": 600 }),
  );
}

/** Where a click chooses a layer; the chosen one has a ground of its own. What a column says is its title. */
export function columnsOf(plot, { x, step }, titleOf, also = {}) {
  return LAYERS.map((layer) => {
    const fill = layer === state.layer ? state.colours.panel : "transparent";
    const place = { x: (x(layer) - step / 2).toFixed(1), y: plot.top, width: step.toFixed(1), height: plot.height };
    const column = drawing("rect", { ...place, fill, class: "column" }, drawing("title", {}, titleOf(layer)));
    Object.assign(column.dataset, { layer, ...also });
    return column;
  });
}

/** What a chart drew, a function to `[{ name, points, ... }]`, for who checks it. */
export function keep(box, drawn) {
  box.drawn = drawn;
}
