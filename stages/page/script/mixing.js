// The view Mixing: the ratio by layer, and what fine-tuning changed.

import { band, drawByLayer, pointsAt } from "./charts.js";
import { checkpoints, data, ratioOf } from "./data.js";
import { forChart } from "./decode.js";
import { byId, inText } from "./elements.js";
import { change, state } from "./state.js";

function lookOf(checkpoint) {
  if (checkpoint === "pretrained") return { color: "#E69F00", dash: "dash" };
  return { color: state.dark ? "#56B4E9" : "#0072B2", dash: "solid" };
}

function tracesOfCheckpoint(checkpoint) {
  const look = lookOf(checkpoint);
  const rows = data.curves.filter((row) => row.checkpoint === checkpoint && row.method === state.method);
  const name = data.labels.checkpoints[checkpoint];
  const traces = band(rows, name, look.color, {
    line: { ...look, width: 2.2 },
    marker: { size: 7 },
    hovertemplate: "layer %{x}: %{y:.1%} (%{customdata[0]:.1%} to %{customdata[1]:.1%})",
  });
  if (state.token === null) return traces;
  const ratios = rows.map(({ layer }) => [layer, ratioOf(state.token, layer, checkpoint, state.method)]);
  const own = pointsAt(ratios, `${forChart(data.tokens[state.token])}, ${inText(name)}`);
  const line = { color: look.color, dash: "dot", width: 1.5 };
  const marker = { symbol: "diamond-open", size: 9 };
  const looks = { mode: "lines+markers", showlegend: true, line, marker, hovertemplate: "layer %{x}: %{y:.1%}" };
  return [...traces, { ...own, ...looks }];
}

export function drawMixing() {
  const shown = checkpoints.filter((name) => state.curveCheckpoint === "both" || state.curveCheckpoint === name);
  const yaxis = { title: { text: "share from other tokens" }, tickformat: ".0%", rangemode: "tozero" };
  drawByLayer(byId("mixing-chart"), shown.flatMap(tracesOfCheckpoint), 60, yaxis, {
    plotly_click: (event) => change({ layer: event.points[0].x }),
  });
}

const points = (share) => `${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(1)}`;

export function drawDifference() {
  const row = data.differences.find((each) => each.layer === state.layer && each.method === state.method);
  const [mean, low, high] = row ? [row.difference, row.ci_low, row.ci_high].map(points) : [];
  const said = `Layer ${state.layer}, fine-tuned minus pretrained: ${mean} points (95 % interval ${low} to ${high}).`;
  byId("difference").textContent = row ? said : "";
}
