// Shares, ratios, changes, sources and lines match the numbers of the run, and the picture shows them.

import assert from "node:assert/strict";
import test, { beforeEach } from "node:test";
import type { Mark } from "../../attnmix/page/src/marks";
import { openPage } from "./open";
import {
  grid,
  KEPT,
  largest,
  LAYERS,
  LOST,
  makeRun,
  MODELS,
  numbers,
  PROBABILITIES,
  product,
  RATIOS,
  total,
} from "./run";

const TEXTS = [
  "[CLS] the film was not the end [SEP]",
  "[CLS] a good film and the plot [SEP]",
  "[CLS] time flies like an arrow [SEP]",
];
const run = makeRun(TEXTS.map((text) => text.split(" ")));
const LENGTHS = run.texts.map(({ length }) => length);
const MATRICES = ["parts", "alti", "attention", "alti_rollout"];
const { blocks, cells, colours, data, measures, state } = await openPage(run.payload);
const opening = Object.fromEntries(Object.entries(state.state).map(([name, { value }]) => [name, value]));

beforeEach(() => state.set(opening));

const isClose = (one: number | null, other: number | null, limit = 1e-4) =>
  one === null || other === null ? one === other : Math.abs(one - other) < limit;
function assertClose(found: (number | null)[], expected: (number | null)[], limit = 1e-4): void {
  assert.equal(found.length, expected.length);
  assert.ok(
    found.every((each, n) => isClose(each, expected[n], limit)),
    `${found} is not ${expected}`,
  );
}

const isLost = (text: number, layer: number, position: number) =>
  text === 2 || (text === 0 && layer === LOST.layer && position === LOST.position);

/** The displayed value of a token, computed from the plain numbers. */
function expectedValue(model: string, text: number, layer: number, position: number, share: string): number | null {
  if (share === "own_share") return run.owns[model][layer - 1][run.starts[text] + position];
  if (RATIOS.includes(share)) return run.ratios[model][share][layer - 1][run.starts[text] + position];
  if (isLost(text, layer, position)) return null;
  return run.matrices[model][`text/${text}`][share][layer - 1][position][position];
}

function expectedChange(...cell: [text: number, layer: number, position: number, share: string]): number | null {
  const [before, after] = MODELS.map((model) => expectedValue(model, ...cell));
  return before === null || after === null ? null : after - before;
}

test("values and changes match the run", () => {
  for (const share of ["own_share", ...MATRICES, ...RATIOS]) {
    state.set({ share });
    for (const [layer, text] of product([1, 2, 3], [0, 1, 2]))
      for (const position of numbers(LENGTHS[text])) {
        const token = run.starts[text] + position;
        const found = [...MODELS, measures.CHANGE].map((model) => measures.valueOf(token, layer, model));
        const expected = MODELS.map((model) => expectedValue(model, text, layer, position, share));
        assertClose(found, [...expected, expectedChange(text, layer, position, share)], 2e-4);
      }
  }
});

test("words are shaded by the chosen measure, layer and model, or by effect", () => {
  for (const layer of [1, 3])
    for (const checkpoint of MODELS) {
      state.set({ layer, checkpoint, document: 1, share: "parts" });
      const expected = numbers(LENGTHS[1]).map((position) => expectedValue(checkpoint, 1, layer, position, "parts"));
      assertClose(data.tokensOf(1).map(measures.wordValue), expected);
    }
  state.set({ effect: "leave_one_out" });
  assertClose(numbers(total(LENGTHS)).map(measures.wordValue), run.effects);
  for (const text of [0, 1, 2]) {
    const inText = run.effects.slice(run.starts[text], run.starts[text] + LENGTHS[text]);
    const most = Math.max(...inText.map((effect) => Math.abs(effect ?? 0)));
    state.set({ document: text, stretch: false });
    // No token matters for the prediction of the second text, so its effects remain pale.
    const end = text === 1 ? 0.1 * Math.log(PROBABILITIES[1] / (1 - PROBABILITIES[1])) : most;
    assertClose(measures.wordRange.value, [-end, end]);
    state.set({ stretch: true });
    assertClose(measures.wordRange.value, [-most, most]);
  }
});

/** Pairs of token and share, by decreasing share. */
const sorted = (pairs: [number, number][]) => pairs.toSorted((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
function assertShares(found: { token: number; share: number }[], expected: [number, number][]): void {
  assert.deepEqual(
    found.map(({ token }) => token),
    expected.map(([token]) => token),
  );
  assertClose(
    found.map(({ share }) => share),
    expected.map(([, share]) => share),
    2e-4,
  );
}

test("`took` lists the largest sources of a token, and `gave` the tokens with this source", () => {
  for (const [share, checkpoint, text] of product(MATRICES, MODELS, [0, 1])) {
    state.set({ share, checkpoint, document: text, layer: 2 });
    const matrix = run.matrices[checkpoint][`text/${text}`][share][1];
    const kept = matrix.map((row, i) => (isLost(text, 2, i) ? [] : largest(row, KEPT)));
    for (const i of numbers(LENGTHS[text])) {
      const found = measures.exchanged(run.starts[text] + i)!;
      const took = kept[i].filter((j) => j !== i).map((j): [number, number] => [run.starts[text] + j, matrix[i][j]]);
      assertShares(found.took, took);
      const targets = numbers(LENGTHS[text]).filter((target) => target !== i && kept[target].includes(i));
      assertShares(found.gave, sorted(targets.map((target) => [run.starts[text] + target, matrix[target][i]])));
    }
  }
  assert.equal(measures.exchanged(run.starts[2]), null); // the page has no matrices of this text
});

test("the listed changes of sources are the largest in the complete row", () => {
  state.set({ change: true, layer: 1, share: "alti" });
  const [before, after] = MODELS.map((model) => run.matrices[model]["text/0"].alti[0]);
  for (const i of numbers(LENGTHS[0])) {
    const others = numbers(LENGTHS[0]).filter((j) => j !== i);
    const changes = others.map((j): [number, number] => [j, after[i][j] - before[i][j]]);
    assertShares(measures.exchanged(i)!.took, sorted(changes).slice(0, KEPT));
  }
});

test("the largest changes by fine-tuning are first, with their layer", () => {
  for (const share of ["parts", "attnresln_n"]) {
    state.set({ share, document: 0 });
    const expected = numbers(LENGTHS[0]).map((position) => {
      const layers = [1, 2, 3].map((layer) => ({
        token: position,
        layer,
        value: expectedChange(0, layer, position, share),
      }));
      return layers.toSorted((a, b) => Math.abs(b.value ?? 0) - Math.abs(a.value ?? 0))[0];
    });
    const order = expected.toSorted((a, b) => Math.abs(b.value!) - Math.abs(a.value!));
    const found = measures.largestChanges.value;
    assert.deepEqual(
      found.map(({ token, layer }) => [token, layer]),
      order.map(({ token, layer }) => [token, layer]),
    );
    assertClose(
      found.map(({ value }) => value),
      order.map(({ value }) => value),
      2e-4,
    );
  }
});

test("the initial measure is the own share, with sources of the first matrix", () => {
  assert.equal(opening.share, "own_share");
  assert.equal(measures.shareKind(), "own share");
  assert.equal(measures.isOfOneLayer(), false);
  assert.equal(measures.sourcesIn.value, "input");
  const sources = measures.sourcesOf(3, 2, MODELS[0]);
  state.set({ share: "parts" });
  assert.deepEqual(measures.sourcesOf(3, 2, MODELS[0]), sources);
});

type Flow = { layer: number; below: number; to: number; from: number; share: number };

/** The lines from a token of the second text to its sources, by the definition of each kind of measure. */
function expectedFlows(model: string, position: number, layer: number, least: number, share: string): Flow[] {
  const matrices = run.matrices[model]["text/1"][share];
  const sources = (i: number, level: number) => largest(matrices[level - 1][i], KEPT);
  if (["parts", "alti_rollout"].includes(share)) {
    const row = matrices[layer - 1][position];
    const large = sources(position, layer).filter((j) => row[j] >= least);
    return large.map((j) => ({ layer, below: 0, to: position, from: j, share: row[j] }));
  }
  const flows: Flow[] = [];
  let reached = new Map([[position, 1]]);
  for (let level = layer; level > 0; level--) {
    const below = new Map<number, number>();
    for (const [to, part] of reached) {
      const flow = (from: number) => part * matrices[level - 1][to][from];
      for (const from of sources(to, level).filter((each) => flow(each) >= least)) {
        flows.push({ layer: level, below: level - 1, to, from, share: flow(from) });
        below.set(from, (below.get(from) ?? 0) + flow(from));
      }
    }
    reached = below;
  }
  return flows;
}

test("lines lead to the sources of the measure, directly or through layers", () => {
  for (const [share, threshold, model] of product(MATRICES, [2, 10, 30], MODELS)) {
    state.set({ share, threshold, layer: 3, token: run.starts[1] + 3 });
    assert.equal(measures.sourcesIn.value, ["parts", "alti_rollout"].includes(share) ? "input" : "layer");
    const block = blocks.blocks.value.find((each) => each.model === model)!;
    const { flows } = cells.origins.value.get(block)!;
    const key = ({ layer, below, to, from }: Flow) => [layer, below, to, from].join();
    const expected = expectedFlows(model, 3, 3, threshold / 100, share);
    const found = flows.map((flow) => ({ ...flow, to: flow.to - run.starts[1], from: flow.from - run.starts[1] }));
    const isClear = (flow: Flow) => Math.abs(flow.share - threshold / 100) > 1e-3;
    const [one, other] = [found, expected].map(
      (all) => new Map(all.filter(isClear).map((flow) => [key(flow), flow.share])),
    );
    assert.deepEqual([...one.keys()].toSorted(), [...other.keys()].toSorted());
    for (const [each, value] of one) assert.ok(isClose(value, other.get(each)!, 1e-3));
    const paths = cells.marksOf(blocks.layout.value).filter(({ kind }) => kind === "path");
    const all = [...cells.origins.value.values()].flatMap((each) => each.flows);
    assert.equal(paths.length, 2 * all.length); // every line has a halo
  }
  for (const share of ["parts", "alti"]) {
    state.set({ share, threshold: 2, layer: 3, token: run.starts[1] + 3 });
    const marks = cells.marksOf(blocks.layout.value);
    const numbered = marks.findIndex((mark) => mark.kind === "text" && mark.size === 11);
    assert.ok(numbered > marks.findLastIndex(({ kind }) => kind === "path")); // no line crosses a number
    const block = blocks.blocks.value[1];
    for (const { layer, below, from, to, share: part } of cells.origins.value.get(block)!.flows) {
      const { x, y, cellWidth, rowHeight } = blocks.layout.value;
      const middle = (token: number) => x(token - run.starts[1]) + (cellWidth - 1) / 2;
      const [start, end] = [y(block, layer) + 0.4 * rowHeight, y(block, below) + 0.3 * rowHeight];
      const found = cells.edgeAt((middle(from) + middle(to)) / 2, (start + end) / 2)!;
      const isIt = found.from === from && found.to === to && found.layer === layer && found.below === below;
      assert.ok(isIt || found.share >= part, "another line that crosses there is stronger");
      if (from !== to && share === "parts") assert.deepEqual([found.from, found.share], [from, part]);
      assert.equal(cells.edgeAt(middle(from), y(block, 3) - 12), null); // above all lines
    }
  }
  state.set({ share: "attnresln_n" });
  assert.equal(measures.sourcesIn.value, null);
  assert.deepEqual(
    [...cells.origins.value.values()].flatMap(({ flows }) => flows),
    [],
  );
});

/** The colours of all cells by their corners. */
function fills(marks: Mark[]): Map<string, string> {
  const boxes = marks.filter((mark) => mark.kind === "boxes");
  return new Map(
    boxes.flatMap(({ fill, boxes: all }) =>
      all.filter(([, , , height]) => height > 1).map(([x, y]) => [`${x},${y}`, fill]),
    ),
  );
}

test("cells have the shade of their values, on the fixed or stretched scale", () => {
  const options = [{}, { stretch: true }, { change: true }];
  for (const [share, document, option] of product([...MATRICES, ...RATIOS], [0, 1], options)) {
    state.set({ ...opening, share, document, token: null, ...option });
    const { x, y } = blocks.layout.value;
    const found = fills(cells.marksOf(blocks.layout.value));
    const shown = "change" in option ? [measures.CHANGE] : MODELS;
    assert.deepEqual(
      blocks.blocks.value.map(({ model }) => model),
      shown,
    );
    const values = shown.map((model) =>
      grid(LAYERS, LENGTHS[document], (layer, position) =>
        model === measures.CHANGE
          ? expectedChange(document, layer + 1, position, share)
          : expectedValue(model, document, layer + 1, position, share),
      ),
    );
    const known = values.flat(2).filter((value) => value !== null);
    assert.equal(found.size, known.length);
    const [low, high] = "stretch" in option ? [Math.min(...known), Math.max(...known)] : [0, 1];
    assertClose(measures.shareRange.value, "change" in option ? [-1, 1] : [low, high]);
    for (const [n, layer, position] of product(numbers(shown.length), [1, 2, 3], numbers(LENGTHS[document]))) {
      const block = blocks.blocks.value[n];
      const value = values[n][layer - 1][position];
      const fill = found.get(`${x(position)},${y(block, layer)}`);
      if (value === null) assert.equal(fill, undefined);
      else {
        const near = [-2e-4, 0, 2e-4].map((off) => colours.shade((value - low) / (high - low) + off).colour);
        assert.ok(near.includes(fill!), `${fill} for ${value}`);
      }
    }
  }
});

test("the row of the input shows the shares of the chosen vector", () => {
  state.set({ share: "parts", document: 1, token: run.starts[1] + 2, layer: 2 });
  const { x, y } = blocks.layout.value;
  const found = fills(cells.marksOf(blocks.layout.value));
  for (const block of blocks.blocks.value) {
    const row = run.matrices[block.model]["text/1"].parts[1][2];
    for (const j of numbers(LENGTHS[1])) {
      const fill = found.get(`${x(j)},${y(block, 0)}`);
      const expected =
        largest(row, KEPT).includes(j) && row[j] >= 0.002
          ? colours.shade(Math.sqrt(row[j]), "source").colour
          : undefined;
      assert.equal(fill, expected);
    }
  }
});

test("the picture shows the names of the chosen token, its sources and the classification token", () => {
  state.set({ share: "parts", document: 0, token: 2, layer: 3, threshold: 5 });
  const layout = blocks.layout.value;
  const marks = cells.marksOf(layout).filter((mark) => mark.kind === "text" && mark.size === blocks.NAME_SIZE);
  const column = (x: number) => numbers(LENGTHS[0]).find((n) => x > layout.x(n) && x < layout.x(n) + layout.cellWidth);
  const named = new Map(
    marks.map((mark) => [column((mark as { x: number }).x), mark as Extract<Mark, { kind: "text" }>]),
  );
  const row = run.matrices.finetuned["text/0"].parts[2][2];
  for (const n of numbers(LENGTHS[0])) {
    const mark = named.get(n)!; // all fit
    assert.equal(mark.text, n === 0 ? "◆ [CLS]" : run.texts[0][n]);
    const isSource = largest(row, KEPT).includes(n) && row[n] >= 0.05;
    assert.equal(mark.fill, n === 2 ? "--mark" : isSource ? "--took" : "--ink");
  }
});

test("a crowded printed picture shows the names of the strongest sources", async () => {
  const long = makeRun([numbers(100).map((n) => `word${n}`)], ["finetuned"]);
  const page = await openPage(long.payload);
  page.state.printing.value = true;
  for (const token of [10, 30, 80]) {
    page.state.set({ token, layer: 3 });
    const marks = page.cells.marksOf(page.blocks.layout.value);
    const names = marks.flatMap((mark) => (mark.kind === "text" && mark.size === blocks.NAME_SIZE ? [mark.text] : []));
    const apart = Math.ceil(blocks.NAME_SIZE / page.blocks.layout.value.cellWidth);
    const sources = largest(long.matrices.finetuned["text/0"].parts[2][token], KEPT);
    const strongest = sources.find((source) => Math.abs(source - token) >= apart)!;
    for (const each of [token, strongest]) assert.ok(names.includes(each === 0 ? "◆ word0" : `word${each}`), `${each}`);
    assert.ok(names.length < 100 / (apart - 1));
  }
});

test("positions in the picture map to cells, in both writing directions", async () => {
  const arabic = await openPage(makeRun(run.texts, MODELS, true).payload);
  for (const page of [{ blocks, state }, arabic]) {
    page.blocks.screenWidth.value = 900;
    page.state.set({ document: 0, token: 1 });
    const { x, y, cellAt, cellWidth, rowHeight, height, width } = page.blocks.layout.value;
    for (const block of page.blocks.blocks.value)
      for (const [layer, column] of product([0, 1, 2, 3], numbers(LENGTHS[0]))) {
        const [left, top] = [x(column) + cellWidth / 2, y(block, layer) + rowHeight / 2];
        assert.deepEqual(cellAt(left, top), { block, column, layer });
        assert.ok(left < width && top < height);
      }
    assert.equal(cellAt(x(0) + 1, 5), null); // on a title
    assert.equal(x(1) > x(0), page !== arabic);
  }
});

test("nearest tokens belong to the chosen capture point", () => {
  for (const point of [0, 3])
    for (const token of [0, 7]) assert.deepEqual(data.nearestTo(token, point), run.nearest[point][token]);
});
