// The first picture: how much every measured review is mixed in each layer, and where the chosen text stands among them.

import { LAYERS, widthOf } from "./charts.js";
import { checkpoints, data, meanRatioOf, reviewRatiosOf } from "./data.js";
import { byId, drawing, element, inText, percent } from "./elements.js";
import { register } from "./panes.js";
import { change, state } from "./state.js";

const TALL = 320;
const EDGES = { top: 26, right: 118, bottom: 42, left: 52 };
const LINE = 15; // pixels between labels
const GOLDEN = 0.618; // spreads dots of one layer sideways, the first in the middle
const figure = byId("overview");

const meansOf = (checkpoint) =>
  data.curves.filter((row) => row.checkpoint === checkpoint && row.method === state.method);

function scales(largest, all) {
  const [width, height] = [all - EDGES.left - EDGES.right, TALL - EDGES.top - EDGES.bottom];
  const step = width / LAYERS.length;
  const tick = largest > 0.5 ? 0.2 : largest > 0.2 ? 0.1 : 0.05;
  const top = Math.min(1, Math.ceil(largest / tick) * tick);
  const ticks = Array.from({ length: Math.round(top / tick) + 1 }, (_, i) => i * tick);
  return {
    step,
    ticks,
    right: all - EDGES.right,
    x: (layer) => EDGES.left + (layer - 0.5) * step,
    y: (share) => EDGES.top + height * (1 - share / top),
  };
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function axes({ x, y, step, ticks, right }) {
  const { line, soft } = state.colours;
  const text = { fill: soft, "font-size": 12 };
  const bottom = TALL - EDGES.bottom;
  const every = step < 22 ? 2 : 1;
  return [
    ...ticks.flatMap((share) => [
      drawing("line", { x1: EDGES.left, x2: right, y1: y(share), y2: y(share), stroke: line }),
      drawing("text", { ...text, x: EDGES.left - 8, y: y(share) + 4, "text-anchor": "end" }, percent(share)),
    ]),
    ...LAYERS.filter((layer) => (layer - 1) % every === 0).map((layer) =>
      drawing("text", { ...text, x: x(layer), y: bottom + 18, "text-anchor": "middle" }, layer),
    ),
    drawing("text", { ...text, x: 2, y: 12 }, "mixing ratio"),
    drawing("text", { ...text, x: (x(1) + x(LAYERS.length)) / 2, y: bottom + 36, "text-anchor": "middle" }, "layer"),
  ];
}

/** A dot for each review and layer; those of a captured text can be chosen. */
function dots({ x, y, step }) {
  const { names } = data.reviews;
  const documents = new Map(data.documents.map((each, number) => [each.name, number]));
  return LAYERS.flatMap((layer) =>
    reviewRatiosOf(layer, state.checkpoint, state.method).flatMap((share, i) => {
      if (share === null) return [];
      const captured = documents.has(names[i]);
      const at = { cx: x(layer) + (((i * GOLDEN + 0.5) % 1) - 0.5) * 0.6 * step, cy: y(share) };
      const looks = {
        r: captured ? 4 : 2.4,
        fill: `rgb(${state.colours.shade})`,
        "fill-opacity": captured ? 0.9 : 0.35,
      };
      const dot = drawing("circle", { ...at, ...looks }, drawing("title", {}, `${names[i]}: ${percent(share)}`));
      dot.dataset.layer = layer;
      if (captured) dot.dataset.document = documents.get(names[i]);
      return [dot];
    }),
  );
}

function ribbon(rows, { x, y }, colour) {
  if (rows.some((row) => row.ci_low === null)) return [];
  const edge = (column) => rows.map((row) => [x(row.layer), y(row[column])]);
  const d = `${path([...edge("ci_low"), ...edge("ci_high").toReversed()])}Z`;
  return [drawing("path", { d, fill: colour, "fill-opacity": 0.22 })];
}

/** Names beside the ends of the lines, moved apart where they would lie on one another. */
function labels(ends, right) {
  let free = -Infinity;
  return ends
    .toSorted((a, b) => a.y - b.y)
    .map(({ name, y, colour }) => {
      free = Math.max(free + LINE, y + 4);
      const at = { x: right + 4, y: free, fill: colour, "font-size": 12.5 };
      return drawing("text", { ...at, "font-weight": 600 }, name);
    });
}

/** The mean of a checkpoint's reviews, and what stands beside its end. */
function meanLine(checkpoint, scale) {
  const rows = meansOf(checkpoint);
  const chosen = checkpoint === state.checkpoint;
  const colour = chosen ? state.colours.ink : state.colours.soft;
  const looks = {
    fill: "none",
    stroke: colour,
    "stroke-width": chosen ? 2.4 : 1.6,
    "stroke-dasharray": chosen ? "none" : "5 4",
  };
  const d = path(rows.map((row) => [scale.x(row.layer), scale.y(row.mean)]));
  const name = data.reviews.total > 1 ? inText(data.labels.checkpoints[checkpoint]) : "";
  return {
    parts: [...(chosen ? ribbon(rows, scale, colour) : []), drawing("path", { ...looks, d, class: "mean" })],
    end: { name, y: scale.y(rows.at(-1).mean), colour },
  };
}

function ownLine(own, { x, y }) {
  const known = own.map((share, i) => [x(i + 1), share]).filter(([, share]) => share !== null);
  const d = path(known.map(([at, share]) => [at, y(share)]));
  const colour = state.colours.mark;
  const { name } = data.documents[state.document];
  return {
    parts: [drawing("path", { d, fill: "none", stroke: colour, "stroke-width": 2.4, class: "own" })],
    end: { name, y: known.length > 0 ? y(known.at(-1)[1]) : y(0), colour },
  };
}

/** Where a click chooses a layer; the chosen one has a ground of its own. */
function columns({ x, step }) {
  const size = { y: EDGES.top, width: step, height: TALL - EDGES.top - EDGES.bottom };
  return LAYERS.map((layer) => {
    const fill = layer === state.layer ? state.colours.panel : "transparent";
    const title = drawing("title", {}, data.labels.layers[layer]);
    return drawing("rect", { ...size, x: x(layer) - step / 2, fill, "data-layer": layer }, title);
  });
}

export function drawOverview() {
  const own = LAYERS.map((layer) => meanRatioOf(state.document, layer, state.checkpoint, state.method));
  const all = LAYERS.flatMap((layer) => reviewRatiosOf(layer, state.checkpoint, state.method));
  const means = checkpoints.flatMap(meansOf).map((row) => row.mean);
  const width = widthOf(figure);
  const scale = scales(Math.max(0.05, ...all, ...own, ...means), width);
  const lines = [...checkpoints.map((name) => meanLine(name, scale)), ownLine(own, scale)];
  const chart = byId("overview-chart");
  const size = { viewBox: `0 0 ${width} ${TALL}`, width, height: TALL };
  for (const [key, value] of Object.entries(size)) chart.setAttribute(key, value);
  const said = meansOf(state.checkpoint).map((row) => `layer ${row.layer} ${percent(row.mean)}`);
  chart.setAttribute("aria-label", `Mean mixing ratio: ${said.join(", ")}.`);
  chart.replaceChildren(
    ...columns(scale),
    ...axes(scale),
    ...dots(scale),
    ...lines.flatMap(({ parts }) => parts),
    ...labels(
      lines.map(({ end }) => end),
      scale.right,
    ),
  );
}

/** How many of the reviews' means lie below the text's own. */
export function drawTypical() {
  const own = meanRatioOf(state.document, state.layer, state.checkpoint, state.method);
  const among = reviewRatiosOf(state.layer, state.checkpoint, state.method).filter((share) => share !== null);
  const where = inText(data.labels.layers[state.layer]);
  const said = own === null ? "" : `The mean ratio of its tokens in ${where} is ${percent(own)}`;
  const below = Math.round((100 * among.filter((share) => share < own).length) / among.length);
  const { total } = data.reviews;
  const which = among.length < total ? `${among.length} of the ${total}` : `the ${total}`;
  const stands = among.length > 1 ? `, higher than in ${below} % of ${which} measured reviews` : "";
  byId("typical").textContent = said && `${said}${stands}.`;
  byId("text-name").replaceChildren(element("bdi", {}, data.documents[state.document].name));
}

byId("overview-chart").addEventListener("click", ({ target }) => {
  const { document: chosen, layer } = target.dataset;
  if (layer) change({ layer: Number(layer), ...(chosen ? { document: Number(chosen) } : {}) });
});
register("overview-chart", () => {
  const rows = LAYERS.flatMap((layer) =>
    reviewRatiosOf(layer, state.checkpoint, state.method).map((share, i) => [data.reviews.names[i], layer, share]),
  );
  return { columns: ["review", "layer", `mean length ratio of others (${state.method})`], rows };
});
