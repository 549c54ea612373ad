// The view Neuron: how one head comes to what it gives to one token, step by step, with every number on the way.

import { headsOf, HEADS } from "./attention.js";
import { namesHere, selectedPosition, shownHead } from "./chosen.js";
import { drawBehind } from "./behind.js";
import { data } from "./data.js";
import { byId, element, fill, inText, isolated } from "./elements.js";

import { register } from "./panes.js";
import { printedPart } from "./printed.js";
import { change, state } from "./state.js";
import { behindSoftmax, figures, largestOfVectors, normOf, meeting, strip } from "./vectors.js";

const MOST_SOURCES = 16; // of a short text, all of which are shown
const LISTED_SOURCES = 13; // of a longer one, always as many, so that what is below stays where it is
const TOP = 5; // dimensions
const THIRD = 2; // the token that is shown until one is selected

/** What the view shows; null where the text's heads are not on the page. */
function shownMeeting() {
  const heads = headsOf(state.document, state.checkpoint);
  if (!heads || heads.ranks) return null;
  const i = selectedPosition() ?? Math.min(THIRD, heads.length - 1);
  const met = meeting(heads, state.layer, shownHead(), i);
  const { start } = data.documents[state.document];
  const strongest = met.sources.reduce((most, each) => (each.weight > most.weight ? each : most));
  const own = state.source === null ? -1 : state.source - start;
  const chosen = met.sources[own] ?? strongest;
  return {
    heads,
    i,
    names: namesHere(),
    ...met,
    chosen,
    behind: behindSoftmax(heads, state.layer, shownHead(), i, met),
  };
}

/** The sources of a short text; of another the strongest, the token itself and the chosen one. */
function listedSources({ sources, i, chosen }) {
  if (sources.length <= MOST_SOURCES) return sources;
  const asked = (each) => each === chosen || each.j === i;
  const order = sources.toSorted((a, b) => asked(b) - asked(a) || b.weight - a.weight);
  return order.slice(0, LISTED_SOURCES).toSorted((a, b) => a.j - b.j);
}

const inQuotes = (name) => ["“", element("bdi", {}, name), "”"];
const columnHead = (number, ...title) =>
  element("th", { scope: "col" }, element("b", { class: "number" }, number), " ", ...title);

function headingOf({ query, scaling, softcap, behind }) {
  const width = `${query.length} numbers`;
  const cap = softcap ? `, at most ${figures(softcap)}` : "";
  return [
    element("th", { scope: "col" }, "token j"),
    columnHead("1", "key kⱼ", element("small", {}, width)),
    columnHead("2", "qᵢ × kⱼ", element("small", {}, "one by one")),
    columnHead("3", "sum", element("small", {}, "qᵢ · kⱼ")),
    columnHead("4", "score", element("small", {}, `× ${figures(scaling)}${cap}`)),
    columnHead("5", "weight aᵢⱼ", element("small", {}, "softmax")),
    ...(behind
      ? [
          columnHead("6", "value vⱼ", element("small", {}, width)),
          columnHead("7", "aᵢⱼ × vⱼ", element("small", {}, "adds up to step 8")),
        ]
      : []),
  ];
}

function nameCell(name, j, shown) {
  const pressed = String(shown.chosen.j === j);
  const button = element("button", { type: "button", "aria-pressed": pressed }, element("bdi", {}, name));
  button.dataset.source = j;
  return element("th", { scope: "row" }, button);
}

const numberCell = (text) => element("td", { class: "number" }, text);

function weightCell(weight) {
  const bar = element("i", { "aria-hidden": "true", style: `width: ${(100 * weight).toFixed(1)}%` });
  return element("td", { class: "number weight" }, bar, element("span", {}, figures(weight)));
}

function sourceRow(source, shown, largest) {
  const { j, seen, key, product } = source;
  const name = shown.names[j];
  const cell = (values, most, label) => element("td", {}, strip(values, most, `${label} of ${name}`));
  const cells = [
    nameCell(name, j, shown),
    cell(key, largest.vectors, "Key"),
    cell(product, largest.products, "Product"),
  ];
  cells.push(
    ...(seen
      ? [numberCell(figures(source.dot)), numberCell(figures(source.score)), weightCell(source.weight)]
      : [numberCell("–"), numberCell("mask"), weightCell(0)]),
  );
  if (shown.behind) {
    cells.push(cell(shown.behind.values[j], largest.values, "Value"));
    cells.push(cell(shown.behind.weighted[j], largest.weighted, "Weighted value"));
  }
  const marked = j === shown.chosen.j ? { class: "chosen" } : {};
  return element("tr", marked, ...cells);
}

function drawRows(shown) {
  const listed = listedSources(shown);
  const largest = {
    vectors: largestOfVectors([shown.query, ...listed.map(({ key }) => key)]),
    products: largestOfVectors(listed.map(({ product }) => product)),
    values: shown.behind ? largestOfVectors(shown.behind.values) : 0,
    weighted: shown.behind ? largestOfVectors(shown.behind.weighted) : 0,
  };
  const name = shown.names[shown.i];
  const query = element(
    "tr",
    { class: "query" },
    element("th", { scope: "row" }, "query qᵢ of ", ...inQuotes(name)),
    element("td", {}, strip(shown.query, largest.vectors, `Query of ${name}`)),
    element(
      "td",
      { colspan: shown.behind ? 6 : 4, class: "small" },
      `${shown.query.length} numbers, length ${figures(normOf(shown.query))}`,
    ),
  );
  byId("neuron-rows").replaceChildren(
    element("thead", {}, element("tr", {}, ...headingOf(shown))),
    element("tbody", {}, query, ...listed.map((source) => sourceRow(source, shown, largest))),
  );
  const left = shown.sources.length - listed.length;
  byId("neuron-left").textContent =
    `Strips: blue above 0, orange below; the strongest is ±${figures(largest.vectors)} in query and keys, ` +
    `±${figures(largest.products)} in products` +
    (shown.behind ? `, ±${figures(largest.values)} in values, ±${figures(largest.weighted)} once weighted.` : ".") +
    (left > 0 ? ` Of ${shown.sources.length} tokens the strongest, and the token itself; Values has all.` : "");
}

/** The chosen pair in one line of numbers, and the dimensions that decide. */
function drawPair(shown) {
  const { chosen, names, i, query, scaling, softcap, logSum } = shown;
  const pair = [...inQuotes(names[i]), " meets ", ...inQuotes(names[chosen.j]), ": "];
  if (!chosen.seen) {
    byId("neuron-pair").replaceChildren(...pair, "the mask hides it, so its weight is 0.");
    return;
  }
  const raw = chosen.dot * scaling;
  const capped = softcap ? ` → capped ${figures(chosen.score)}` : "";
  const sums = `q · k = ${figures(chosen.dot)}; × ${figures(scaling)} = ${figures(raw)}${capped}; `;
  const soft = `exp(${figures(chosen.score)} − ${figures(logSum)}) = ${figures(chosen.weight)}`;
  const decisive = [...chosen.product.keys()]
    .toSorted((a, b) => Math.abs(chosen.product[b]) - Math.abs(chosen.product[a]))
    .slice(0, TOP)
    .map((n) => `${n + 1}: ${figures(query[n])} × ${figures(chosen.key[n])} = ${figures(chosen.product[n])}`);
  byId("neuron-pair").replaceChildren(
    ...pair,
    sums,
    soft,
    `, where ${figures(logSum)} is the logarithm of the sum of exp(score) over all tokens that it sees. Dimensions that decide: `,
    decisive.join("; "),
    ".",
  );
}

const NOT_WHOLE = "Its queries and keys are not on the page as the model has them, as the text is too long.";

export function drawNeuron() {
  const shown = shownMeeting();
  byId("neuron-note").hidden = shown !== null;
  byId("neuron-whole").hidden = shown === null;
  byId("neuron-note").textContent = shown ? "" : NOT_WHOLE;
  if (!shown) return;
  const where = `${data.labels.layers[state.layer]}, head ${shownHead() + 1} of ${HEADS}`;
  byId("neuron-name").replaceChildren(...inQuotes(shown.names[shown.i]), ` in ${inText(where)}`);
  const options = shown.names.map((name, j) => [j, `${j} ${isolated(name)}`]);
  fill(byId("neuron-source"), options);
  byId("neuron-source").value = shown.chosen.j;
  drawRows(shown);
  drawPair(shown);
  drawBehind(shown);
}

const meet = (j) => change({ source: data.documents[state.document].start + Number(j) });
byId("neuron-source").addEventListener("change", ({ target }) => meet(target.value));
byId("neuron-rows").addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (!button) return;
  const { source } = button.dataset;
  meet(source);
  byId("neuron-rows").querySelector(`[data-source="${source}"]`).focus();
});

register(
  "neuron-scores",
  () => {
    const columns = ["position", "token", "q.k", "score", "weight"];
    const shown = shownMeeting();
    if (!shown) return { columns, rows: [] };
    const rows = shown.sources.map((each) => [each.j, shown.names[each.j], each.dot, each.score, each.weight]);
    return { columns, rows };
  },
  () => printedPart(byId("neuron-scores")),
);
register(
  "neuron-steps",
  () => {
    const columns = ["step", "dimension", "value"];
    const shown = shownMeeting();
    if (!shown) return { columns, rows: [] };
    const { query, chosen, behind } = shown;
    const pair = [
      ["query", query],
      ["key", chosen.key],
      ["product", chosen.product],
    ];
    const all = [...pair, ...(behind ? [["value", behind.values[chosen.j]], ...behind.steps] : [])];
    return { columns, rows: all.flatMap(([name, vector]) => [...vector].map((value, n) => [name, n + 1, value])) };
  },
  () => printedPart(byId("neuron-steps")),
);
