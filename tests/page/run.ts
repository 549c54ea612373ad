// A small run with random numbers: the data of its page, and the plain numbers for comparison.

import { Buffer } from "node:buffer";
import type { Payload } from "../../attnmix/page/src/payload";

/** Reproducible random numbers from 0 to 1 (mulberry32). */
function generator(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
export const random = generator(1);
const randomOwn = generator(2); // separate, to keep the other numbers unchanged

export const numbers = (end: number) => Array.from({ length: end }, (_, n) => n);
export const grid = <T>(rows: number, columns: number, value: (i: number, j: number) => T) =>
  numbers(rows).map((i) => numbers(columns).map((j) => value(i, j)));
export const base64 = (array: Uint16Array | Int16Array | Float32Array) => Buffer.from(array.buffer).toString("base64");
export const encode16 = (values: number[]) => base64(Uint16Array.from(values));
/** Numbers between two ends in 16 bits; null for missing values. */
export const quantise = (values: (number | null)[], low = 0, high = 1) =>
  encode16(values.map((value) => (value === null ? 65535 : Math.round(((value - low) / (high - low)) * 65534))));
export const floats = (values: number[]) => base64(Float32Array.from(values));
type Items<L> = { [K in keyof L]: L[K] extends readonly (infer T)[] ? T : never };
/** All combinations of the items of lists. */
export const product = <const L extends readonly (readonly unknown[])[]>(...lists: L): Items<L>[] =>
  lists.reduce<unknown[][]>(
    (all, list) => all.flatMap((some) => list.map((each) => [...some, each])),
    [[]],
  ) as Items<L>[];
export const total = (values: number[]) => values.reduce((sum, value) => sum + value, 0);

export const MODELS = ["pretrained", "finetuned"];
export const [LAYERS, HEADS, WIDTH, HIDDEN, KEPT] = [3, 4, 4, 6, 4];
export const RATIOS = ["attn_w", "attnresln_n"];
const MATRICES = ["parts", "alti", "attention", "alti_rollout"];
export const MATRIX_NAMES = {
  parts: "Exact parts since the input",
  alti: "ALTI",
  attention: "Attention weights",
  alti_rollout: "ALTI since the input",
};
const METHOD_NAMES = { own_share: "Own share, by exchange", attn_w: "Weights", attnresln_n: "Norm-based" };

export const isSpecial = (name: string) => name.startsWith("[");
/** Whether a token is neither a special token nor punctuation. */
export const isWord = (name: string) => /^\w+$/.test(name);

/** Probabilities of the predicted classes. In the second text, all effects are small relative to the log-odds. */
export const PROBABILITIES = [0.8, 0.9999, 0.4];

/** A row of the first of three texts that is missing in all matrices because of rounding. */
export const LOST = { layer: 2, position: 5 };

export type Matrix = number[][];
export type Run = {
  texts: string[][];
  starts: number[];
  ratios: Record<string, Record<string, number[][]>>; // by model and method `[layers, tokens]`
  owns: Record<string, (number | null)[][]>; // own shares by model, null for the first token of each text
  matrices: Record<string, Record<string, Record<string, Matrix[]>>>; // by model, text, method `[layers, T, T]`
  effects: (number | null)[];
  nearest: number[][][]; // `[sites, tokens, 2]`
  payload: Payload;
};

function randomMatrix(length: number): Matrix {
  const rows = grid(length, length, () => random() ** 3);
  return rows.map((row) => row.map((value) => value / total(row)));
}

/** The indices of the largest values; equal values keep their order. */
export const largest = (values: number[], keep: number) =>
  numbers(values.length)
    .toSorted((a, b) => values[b] - values[a] || a - b)
    .slice(0, keep);

/** The stored entries of matrices: the largest sources of each row in every model, and the largest changes. */
function contributionsOf(byModel: Record<string, Matrix[]>, hasLost: boolean) {
  const kept: number[][] = [];
  const rows = numbers(LAYERS).flatMap((layer) =>
    Object.values(byModel)[0][layer].map((_, i) => ({
      layer,
      i,
      isLost: hasLost && layer + 1 === LOST.layer && i === LOST.position,
    })),
  );
  for (const { layer, i } of rows) {
    const all = Object.values(byModel).map((matrices) => matrices[layer][i]);
    const changes = all[0].map((share, j) => (all.length < 2 || i === j ? 0 : Math.abs(share - all[1][j])));
    const sources = new Set([...all, changes].flatMap((values) => largest(values, KEPT)));
    kept.push([...sources].toSorted((a, b) => a - b));
  }
  const checkpoints = Object.fromEntries(
    Object.entries(byModel).map(([model, matrices]) => {
      const shares = rows.flatMap(({ layer, i, isLost }, n) =>
        kept[n].map((j) => (isLost ? null : Math.sqrt(matrices[layer][i][j]))),
      );
      const own = rows.map(({ layer, i, isLost }) => (isLost ? null : matrices[layer][i][i]));
      return [model, { shares: quantise(shares), own: quantise(own) }];
    }),
  );
  return { counts: encode16(kept.map(({ length }) => length)), sources: encode16(kept.flat()), checkpoints };
}

/** Return a run of texts, given as lists of tokens. The last of three or more texts has no matrices on the page. */
export function makeRun(texts: string[][], models = MODELS, rightToLeft = false): Run {
  const starts = texts.map((_, n) => total(texts.slice(0, n).map(({ length }) => length)));
  const tokens = texts.flat();
  const names = texts.map((_, n) => `text/${n}`);
  const ratios = Object.fromEntries(
    models.map((model) => [
      model,
      Object.fromEntries(RATIOS.map((name) => [name, grid(LAYERS, tokens.length, random)])),
    ]),
  );
  const isFirst = (token: number) => starts.includes(token);
  const owns = Object.fromEntries(
    models.map((model) => [model, grid(LAYERS, tokens.length, (_, n) => (isFirst(n) ? null : randomOwn()))]),
  );
  const matrices = Object.fromEntries(
    models.map((model) => [
      model,
      Object.fromEntries(
        texts.map(({ length }, n) => [
          names[n],
          Object.fromEntries(MATRICES.map((name) => [name, numbers(LAYERS).map(() => randomMatrix(length))])),
        ]),
      ),
    ]),
  );
  const onPage = texts.length > 2 ? names.slice(0, -1) : names;
  const contributions = Object.fromEntries(
    onPage.map((name, n) => [
      name,
      Object.fromEntries(
        MATRICES.map((method) => {
          const byModel = Object.fromEntries(models.map((model) => [model, matrices[model][name][method]]));
          return [method, contributionsOf(byModel, texts.length > 2 && n === 0)];
        }),
      ),
    ]),
  );
  const effects = tokens.map((_, n) => (starts.includes(n) ? null : random() - 0.5));
  const sites = numbers(LAYERS + 1).map((layer) => ({
    layer,
    point: "layer_output",
    label: `Layer ${layer}`,
    reading: 0,
  }));
  const nearest = sites.map(() => tokens.map((_, n) => [(n + 1) % tokens.length, (n + 2) % tokens.length]));
  const readings = {
    names: tokens,
    words: tokens,
    apart: tokens.map(() => 1),
    classes: tokens.map((name) => (isSpecial(name) ? 2 : Number(!isWord(name)))),
  };
  const coordinates = sites.flatMap(() => tokens.map(random));
  const means = Object.fromEntries(models.map((model) => [model, numbers(LAYERS).map(randomOwn)]));
  const changes = numbers(LAYERS).map((layer) => (means.finetuned?.[layer] ?? 0) - (means.pretrained?.[layer] ?? 0));
  const corpus = Object.fromEntries(
    Object.entries({ ...means, difference: changes }).map(([model, values]) => {
      const [low, high] = [-0.05, 0.05].map((off) => values.map((value) => value + off));
      return [model, { values, low, high, texts: 40 }];
    }),
  );
  const payload = {
    wording: { texts: "reviews", change: "fine-tuning", by_change: "by fine-tuning" },
    pointsPerSecond: 2,
    labels: {
      methods: METHOD_NAMES,
      checkpoints: Object.fromEntries(models.map((name) => [name, name === "finetuned" ? "Fine-tuned" : "Pretrained"])),
      matrices: MATRIX_NAMES,
      importance: { leave_one_out: "Leave one out" },
      controls: {},
      derivatives: {},
      layers: ["Input", ...numbers(LAYERS).map((n) => `Layer ${n + 1}`)],
    },
    captured: models.at(-1),
    ownBasis: [],
    method: "attnresln_n",
    layer: LAYERS,
    importance: { leave_one_out: { limit: 0.5, values: quantise(effects, -0.5, 0.5) } },
    reviews: { names: [], total: 0, values: {} },
    answer: { headline: "", sentences: [], notes: {}, chart: { title: "", series: [], unit: "", means: "" } },
    cautions: { answer: "", map: {} },
    sinceInput: ["parts", "alti_rollout"],
    opens: { document: 0, positions: texts.map(() => 2) },
    curves: { own_share: corpus },
    controls: {},
    sources: {},
    classShares: {},
    probes: {},
    neighboursKept: {},
    documents: texts.map((text, n) => ({
      ...{ name: names[n], start: starts[n], length: text.length, title: names[n] },
      ...{ heading: `${names[n]}: ${text.slice(1, -1).join(" ")}`, caution: "" },
      ...{ direction: rightToLeft ? "rtl" : "ltr", note: "", label: n === 0 ? "negative" : null },
      ...{ predicted: "positive", probability: PROBABILITIES[n % 3], reads: n === 0 ? 0 : null },
    })),
    encoder: null,
    readings: [readings],
    classNames: ["Word", "Punctuation", "Mark"],
    specialClasses: [2],
    wordClasses: [0],
    ratios: {
      methods: RATIOS,
      layers: LAYERS,
      values: Object.fromEntries(
        models.map((model) => [
          model,
          {
            ...Object.fromEntries(RATIOS.map((name) => [name, quantise(ratios[model][name].flat())])),
            own_share: quantise(owns[model].flat()),
          },
        ]),
      ),
    },
    contributions,
    sourcesKept: KEPT,
    partsLimit: 64,
    exchangeLimit: 128,
    matrices: MATRICES,
    attention: { number: HEADS, width: WIDTH, skip: true },
    sites,
    mapNote: "",
    maps: {
      aligned: { x: quantise(coordinates), y: quantise(coordinates), absent: [] },
      pca: { x: quantise(coordinates), y: quantise(coordinates), absent: [] },
    },
    variances: sites.map(() => [null, null]),
    nearest: { number: 2, tokens: encode16(nearest.flat(2)) },
  } as unknown as Payload;
  return { texts, starts, ratios, owns, matrices, effects, nearest, payload };
}
