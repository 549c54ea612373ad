// The right margin of the picture shows means over all texts and over the current text, in the rows of the layers.

import assert from "node:assert/strict";
import test, { beforeEach } from "node:test";
import { elementsOf, openPage, textOf } from "./open";
import { LAYERS, makeRun, MODELS, numbers, product, total } from "./run";

const TEXTS = ["[CLS] the film was not the end [SEP]", "[CLS] a good film and the plot [SEP]"];
const run = makeRun(TEXTS.map((text) => text.split(" ")));
const page = await openPage(run.payload);
const opening = Object.fromEntries(Object.entries(page.state.state).map(([name, { value }]) => [name, value]));

beforeEach(() => {
  page.blocks.screenWidth.value = 900;
  page.state.set(opening);
});

const corpus = (model: string) => run.payload.curves.own_share[model];
/** The mean own share of a text after each layer, over tokens with a value. */
const textMeans = (model: string, text: number) =>
  run.owns[model].map((row) => {
    const values = row.slice(run.starts[text], run.starts[text] + run.texts[text].length);
    const known = values.filter((value) => value !== null);
    return total(known) / known.length;
  });
const assertNear = (found: number[], expected: number[], limit: number) => {
  assert.equal(found.length, expected.length);
  for (const [n, each] of found.entries()) assert.ok(Math.abs(each - expected[n]) < limit, `${found}, ${expected}`);
};
const clamp = (value: number) => Math.min(Math.max(value, 0), 1);

test("means and intervals are at their values, in the middle of their layer's row", () => {
  for (const [document, change] of product([0, 1], [false, true])) {
    page.state.set({ document, change });
    const layout = page.blocks.layout.value;
    const margin = page.margin.marginOf(layout);
    assert.equal(margin.length, change ? 1 : 2);
    for (const [n, { block, means, band, text, scale }] of margin.entries()) {
      const [low, high] = scale;
      assert.deepEqual([low.value, high.value], change ? [-1, 1] : [0, 1]);
      const x = (value: number) => low.x + (high.x - low.x) * clamp((value - low.value) / (high.value - low.value));
      const { values, low: from, high: to } = corpus(change ? "difference" : MODELS[n]);
      const [before, after] = MODELS.map((model) => textMeans(model, document));
      const ofText = change ? after.map((value, layer) => value - before[layer]) : [before, after][n];
      assertNear(
        means.map((each) => each.x),
        values.map((value) => x(value!)),
        0.01,
      );
      assertNear(
        band.map((each) => each.x),
        [...from, ...to.toReversed()].map((value) => x(value!)),
        0.01,
      );
      assertNear(
        text.map((each) => each.x),
        ofText.map(x),
        0.05,
      );
      const middles = numbers(LAYERS).map((layer) => {
        const { cellAt, cellWidth, rowHeight, y, x: left } = layout;
        const top = y(block, layer + 1);
        assert.equal(cellAt(left(0) + cellWidth / 2, top + 1)!.layer, layer + 1);
        return top + (rowHeight * (1 - page.blocks.GAP)) / 2;
      });
      for (const points of [means, text])
        assertNear(
          points.map(({ y }) => y),
          middles,
          1e-9,
        );
    }
  }
});

const percent = (value: number) => `${Math.round(100 * value)}%`;

test("numbers of the last layer are in the margin, or in words in a narrow window", () => {
  const last = LAYERS - 1;
  const words = () => textOf(page.means.MeansText());
  const ofTexts = MODELS.map((model) => percent(textMeans(model, 0)[last]));
  const ofCorpus = MODELS.map((model) => corpus(model)).map(
    ({ values, low, high }) => `${percent(values[last]!)} [${percent(low[last]!)}, ${percent(high[last]!)}]`,
  );
  const numbersText =
    `After the last layer, the mean own share of this text's tokens is ${ofTexts[0]} pretrained, ${ofTexts[1]} fine-tuned. ` +
    `Over 40 reviews: ${ofCorpus[0]} pretrained, ${ofCorpus[1]} fine-tuned [95% interval of the mean]. `;
  assert.ok(words().startsWith(numbersText), words());
  assert.match(
    words(),
    /short lines show the means of this text by layer, and dots and bands the means over 40 reviews /,
  );
  const drawn = textOf(page.means.Margin());
  for (const model of MODELS) {
    assert.ok(drawn.includes(percent(corpus(model).values[last]!)));
    assert.ok(drawn.includes(percent(textMeans(model, 0)[last])));
  }
  page.blocks.screenWidth.value = 390;
  assert.equal(page.means.Margin(), null);
  assert.equal(words(), numbersText);
});

test("without means over reviews or with few texts, only means of the text are shown", async () => {
  page.state.set({ share: "parts" });
  for (const { corpus: series, means, text } of page.margin.marginOf(page.blocks.layout.value)) {
    assert.equal(series, null);
    assert.equal(means.length, 0);
    assert.equal(text.length, LAYERS);
  }
  assert.doesNotMatch(textOf(page.means.MeansText()), /reviews/);
  for (const { d } of elementsOf(page.means.Margin(), "path")) assert.match(d, /^M[\d.]+,/); // no path is empty
  const few = makeRun([run.texts[0]]);
  for (const model of MODELS)
    Object.assign(few.payload.curves.own_share[model], {
      low: numbers(LAYERS).map(() => null),
      high: numbers(LAYERS).map(() => null),
      texts: 1,
    });
  const opened = await openPage(few.payload);
  assert.doesNotMatch(textOf(opened.means.MeansText()), /reviews|interval/);
});
