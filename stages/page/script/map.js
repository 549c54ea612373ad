// The view Map: the tokens at one capture point, with the way that the selected one took.

import { PRINTED, drawChart, pointsAt } from "./charts.js";
import { colourOf } from "./colours.js";
import { CAPTURED, data, documentOf, inOnePlane, limits, place, positionOf, ratioOf, tokens } from "./data.js";
import { forChart } from "./decode.js";
import { byId, percent } from "./elements.js";
import { change, state } from "./state.js";
import { MARGIN, SIZE, withRoom } from "./words.js";

const chart = byId("map-chart");
const SURROUNDINGS = 2000; // points at most

function hoverText(token) {
  const site = data.sites[state.point];
  const share = ratioOf(token, site.layer, CAPTURED, state.method);
  const where = `position ${positionOf(token)} of ${data.documents[documentOf[token]].name}`;
  const mixed = share === null ? "" : `<br>${data.labels.methods[state.method]}: ${percent(share)} from others`;
  return `<b>${forChart(data.tokens[token])}</b><br>${where}<br>${site.label}${mixed}`;
}

/** The tokens that are shown, with their place on the map. */
function shownTokens() {
  const chosen = [...tokens.keys()].filter((token) => state.everyone || documentOf[token] === state.document);
  return chosen.map((token) => ({ token, at: place(state.layout, state.point, token) })).filter(({ at }) => at);
}

function looksOfWords(shown, color, range) {
  // A chart keeps what its reader zoomed to until the layout changes.
  const seen = chart.layout && chart.layout.uirevision === state.layout;
  const fits = withRoom(shown, chart, seen ? [chart.layout.xaxis.range, chart.layout.yaxis.range] : range);
  // A space, as plotly never draws a text again that was once empty.
  const text = shown.map(({ token }) => (fits.has(token) ? forChart(data.tokens[token]) : " "));
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

/** The selected token's way to this point. */
function trailTrace() {
  const color = state.colours.mark;
  const points = [...data.sites.keys()].slice(0, state.point + 1);
  const way = points.filter((point) => place(state.layout, point, state.token));
  const places = way.map((point) => place(state.layout, point, state.token));
  const customdata = way.map((point) => data.sites[point].label);
  const line = { color, width: 1.5 };
  const told = { customdata, hovertemplate: "%{customdata}<extra>trail</extra>" };
  return {
    ...pointsAt(places, "trail"),
    ...told,
    mode: "lines+markers",
    line,
    marker: { size: 5, color },
    opacity: 0.75,
  };
}

function selectedTrace(at) {
  const marker = { symbol: "circle-open", size: 18, color: state.colours.mark, line: { width: 3 } };
  return { ...pointsAt([at], "selected"), hoverinfo: "skip", marker };
}

function drawNote(shown, selected) {
  const candidates = state.everyone ? tokens.length : data.documents[state.document].length;
  const off = state.token !== null && !selected ? " The selected token is not among them." : "";
  const note = `${shown.length} of ${candidates} tokens are on this map (umap.max_points).${off}`;
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
