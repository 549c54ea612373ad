// Attention weights of all heads, computed from queries and keys, and all steps of one head for a token.

import { max, mean, sum } from "d3";
import { bytes, data, floats, once, range } from "./data";
import type { Heads as Packed } from "./payload";

const ARRAYS = { 16: Int16Array, 32: Float32Array };

export const headCount = data.attention.number;
type Side = (at: number) => { width: number; vectors: Float32Array };

/** Queries or keys by head. Vectors in 16 bits are multiplied by their scales when they are first used. */
function sideOf(part: Packed, name: "query" | "key", length: number): Side {
  const whole = new ARRAYS[part.bits as 16 | 32](bytes(part[name]).buffer);
  const { width } = data.attention;
  const packed = part[`${name}_scales`];
  const scales = packed ? floats(packed) : null;
  return once((head) => {
    const stored = whole.subarray(head * width * length, (head + 1) * width * length);
    if (!scales) return { width, vectors: stored as Float32Array };
    const scaleOf = (i: number) => scales[head * length + Math.floor(i / width)];
    return { width, vectors: Float32Array.from(stored, (value, i) => value * scaleOf(i)) };
  });
}

/** The data of heads by text and checkpoint, which are half of the page and are parsed when heads are first shown. */
const headParts = once((): Record<string, Record<string, Packed>> =>
  JSON.parse(document.getElementById("head-parts")!.textContent!),
);
/** True if a text's queries and keys are on the page. */
export const hasHeads = (number: number) => data.documents[number].name in headParts();

/** A text's heads in one checkpoint; null if its queries and keys are not on the page. */
export const headsOf = once((number: number, checkpoint: string) => {
  const { name, length } = data.documents[number];
  const part = headParts()[name]?.[checkpoint];
  if (!part) return null;
  return {
    ...part,
    length,
    queries: sideOf(part, "query", length),
    keys: sideOf(part, "key", length),
    reach: new Uint16Array(bytes(part.reach).buffer),
    sums: part.sums ? floats(part.sums) : null,
    source_norms: floats(part.source_norms),
    vectors: part.vectors ? once((each: string) => (part.vectors![each] ? floats(part.vectors![each]) : null)) : null,
  };
});
export type Heads = NonNullable<ReturnType<typeof headsOf>>;

const headAt = (layer: number, head: number) => (layer - 1) * headCount + head;
const keyHead = (heads: Heads, layer: number, head: number) =>
  (layer - 1) * heads.key_heads + Math.floor((head * heads.key_heads) / headCount);
const vectorOf = ({ width, vectors }: ReturnType<Side>, i: number) => vectors.subarray(i * width, (i + 1) * width);

/** A row of a head for the sources from `first` to `last`: dot products q·k, scores before the softmax, and weights. */
export function attentionRow(heads: Heads, layer: number, head: number, i: number) {
  const ends = 2 * ((layer - 1) * heads.length + i);
  const [first, last] = [heads.reach[ends], heads.reach[ends + 1]];
  const [scaling, softcap] = heads.scores[layer - 1];
  const query = vectorOf(heads.queries(headAt(layer, head)), i);
  const { width, vectors } = heads.keys(keyHead(heads, layer, head));
  const dots = new Float64Array(last - first + 1);
  for (let j = 0, at = first * width; j < dots.length; j++, at += width) {
    let dot = 0;
    for (let n = 0; n < width; n++) dot += query[n] * vectors[at + n];
    dots[j] = dot;
  }
  const scores = dots.map((dot) => (softcap ? softcap * Math.tanh((dot * scaling) / softcap) : dot * scaling));
  const largest = max(scores)!;
  const weights = scores.map((score) => Math.exp(score - largest));
  const total = sum(weights);
  const share = heads.sums ? heads.sums[headAt(layer, head) * heads.length + i] : 1; // below 1 with an attention sink
  const logSum = largest + Math.log(total / share);
  return { first, last, dots, scores, logSum, weights: weights.map((each) => (each * share) / total) };
}

/** One in `every` rows of a head; for `kind` "norm", weights times the length |f(x_j)| of the transformed value. */
export function headRows(heads: Heads, layer: number, head: number, kind: string, every = 1): Float32Array[] {
  return range(Math.ceil(heads.length / every)).map((n) => {
    const { first, weights } = attentionRow(heads, layer, head, n * every);
    const row = new Float32Array(heads.length);
    for (const [j, weight] of weights.entries()) {
      const norm = kind === "norm" ? heads.source_norms[headAt(layer, head) * heads.length + first + j] : 1;
      row[first + j] = weight * norm;
    }
    return row;
  });
}

/** The head of a layer in which tokens attend most to other tokens, except the first and the last token. */
export const tellingHead = once((number: number, checkpoint: string, layer: number) => {
  const heads = headsOf(number, checkpoint);
  if (!heads) return 0;
  const every = Math.ceil(heads.length / 32);
  const strength = range(headCount).map((head) =>
    sum(headRows(heads, layer, head, "weight", every), (row, n) =>
      max(row.filter((_, j) => ![0, n * every, row.length - 1].includes(j))),
    ),
  );
  return strength.indexOf(Math.max(...strength));
});

export type Vector = Float32Array | Float64Array;
export const lengthOf = (vector: Vector) => Math.hypot(...vector);
export const largestOf = (vectors: Vector[]) => max(vectors, (vector) => max(vector, Math.abs)) ?? 0;
const plus = (one: Vector, other: Vector) => Float64Array.from(one, (each, n) => each + other[n]);
const farthest = (one: Vector, other: Vector) => largestOf([Float64Array.from(one, (each, n) => each - other[n])]);

/** The query of one token in one head, and its sources with keys, products, scores and weights (0 if masked). */
export function meeting(heads: Heads, layer: number, head: number, i: number) {
  const row = attentionRow(heads, layer, head, i);
  const query = vectorOf(heads.queries(headAt(layer, head)), i);
  const keys = heads.keys(keyHead(heads, layer, head));
  const [scaling, softcap] = heads.scores[layer - 1];
  const sources = range(heads.length).map((j) => {
    const key = vectorOf(keys, j);
    const seen = j >= row.first && j <= row.last;
    const product = query.map((each, n) => each * key[n]);
    const at = j - row.first;
    return { j, seen, key, product, dot: row.dots[at], score: row.scores[at], weight: seen ? row.weights[at] : 0 };
  });
  return { query, sources, scaling, softcap, logSum: row.logSum };
}
export type Meeting = ReturnType<typeof meeting>;

/** Apply a LayerNorm, or an RMSNorm, which does not centre the vector. */
function normalised(vector: Vector, [eps, centred]: Float32Array, weights: Float32Array): Vector {
  const middle = centred ? mean(vector)! : 0;
  const inner = Float64Array.from(vector, (each) => each - middle);
  const deviation = Math.sqrt(mean(inner, (each) => each * each)! + eps);
  return inner.map((each, n) => (each / deviation) * weights[n] + weights[vector.length + n]);
}

/** The steps from a head's weights to the vector after the attention block; null for long texts. */
export function afterSoftmax(heads: Heads, layer: number, head: number, i: number, { sources, query }: Meeting) {
  if (!heads.vectors) return null;
  const all = (name: string) => heads.vectors!(name);
  const [width, hidden] = [query.length, all("output_bias")!.length / heads.scores.length];
  const part = (name: string, at: number, size: number) => all(name)!.subarray(at * size, (at + 1) * size);
  const ofHead = (each: number) => headAt(layer, each) * heads.length + i;
  const values = sources.map(({ j }) => part("value", keyHead(heads, layer, head) * heads.length + j, width));
  const weighted = sources.map(({ weight }, j) => Float64Array.from(values[j], (each) => weight * each));
  const attended = weighted.reduce<Vector>(plus, new Float64Array(width));
  const given = part("given", ofHead(head), hidden);
  const others = range(headCount).filter((each) => each !== head);
  const summed = others.map((each) => part("given", ofHead(each), hidden)).reduce<Vector>(plus, given);
  let vector: Vector = plus(summed, part("output_bias", layer - 1, hidden));
  const steps: [string, Vector][] = [
    ["attended", attended],
    ["given", given],
    ["output", vector],
  ];
  const norm = (name: string, which: number) => {
    if (!all(name)) return false;
    const constants = part("norm_constants", 2 * (layer - 1) + which, 2);
    vector = normalised(vector, constants, part(name, layer - 1, 2 * hidden));
    return true;
  };
  if (norm("attention_output_norm", 0)) steps.push(["output_norm", vector]);
  if (data.attention.skip) {
    const input = part("input", (layer - 1) * heads.length + i, hidden);
    vector = plus(vector, input);
    steps.push(["input", input], ["skip", vector]);
  }
  if (norm("attention_norm", 1)) steps.push(["norm", vector]);
  const stored = part("result", (layer - 1) * heads.length + i, hidden);
  steps.push(["stored", stored]);
  const off = { attended: farthest(attended, part("attended", ofHead(head), width)), stored: farthest(vector, stored) };
  return { values, weighted, steps, off };
}
