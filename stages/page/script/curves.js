// The views Mixing and Steps: curves over the layers.

import { drawChart, forChart, pointsAt } from "./charts.js";
import { CAPTURED, checkpoints, cosinesOf, data, nameOf, ratioOf } from "./data.js";
import { byId, inText } from "./elements.js";
import { change, state } from "./state.js";

const SYMBOLS = "triangle-down square pentagon triangle-up triangle-left triangle-right x circle hexagon".split(" ");
const BLACK = "#000000";
const SHARE = ".1%";
const LENGTH = ".3f";

/** Draw curves over the layers, with a mark at the chosen one. */
function drawByLayer(chart, traces, top, yaxis, heard) {
  const lines = { gridcolor: state.colours.line, zerolinecolor: state.colours.line, linecolor: state.colours.line };
  const line = { color: state.colours.soft, width: 1, dash: "dot" };
  const layout = {
    margin: { l: 56, r: 16, t: top, b: 48 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    shapes: [{ type: "line", x0: state.layer, x1: state.layer, yref: "paper", y0: 0, y1: 1, line }],
    xaxis: { ...lines, title: { text: "layer" }, dtick: data.ratios.layers > 16 ? 2 : 1 },
    yaxis: { ...lines, ...yaxis },
  };
  drawChart(chart, traces, layout, heard);
}

/** A curve of means with its interval; numbers are told in `format`. */
function band(rows, name, line, marker, format) {
  const [x, low, high, y] = ["layer", "ci_low", "ci_high", "mean"].map((column) => rows.map((row) => row[column]));
  const common = { type: "scatter", x, legendgroup: name };
  const edge = {
    ...common,
    mode: "lines",
    line: { color: line.color, width: 0 },
    hoverinfo: "skip",
    showlegend: false,
  };
  const customdata = rows.map((row) => [row.ci_low, row.ci_high]);
  const ends = low.some((end) => end !== null) ? ` (%{customdata[0]:${format}} to %{customdata[1]:${format}})` : "";
  const hovertemplate = `layer %{x}: %{y:${format}}${ends}`;
  const looks = { mode: "lines+markers", name, line: { ...line, width: 2.2 }, marker, customdata, hovertemplate };
  return [
    { ...edge, y: low },
    { ...edge, y: high, fill: "tonexty", fillcolor: `${line.color}33` },
    { ...common, y, ...looks },
  ];
}

/** The selected token's own values, pairs of layer and value. */
function ownTrace(places, label, format, looks) {
  const name = forChart(nameOf(state.token)) + label;
  return { ...pointsAt(places, name), hovertemplate: `layer %{x}: %{y:${format}}`, ...looks };
}

function lookOf(checkpoint) {
  if (checkpoint === "pretrained") return { color: "#E69F00", dash: "dash" };
  return { color: state.dark ? "#56B4E9" : "#0072B2", dash: "solid" };
}

function tracesOfCheckpoint(checkpoint) {
  const look = lookOf(checkpoint);
  const rows = data.curves.filter((row) => row.checkpoint === checkpoint && row.method === state.method);
  const name = data.labels.checkpoints[checkpoint];
  const traces = band(rows, name, look, { size: 7 }, SHARE);
  if (state.token === null) return traces;
  const ratios = rows.map(({ layer }) => [layer, ratioOf(state.token, layer, checkpoint, state.method)]);
  const line = { color: look.color, dash: "dot", width: 1.5 };
  const looks = { mode: "lines+markers", showlegend: true, line, marker: { symbol: "diamond-open", size: 9 } };
  return [...traces, ownTrace(ratios, `, ${inText(name)}`, SHARE, looks)];
}

export function drawMixing() {
  const yaxis = { title: { text: "length ratio of other tokens" }, tickformat: ".0%", rangemode: "tozero" };
  drawByLayer(byId("mixing-chart"), checkpoints.flatMap(tracesOfCheckpoint), 60, yaxis, {
    plotly_click: (event) => change({ layer: event.points[0].x }),
  });
}

const points = (share) => `${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(1)}`;

export function drawDifference() {
  const row = data.differences.find((each) => each.layer === state.layer && each.method === state.method);
  const [mean, low, high] = row ? [row.difference, row.ci_low, row.ci_high].map(points) : [];
  const said = `${data.labels.layers[state.layer]}, fine-tuned minus pretrained: ${mean} percentage points (95 % interval ${low} to ${high}).`;
  byId("difference").textContent = row ? said : "";
}

function tracesOfStep(step, rows) {
  const drawn = data.stepColors[step];
  const color = drawn === BLACK ? state.colours.ink : drawn; // which can be seen on dark paper too
  const name = data.labels.steps[step];
  const traces = band(
    rows,
    name,
    { color, dash: "solid" },
    { size: 8, symbol: SYMBOLS[Object.keys(data.stepColors).indexOf(step)] },
    LENGTH,
  );
  if (state.token === null || state.stepMeasure !== "cosine_input" || state.checkpoint !== CAPTURED) return traces;
  const own = cosinesOf(state.token, step).map((cosine, i) => [i + 1, cosine]);
  const marker = { symbol: "diamond-open", size: 12, color, line: { width: 2 } };
  return own.length === 0 ? traces : [...traces, ownTrace(own, "", LENGTH, { legendgroup: name, marker })];
}

export function drawSteps() {
  const rows = data.steps.filter((row) => row.checkpoint === state.checkpoint && row.measure === state.stepMeasure);
  const steps = Object.keys(data.stepColors).filter((step) => rows.some((row) => row.step === step));
  const ofStep = (step) => rows.filter((row) => row.step === step);
  const traces = steps.flatMap((step) => tracesOfStep(step, ofStep(step)));
  const label = byId("step-measure").querySelector(`[value=${state.stepMeasure}]`).textContent;
  const title = { text: label.length > 40 ? "relative to the input" : label };
  drawByLayer(byId("steps-chart"), traces, 84, { title });
}
