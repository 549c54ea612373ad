// What the lines of a head say, in words, with their scale.

import { headsOf, HEADS } from "./attention.js";
import { matrixHere, namesHere, shownHead } from "./chosen.js";
import { data } from "./data.js";
import { byId, inText, isolated, percent, ramp } from "./elements.js";
import { endsOf, ownerOf, PALEST, scaleOf, STRONGEST_ENDS } from "./ends.js";
import { state } from "./state.js";

/** A weight as a share, a length as a number. */
const said = (value) => (state.headValue === "weight" ? percent(value) : value.toPrecision(3));

const listOf = (pairs, names) =>
  pairs.map(([at, value]) => `“${isolated(names[at])}” ${said(value).replaceAll(" ", "\u00A0")}`).join(", ");
const mostOf = (pairs) =>
  pairs
    .filter(([, value]) => value > 0)
    .toSorted((a, b) => b[1] - a[1])
    .slice(0, 4);

/** What a token takes and gives most, in words. */
function saidOf(rows, looked, { folded }) {
  const names = namesHere();
  const taken = mostOf([...rows[looked].entries()]);
  const given = mostOf([...rows.entries()].filter(([i]) => i !== looked).map(([i, row]) => [i, row[looked]]));
  const others = given.length > 0 ? `; most is taken from it by ${listOf(given, names)}` : "";
  const rest = folded ? ` Of ${rows.length} tokens the strongest stand on each side, ${STRONGEST_ENDS} at most.` : "";
  return `“${isolated(names[looked])}” takes most from ${listOf(taken, names)}${others}.${rest}`;
}

const between = (colour, least) => [`color-mix(in srgb, ${colour} ${100 * least}%, transparent)`, colour];

/** What the colours stand for: one scale for what a token takes and what is taken from it, or that of the head. */
function legendOf(rows, looked) {
  const [what, none] = state.headValue === "weight" ? ["weight", "0 %"] : ["length", "0"];
  const largest = said(scaleOf(rows, looked));
  const shade = `rgb(${state.colours.shade})`;
  if (looked === null) return ramp(`${what} ${none}`, largest, between(shade, 0));
  return [
    ...ramp(`it takes: ${what} ${none}`, largest, between(state.colours.took, PALEST)),
    ...ramp(`is taken from it: ${none}`, largest, between(shade, PALEST)),
  ];
}

/** What the lines show, in words, and their scale. */
export function drawHeadsSaid() {
  const rows = matrixHere();
  const where = `${data.labels.layers[state.layer]}, head ${shownHead() + 1} of ${HEADS}`;
  byId("heads-name").textContent = where;
  const ends = rows && endsOf(rows);
  const looked = rows ? ownerOf(ends) : null;
  const text = looked === null ? "Select a token to see its lines alone." : saidOf(rows, looked, ends);
  byId("heads-said").textContent = rows ? text : "";
  byId("head-value").value = state.headValue;
  byId("heads-legend").replaceChildren(...(rows ? legendOf(rows, looked) : []));
}

const NOT_HERE_HEADS =
  "This text's queries and keys are not on the page, which would grow too large; they are in features/measure/heads.";

export function drawHeadsNote() {
  const heads = headsOf(state.document, state.checkpoint);
  const notes = [];
  if (!heads) notes.push(NOT_HERE_HEADS);
  else if (heads.bits === 8) {
    const [mean, most] = [heads.mean_error, heads.largest_error].map((off) => off.toPrecision(1));
    notes.push(
      `The text is long: of each head the strongest ${heads.dimensions} of ${data.attention.width} dimensions are here, ` +
        `and a weight is off by ${mean} on average, by ${most} at most. All are in features/measure/heads.`,
    );
  }
  if (data.encoder !== null && state.layer > data.encoder)
    notes.push(`Of ${inText(data.labels.layers[state.layer])} this is self-attention; cross-attention is not shown.`);
  byId("heads-note").hidden = notes.length === 0;
  byId("heads-note").textContent = notes.join(" ");
}
