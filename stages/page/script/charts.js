// What the charts have in common.

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

/** A trace of points, from pairs of x and y. */
export function pointsAt(places, name) {
  const [x, y] = [0, 1].map((axis) => places.map((at) => at[axis]));
  return { type: "scatter", mode: "markers", x, y, name, showlegend: false };
}

/** Charts read a few tags in their labels. */
export const forChart = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
