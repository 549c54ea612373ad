// Choices depend on each other, are part of the address, and are kept for the next text.

import assert from "node:assert/strict";
import test, { beforeEach } from "node:test";
import type { Choice } from "../../attnmix/page/src/state";
import { openPage, type OpenPage } from "./open";
import { makeRun, numbers, product } from "./run";

const TEXTS = [
  "[CLS] the film was not the end [SEP]",
  "[CLS] a good film and the plot [SEP]",
  "[CLS] time flies like the arrow [SEP]",
];
const run = makeRun(TEXTS.map((text) => text.split(" ")));
const PAIR = ["[CLS] the film was not good [SEP]", "[CLS] the film was good [SEP]"];
const pair = makeRun(
  PAIR.map((text) => text.split(" ")),
  ["pretrained"],
);
const page = await openPage(run.payload);
const valuesOf = ({ state }: OpenPage) =>
  Object.fromEntries(Object.entries(state.state).map(([name, { value }]) => [name, value])) as Choice;
const opening = valuesOf(page);

beforeEach(() => page.state.set(opening));

test("another text keeps the chosen word or selects its initial word", () => {
  const { set, state } = page.state;
  let kept = 0;
  for (const [from, to] of product([0, 1, 2], [0, 1, 2]).filter(([one, other]) => one !== other))
    for (const [position, word] of run.texts[from].entries()) {
      set({ document: from });
      set({ token: run.starts[from] + position, layer: 2 });
      set({ document: to });
      const matches = numbers(run.texts[to].length).filter((match) => run.texts[to][match] === word);
      const nearest = Math.min(...matches.map((match) => Math.abs(match - position)));
      const chosen = state.token.value! - run.starts[to];
      if (matches.length > 0) assert.ok(matches.includes(chosen) && Math.abs(chosen - position) === nearest, word);
      else assert.equal(chosen, 2); // the initial word
      assert.equal(state.layer.value, 2);
      kept += Number(matches.length > 0);
    }
  assert.ok(kept > 6);
  set({ token: null });
  set({ document: 1 });
  assert.equal(state.token.value, null);
});

test("a token selects its text, and layers and capture points select each other", () => {
  const { set, state } = page.state;
  set({ token: run.starts[2] + 1 });
  assert.equal(state.document.value, 2);
  set({ layer: 1 });
  assert.equal(state.point.value, 1); // the run has one capture point after each layer
  set({ point: 3 });
  assert.equal(state.layer.value, 3);
  set({ point: 0 }); // the input is not a layer
  assert.equal(state.layer.value, 3);
});

test("choosing the compared text swaps both texts", () => {
  const { set, state } = page.state;
  set({ document: 0 });
  set({ compare: 2 });
  set({ document: 2 });
  assert.deepEqual([state.document.value, state.compare.value], [2, 0]);
  set({ document: 1 });
  assert.deepEqual([state.document.value, state.compare.value], [1, 0]);
});

const CHOICES: Partial<Choice> = {
  ...{ document: 1, compare: 2, token: run.starts[1] + 3, checkpoint: "pretrained", layer: 2, share: "attention" },
  ...{
    threshold: 7,
    stretch: true,
    head: 1,
    effect: "leave_one_out",
    lines: "norm",
    layout: "aligned",
    colour: "class",
  },
};

test("a link restores choices and ignores invalid ones", async () => {
  page.state.set(CHOICES);
  const sent = valuesOf(page);
  const other = await openPage(run.payload, {}, `#${page.state.address()}`);
  other.state.followAddress();
  assert.deepEqual(valuesOf(other), sent);
  for (const foreign of [
    "document=9&layer=99&share=<b>&token=-1",
    "%E0%A4%A=1",
    "__proto__=1&constructor=2",
    "tour=9",
  ]) {
    const opened = await openPage(run.payload, {}, `#${foreign}`);
    opened.state.followAddress();
    assert.deepEqual(valuesOf(opened), opening, foreign);
  }
  const layer = await openPage(run.payload, {}, "#layer=1");
  layer.state.followAddress();
  assert.deepEqual([layer.state.state.layer.value, layer.state.state.point.value], [1, 1]);
  const text = await openPage(run.payload, {}, "#document=1");
  text.state.followAddress();
  assert.deepEqual([text.state.state.document.value, text.state.state.token.value], [1, null]);
});

test("only texts, models and tokens are history entries", async (t: { mock: any }) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const opened = await openPage(run.payload);
  const steps: string[] = [];
  history.pushState = (_: unknown, __: string, address) => void steps.push(String(address).split("#")[1]);
  history.replaceState = () => void steps.push("replaced");
  opened.state.followAddress();
  const changes: Partial<Choice>[] = [
    { document: 1 },
    { token: run.starts[1] + 4 },
    { compare: 0 },
    { checkpoint: "pretrained" },
  ];
  for (const [n, change] of changes.entries()) {
    opened.state.set(change);
    assert.equal(steps.length, n + 1);
    for (const [name, value] of Object.entries(change)) assert.ok(steps.at(-1)!.includes(`${name}=${value}`));
  }
  opened.state.set({ layer: 1 });
  opened.state.set({ threshold: 9 });
  assert.equal(steps.length, changes.length);
  t.mock.timers.tick(400);
  assert.deepEqual(steps.slice(changes.length), ["replaced"]);
});

test("the next text of the server keeps word, layer and head without the word in the address", async () => {
  const before = await openPage(run.payload);
  before.state.followAddress();
  before.state.set({ token: 5, head: 1 }); // "the", the second of two
  before.state.set({ layer: 2, document: 0 });
  const { choices, word } = before.root.dataset;
  assert.equal(word, "the");
  assert.ok(!choices.includes("the"));
  const given = new URLSearchParams(choices);
  for (const single of ["document", "compare", "token", "source", "point"]) assert.ok(!given.has(single), single);
  const positions: (number | null)[] = [];
  for (const texts of [["the a the b c the"], ["b c"], ["x y"]]) {
    const next = makeRun(texts.map((text) => text.split(" ")));
    Object.assign(globalThis, { frameElement: { getAttribute: () => "the" } });
    const after = await openPage(next.payload, {}, `#${choices}`);
    after.state.followAddress();
    positions.push(after.state.state.token.value);
    assert.deepEqual([after.state.state.layer.value, after.state.state.head.value], [2, 1]);
  }
  assert.deepEqual(positions, [5, null, null]); // the nearest equal word, or none
  Object.assign(globalThis, { frameElement: undefined });
});

test("only similar texts open side by side", async () => {
  const alike = await openPage(pair.payload);
  assert.equal(alike.state.state.compare.value, 1);
  assert.deepEqual(
    alike.blocks.blocks.value.map(({ title }) => title),
    ["text/0: the film was not good", "text/1: the film was good", "Difference: text/1 minus text/0"],
  );
  const link = await openPage(pair.payload, {}, "#document=1"); // from a page with a different initial text
  link.state.followAddress();
  assert.deepEqual([link.state.state.document.value, link.state.state.compare.value], [1, 0]);
  const unlike = await openPage(
    makeRun([
      ["a", "warm", "end"],
      ["time", "flies"],
    ]).payload,
  );
  assert.equal(unlike.state.state.compare.value, null);
  assert.equal(page.state.state.compare.value, null); // this page has three texts
});

test("every measure has a single name", () => {
  assert.deepEqual(page.state.shareRatios, ["attnresln_n"]); // attention weights are available as a matrix
});

test("measures are grouped by question, without duplicates and with explanations", async () => {
  const { shareGroups, explainShare } = page.shares;
  assert.deepEqual(shareGroups, {
    "All layers since the input": ["own_share", "parts", "alti_rollout"],
    "One layer": ["attnresln_n", "alti"],
    More: ["attention"],
  });
  const listed = Object.values(shareGroups).flat();
  assert.deepEqual(listed.toSorted(), [...page.state.shares].toSorted());
  const lines = listed.map(explainShare);
  assert.equal(new Set(lines).size, lines.length);
  for (const line of lines) assert.match(line, /^[A-Z].*\.$/);
  assert.equal(
    explainShare("alti_rollout"),
    "The shares of one layer (ALTI), multiplied over all layers since the input.",
  );
});
