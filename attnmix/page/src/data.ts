// The page's data, decoded on first use. Tokens are numbered from 0 over all documents.
// `readings` are the input tokens of the encoder and of the decoder, if there is one (shifted right by one token).

import type { Payload } from "./payload";

const MISSING = 65535; // code of a missing value
const MAX_CODE = 65534;

export function bytes(text: string): Uint8Array<ArrayBuffer> {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text); // for browsers from before the end of 2025
  const array = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) array[i] = raw.charCodeAt(i);
  return array;
}

async function unpack(text: string): Promise<Payload> {
  const stream = new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** A function that computes its result once for the same arguments. */
export function once<K extends (string | number | boolean)[], V>(compute: (...all: K) => V): (...all: K) => V {
  const results = new Map<unknown, V>();
  return (...all) => {
    const key = all.length === 1 ? all[0] : all.join(); // `join` would copy and rehash a long string
    if (!results.has(key)) results.set(key, compute(...all));
    return results.get(key)!;
  };
}

const codes = once((text: string) => new Uint16Array(bytes(text).buffer));
export const floats = (text: string) => new Float32Array(bytes(text).buffer);
const value = (code: number, low: number, high: number) =>
  code === MISSING ? null : low + (code * (high - low)) / MAX_CODE;

export type Maybe = number | null;
export const range = (end: number, start = 0) => Array.from({ length: end - start }, (_, i) => i + start);

export const data = await unpack(document.getElementById("data")!.textContent!.trim()).catch((error: unknown) => {
  const note = Object.assign(document.createElement("p"), { className: "note missing" });
  note.textContent = `The views cannot be shown. Use a current browser, or write the page again if its data are damaged. (${error})`;
  document.getElementById("app")!.append(note);
  throw error;
});
export const documentOf = data.documents.flatMap((each, number) => Array<number>(each.length).fill(number));
export const tokenCount = documentOf.length;
export const positionOf = (token: number) => token - data.documents[documentOf[token]].start;
export const tokensOf = (number: number) => {
  const { start, length } = data.documents[number];
  return range(start + length, start);
};
export const checkpoints = Object.keys(data.labels.checkpoints).filter((name) => name in data.ratios.values);
/** The checkpoint of the vectors on the maps. */
export const captured = data.captured;
export const layerCount = data.ratios.layers;
export const layers = range(layerCount + 1, 1);
export const layouts = ["pca", "aligned", "joint", "separate"].filter((name) => name in data.maps);
/** True if a token is the only one whose last vector the classifier reads. */
export const isRead = (token: number) => data.documents[documentOf[token]].reads === positionOf(token);
/** True for words and pieces of words, but not for special tokens and punctuation, which are not listed as findings. */
export const isWord = (token: number) => data.wordClasses.includes(data.readings[0].classes[token]);
/** True for special tokens such as [CLS], which are not part of the text. */
export const isSpecial = (token: number) => data.specialClasses.includes(data.readings[0].classes[token]);
export const readingAt = (layer: number) => data.readings[Number(layer > (data.encoder ?? Infinity))];
/** A checkpoint's name for use within a sentence. */
export const modelName = (checkpoint: string) => data.labels.checkpoints[checkpoint].toLowerCase();
/** A checkpoint's name with the noun “model”, such as `fine-tuned model` or `the model as it is`. */
export const modelText = (checkpoint: string) => modelName(checkpoint).replace(/^(?!.*model).*/, "$& model");
/** The name of the own share by exchange, which is neither a mixing ratio nor based on a matrix. */
export const OWN_SHARE = "own_share";
export const hasOwnShare = Object.values(data.ratios.values).some((values) => OWN_SHARE in values);
/** A token's mixing ratio or own share; null if it was not measured or is not reliable. */
export function ratioOf(token: number, layer: number, checkpoint: string, method: string): Maybe {
  const text = data.ratios.values[checkpoint]?.[method];
  return text && layer > 0 ? value(codes(text)[(layer - 1) * tokenCount + token], 0, 1) : null;
}

/** The mean ratio of each review in a layer. */
export function reviewRatios(layer: number, checkpoint: string, method: string): Maybe[] {
  const { names, values } = data.reviews;
  const reviews = range(layer * names.length, (layer - 1) * names.length);
  return reviews.map((at) => value(codes(values[checkpoint][method])[at], 0, 1));
}

export const largestRatio = once((checkpoint: string, method: string) => {
  const all = codes(data.ratios.values[checkpoint][method]);
  return all.reduce((most, code) => Math.max(most, value(code, 0, 1) ?? 0), 0) || 1;
});

/** The coordinates `[x, y]` of tokens in the unit square; NaN for tokens that are not on the map (umap.max_points). */
export const placesOf = once((layout: string, point: number) =>
  (["x", "y"] as const).map((axis) => {
    const here = codes(data.maps[layout][axis]).subarray(point * tokenCount, (point + 1) * tokenCount);
    return Float32Array.from(here, (code) => value(code, 0, 1) ?? Number.NaN);
  }),
);

/** The nearest neighbours of a token in the full space at a capture point, in order of their distance. */
export function nearestTo(token: number, point: number): number[] {
  const from = (point * tokenCount + token) * data.nearest.number;
  return [...codes(data.nearest.tokens).subarray(from, from + data.nearest.number)].filter((each) => each !== MISSING);
}

export type Share = { token: number; share: number };
/** The start index of each row's sources, and the end index of the last row's sources, from the encoded counts. */
const startsOf = once((counts: string) => {
  const starts = [0];
  for (const count of codes(counts)) starts.push(starts.at(-1)! + count);
  return starts;
});

/** The stored sources of a token; null if there are none, for example for exact parts in a decoder. */
function sourcesIn(token: number, layer: number, matrix: string | undefined) {
  const { name, length, start } = data.documents[documentOf[token]];
  const part = matrix && data.contributions[name]?.[matrix];
  if (!part) return null;
  const row = (layer - 1) * length + positionOf(token);
  const starts = startsOf(part.counts);
  if (row >= starts.length - 1) return null;
  return { part, row, start, places: range(starts[row + 1], starts[row]), sources: codes(part.sources) };
}

/** A token's own share (null if it is not reliable) and its largest sources; null if they are not on the page. */
export function sharesOf(token: number, layer: number, checkpoint: string, matrix: string | undefined) {
  const stored = sourcesIn(token, layer, matrix);
  const shares = stored?.part.checkpoints[checkpoint];
  if (!stored || !shares) return null;
  const roots = codes(shares.shares);
  const largest = (): Share[] =>
    stored.places
      .filter((at) => roots[at] !== MISSING && roots[at] > 0)
      .toSorted((a, b) => roots[b] - roots[a])
      .slice(0, data.sourcesKept)
      .map((at) => ({ token: stored.start + stored.sources[at], share: (roots[at] / MAX_CODE) ** 2 }));
  return { own: value(codes(shares.own)[stored.row], 0, 1), largest };
}

/** The changes between two checkpoints of the other tokens' shares in a token, for all sources on the page. */
export function changesOf(
  token: number,
  layer: number,
  [before, after]: readonly string[],
  matrix: string | undefined,
): Share[] {
  const stored = sourcesIn(token, layer, matrix);
  const [earlier, later] = [before, after].map((each) => stored?.part.checkpoints[each]);
  if (!stored || !earlier || !later) return [];
  const [from, to] = [codes(earlier.shares), codes(later.shares)];
  return stored.places
    .filter((at) => from[at] !== MISSING && to[at] !== MISSING)
    .map((at) => ({
      token: stored.start + stored.sources[at],
      share: (to[at] / MAX_CODE) ** 2 - (from[at] / MAX_CODE) ** 2,
    }))
    .filter((each) => each.token !== token);
}

/** A token's score for the predicted class's logit; null if it is missing. */
export const importanceOf = (token: number, name: string): Maybe => {
  const { values, limit } = data.importance[name];
  return value(codes(values)[token], -limit, limit);
};
