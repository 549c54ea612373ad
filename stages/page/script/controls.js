// The controls, which say what is chosen and change it; the name of the selected token; the walk through the model.

import { checkpoints, data, holds, layouts, nameOf, positionOf } from "./data.js";
import { byId, element, fill, isolated } from "./elements.js";
import { change, state } from "./state.js";

const named = (names, of) => names.map((name) => [name, of[name]]);
const measured = named(checkpoints, data.labels.checkpoints);

// Select, the key of the state that it changes, and its options where neither the template nor `drawHeads` gives them.
const SELECTS = [
  [
    "document",
    "document",
    data.documents.map((each, number) => [number, `${each.name}: ${isolated(each.begins)} (${each.length} tokens)`]),
  ],
  ["layout", "layout", layouts.map((name) => [name, name])],
  ["colour", "colour"],
  ["shape", "shape"],
  ["layer", "layer", data.labels.layers.map((name, layer) => [layer, name]).slice(1)],
  ["checkpoint", "checkpoint", measured],
  ["ratio-method", "method", named(data.ratios.methods, data.labels.methods)],
  ["matrix", "matrix", named(data.matrices, data.labels.matrices)],
  ["head", "head"],
  ["step-measure", "stepMeasure", Object.entries(data.labels.stepMeasures)],
];

for (const [id, key, options] of SELECTS) {
  if (options) fill(byId(id), options);
  byId(id).addEventListener("change", ({ target: { value: chosen } }) => {
    change({ [key]: Number.isNaN(Number(chosen)) ? chosen : Number(chosen) });
  });
}
byId("everyone").addEventListener("change", ({ target }) => change({ everyone: target.checked }));
byId("clear").addEventListener("click", () => {
  change({ token: null });
  byId("words").focus();
});

/** Attention alone is there by head. */
export function drawHeads() {
  const attention = state.matrix === "attention";
  const each = Array.from({ length: data.heads }, (_, i) => [i, `head ${i + 1}`]);
  fill(byId("head"), attention ? [["mean", "mean of the heads"], ...each] : [[state.head, "–"]]);
  byId("head").disabled = !attention;
}

/** Every control says what the state holds; the heads must be there by now. */
export function drawControls() {
  for (const [id, key] of SELECTS) byId(id).value = state[key];
  byId("everyone").checked = state.everyone;
}

export function drawSelection() {
  byId("clear").hidden = state.token === null;
  if (state.token === null) {
    byId("selected").textContent = "No token is selected: choose one in the text or the map.";
    return;
  }
  const where = `, position ${positionOf(state.token)} of ${data.documents[state.document].name}`;
  byId("selected").replaceChildren("Selected: ", element("b", {}, element("bdi", {}, nameOf(state.token))), where);
}

// Through the model: the slider over the capture points, and Play.

byId("point").max = data.sites.length - 1;
byId("point").addEventListener("input", ({ target }) => change({ point: Number(target.value) }));

function pause() {
  clearInterval(state.timer);
  change({ timer: null });
}

/** The first point of the map after `point`; -1 behind the last one. */
const after = (point) => data.sites.findIndex((_, next) => next > point && holds(state.layout, next));

function forward() {
  const next = after(state.point);
  if (next < 0) pause();
  else change({ point: next });
}

function play() {
  if (after(state.point) < 0) change({ point: after(-1) });
  change({ timer: setInterval(forward, 1000 / data.framesPerSecond) });
}

byId("play").addEventListener("click", () => (state.timer === null ? play() : pause()));

export function drawPoint() {
  const { label } = data.sites[state.point];
  byId("point").value = state.point;
  byId("point").setAttribute("aria-valuetext", label);
  byId("point-name").textContent = `${label} (${state.point + 1} of ${data.sites.length})`;
}

export function drawPlay() {
  const playing = state.timer !== null;
  byId("play").textContent = playing ? "Pause" : "Play";
  byId("play").classList.toggle("playing", playing);
  // Several names a second are too many to be read out.
  byId("point-name").setAttribute("aria-live", playing ? "off" : "polite");
}
