// One layer as a flow: what enters it, what each sublayer adds to that, and where the norms stand.

import { LETTER, caption } from "./charts.js";
import { data } from "./data.js";
import { decimals, drawing } from "./elements.js";
import { state } from "./state.js";

const ROW = 32; // pixels
const BOX = { width: 168, tall: 23 };
const STREAM = 14; // where the residual stream runs, from the left
const BRANCH = 44; // where a sublayer's way runs
const BESIDE = 10; // how much further right that of a second one runs beside the first
const PLUS = 8; // radius
const NUMBERS_END = BRANCH + BOX.width + 48;
export const FLOW = { narrow: NUMBERS_END + 4, wide: NUMBERS_END + 120, top: 36 }; // without and with intervals
const NAMED_AT = FLOW.top - 2; // where the columns of numbers have their names

const THE_TOKEN = "the token"; // the selected one's own

/** Boxes one after another, off the stream from the first on. */
const branch = (boxes, looks) => boxes.map((each, i) => Object.assign(each, looks, { leaves: i === 0 }));

/** The parts of a layer in order, `kind` and the `step` measured after it; `parts` are the norms that it has. */
function partsOf(parts, steps) {
  const has = (name) => parts.includes(name);
  const boxes = (...names) =>
    names.flatMap((name) => {
      if (steps.includes(name)) return [{ kind: "box", step: name }];
      return has(name) ? [{ kind: "box", label: "norm" }] : [];
    });
  const norm = (step) => (steps.includes(step) ? [{ kind: "norm", step }] : []);
  const beside = has("parallel");
  const crosses = steps.includes("cross_attention");
  const attention = boxes("input_norm", "heads", "output_linear");
  const network = boxes("feed_forward_norm", "feed_forward");
  return [
    { kind: "input", label: "layer's input" },
    ...branch(attention, {}),
    ...(beside ? [] : [{ kind: "plus", step: "attention_skip", label: "skip" }]),
    ...norm("attention_norm"),
    ...(crosses
      ? [
          { kind: "box", step: "cross_attention", leaves: true },
          { kind: "plus", label: "skip" },
        ]
      : []),
    ...norm("cross_attention_norm"),
    ...branch(network, { beside }),
    { kind: "plus", step: "ffn_skip", label: "skip", beside },
    ...norm("ffn_norm"),
  ];
}

/** The ways between the parts: the stream, and off it each sublayer's own, which ends at the next sum. */
function waysOf(rows) {
  const looks = { fill: "none", stroke: state.colours.soft, "stroke-width": 1.6 };
  const ways = [`M${STREAM} ${rows[0].y}V${rows.at(-1).y + ROW * 0.7}`];
  for (const { y, leaves, beside } of rows) {
    if (!leaves) continue;
    const end = rows.find((each) => each.kind === "plus" && each.y > y).y;
    const at = BRANCH + (beside ? BESIDE : 0);
    ways.push(`M${STREAM} ${y - ROW * 0.62}H${at}V${end}H${STREAM + PLUS + 5}l5 -4m-5 4l5 4`);
  }
  return ways.map((d) => drawing("path", { ...looks, d }));
}

function shapeOf({ kind, step, y, beside }, looks) {
  const { colour, label } = looks;
  if (kind === "plus") {
    const circle = { cx: STREAM, cy: y, r: PLUS, fill: state.colours.paper, stroke: colour, "stroke-width": 2 };
    const cross = { d: `M${STREAM - 5} ${y}h10m-5 -5v10`, stroke: colour, "stroke-width": 2 };
    return [drawing("circle", circle), drawing("path", cross), caption(label, { x: BRANCH + 18, y: y + 4 })];
  }
  if (kind === "input") {
    const dot = { cx: STREAM, cy: y, r: 5, fill: state.colours.ink };
    return [drawing("circle", dot), caption(label, { x: STREAM + 14, y: y + 4, fill: state.colours.ink })];
  }
  const x = kind === "norm" ? 2 : BRANCH - 10 + (beside ? BESIDE : 0);
  const edge = { stroke: colour, "stroke-width": 1.6, "stroke-dasharray": step ? "none" : "3 3" };
  const box = { x, y: y - BOX.tall / 2, width: BOX.width, height: BOX.tall, rx: 4, fill: state.colours.paper, ...edge };
  return [drawing("rect", box), caption(label, { x: x + 9, y: y + 4, fill: state.colours.ink })];
}

/** What was measured after a step: the mean, and the selected token's own or, where there is room, the interval. */
function numbersOf({ step, y }, found, beside) {
  const { row, own } = found(step);
  if (!row) return [];
  const end = { y: y + 4, "text-anchor": "end", "font-size": LETTER };
  const mean = { ...end, x: NUMBERS_END, fill: state.colours.ink, "font-weight": 600 };
  const written = [caption(decimals(row.mean), { ...mean, class: "measured", "data-step": step })];
  const at = { y: y + 4, x: NUMBERS_END + 8, "font-size": LETTER - 1 };
  if (beside === THE_TOKEN) written.push(caption(own === undefined || own === null ? "–" : decimals(own), at));
  else if (beside && row.ci_low !== null)
    written.push(caption(`${decimals(row.ci_low)} to ${decimals(row.ci_high)}`, at));
  return written;
}

/**
 * The drawing of the chosen layer, and its height: `steps` are those measured, `looksOf(step)` their label and colour,
 * `found(step)` the `row` of the mean in this layer and the selected token's `own`.
 */
export function flowOf({ steps, looksOf, found, wide }) {
  const stack = Number(state.layer > (data.encoder ?? Infinity));
  const rows = partsOf(data.layerParts[stack], steps).map((part, i) =>
    Object.assign(part, { y: FLOW.top + (i + 0.5) * ROW }),
  );
  const shapes = rows.flatMap((row) => {
    const looks = { colour: state.colours.soft, ...(row.step ? looksOf(row.step) : {}) };
    return shapeOf(row, { ...looks, label: row.label ?? looks.label });
  });
  const own = rows.some(({ step }) => step && (found(step).own ?? null) !== null);
  const beside = own ? THE_TOKEN : wide ? "95 % interval" : null;
  const numbers = rows.flatMap((row) => (row.step ? numbersOf(row, found, beside) : []));
  const heads = [
    caption("mean", { x: NUMBERS_END, y: NAMED_AT, "text-anchor": "end" }),
    ...(beside ? [caption(beside, { x: NUMBERS_END + 8, y: NAMED_AT })] : []),
  ];
  return { parts: [...waysOf(rows), ...shapes, ...heads, ...numbers], height: FLOW.top + (rows.length + 0.7) * ROW };
}
