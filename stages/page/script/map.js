// The view Map: the tokens at one capture point, the way that the selected one took, and how far to trust all that.

import { FONT, PRINTED, drawChart, forChart, pointsAt } from "./charts.js";
import { colourOf } from "./colours.js";
import {
  CAPTURED,
  data,
  documentOf,
  holds,
  inOnePlane,
  limits,
  once,
  place,
  positionOf,
  ratioOf,
  readings,
  tokens,
} from "./data.js";
import { byId, element, inText, percent } from "./elements.js";
import { change, state } from "./state.js";

const chart = byId("map-chart");
const SURROUNDINGS = 2000; // points at most
const MARGIN = 8; // pixels around the map
const SIZE = 11; // pixels

const pen = document.createElement("canvas").getContext("2d");
pen.font = `${SIZE}px ${FONT}`;
const widthOf = once((name) => pen.measureText(name).width);
/** What a token is called at the chosen point. */
const nameHere = (token) => readings[data.sites[state.point].reading].names[token];

function hoverText(token) {
  const site = data.sites[state.point];
  const share = ratioOf(token, site.layer, CAPTURED, state.method);
  const where = `position ${positionOf(token)} of ${data.documents[documentOf[token]].name}`;
  const mixed =
    share === null ? "" : `<br>${data.labels.methods[state.method]}: length ratio of others ${percent(share)}`;
  return `<b>${forChart(nameHere(token))}</b><br>${where}<br>${site.label}${mixed}`;
}

/** The tokens that are shown, with their place on the map. */
function shownTokens() {
  const chosen = tokens.filter((token) => state.everyone || documentOf[token] === state.document);
  return chosen.map((token) => ({ token, at: place(state.layout, state.point, token) })).filter(({ at }) => at);
}

/** Pixels for one unit of the map, which is as long upwards as sideways. */
function pixelsPerUnit(ranges) {
  const sizes = state.printing ? [PRINTED.width, PRINTED.tall] : [chart.clientWidth, chart.clientHeight];
  return Math.min(...sizes.map((size, i) => (size - 2 * MARGIN) / Math.abs(ranges[i][1] - ranges[i][0])));
}

/** Those of the shown tokens whose words do not lie on one another, the selected one first. */
function withRoom(shown, ranges) {
  const scale = pixelsPerUnit(ranges);
  const taken = [];
  const found = new Set();
  for (const { token, at } of shown.toSorted((a, b) => (b.token === state.token) - (a.token === state.token))) {
    const [x, y] = at.map((each) => each * scale);
    const half = widthOf(nameHere(token)) / 2 + 1;
    if (taken.some((other) => Math.abs(x - other.x) < half + other.half && Math.abs(y - other.y) < SIZE)) continue;
    taken.push({ x, y, half });
    found.add(token);
  }
  return found;
}

function looksOfWords(shown, color, range) {
  // A chart keeps what its reader zoomed to until the layout changes.
  const seen = chart.layout && chart.layout.uirevision === state.layout;
  const fits = withRoom(shown, seen ? [chart.layout.xaxis.range, chart.layout.yaxis.range] : range);
  // A space, as plotly never draws a text again that was once empty.
  const text = shown.map(({ token }) => (fits.has(token) ? forChart(nameHere(token)) : " "));
  const textfont = { size: SIZE, color: state.colours.ink };
  const marker = { color, size: 6, line: { width: 0 } };
  return { mode: "markers+text", text, textposition: "top center", textfont, marker };
}

function tokenTrace(shown, range) {
  const places = shown.map(({ at }) => at);
  const color = shown.map(({ token }) => colourOf(token));
  const customdata = shown.map(({ token }) => [token, hoverText(token)]);
  const line = { width: 0.6, color: state.colours.paper };
  const marker = { color, size: shown.length > 800 ? 6 : 9, opacity: 0.85, line };
  const looks = state.shape === "points" ? { marker } : looksOfWords(shown, color, range);
  return { ...pointsAt(places, "tokens"), customdata, hovertemplate: "%{customdata[1]}<extra></extra>", ...looks };
}

let surroundings = null;

/** Where the vectors of all points lie, thinned out, so that the shown ones have their surroundings. */
function surroundingsTrace() {
  const all = data.sites.length * tokens.length;
  const stride = Math.ceil(all / SURROUNDINGS);
  surroundings ||= Array.from({ length: Math.ceil(all / stride) }, (_, i) => i * stride)
    .map((i) => place("joint", Math.floor(i / tokens.length), i % tokens.length))
    .filter((at) => at);
  const marker = { size: 3, color: state.colours.line };
  return { ...pointsAt(surroundings, "all points"), hoverinfo: "skip", marker };
}

/** Not so on the joint map for a point whose vectors have a basis of their own. */
const comparable = (site) => state.layout !== "joint" || !data.ownBasis.includes(site.point);

/** The selected token's way to this point. */
function trailTrace() {
  const color = state.colours.mark;
  const sites = data.sites.slice(0, state.point + 1);
  const { reading } = data.sites[state.point]; // from an encoder's points none leads to a decoder's
  const way = sites.map(({ label }, point) => ({ label, at: place(state.layout, point, state.token) }));
  const found = way.filter(({ at }, point) => at && sites[point].reading === reading && comparable(sites[point]));
  const told = { customdata: found.map(({ label }) => label), hovertemplate: "%{customdata}<extra>trail</extra>" };
  const looks = { mode: "lines+markers", line: { color, width: 1.5 }, marker: { size: 5, color }, opacity: 0.75 };
  const places = found.map(({ at }) => at);
  return { ...pointsAt(places, "trail"), ...told, ...looks };
}

function selectedTrace(at) {
  const marker = { symbol: "circle-open", size: 18, color: state.colours.mark, line: { width: 3 } };
  return { ...pointsAt([at], "selected"), hoverinfo: "skip", marker };
}

function drawNote(shown, selected) {
  const candidates = state.everyone ? tokens.length : data.documents[state.document].length;
  const off = state.token !== null && !selected ? " The selected token is not among them." : "";
  const note = holds(state.layout, state.point)
    ? `${shown.length} of ${candidates} tokens are on this map (umap.max_points).${off}`
    : `The ${state.layout} layout leaves this capture point out.`;
  byId("map-note").textContent = shown.length === candidates ? "" : note;
  chart.setAttribute("aria-label", `${state.layout} map, ${data.sites[state.point].label}: ${shown.length} tokens`);
}

export function drawMap() {
  // Or a reset of the axes would be to those of another layout.
  if (chart.layout && chart.layout.uirevision !== state.layout) Plotly.purge(chart);
  const shown = shownTokens();
  const selected = state.token === null ? null : place(state.layout, state.point, state.token);
  const margin = inOnePlane(state.layout) ? 0 : 0.02;
  const range = limits(state.layout).map(([low, high]) => [low - margin, high + margin]);
  const traces = [tokenTrace(shown, range)];
  if (state.layout === "joint") traces.unshift(surroundingsTrace());
  if (state.token !== null && inOnePlane(state.layout)) traces.unshift(trailTrace());
  if (selected) traces.push(selectedTrace(selected));
  const bare = { showticklabels: false, zeroline: false, ticks: "", showgrid: false };
  const layout = {
    ...(state.printing ? { height: PRINTED.tall } : {}),
    margin: { l: MARGIN, r: MARGIN, t: MARGIN, b: MARGIN },
    dragmode: "pan",
    uirevision: state.layout,
    xaxis: { ...bare, range: range[0], constrain: "domain" },
    yaxis: { ...bare, range: range[1], scaleanchor: "x" },
  };
  drawChart(chart, traces, layout, {
    plotly_click: (event) => {
      const found = event.points.find((each) => Array.isArray(each.customdata));
      if (found) change({ token: found.customdata[0] });
    },
    // Zooming in makes room for more words.
    plotly_relayout: () => state.shape === "words" && !state.printing && drawMap(),
  });
  drawNote(shown, selected);
}

const number = (found) => (found === null ? "–" : found.toFixed(3));

export function drawQuality() {
  const { whole, points } = data.quality[state.layout];
  const rowOf = (name) => {
    const [here] = points[state.point][name] || [null]; // the joint map has no seeds' scores by point
    const cells = [whole[name][0], here, whole[name][1]].map((found) => element("td", {}, number(found)));
    return element(
      "tr",
      { "data-measure": name },
      element("th", { scope: "row" }, data.labels.mapMeasures[name]),
      ...cells,
    );
  };
  const rows = Object.keys(data.labels.mapMeasures).filter((name) => name in whole);
  byId("quality").tBodies[0].replaceChildren(...rows.map(rowOf));
}

const STEPS = { attention: "the attention step", ffn: "the feed-forward step", layer: "the whole" };
const PROJECTIONS = { pca: "PCA", random_projection: "random" };
const MEASURES = { partial_full_space: "given the moves in the full space", partial_position: "given the positions" };
const fixed = (low, high) => `${low.toFixed(2)} to ${high.toFixed(2)}`;

/** A mean rank correlation with its interval over texts; of one text, with its range over the seeds. */
function correlation(row) {
  if (row.mean === null) return "none (not defined)";
  const spread =
    row.ci_low !== null
      ? ` (95 % interval ${fixed(row.ci_low, row.ci_high)})`
      : row.seeds > 1
        ? ` (${fixed(row.lowest_seed, row.highest_seed)} with ${row.seeds} seeds)`
        : "";
  return row.mean.toFixed(2) + spread;
}

/** What moves on the map in one step have to do with a variable, and what stands against that. */
function against(here, name) {
  const own = here.filter((row) => row.against === name);
  const of = (layout, measure) => own.find((row) => row.layout === layout && row.measure === measure);
  const plain = of(state.layout, "spearman");
  if (!plain) return null;
  const others = [
    ...Object.entries(MEASURES).map(([measure, label]) => [label, of(state.layout, measure)]),
    ...Object.entries(PROJECTIONS).map(([layout, label]) => [`on the ${label} projection`, of(layout, "spearman")]),
  ].filter(([, row]) => row && row.mean !== null);
  const chance = of(state.layout, "permutation_null");
  const said = others.map(([label, row]) => `${label} ${row.mean.toFixed(2)}`);
  if (chance && chance.mean !== null) said.push(`by chance ${fixed(chance.ci_low, chance.ci_high)}`);
  return { row: plain, text: correlation(plain) + (said.length ? `; ${said.join(", ")}` : "") };
}

/** A sentence for each step of the layer, and one on how many texts they are about. */
function movement() {
  if (!inOnePlane(state.layout)) return ["Separate maps share no plane, so there is no trail from one to the next."];
  const { layer } = data.sites[state.point];
  const here = data.movement.filter((row) => row.layer === layer);
  const found = Object.entries(STEPS).map(([step, label]) => {
    const [full, mixed] = ["full_space", state.method].map((name) =>
      against(
        here.filter((row) => row.step === step),
        name,
      ),
    );
    return { label, full, mixed };
  });
  const captured = found.filter(({ full }) => full); // of the others a point before or after was not
  const sentences = captured.map(({ label, full, mixed }) => {
    const of = mixed ? ` With the mixing ratio: ${mixed.text}.` : "";
    const where = `In ${label} of ${inText(data.labels.layers[layer])}`;
    return `${where}, moves on this map have a rank correlation with moves in the full space of ${full.text}.${of}`;
  });
  if (sentences.length === 0) return [];
  const texts = Math.max(...captured.map(({ full }) => full.row.documents));
  const interval = "intervals are over texts and seeds";
  const said = texts > 1 ? `Means over ${texts} texts; ${interval}.` : "Of one text: there is no interval over texts.";
  return [...sentences, said];
}

export function drawMovement() {
  byId("movement").replaceChildren(...movement().map((text) => element("p", { class: "small" }, text)));
}
