// Attention weights of heads, and the steps of one head for a token, match loops over plain numbers.

import assert from "node:assert/strict";
import test from "node:test";
import { openPage } from "./open";
import {
  base64,
  encode16,
  floats,
  grid,
  HEADS,
  HIDDEN,
  LAYERS,
  makeRun,
  numbers,
  product,
  random,
  total,
  WIDTH,
} from "./run";

const run = makeRun([numbers(7).map((n) => `a${n}`), numbers(9).map((n) => `b${n}`), ["c"]]);
const SCALING = 0.4;
const SOFTCAP = 2; // in the second layer only
const KEY_HEADS = 2; // each shared by two heads
const keyHeadOf = (layer: number, head: number) => (layer - 1) * KEY_HEADS + (head < HEADS / 2 ? 0 : 1);
const around = () => 4 * random() - 2;

type Numbers = { query: number[][][]; key: number[][][]; sums: number[]; norms: number[]; isCausal: boolean };
const scalings = numbers(LAYERS).map((layer) => [SCALING, layer === 1 ? SOFTCAP : 0]);
/** Random queries and keys `[layers · heads, tokens, width]`, with sums and norms of each token in each head. */
const makeNumbers = (length: number, isCausal: boolean): Numbers => ({
  query: numbers(LAYERS * HEADS).map(() => grid(length, WIDTH, around)),
  key: numbers(LAYERS * KEY_HEADS).map(() => grid(length, WIDTH, around)),
  sums: numbers(LAYERS * HEADS * length).map(() => (isCausal ? 0.5 + random() / 2 : 1)),
  norms: numbers(LAYERS * HEADS * length).map(() => 0.5 + random()),
  isCausal,
});
const short = makeNumbers(7, false);
const long = makeNumbers(9, true);

function commonOf({ norms, isCausal, sums }: Numbers, length: number) {
  const ends = grid(length, 2, (i, side) => (side === 0 ? 0 : isCausal ? i : length - 1)).flat();
  return {
    ...{ scores: scalings, key_heads: KEY_HEADS, source_norms: floats(norms) },
    reach: encode16(numbers(LAYERS).flatMap(() => ends)),
    ...(isCausal ? { sums: floats(sums) } : {}),
  };
}

const vectors = {
  value: numbers(LAYERS * KEY_HEADS).map(() => grid(7, WIDTH, around)),
  attended: numbers(LAYERS * HEADS).map(() => grid(7, WIDTH, around)),
  given: numbers(LAYERS * HEADS).map(() => grid(7, HIDDEN, around)),
  output_bias: grid(LAYERS, HIDDEN, around),
  norm_constants: grid(LAYERS, 4, (_, n) => [1e-5, 0, 1e-5, 1][n]), // eps and centring of both norms
  attention_output_norm: grid(LAYERS, 2 * HIDDEN, around), // scales and biases
  attention_norm: grid(LAYERS, 2 * HIDDEN, around),
  input: grid(LAYERS * 7, HIDDEN, around),
  result: grid(LAYERS * 7, HIDDEN, around),
};
const packed = Object.fromEntries(
  Object.entries(vectors).map(([name, values]) => [name, floats(values.flat(2) as number[])]),
);

/** Vectors as 16-bit integers, with a scale for each vector. */
function inBits(all: number[][]) {
  const scales = all.map((vector) => Math.max(...vector.map(Math.abs)) / 32767);
  const integers = Int16Array.from(all.flatMap((vector, n) => vector.map((each) => Math.round(each / scales[n]))));
  return { integers: base64(integers), scales: floats(scales) };
}
const [queries, keys] = [inBits(long.query.flat()), inBits(long.key.flat())];
const page = await openPage(run.payload, {
  "text/0": {
    finetuned: {
      ...commonOf(short, 7),
      bits: 32,
      query: floats(short.query.flat(2)),
      key: floats(short.key.flat(2)),
      vectors: packed,
    },
  },
  "text/1": {
    finetuned: {
      ...{ ...commonOf(long, 9), bits: 16, query: queries.integers, key: keys.integers },
      ...{ query_scales: queries.scales, key_scales: keys.scales },
    },
  },
});
const { attention } = page;

function assertClose(found: Iterable<number>, expected: number[], limit: number): void {
  const all = [...found];
  assert.equal(all.length, expected.length);
  assert.ok(
    all.every((each, n) => Math.abs(each - expected[n]) < limit),
    `${all} is not ${expected}`,
  );
}

/** The dot products, scores and weights of a token's row in a head. */
function expectedRow({ query, key, sums, isCausal }: Numbers, layer: number, head: number, i: number) {
  const at = (layer - 1) * HEADS + head;
  const length = query[0].length;
  const sources = numbers(isCausal ? i + 1 : length);
  const dots = sources.map((j) => total(query[at][i].map((each, n) => each * key[keyHeadOf(layer, head)][j][n])));
  const capped = (score: number) => (layer === 2 ? SOFTCAP * Math.tanh(score / SOFTCAP) : score);
  const scores = dots.map((dot) => capped(dot * SCALING));
  const raised = scores.map(Math.exp);
  const share = isCausal ? sums[at * length + i] : 1;
  return { dots, scores, weights: raised.map((each) => (share * each) / total(raised)) };
}

const TEXTS = [
  { number: 0, made: short, limit: 1e-5 },
  { number: 1, made: long, limit: 2e-3 },
];

test("scores and weights match queries and keys in every stored precision", () => {
  for (const { number, made, limit } of TEXTS) {
    const heads = attention.headsOf(number, "finetuned")!;
    const length = made.query[0].length;
    for (const [layer, head, i] of product([1, 2, 3], numbers(HEADS), numbers(length))) {
      const found = attention.attentionRow(heads, layer, head, i);
      const expected = expectedRow(made, layer, head, i);
      assertClose(found.dots, expected.dots, 3 * limit);
      assertClose(found.scores, expected.scores, limit);
      assertClose(found.weights, expected.weights, limit);
      assertClose(
        found.scores.map((score) => Math.exp(score - found.logSum)),
        expected.weights,
        limit,
      );
      const row = numbers(length).map((j) => expected.weights[j] ?? 0);
      const norms = row.map((each, j) => each * made.norms[((layer - 1) * HEADS + head) * length + j]);
      assertClose(attention.headRows(heads, layer, head, "weight")[i], row, limit);
      assertClose(attention.headRows(heads, layer, head, "norm")[i], norms, limit);
    }
    assert.equal(attention.headRows(heads, 1, 0, "weight", 4).length, Math.ceil(length / 4));
    assertClose(
      attention.headRows(heads, 1, 0, "weight", 4)[1].slice(0, 5),
      expectedRow(made, 1, 0, 4).weights.slice(0, 5),
      limit,
    );
  }
});

test("texts without queries and keys on the page have no heads", () => {
  assert.deepEqual([0, 1, 2].map(attention.hasHeads), [true, true, false]);
  assert.equal(attention.headsOf(2, "finetuned"), null);
  assert.equal(attention.headsOf(0, "pretrained"), null);
  assert.equal(attention.tellingHead(2, "finetuned", 1), 0);
});

test("the initially selected head attends most to other tokens between the first and the last", () => {
  for (const { number, made } of TEXTS) {
    const length = made.query[0].length;
    for (const layer of [1, 2, 3]) {
      const strengths = numbers(HEADS).map((head) =>
        total(
          numbers(length).map((i) => {
            const { weights } = expectedRow(made, layer, head, i);
            return Math.max(0, ...weights.filter((_, j) => j !== 0 && j !== i && j !== length - 1));
          }),
        ),
      );
      assert.equal(attention.tellingHead(number, "finetuned", layer), strengths.indexOf(Math.max(...strengths)));
    }
  }
});

test("products match query and key, and masked keys have weight 0", () => {
  const heads = attention.headsOf(1, "finetuned")!;
  const { query, sources, scaling, softcap } = attention.meeting(heads, 2, 1, 4);
  assert.deepEqual([scaling, softcap], [SCALING, SOFTCAP]);
  assertClose(query, long.query[HEADS + 1][4], 1e-3);
  for (const { j, seen, key, product: found, weight } of sources) {
    assert.equal(seen, j <= 4);
    assertClose(key, long.key[keyHeadOf(2, 1)][j], 1e-3);
    assertClose(
      found,
      long.key[keyHeadOf(2, 1)][j].map((each, n) => each * long.query[HEADS + 1][4][n]),
      1e-2,
    );
    assert.ok(seen || weight === 0);
  }
});

/** The norm of a vector with scales and biases, optionally centred. */
function normed(vector: number[], eps: number, isCentred: boolean, constants: number[]): number[] {
  const mean = isCentred ? total(vector) / HIDDEN : 0;
  const inner = vector.map((each) => each - mean);
  const deviation = Math.sqrt(total(inner.map((each) => each ** 2)) / HIDDEN + eps);
  return inner.map((each, n) => (each / deviation) * constants[n] + constants[HIDDEN + n]);
}

test("steps from the weights to the layer output match the model", () => {
  const heads = attention.headsOf(0, "finetuned")!;
  for (const layer of [1, 2, 3])
    for (const [i, head] of product([0, 3], [1, 2])) {
      const met = attention.meeting(heads, layer, head, i);
      const { steps, values, weighted, off } = attention.afterSoftmax(heads, layer, head, i, met)!;
      const { weights } = expectedRow(short, layer, head, i);
      const value = vectors.value[keyHeadOf(layer, head)];
      for (const j of numbers(7)) {
        assertClose(values[j], value[j], 1e-5);
        assertClose(
          weighted[j],
          value[j].map((each) => each * weights[j]),
          1e-5,
        );
      }
      const attended = numbers(WIDTH).map((n) => total(weights.map((weight, j) => weight * value[j][n])));
      const given = numbers(HEADS).map((each) => vectors.given[(layer - 1) * HEADS + each][i]);
      const output = numbers(HIDDEN).map(
        (n) => total(given.map((each) => each[n])) + vectors.output_bias[layer - 1][n],
      );
      const outputNorm = normed(output, 1e-5, false, vectors.attention_output_norm[layer - 1]);
      const input = vectors.input[(layer - 1) * 7 + i];
      const skip = input.map((each, n) => each + outputNorm[n]);
      const norm = normed(skip, 1e-5, true, vectors.attention_norm[layer - 1]);
      const stored = vectors.result[(layer - 1) * 7 + i];
      const expected = { attended, given: given[head], output, output_norm: outputNorm, input, skip, norm, stored };
      assert.deepEqual(
        steps.map(([name]) => name),
        Object.keys(expected),
      );
      for (const [name, vector] of steps) assertClose(vector, expected[name as keyof typeof expected], 1e-4);
      const farthest = (one: number[], other: number[]) => Math.max(...one.map((each, n) => Math.abs(each - other[n])));
      const kept = vectors.attended[(layer - 1) * HEADS + head][i];
      assertClose([off.attended, off.stored], [farthest(attended, kept), farthest(norm, stored)], 1e-4);
    }
  const met = attention.meeting(attention.headsOf(1, "finetuned")!, 1, 0, 0);
  assert.equal(attention.afterSoftmax(attention.headsOf(1, "finetuned")!, 1, 0, 0, met), null); // without `vectors`
});
