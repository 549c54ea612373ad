// Beside the text the same in another model, or another text, in one layer.

import { checkpoints, data } from "./data.js";
import { byId, element, inText } from "./elements.js";
import { exchanged, modelName } from "./measures.js";
import { change, state } from "./state.js";
import { lookedAt, markWords, NOTHING, shadeWords, tokenAt, wordsOf } from "./words.js";

const beside = byId("beside-words");

/** The other model, or the number of the other text; null where that is the one that is chosen. */
export function besideNow() {
  const { beside: chosen } = state;
  if (checkpoints.includes(chosen)) return state.difference || chosen === state.checkpoint ? null : chosen;
  return chosen === "none" || chosen === state.document ? null : chosen;
}

export function buildBeside() {
  const shown = besideNow();
  byId("beside").hidden = shown === null;
  byId("text").classList.toggle("two", shown !== null);
  if (shown === null) return;
  const model = checkpoints.includes(shown);
  const { name, direction } = data.documents[model ? state.document : shown];
  beside.replaceChildren(...wordsOf(model ? state.document : shown, () => ({})));
  beside.dir = direction;
  const called = model ? inText(data.labels.checkpoints[shown]) : modelName();
  byId("beside-name").replaceChildren(element("bdi", {}, name), `, ${called}`);
}

export function drawBeside() {
  const shown = besideNow();
  if (shown === null) return;
  const model = checkpoints.includes(shown) ? shown : null;
  shadeWords(beside.children, model ?? state.checkpoint, model === null && state.difference);
  markWords(beside.children, lookedAt() === null || !model ? NOTHING : exchanged(lookedAt(), model));
}

beside.addEventListener("click", (event) => change({ token: tokenAt(event) ?? state.token }));
