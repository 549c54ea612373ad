// Sentences below the picture and the tokens of the text have the correct words and numbers, and respond to clicks.

import assert from "node:assert/strict";
import test, { beforeEach } from "node:test";
import { elementsOf, openPage, textOf } from "./open";
import { isWord, KEPT, largest, makeRun, MODELS, numbers, PROBABILITIES, quantise, total } from "./run";

const TEXTS = [
  "[CLS] the film was not the end [SEP]",
  "[CLS] a good film and the plot [SEP]",
  "[CLS] time flies [SEP]",
];
const run = makeRun(TEXTS.map((text) => text.split(" ")));
const page = await openPage(run.payload);
const opening = Object.fromEntries(Object.entries(page.state.state).map(([name, { value }]) => [name, value]));
const PAIR = ["[CLS] the film was not good , it was great [SEP]", "[CLS] the film was good , it was not great [SEP]"];
const pair = makeRun(
  PAIR.map((text) => text.split(" ")),
  ["pretrained"],
);
const compared = await openPage(pair.payload);

beforeEach(() => page.state.set(opening));

const percent = (share: number) => (share > 0 && share < 0.0005 ? "<0.1%" : `${(100 * share).toFixed(1)}%`);
/** The numbers of a text with a decimal place. */
const numbersIn = (text: string) =>
  [...text.replaceAll("−", "-").matchAll(/[-+]?\d+\.\d/g)].map(([each]) => Number(each));
function assertClose(found: number[], expected: number[]): void {
  assert.equal(found.length, expected.length);
  assert.ok(
    found.every((each, n) => Math.abs(each - expected[n]) < 0.07),
    `${found} is not ${expected}`,
  );
}
const name = (text: number, position: number) => {
  const names = run.texts[text];
  const isOnly = names.filter((each) => each === names[position]).length === 1;
  return isOnly ? names[position] : `${names[position]} (${position})`;
};

test("the sentence of a cell has its values and largest sources in each model", () => {
  let [withMarks, withoutMarks] = [0, 0];
  for (const share of ["parts", "alti"])
    for (const position of [1, 2, 3, 4, 5]) {
      page.state.set({ document: 0, token: position, layer: 3, share });
      const text = textOf(page.chosen.ChosenText());
      const rows = MODELS.map((model) => run.matrices[model]["text/0"][share][2][position]);
      const origin = share === "parts" ? "the input" : "the layer below";
      const sources = (n: number) => largest(rows[n], KEPT).filter((j) => j !== position);
      const isMark = (j: number) => ["[CLS]", "[SEP]"].includes(run.texts[0][j]);
      const said = (n: number) => {
        const words = sources(n).filter((j) => !isMark(j));
        const marks = sources(n).filter(isMark);
        const sum = percent(total(marks.map((j) => rows[n][j])));
        const together = `; special tokens and punctuation among the ${KEPT} largest sources contribute ${sum}`;
        const named = words.map((j) => `${name(0, j)} ${percent(rows[n][j])}`).join(", ");
        withMarks += Number(marks.length > 0);
        withoutMarks += Number(marks.length === 0);
        return `${named}${marks.length > 0 ? together : ""}`;
      };
      const values = `${percent(rows[0][position])} pretrained, ${percent(rows[1][position])} fine-tuned`;
      const expected =
        `“${name(0, position)}” ${share === "parts" ? "after" : "in"} layer 3: the own share is ${values}. ` +
        `The largest contributions of other words in ${origin} (pretrained) are ${said(0)}. The largest contributions of other words in ${origin} (fine-tuned) are ${said(1)}. `;
      assert.equal(text.replaceAll(/[\d.]+%/g, "%"), expected.replaceAll(/[\d.]+%/g, "%"));
      assertClose(numbersIn(text), numbersIn(expected));
    }
  assert.ok(withMarks > 0 && withoutMarks > 0); // both variants of the sentence occur
  page.state.set({ share: "attnresln_n", token: 2 });
  const text = textOf(page.chosen.ChosenText());
  assert.match(text, /^“film” in layer 3: the mixing ratio is /);
  assert.doesNotMatch(text, /sources/);
  page.state.set({ token: null });
  assert.match(textOf(page.chosen.ChosenText()), /^Click a cell/);
});

test("words with the largest changes are listed with signs and can be chosen", () => {
  page.state.set({ document: 1, token: null, layer: 1, share: "parts" });
  const change = (layer: number, i: number) => {
    const [before, after] = MODELS.map((model) => run.matrices[model]["text/1"].parts[layer][i][i]);
    return after - before;
  };
  const largestOf = (i: number) => numbers(3).toSorted((a, b) => Math.abs(change(b, i)) - Math.abs(change(a, i)))[0];
  const words = numbers(run.texts[1].length).filter((i) => isWord(run.texts[1][i]));
  const order = words.toSorted((a, b) => Math.abs(change(largestOf(b), b)) - Math.abs(change(largestOf(a), a)));
  const buttons = elementsOf(page.chosen.Changes(), "button");
  assert.equal(buttons.length, 6);
  for (const [n, button] of buttons.entries()) {
    const [token, layer] = [order[n], largestOf(order[n])];
    const said = textOf(button.children);
    assert.ok(said.startsWith(`${name(1, token)} layer ${layer + 1} `), said);
    assertClose(numbersIn(said), [100 * change(layer, token)]);
  }
  buttons[1].onClick();
  const { token, layer } = page.state.state;
  assert.deepEqual([token.value, layer.value], [run.starts[1] + order[1], 1 + largestOf(order[1])]);
  page.state.set({ change: true });
  const [said] = textOf(page.chosen.ChosenText()).split(" points");
  assertClose(numbersIn(said), [100 * change(largestOf(order[1]), order[1])]);
});

test("each text has a label, a prediction, and the largest effect of a token", () => {
  const said = (text: number) => textOf(page.prediction.Prediction({ text }));
  assert.deepEqual([0, 1, 2].map(said), [
    "label negative, predicted positive (80.0%)",
    "predicted positive (100.0%)",
    "predicted positive (40.0%)",
  ]);
  for (const text of [0, 1, 2]) {
    const effects = run.texts[text].map((_, n) => run.effects[run.starts[text] + n] ?? 0);
    const [strongest] = numbers(effects.length).toSorted((a, b) => Math.abs(effects[b]) - Math.abs(effects[a]));
    const sentence = page.prediction.effectText(text, "leave_one_out");
    assert.equal(sentence.startsWith("By this measure, no single token matters"), text === 1, sentence);
    assert.ok(sentence.includes(`“${name(text, strongest)}”`), sentence);
    const [, effect] = /effect (?:in this text )?is ([^,]+),/.exec(sentence)!;
    assert.ok(Math.abs(Number(effect.replace("−", "-")) - effects[strongest]) < 0.006, sentence);
    const ending =
      /less than a tenth of the log-odds of the predicted class \(9\.2\)\. Positive effects support this class\.$/;
    if (text === 1) assert.match(sentence, ending);
  }
});

/** Own shares `[layers, tokens]` of a text, optionally without one of its words. */
const valuesOf = (text: number, without = "") =>
  pair.matrices.pretrained[`text/${text}`].parts.map((matrix) =>
    numbers(matrix.length)
      .filter((i) => pair.texts[text][i] !== without)
      .map((i) => matrix[i][i]),
  );

test("differences of two texts are described, marked, measured and can be chosen", () => {
  const { state, set } = compared.state;
  set({ document: 0, token: null, layer: 2, share: "parts" });
  assert.equal(
    textOf(elementsOf(compared.compared.Differences(), "p")[0].children),
    "Tokens that differ (framed), in 2 of 12 columns: “not” in text/0, no token in text/1; “not” in text/1, no token in text/0.",
  );
  const means = [0, 1].map((text) => total(valuesOf(text)[1]) / pair.texts[text].length);
  assert.match(
    textOf(compared.means.MeansText()),
    /^After the last layer, the mean own share of each text's tokens is /,
  );
  const whole = textOf(elementsOf(compared.compared.Differences(), "p")[1].children);
  assertClose(numbersIn(whole), [100 * means[0], 100 * means[1], 100 * (means[1] - means[0])]);
  const [one, other] = [valuesOf(0, "not"), valuesOf(1, "not")];
  const differences = one[0].map((_, column) => one.map((row, layer) => other[layer][column] - row[column]));
  const most = differences.map((layers) => layers.toSorted((a, b) => Math.abs(b) - Math.abs(a))[0]);
  const columns = pair.texts[0].filter((token) => token !== "not"); // the common token of each column
  const words = numbers(most.length).filter((n) => isWord(columns[n])); // only differences of words are listed
  const order = words.toSorted((a, b) => Math.abs(most[b]) - Math.abs(most[a]));
  const [top] = numbers(most.length).toSorted((a, b) => Math.abs(most[b]) - Math.abs(most[a]));
  const buttons = elementsOf(compared.compared.Differences(), "button");
  assertClose(
    buttons.map(({ children }) => numbersIn(textOf(children))[0]),
    order.slice(0, 6).map((column) => 100 * most[column]),
  );
  buttons[0].onClick();
  const layer = differences[order[0]].indexOf(most[order[0]]);
  assert.equal(state.layer.value, layer + 1);
  const text = textOf(compared.chosen.ChosenText());
  const values = [one[layer][order[0]], other[layer][order[0]]];
  const [cell, ...sources] = text.split("The largest contributions of other words in the input (");
  assertClose(
    numbersIn(cell),
    [...values, values[1] - values[0]].map((each) => 100 * each),
  );
  assert.deepEqual(
    sources.map((each) => each.slice(0, 7)),
    ["text/0)", "text/1)"],
  );
  assert.match(cell, /% in text\/0, [\d.]+% in text\/1, a difference of [−+][\d.]+ points\. $/);
  assert.deepEqual(compared.comparison.differenceRange.value, [-0.25, 0.25]);
  set({ stretch: true });
  assertClose(
    compared.comparison.differenceRange.value.map((each) => 100 * each),
    [-100, 100].map((each) => each * Math.abs(most[top])),
  );
  const frames = compared.cells
    .marksOf(compared.blocks.layout.value)
    .filter((mark) => mark.kind === "frame" && mark.stroke === "--ink");
  assert.equal(frames.length, 2); // around the displaced word in each text
  set({ token: 4 }); // the second text has no token in this column
  assert.match(textOf(compared.chosen.ChosenText()), /^“not” after layer .* text\/1 has no token in this column\. /);
  set({ stretch: false });
});

test("cells of a difference have their shades", () => {
  const { shade } = compared.colours;
  const layout = compared.blocks.layout.value;
  const block = compared.blocks.blocks.value[2];
  const boxes = compared.cells
    .marksOf(layout)
    .flatMap((mark) => (mark.kind === "boxes" ? mark.boxes.map((box) => [`${box[0]},${box[1]}`, mark.fill]) : []));
  const fills = new Map(boxes as [string, string][]);
  const columns = compared.alignment.columnsOf(0, 1);
  let count = 0;
  for (const [n, { first, second }] of columns.entries())
    for (const layer of [1, 2, 3]) {
      const fill = fills.get(`${layout.x(n)},${layout.y(block, layer)}`);
      if (first === null || second === null) {
        assert.equal(fill, undefined);
        continue;
      }
      const [one, other] = [first, second - pair.starts[1]].map(
        (i, text) => pair.matrices.pretrained[`text/${text}`].parts[layer - 1][i][i],
      );
      const near = [-1e-3, 0, 1e-3].map((off) => shade((other - one) / 0.25 + off).colour);
      assert.ok(near.includes(fill!), `${fill} for ${other - one}`);
      count += 1;
    }
  assert.equal(count, 30);
});

test("texts with few common tokens are compared at equal tokens only", () => {
  page.state.set({ document: 0, compare: 1, share: "parts" });
  const columns = page.alignment.columnsOf(0, 1);
  const same = columns.filter(page.alignment.isSame);
  const said = textOf(elementsOf(page.compared.Differences(), "p")[0].children);
  assert.equal(
    said,
    `These texts have few tokens in common. Both have the same token in ${same.length} of ${columns.length} columns; differences are shown in these columns only.`,
  );
  for (const column of columns)
    for (const layer of [1, 3]) {
      const found = page.comparison.differenceOf(column, layer);
      if (!page.alignment.isSame(column)) {
        assert.equal(found, null);
        continue;
      }
      const [one, other] = [column.first!, column.second! - run.starts[1]].map(
        (i, text) => run.matrices.finetuned[`text/${text}`].parts[layer - 1][i][i],
      );
      assert.ok(Math.abs(found! - (other - one)) < 1e-3);
    }
});

/** The element with the tokens of the selected text. */
const drawnTokens = () =>
  page.words.Tokens({
    id: "words",
    tokens: page.data.tokensOf(page.state.state.document.value),
    prefix: "token-",
    label: "Tokens",
    marks: true,
  });

test("tokens have names, positions, values and shades", () => {
  for (const [document, effect] of [
    [0, ""],
    [1, ""],
    [1, "leave_one_out"],
  ] as const) {
    page.state.set({ document, effect, layer: 3, token: run.starts[document] + 1 });
    const spans = elementsOf(drawnTokens(), "span");
    assert.equal(spans.length, run.texts[document].length);
    for (const [position, span] of spans.entries()) {
      const token = run.starts[document] + position;
      assert.equal(textOf(span.children), run.texts[document][position]);
      assert.deepEqual([span.role, span.id, span["data-token"]], ["option", `token-${token}`, token]);
      assert.equal(span["aria-selected"], position === 1);
      const value = effect ? run.effects[token] : run.owns.finetuned[2][token];
      const read = document === 0 && position === 0 ? ", read by the classifier" : "";
      const begin = `${run.texts[document][position]}, position ${position}${read}`;
      if (value === null) {
        assert.equal(span.title, begin);
        assert.equal(span.style.backgroundColor, undefined);
        continue;
      }
      assert.ok(span.title.startsWith(`${begin}, ${effect ? "effect" : "own share"} `), span.title);
      const shown = Number(span["data-share"].replace("−", "-").replace("%", ""));
      assert.ok(Math.abs(shown - (effect ? value : 100 * value)) < (effect ? 0.006 : 0.06));
      const logOdds = Math.log(PROBABILITIES[document] / (1 - PROBABILITIES[document]));
      const scaled = effect ? value / (0.1 * logOdds) : value; // no token of the second text matters
      const near = [-2e-4, 0, 2e-4].map((off) => page.colours.shade(scaled + off).colour);
      assert.ok(near.includes(span.style.backgroundColor));
    }
  }
});

test("sources of the chosen token are underlined, and its targets overlined", () => {
  page.state.set({ document: 1, token: run.starts[1] + 3, layer: 2 });
  const { took, gave } = page.measures.exchanged(run.starts[1] + 3)!;
  for (const span of elementsOf(drawnTokens(), "span")) {
    const has = (kind: string) => span.class.split(" ").includes(kind);
    assert.equal(
      has("took"),
      took.some(({ token }) => token === span["data-token"]),
    );
    assert.equal(
      has("gave"),
      gave.some(({ token }) => token === span["data-token"]),
    );
    assert.equal(has("chosen"), span["aria-selected"]);
  }
});

test("arrow keys, Home, End and Escape move between tokens", () => {
  page.state.set({ document: 1, token: run.starts[1] + 3 });
  const last = run.texts[1].length - 1;
  const moves: [string, number | null][] = [
    ...([
      ["ArrowRight", 4],
      ["ArrowLeft", 3],
      ["ArrowUp", 2],
      ["ArrowDown", 3],
      ["Home", 0],
      ["ArrowLeft", 0],
    ] as [string, number][]),
    ...([
      ["End", last],
      ["ArrowRight", last],
      ["a", last],
      ["Escape", null],
      ["ArrowRight", 0],
    ] as [string, number | null][]),
  ];
  for (const [key, position] of moves) {
    const [list] = elementsOf(drawnTokens(), "div");
    let stopped = false;
    list.onKeyDown({ key, preventDefault: () => (stopped = true) });
    assert.equal(stopped, key !== "a");
    assert.equal(page.state.state.token.value, position === null ? null : run.starts[1] + position, key);
    const [now] = elementsOf(drawnTokens(), "div");
    assert.equal(now["aria-activedescendant"], position === null ? undefined : `token-${run.starts[1] + position}`);
  }
});

test("special tokens and punctuation are never highlighted", async () => {
  const texts = [["[CLS]", "a", ".", ",", "film", "[SEP]"]];
  const marked = makeRun(texts);
  const isMark = (index: number) => !isWord(texts[0][index]);
  for (const model of MODELS)
    for (const layer of marked.owns[model])
      for (const index of [2, 3]) layer[index] = model === "finetuned" ? 0.02 * index : 0.99; // the largest changes
  const owns = (model: string) => quantise(marked.owns[model].flat());
  for (const model of MODELS) marked.payload.ratios.values[model].own_share = owns(model);
  const opened = await openPage(marked.payload);
  const named = opened.measures.largestChanges.value.map(({ token }) => token);
  assert.ok(isMark(named[0]));
  const said = elementsOf(opened.chosen.Changes(), "button").map(({ children }) => textOf(children).split(" ")[0]);
  assert.deepEqual(
    said,
    named.filter((token) => !isMark(token)).map((token) => texts[0][token]),
  );
  const effects = texts[0].map((_, index) => (index === 2 ? 0.45 : 0.01));
  marked.payload.importance.leave_one_out.values = quantise(effects.map((effect) => effect + 0.5));
  const scored = await openPage(marked.payload);
  const sentence = scored.prediction.effectText(0, "leave_one_out");
  assert.match(sentence, /is 0\.45, by a special token or punctuation mark; /);
  scored.state.set({ token: 4 });
  const sources = textOf(scored.chosen.ChosenText()).split(") are ").slice(1);
  assert.ok(sources.length > 0);
  for (const each of sources) assert.match(each, /^a [\d.]+%; special tokens and punctuation among /);
});

test("text and picture describe the chosen token by the same number and words", () => {
  for (const share of ["own_share", "parts", "alti", "attnresln_n"])
    for (const change of [false, true]) {
      page.state.set({ document: 0, token: 2, layer: 2, share, change });
      const picture = textOf(page.chosen.ChosenText());
      const text = textOf(elementsOf(page.text.Card({ token: 2 }), "p")[0].children);
      const kind = share === "attnresln_n" ? "mixing ratio" : "own share";
      const [, value] = new RegExp(`^“film”: ${kind} (\\S+)`).exec(text)!;
      assert.match(picture, change ? /fine-tuning changes the/ : new RegExp(`the ${kind} is`));
      assert.ok(picture.includes(change ? value.replace(" points", "") : `${value} fine-tuned`), `${picture} ${value}`);
      if (share === "own_share" && !change) assertClose(numbersIn(value), [100 * run.owns.finetuned[1][2]!]);
    }
});

test("unknown own shares and empty columns are explained", async () => {
  const reasons = {
    special: "special tokens are not exchanged",
    same: "all donor texts have the same token at this position",
    alone: "this text has no other token to exchange",
    none: "the own share of single tokens was not computed for this text",
    sampled: "only 3 tokens of this text were exchanged",
    rounding: "replacing tokens changes this vector by no more than rounding errors",
  };
  const lost = makeRun([...TEXTS, "[CLS] time [SEP]", "[CLS] time flies [SEP]"].map((text) => text.split(" ")));
  const unknown = [lost.starts[0], lost.starts[0] + 2, ...numbers(7).map((n) => lost.starts[3] + n)];
  for (const model of MODELS) for (const row of lost.owns[model]) for (const token of unknown) row[token] = null;
  lost.owns.finetuned[2][lost.starts[1] + 1] = null;
  for (const model of MODELS) lost.payload.ratios.values[model].own_share = quantise(lost.owns[model].flat());
  const { missing, state, data } = await openPage(lost.payload);
  const said = (token: number) => missing.missingText(token).replace("not known, because ", "");
  assert.equal(said(lost.starts[0]), reasons.special);
  assert.equal(said(lost.starts[0] + 2), reasons.same);
  assert.equal(said(lost.starts[1] + 1), reasons.rounding);
  assert.equal(said(lost.starts[3] + 1), reasons.alone);
  assert.equal(said(lost.starts[4] + 1), reasons.none);
  assert.equal(missing.emptyCellsText([0]), `Empty columns: ${reasons.special}; ${reasons.same}.`);
  assert.equal(missing.emptyCellsText([2]), `Empty columns: ${reasons.special}.`);
  state.set({ document: 0, compare: 3 }); // the unknown “film” of the first text is in a gap of the other text
  const gaps = "In the gaps of a text, only the other text has tokens.";
  const alone = reasons.alone.replace("this text", lost.payload.documents[3].title);
  assert.equal(missing.emptyCellsText([0, 3]), `Empty columns: ${reasons.special}; ${alone}. ${gaps}`);
  state.set({ share: "parts" });
  assert.equal(missing.emptyCellsText([0, 3]), gaps);
  state.set({ compare: null, share: "own_share" });
  data.data.exchangeLimit = 3; // less than the length of the first text
  assert.equal(said(lost.starts[0] + 2), reasons.sampled);
  state.set({ share: "parts" });
  assert.equal(missing.emptyCellsText([0]), "");
  assert.equal(missing.missingText(2), "not known");
});
