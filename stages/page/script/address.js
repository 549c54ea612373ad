// What is chosen, in the page's address: a link shows what its sender saw.

import { checkpoints, data, layouts, tokens } from "./data.js";
import { byId } from "./elements.js";
import { change, initial, state } from "./state.js";

const PAUSE = 250; // milliseconds; a browser takes so many changes of an address and no more
const TOLD = 2000;

const upTo = (end, start = 0) => Array.from({ length: end - start }, (_, i) => i + start);
const optionsOf = (id) => [...byId(id).options].map((option) => option.value);
// What is shared, by its key of the state, and what it can be.
const SHARED = {
  document: upTo(data.documents.length),
  token: tokens,
  checkpoint: checkpoints,
  method: data.ratios.methods,
  layer: upTo(data.ratios.layers + 1, 1),
  matrix: data.matrices,
  head: ["mean", ...upTo(data.heads)],
  layout: layouts,
  point: upTo(data.sites.length),
  colour: optionsOf("colour"),
  shape: optionsOf("shape"),
  everyone: [true, false],
  stepMeasure: Object.keys(data.labels.stepMeasures),
};

/** The part of an address after #, of what differs from how the page opens; empty where nothing does. */
function written() {
  const changed = Object.keys(SHARED).filter((key) => state[key] !== initial[key] && state[key] !== null);
  return new URLSearchParams(changed.map((key) => [key, state[key]])).toString();
}

/** What an address says; what this page does not have is left as it is. */
function read(hash) {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  return Object.fromEntries(
    Object.entries(SHARED).flatMap(([key, allowed]) => {
      const found = allowed.find((each) => String(each) === said.get(key));
      return found === undefined ? [] : [[key, found]];
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
  if (location.hash.includes("=")) change(read(location.hash));
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
