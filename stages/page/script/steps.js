// The view Steps: what each step of a layer does to a vector.

import { band, drawByLayer, pointsAt } from "./charts.js";
import { CAPTURED, cosinesOf, data } from "./data.js";
import { forChart } from "./decode.js";
import { byId } from "./elements.js";
import { state } from "./state.js";

const SYMBOLS = ["triangle-down", "square", "pentagon", "triangle-up", "x", "circle", "hexagon"];

function tracesOfStep(step, number, rows) {
  const color = data.stepColors[step];
  const name = data.labels.steps[step];
  const traces = band(rows, name, color, {
    line: { color, width: 2.2, dash: "solid" },
    marker: { size: 8, symbol: SYMBOLS[number] },
    hovertemplate: "layer %{x}: %{y:.3f} (%{customdata[0]:.3f} to %{customdata[1]:.3f})",
  });
  if (state.token === null || state.stepMeasure !== "cosine_input" || state.stepCheckpoint !== CAPTURED) return traces;
  const own = cosinesOf(state.token, step).map((cosine, i) => [i + 1, cosine]);
  const marker = { symbol: "diamond-open", size: 12, color, line: { width: 2 } };
  const looks = { legendgroup: name, marker, hovertemplate: "layer %{x}: %{y:.3f}" };
  return own.length === 0 ? traces : [...traces, { ...pointsAt(own, forChart(data.tokens[state.token])), ...looks }];
}

export function drawSteps() {
  const rows = data.steps.filter((row) => row.checkpoint === state.stepCheckpoint && row.measure === state.stepMeasure);
  const steps = [...new Set(rows.map((row) => row.step))];
  const ofStep = (step) => rows.filter((row) => row.step === step);
  const traces = steps.flatMap((step, number) => tracesOfStep(step, number, ofStep(step)));
  const label = byId("step-measure").querySelector(`[value=${state.stepMeasure}]`).textContent;
  const title = { text: label.length > 40 ? "relative to the input" : label };
  drawByLayer(byId("steps-chart"), traces, 84, { title });
}
