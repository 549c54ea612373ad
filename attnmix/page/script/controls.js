// The controls, which say what is chosen and change it; the name of the selected token; the walk through the model.

import { besideNow } from "./beside.js";
import { checkpoints, data, holds, layouts, nameOf, positionOf } from "./data.js";
import { byId, element, fill, isolated } from "./elements.js";
import { canDiffer, shades } from "./measures.js";
import { change, initial, state } from "./state.js";

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
  ["ratio-method", "method", named(data.ratios.methods, data.labels.methods)],
  ["matrix", "matrix", named(data.matrices, data.labels.matrices)],
  ["shade", "shade", shades],
  ["head", "head"],
  ["step-measure", "stepMeasure", Object.entries(data.labels.stepMeasures)],
];

/** A control that leaves no choice in this run is not shown. */
function offer(id, options) {
  if (options) fill(byId(id), options);
  byId(id).closest("label").hidden = byId(id).options.length < 2;
}

for (const [id, key, options] of SELECTS) {
  offer(id, options);
  byId(id).addEventListener("change", ({ target: { value: chosen } }) => {
    change({ [key]: Number.isNaN(Number(chosen)) ? chosen : Number(chosen) });
  });
}

// Of the models, the third is what fine-tuning changed; it is shown of the words; elsewhere the fine-tuned model.
offer("checkpoint", canDiffer ? [...measured, ["difference", "Difference (fine-tuned minus pretrained)"]] : measured);
byId("checkpoint").addEventListener("change", ({ target: { value: chosen } }) => {
  const difference = chosen === "difference";
  change({ difference, checkpoint: difference ? checkpoints.at(-1) : chosen });
});

const besides = data.documents.map((each, number) => [number, each.name]);
/** The other model of the same text, and the other texts. */
export function drawBesides() {
  const models = measured.filter(([name]) => !state.difference && name !== state.checkpoint);
  const texts = besides.filter(([number]) => number !== state.document);
  const now = besideNow() ?? "none";
  offer("beside-choice", [["none", "nothing"], ...models, ...texts]);
  offer("map-beside", [["none", "nothing"], ...texts]); // of models the captured one alone has maps
  byId("beside-choice").value = now;
  byId("map-beside").value = checkpoints.includes(now) ? "none" : now;
}
for (const id of ["beside-choice", "map-beside"]) {
  byId(id).addEventListener("change", ({ target: { value: chosen } }) =>
    change({ beside: Number.isNaN(Number(chosen)) ? chosen : Number(chosen) }),
  );
}

byId("depth").max = data.ratios.layers;
byId("depth").closest("label").hidden = data.ratios.layers < 2;
byId("depth").addEventListener("input", ({ target }) => change({ layer: Number(target.value) }));
if (data.documents.length < 2) {
  byId("everyone").closest("label").hidden = true;
  byId("colour").querySelector("[value=document]").remove();
}
for (const key of ["everyone", "excursions"]) {
  byId(key).addEventListener("change", ({ target }) => change({ [key]: target.checked }));
}
byId("clear").addEventListener("click", () => {
  change({ token: null });
  byId("words").focus();
});

/** Attention alone is there by head. */
export function drawHeads() {
  const attention = state.matrix === "attention";
  const each = Array.from({ length: data.attention.number }, (_, i) => [i, `head ${i + 1}`]);
  offer("head", attention && each.length > 1 ? [["mean", "mean of the heads"], ...each] : [[state.head, "–"]]);
}

/** Every control says what the state holds; the heads must be there by now. */
export function drawControls() {
  for (const [id, key] of SELECTS) byId(id).value = state[key];
  byId("checkpoint").value = state.difference ? "difference" : state.checkpoint;
  byId("depth").value = state.layer;
  for (const key of ["everyone", "excursions"]) byId(key).checked = state[key];
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

/** From where the map stands; from the first point where that is the end, or where the page opened. */
function play() {
  if (after(state.point) < 0 || state.point === initial.point) change({ point: after(-1) });
  change({ timer: setInterval(forward, 1000 / data.pointsPerSecond) });
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
