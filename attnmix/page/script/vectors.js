// The vectors of a short text on their way through a head and out of attention, and how they are drawn.

import { attentionRow, headAt, HEADS, keyOf, queryOf } from "./attention.js";
import { bytes, data, once } from "./data.js";
import { element } from "./elements.js";
import { state } from "./state.js";

const USUAL = 0.98; // of the numbers

const RESULT = data.steps.some(({ step }) => step === "attention_norm")
  ? "norm"
  : data.steps.some(({ step }) => step === "attention_skip")
    ? "skip"
    : "output";

const decodedVectors = once((heads) =>
  Object.fromEntries(Object.entries(heads.vectors).map(([name, text]) => [name, new Float32Array(bytes(text).buffer)])),
);

/** A number as it is read. */
export const figures = (value) => {
  const size = Math.abs(value);
  const text =
    size === 0 || (size >= 0.001 && size < 1000) ? value.toFixed(size >= 10 ? 2 : 3) : value.toExponential(1);
  return text.replace("-", "−");
};

const plus = (one, other) => Float64Array.from(one, (each, n) => each + other[n]);
export const normOf = (vector) => Math.sqrt(vector.reduce((sum, each) => sum + each * each, 0));
export const largestOfVectors = (vectors) =>
  vectors.reduce((most, vector) => vector.reduce((more, each) => Math.max(more, Math.abs(each)), most), 0);
/** What all but the largest of a vector's numbers stay below, so that one of them does not make the others pale. */
export function usualOf(vector) {
  const sizes = Float64Array.from(vector, Math.abs).toSorted();
  return sizes[Math.floor(USUAL * (sizes.length - 1))];
}

/** How far two vectors are from each other where they are furthest. */
const farthest = (one, other) => largestOfVectors([Float64Array.from(one, (each, n) => each - other[n])]);

/** A LayerNorm, or an RMSNorm, which does not centre. */
function normed(vector, [eps, centred], weights) {
  const mean = centred ? vector.reduce((sum, each) => sum + each, 0) / vector.length : 0;
  const inner = vector.map((each) => each - mean);
  const deviation = Math.sqrt(inner.reduce((sum, each) => sum + each * each, 0) / inner.length + eps);
  return inner.map((each, n) => (each / deviation) * weights[n] + weights[vector.length + n]);
}

/** Query, keys and products of one token in one head, with its scores and weights; keys that the mask hides have none. */
export function meeting(heads, layer, head, i) {
  const row = attentionRow(heads, layer, head, i);
  const query = queryOf(heads, layer, head, i);
  const [scaling, softcap] = heads.scores[layer - 1];
  const sources = Array.from({ length: heads.length }, (_, j) => {
    const key = keyOf(heads, layer, head, j);
    const seen = j >= row.first && j <= row.last;
    return {
      j,
      seen,
      key,
      product: query.map((each, n) => each * key[n]),
      dot: row.dots[j - row.first],
      score: row.scores[j - row.first],
      weight: seen ? row.weights[j - row.first] : 0,
    };
  });
  return { query, sources, scaling, softcap, logSum: row.logSum };
}

/** The steps from the weights to the vector in which attention's part of the layer ends; null for a long text. */
export function behindSoftmax(heads, layer, head, i, { sources, query }) {
  if (!heads.vectors) return null;
  const all = decodedVectors(heads);
  const [width, hidden] = [query.length, all.output_bias.length / heads.scores.length];
  const part = (name, at, size) => all[name].subarray(at * size, (at + 1) * size);
  const ofLayer = (layer - 1) * heads.length + i;
  const ofHead = (each) => headAt(layer, each) * heads.length + i;
  const keyHead = (layer - 1) * heads.key_heads + Math.floor((head * heads.key_heads) / HEADS);
  const values = sources.map(({ j }) => part("value", keyHead * heads.length + j, width));
  const weighted = sources.map(({ weight }, j) => Float64Array.from(values[j], (each) => weight * each));
  const attended = weighted.reduce(plus, new Float64Array(width));
  const given = part("given", ofHead(head), hidden);
  const others = Array.from({ length: HEADS }, (_, each) => each).filter((each) => each !== head);
  const summed = others.map((each) => part("given", ofHead(each), hidden)).reduce(plus, given);
  let vector = plus(summed, part("output_bias", layer - 1, hidden));
  const steps = [["output", vector]];
  const constants = (which) => part("norm_constants", 2 * (layer - 1) + which, 2);
  if (all.attention_output_norm) {
    vector = normed(vector, constants(0), part("attention_output_norm", layer - 1, 2 * hidden));
    steps.push(["output_norm", vector]);
  }
  if (RESULT !== "output") {
    const input = part("input", ofLayer, hidden);
    vector = plus(vector, input);
    steps.push(["input", input], ["skip", vector]);
  }
  if (all.attention_norm) {
    vector = normed(vector, constants(1), part("attention_norm", layer - 1, 2 * hidden));
    steps.push(["norm", vector]);
  }
  const stored = part("result", ofLayer, hidden);
  return {
    values,
    weighted,
    steps: [["attended", attended], ["given", given], ...steps, ["stored", stored]],
    off: { attended: farthest(attended, part("attended", ofHead(head), width)), stored: farthest(vector, stored) },
  };
}

/** A row of cells, one for each dimension: blue above 0, orange below, the stronger the further. */
export function strip(values, largest, label) {
  const canvas = element("canvas", { class: "strip", role: "img", "aria-label": label });
  [canvas.width, canvas.height] = [values.length, 1];
  const image = new ImageData(values.length, 1);
  const above = state.colours.shade.split(",").map(Number);
  const below = state.dark ? [255, 157, 77] : [179, 74, 0]; // --took
  for (const [n, value] of values.entries()) {
    const strength = largest > 0 ? Math.min(1, Math.abs(value) / largest) : 0;
    image.data.set([...(value < 0 ? below : above), Math.round(255 * strength)], 4 * n);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
