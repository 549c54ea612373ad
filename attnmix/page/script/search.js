// Words of the text that hold what is searched for; Enter goes from one to the next.

import { data, readingOf } from "./data.js";
import { byId } from "./elements.js";
import { change, state } from "./state.js";

const field = byId("find");

function matches() {
  const sought = state.sought.trim().toLowerCase();
  const { start, length } = data.documents[state.document];
  const { names } = readingOf(state.layer);
  const tokens = Array.from({ length }, (_, i) => start + i);
  return sought === "" ? [] : tokens.filter((token) => names[token].toLowerCase().includes(sought));
}

/** To be drawn after `buildWords`, which makes the words anew. */
export function drawFound() {
  const found = new Set(matches());
  for (const span of byId("words").children) span.classList.toggle("found", found.has(Number(span.dataset.token)));
  byId("found").textContent = state.sought.trim() === "" ? "" : `${found.size} found`;
}

field.addEventListener("input", () => change({ sought: field.value }));
field.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  const found = matches();
  const next = found.find((token) => token > (state.token ?? -1)) ?? found[0];
  if (next === undefined) return;
  change({ token: next, hovered: null });
  byId(`token-${next}`).scrollIntoView({ block: "nearest" });
});
