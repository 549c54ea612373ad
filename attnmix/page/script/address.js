// What is chosen, in the page's address: a link shows what its sender saw.

import { checkpoints, data, layouts, positionOf, tokens } from "./data.js";
import { byId } from "./elements.js";
import { canDiffer, shades } from "./measures.js";
import { change, initial, state } from "./state.js";

const PAUSE = 250; // milliseconds; a browser takes so many changes of an address and no more
const TOLD = 2000;

const upTo = (end, start = 0) => Array.from({ length: end - start }, (_, i) => i + start);
const optionsOf = (id) => [...byId(id).options].map((option) => option.value);
// What is shared, by its key of the state, and what it can be.
const SHARED = {
  document: upTo(data.documents.length),
  token: [null, ...tokens],
  checkpoint: checkpoints,
  method: data.ratios.methods,
  layer: upTo(data.ratios.layers + 1, 1),
  matrix: data.matrices,
  shade: shades.map(([name]) => name),
  difference: canDiffer ? [true, false] : [false],
  beside: ["none", ...checkpoints, ...upTo(data.documents.length)],
  head: ["mean", ...upTo(data.attention.number)],
  headValue: ["weight", "norm"],
  source: [null, ...tokens],
  layout: layouts,
  point: upTo(data.sites.length),
  colour: optionsOf("colour"),
  shape: optionsOf("shape"),
  everyone: [true, false],
  excursions: [true, false],
  stepMeasure: Object.keys(data.labels.stepMeasures),
};

const siteName = ({ layer, point }) => (layer === 0 ? point : `${layer}.${point}`);
const inItsText = (token) => (token === null ? "none" : positionOf(token));
// Names rather than numbers, so that the page of another run finds the same; tokens by their position in the text.
const NAMED = {
  document: (number) => data.documents[number].name,
  beside: (chosen) => data.documents[chosen]?.name ?? chosen,
  token: inItsText,
  source: inItsText,
  point: (number) => siteName(data.sites[number]),
};
const nameIn = (key, chosen) => String(key in NAMED ? NAMED[key](chosen) : chosen);

/** The part of an address after #, of what differs from how the page opens; empty where nothing does. */
function written() {
  const changed = Object.keys(SHARED).filter((key) => state[key] !== initial[key]);
  return new URLSearchParams(changed.map((key) => [key, nameIn(key, state[key])])).toString();
}

/** What an address says; what this page does not have is left as it is. */
function read(said) {
  const found = (key, allowed) => allowed.find((each) => nameIn(key, each) === said.get(key));
  const number = said.has("document") ? found("document", SHARED.document) : state.document;
  const { start, length } = data.documents[number] ?? { start: 0, length: 0 };
  const inText = [null, ...upTo(start + length, start)];
  return Object.fromEntries(
    Object.entries({ ...SHARED, token: inText, source: inText }).flatMap(([key, allowed]) => {
      const chosen = found(key, allowed);
      return chosen === undefined ? [] : [[key, chosen]];
    }),
  );
}

let timer = null;

export function writeAddress() {
  const text = written();
  clearTimeout(timer);
  timer = setTimeout(() => {
    // A place on the page that somebody went to stays in the address until something else is chosen.
    if (text || location.hash.includes("=")) history.replaceState(null, "", text ? `#${text}` : " ");
  }, PAUSE);
}

/** Before the first drawing, and when somebody pastes another link. */
export function readAddress() {
  if (location.hash.includes("=")) change(read(new URLSearchParams(location.hash.slice(1))));
}

addEventListener("hashchange", readAddress);
const button = byId("copy-link");
button.addEventListener("click", async () => {
  const copied = await navigator.clipboard.writeText(`${location.href.split("#")[0]}#${written()}`).then(
    () => true,
    () => false,
  );
  button.textContent = copied ? "Copied" : "Copy the address";
  setTimeout(() => (button.textContent = "Copy link"), TOLD);
});
