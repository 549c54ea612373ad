// The attention of every head, computed here from the queries and keys of a text.

import { bytes, data, documentOf, once, positionOf } from "./data.js";

const ARRAYS = { 8: Int8Array, 16: Int16Array, 32: Float32Array }; // by the bits of a number
const KEPT_HEADS = 24; // whose weights are held at once
const SOURCES_OF_HEAD = 16;

export const HEADS = data.attention.number;
const floats = (text) => new Float32Array(bytes(text).buffer);

const decodedHeads = once(({ part, length }) => ({
  ...part,
  length,
  sides: { query: side(part, "query", length), key: side(part, "key", length) },
  reach: new Uint16Array(bytes(part.reach).buffer),
  sums: part.sums && floats(part.sums),
  source_norms: floats(part.source_norms),
  given_norms: floats(part.given_norms),
}));

/**
 * The queries or keys of every head, each multiplied by its scales once it is asked for: one for each vector (16 bits),
 * or for each dimension (8 bits), of which heads have as many as they need.
 */
function side(part, name, length) {
  const whole = new ARRAYS[part.bits](bytes(part[name]).buffer);
  const number = part.scores.length * (name === "key" ? part.key_heads : HEADS);
  const widths = part.ranks ?? Array(number).fill(data.attention.width);
  const starts = widths.map(() => 0);
  for (let at = 1; at < number; at++) starts[at] = starts[at - 1] + widths[at - 1];
  const scales = part.bits < 32 && floats(part[`${name}_scales`]);
  return once((at) => {
    const width = widths[at];
    const own = whole.subarray(starts[at] * length, (starts[at] + width) * length);
    const scaleOf = part.ranks
      ? (i) => scales[starts[at] + (i % width)]
      : (i) => scales[at * length + Math.floor(i / width)];
    return { width, vectors: scales ? Float32Array.from(own, (each, i) => each * scaleOf(i)) : own };
  });
}

const packedHeads = once((key) => {
  const [number, checkpoint] = key.split(" ");
  const { name, length } = data.documents[number];
  const part = data.attention.documents[name]?.[checkpoint];
  return part ? { part, length } : { part: null };
});

/** What is there of a document's heads; null where its queries and keys are not on the page. */
export function headsOf(number, checkpoint) {
  const found = packedHeads(`${number} ${checkpoint}`);
  return found.part && decodedHeads(found);
}

/** A head's number among those of all layers, and its key's. */
export const headAt = (layer, head) => (layer - 1) * HEADS + head;
const keyAt = (heads, layer, head) => (layer - 1) * heads.key_heads + Math.floor((head * heads.key_heads) / HEADS);
const vector = ({ width, vectors }, i) => vectors.subarray(i * width, (i + 1) * width);
export const queryOf = (heads, layer, head, i) => vector(heads.sides.query(headAt(layer, head)), i);
export const keyOf = (heads, layer, head, j) => vector(heads.sides.key(keyAt(heads, layer, head)), j);
const capped = (score, softcap) => (softcap ? softcap * Math.tanh(score / softcap) : score);

/** One row of a head: from the source `first` on q.k, what the softmax is taken of, and the weights. */
export function attentionRow(heads, layer, head, i) {
  const ends = 2 * ((layer - 1) * heads.length + i);
  const [first, last] = [heads.reach[ends], heads.reach[ends + 1]];
  const [scaling, softcap] = heads.scores[layer - 1];
  const query = queryOf(heads, layer, head, i);
  const { width, vectors } = heads.sides.key(keyAt(heads, layer, head));
  const dots = new Float64Array(last - first + 1);
  for (let j = 0, at = first * width; j < dots.length; j++, at += width) {
    let sum = 0;
    for (let n = 0; n < width; n++) sum += query[n] * vectors[at + n];
    dots[j] = sum;
  }
  const scores = dots.map((dot) => capped(dot * scaling, softcap));
  const largest = scores.reduce((most, score) => Math.max(most, score), -Infinity);
  const weights = scores.map((score) => Math.exp(score - largest));
  const whole = weights.reduce((sum, each) => sum + each, 0);
  const share = heads.sums ? heads.sums[headAt(layer, head) * heads.length + i] : 1; // a sink takes the rest
  const logSum = largest + Math.log(whole / share);
  return { first, last, dots, scores, logSum, weights: weights.map((each) => (each * share) / whole) };
}

/** The length |f_h(x_j)| of what a source's value becomes behind W_O. */
const sourceNorm = (heads, layer, head, j) => heads.source_norms[headAt(layer, head) * heads.length + j];

/** A row as it is drawn, of all sources: the weights, or `norm`, times the length of what each gives. */
function shownRow(heads, { layer, head, kind }, i) {
  const { first, weights } = attentionRow(heads, layer, head, i);
  const row = new Float32Array(heads.length);
  for (const [j, weight] of weights.entries())
    row[first + j] = kind === "norm" ? weight * sourceNorm(heads, layer, head, first + j) : weight;
  return row;
}

/** Every so many rows of a head, of all sources. */
export function someRows(heads, which, every) {
  const rows = [];
  for (let i = 0; i < heads.length; i += every) rows.push(shownRow(heads, which, i));
  return rows;
}

const kept = new Map(); // the newest last

/** `[i][j]` of one head, `kind` "weight" or "norm"; null where they are not on the page. */
export function headMatrix(number, checkpoint, layer, head, kind) {
  const name = [number, checkpoint, layer, head, kind].join();
  const heads = headsOf(number, checkpoint);
  if (!heads) return null;
  const found = kept.get(name) ?? someRows(heads, { layer, head, kind }, 1);
  kept.delete(name);
  kept.set(name, found);
  if (kept.size > KEPT_HEADS) kept.delete(kept.keys().next().value);
  return found;
}

const ownShares = once((key) => {
  const [number, checkpoint, layer, head] = key.split(" ");
  const heads = headsOf(number, checkpoint);
  const own = (i) => {
    const { first, weights } = attentionRow(heads, Number(layer), Number(head), i);
    return weights[i - first];
  };
  return heads && Array.from({ length: heads.length }, (_, i) => own(i));
});

/** A token's own share of what it took through one head; null where it is not on the page. */
export function headShareOf(token, layer, checkpoint, head) {
  const own = ownShares([documentOf[token], checkpoint, layer, head].join(" "));
  return own && own[positionOf(token)];
}

/** The largest shares that a token took through one head; null where they are not on the page. */
export function headSources(token, layer, checkpoint, head) {
  const number = documentOf[token];
  const { start } = data.documents[number];
  const heads = headsOf(number, checkpoint);
  if (!heads) return null;
  const { first, weights } = attentionRow(heads, layer, head, positionOf(token));
  return [...weights]
    .map((share, j) => ({ token: start + first + j, share }))
    .toSorted((a, b) => b.share - a.share)
    .slice(0, SOURCES_OF_HEAD)
    .filter((each) => each.share > 0);
}
