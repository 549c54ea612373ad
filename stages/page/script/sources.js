// Beside the text: the tokens that a token took most from.

import { data, positionOf, ratioOf, tokens } from "./data.js";
import { byId, element, inText, percent } from "./elements.js";
import { state } from "./state.js";
import { lookedAt, sourcesHere } from "./text.js";

const LISTED = 12;
const NOT_HERE =
  "What this text's words took from each other is not on the page, which would grow too large; " +
  "it is in features/mixing/contributions.";
const NOT_MEASURED = "Contribution matrices were not measured (mixing.matrices).";
const NOT_TRUSTED = "The row of this token is too small to be told from rounding, so it is not shown.";

function ratioLine(looked) {
  const share = ratioOf(looked, state.layer, state.checkpoint, state.method);
  const by = inText(data.labels.methods[state.method]);
  const line = share === null ? "" : `Layer ${state.layer}: ${percent(share)} from others (${by}).`;
  return element("p", { class: "small" }, line);
}

function howLine() {
  const head = state.matrix === "attention" && state.head !== "mean" ? `, head ${state.head + 1}` : "";
  const where = state.matrix.endsWith("_rollout") ? "from the embedding to" : "in";
  return element("p", {}, `By ${data.labels.matrices[state.matrix]}${head}, ${where} layer ${state.layer}:`);
}

function listed(found, looked) {
  const items = found.map(({ token, share }) => {
    const bar = element("i", { "aria-hidden": "true", style: `width: ${(100 * share) / found[0].share}%` });
    const which = token === looked ? " (itself)" : element("small", {}, ` ${positionOf(token)}`);
    const name = element("bdi", {}, tokens[token], which);
    return element("li", { "data-token": token }, bar, name, element("span", {}, percent(share)));
  });
  return element("ol", {}, ...items);
}

function sourcesOfToken(looked) {
  const found = sourcesHere(looked);
  if (found === null) return [element("p", { class: "note" }, data.matrices.length > 0 ? NOT_HERE : NOT_MEASURED)];
  if (found.length === 0) return [element("p", { class: "note" }, NOT_TRUSTED)];
  const shown = found.slice(0, LISTED);
  const others = Math.max(0, 1 - shown.reduce((sum, { share }) => sum + share, 0));
  return [howLine(), listed(shown, looked), element("p", { class: "small" }, `All others: ${percent(others)}.`)];
}

export function drawSources() {
  const looked = lookedAt();
  byId("sources-title").textContent = looked === null ? "Took from" : `“${tokens[looked]}” took from`;
  const none = [element("p", { class: "small" }, "Select a word.")];
  byId("sources").replaceChildren(...(looked === null ? none : [ratioLine(looked), ...sourcesOfToken(looked)]));
}
