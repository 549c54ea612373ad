// The controls, which say what is chosen and change it, and the name of the selected token.

import { checkpoints, data, heads, layouts, positionOf, tokens } from "./data.js";
import { byId, element, fill } from "./elements.js";
import { change, state } from "./state.js";

const named = (names, of) => names.map((name) => [name, of[name]]);
const measured = named(checkpoints, data.labels.checkpoints);
const compared = checkpoints.length > 1 ? [["both", "pretrained against fine-tuned"]] : [];

// Select, the key of the state that it changes, and its options where they are not the template's.
const SELECTS = [
  ["document", "document", data.documents.map((each, number) => [number, `${each.name} (${each.length} tokens)`])],
  ["layout", "layout", layouts.map((name) => [name, name])],
  ["colour", "colour"],
  ["shape", "shape"],
  ["layer", "layer", Array.from({ length: data.ratios.layers }, (_, i) => [i + 1, `Layer ${i + 1}`])],
  ["checkpoint", "checkpoint", measured],
  ["ratio-method", "method", named(data.ratios.methods, data.labels.methods)],
  ["matrix", "matrix", Object.entries(data.labels.matrices)],
  ["curve-method", "method", named(data.ratios.methods, data.labels.methods)],
  ["curve-checkpoint", "curveCheckpoint", [...compared, ...measured]],
  ["step-measure", "stepMeasure"],
  ["step-checkpoint", "stepCheckpoint", measured],
];

function listen(id, key) {
  byId(id).addEventListener("change", ({ target }) => {
    const number = Number(target.value);
    change({ [key]: Number.isNaN(number) ? target.value : number });
  });
}

for (const [id, key, options] of SELECTS) {
  if (options) fill(byId(id), options);
  listen(id, key);
}
listen("head", "head");
byId("everyone").addEventListener("change", ({ target }) => change({ everyone: target.checked }));
byId("clear").addEventListener("click", () => {
  change({ token: null });
  byId("words").focus();
});

export function drawControls() {
  for (const [id, key] of SELECTS) byId(id).value = state[key];
  byId("everyone").checked = state.everyone;
}

/** Attention alone is there by head. */
export function drawHeads() {
  const byHead = state.matrix === "attention";
  const each = Array.from({ length: byHead ? heads : 0 }, (_, i) => [i, `head ${i + 1}`]);
  fill(byId("head"), [["mean", byHead ? "mean of the heads" : "–"], ...each]);
  byId("head").value = byHead ? state.head : "mean";
  byId("head").disabled = !byHead;
}

export function drawSelection() {
  byId("clear").hidden = state.token === null;
  if (state.token === null) {
    byId("selected").textContent = "No token is selected: choose one in the map or the text.";
    return;
  }
  const where = `, position ${positionOf(state.token)} of ${data.documents[state.document].name}`;
  byId("selected").replaceChildren("Selected: ", element("b", {}, element("bdi", {}, tokens[state.token])), where);
}
