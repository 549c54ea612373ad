// The view Steps: one layer as a flow, with what was measured after each step, and the same over the layers.

import {
  axesOf,
  BESIDE_CURVES,
  caption,
  columnsOf,
  curveOf,
  keep,
  LAYERS,
  namesOf,
  niceFrom,
  put,
  scalesOf,
  widthOf,
  widthOfName,
} from "./charts.js";
import { legible } from "./colours.js";
import { rowsOfCurves } from "./curves.js";
import { CAPTURED, cosinesOf, data, nameOf } from "./data.js";
import { byId, drawing, inText } from "./elements.js";
import { FLOW, flowOf } from "./flow.js";
import { register } from "./panes.js";
import { change, state } from "./state.js";

const stepsBox = byId("steps-chart");
const BLACK = "#000000";
const SYMBOLS = {
  heads: d3.symbolTriangle,
  output_linear: d3.symbolSquare,
  attention_skip: d3.symbolStar,
  attention_norm: d3.symbolDiamond,
  cross_attention: d3.symbolWye,
  cross_attention_norm: d3.symbolDiamond,
  feed_forward: d3.symbolCross,
  ffn_skip: d3.symbolStar,
  ffn_norm: d3.symbolCircle,
};
const BESIDE_FROM = 760; // pixels, the least width with flow and curves beside each other
const CURVES = { left: 46, top: 30, bottom: 40, tall: 360 };
const number = d3.format(".3~f");

const colourOfStep = (step) => {
  const drawn = data.stepColors[step];
  return drawn === BLACK ? state.colours.ink : legible(drawn); // black can be seen on dark paper too
};

const measuredRows = () =>
  data.steps.filter((row) => row.checkpoint === state.checkpoint && row.measure === state.stepMeasure);

/** The selected token's own values, where they were captured. */
function ownOf(step) {
  if (state.token === null || state.stepMeasure !== "cosine_input" || state.checkpoint !== CAPTURED) return [];
  return cosinesOf(state.token, step).map((cosine, i) => [i + 1, cosine]);
}

function curvesOfStep(step, rows) {
  const [points, low, high] = ["mean", "ci_low", "ci_high"].map((key) => rows.map((row) => [row.layer, row[key]]));
  const looks = { step, colour: colourOfStep(step), symbol: SYMBOLS[step] };
  const mean = { ...looks, name: data.labels.steps[step], label: data.labels.steps[step], points, low, high };
  const own = ownOf(step);
  if (own.length === 0) return [mean];
  return [mean, { ...looks, name: nameOf(state.token), points: own, dash: "1.5 3", wide: 1.2, open: true }];
}

const stepCurves = () => {
  const rows = measuredRows();
  const there = Object.keys(data.stepColors).filter((step) => rows.some((row) => row.step === step));
  return there.flatMap((step) =>
    curvesOfStep(
      step,
      rows.filter((row) => row.step === step),
    ),
  );
};

function titleOfLayer(layer) {
  const here = measuredRows().filter((row) => row.layer === layer);
  return [data.labels.layers[layer], ...here.map((row) => `${data.labels.steps[row.step]} ${number(row.mean)}`)].join(
    "\n",
  );
}

function curvesPanel(curves, at, width) {
  const names = BESIDE_CURVES + (d3.max(curves, ({ label = "" }) => widthOfName(label)) ?? 0);
  const plot = {
    left: at.x + CURVES.left,
    top: at.y + CURVES.top,
    width: (width - CURVES.left - names - 2) / (1 - 0.5 / LAYERS.length), // names begin half a step before its end
    height: CURVES.tall - CURVES.top - CURVES.bottom,
  };
  const values = curves.flatMap(({ points, low = [], high = [] }) => [...points, ...low, ...high]);
  const [least, largest] = d3.extent(
    values.filter(([, value]) => value !== null),
    ([, value]) => value,
  );
  const domain = niceFrom(Math.min(0, least ?? 0), largest ?? 1);
  const scales = scalesOf(plot, domain);
  const zero = { x1: plot.left, x2: plot.left + plot.width, y1: scales.y(0), y2: scales.y(0) };
  return [
    caption("over the layers", { x: plot.left, y: plot.top - 12, "font-weight": 600 }),
    ...columnsOf(plot, scales, titleOfLayer),
    ...axesOf(plot, scales, d3.format(".2~f"), { x: true, y: true }),
    ...(domain[0] < 0 ? [drawing("line", { ...zero, stroke: state.colours.soft })] : []),
    ...curves.flatMap((each) => curveOf(each, scales)),
    ...namesOf(curves, plot, scales),
    caption("layer", { x: plot.left + plot.width / 2, y: plot.top + plot.height + 34, "text-anchor": "middle" }),
  ];
}

export function drawSteps() {
  const width = widthOf(stepsBox);
  const rows = measuredRows();
  const here = new Map(rows.filter((row) => row.layer === state.layer).map((row) => [row.step, row]));
  const everywhere = data.steps.filter((row) => row.layer === state.layer).map((row) => row.step);
  const flow = flowOf({
    steps: [...new Set(everywhere)],
    looksOf: (step) => ({ label: data.labels.steps[step], colour: colourOfStep(step) }),
    found: (step) => ({ row: here.get(step), own: ownOf(step).find(([layer]) => layer === state.layer)?.[1] }),
    wide: width >= FLOW.wide,
  });
  const curves = stepCurves();
  const beside = width >= BESIDE_FROM;
  const at = beside ? { x: FLOW.wide + 12, y: 0 } : { x: 0, y: flow.height + 8 };
  const height = beside ? Math.max(flow.height, CURVES.tall) : at.y + CURVES.tall;
  const label = byId("step-measure").querySelector(`[value=${state.stepMeasure}]`).textContent;
  const head = `${data.labels.layers[state.layer]}: ${label}`;
  const told = [...here.values()].map((row) => `${inText(data.labels.steps[row.step])} ${number(row.mean)}`);
  put(stepsBox, width, height, `${head}. ${told.join(", ")}`, [
    caption(head, { x: 2, y: 14, "font-weight": 600, class: "head" }),
    ...flow.parts,
    ...curvesPanel(curves, at, beside ? width - at.x : width),
  ]);
  keep(stepsBox, () => curves);
}

stepsBox.addEventListener("click", ({ target }) => {
  if (target.dataset.layer) change({ layer: Number(target.dataset.layer) });
});

register("steps-chart", () => ({
  columns: ["step", "of", "layer", state.stepMeasure, "95 % from", "to"],
  rows: rowsOfCurves(stepCurves(), "step"),
}));
