// What the charts have in common.

import { data } from "./data.js";
import { state } from "./state.js";

// A finger scrolls the page; what it would drag or zoom stays as it is.
const COARSE = matchMedia("(pointer: coarse)").matches;
export const FONT = "system-ui, DejaVu Sans, sans-serif";
export const PRINTED = { width: 640, height: 400, tall: 480 }; // pixels, as in the style sheet
const CONFIG = {
  responsive: true,
  displaylogo: false,
  displayModeBar: COARSE ? false : "hover",
  scrollZoom: false,
  // By name, as plotly's own choice holds one that sends the chart to a cloud.
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
};

/** Draw a chart, the first time or again; `heard` are its events and what they do. */
export function drawChart(chart, traces, layout, heard = {}) {
  const clear = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
  const font = { color: state.colours.ink, family: FONT, size: 13 };
  const size = state.printing ? { width: PRINTED.width, height: PRINTED.height } : {};
  const looks = { ...clear, font, ...size, hoverlabel: { align: "left" }, hovermode: "closest", ...layout };
  Plotly.react(chart, traces, { ...looks, dragmode: COARSE ? false : layout.dragmode || "zoom" }, CONFIG);
  for (const [event, act] of Object.entries(heard)) {
    chart.removeAllListeners(event);
    chart.on(event, act);
  }
}

/** Draw curves over the layers, with a mark at the chosen one. */
export function drawByLayer(chart, traces, top, yaxis, heard) {
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

/** A trace of points, from pairs of x and y. */
export function pointsAt(places, name) {
  const [x, y] = [0, 1].map((axis) => places.map((at) => at[axis]));
  return { type: "scatter", mode: "markers", x, y, name, showlegend: false };
}

/** A curve of means with its interval; `look` goes into the trace of the means. */
export function band(rows, name, color, look) {
  const common = { type: "scatter", x: rows.map((row) => row.layer), legendgroup: name };
  const edge = { ...common, mode: "lines", line: { color, width: 0 }, hoverinfo: "skip", showlegend: false };
  const [low, high, mean] = ["ci_low", "ci_high", "mean"].map((column) => rows.map((row) => row[column]));
  const customdata = rows.map((row) => [row.ci_low, row.ci_high]);
  return [
    { ...edge, y: low },
    { ...edge, y: high, fill: "tonexty", fillcolor: `${color}33` },
    { ...common, mode: "lines+markers", y: mean, customdata, name, ...look },
  ];
}
