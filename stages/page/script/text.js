// The view Text: the words of one text, shaded by their mixing ratio, and what a word took from others.

import { data, positionOf, ratioOf, readingOf, readings, sourcesOf, usualRatios } from "./data.js";
import { byId, element, inText, isolated, percent, ramp } from "./elements.js";
import { change, state } from "./state.js";

const box = byId("words");
const MOVES = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
const SIDEWAYS = new Set(["ArrowRight", "ArrowLeft"]);
const LISTED = 12;
const NOT_HERE =
  "What this text's words took from each other is not on the page, which would grow too large; " +
  "it is in features/mixing/contributions.";
const NOT_MEASURED = "Contribution matrices were not measured (mixing.matrices).";
const NOT_TRUSTED = "The row of this token is too small to be told from rounding, so it is not shown.";

/** What a token is called in the chosen layer. */
const nameThere = (token) => readingOf(state.layer).names[token];

/** The token whose sources are shown: that under the mouse, or the selected one. */
const lookedAt = () => (state.hovered === null ? state.token : state.hovered);
const sourcesHere = (token) => sourcesOf(token, state.layer, state.checkpoint, state.matrix, state.head);
/** What a token took from others, the most first. */
const givenTo = (token) => (sourcesHere(token) || []).filter((source) => source.token !== token);

const spanOf = (token) => byId(`token-${token}`);
const tokenAt = (event) => {
  const found = event.target.closest("[data-token]");
  return found ? Number(found.dataset.token) : null;
};

export function buildWords() {
  const { start, length, name, note, direction } = data.documents[state.document];
  byId("text-note").textContent = note;
  // Only a decoder has words of its own, for which those of the text are put anew.
  const { words, apart } = readings.length > 1 ? readingOf(state.layer) : readings[0];
  const parts = [];
  for (let token = start; token < start + length; token++) {
    const attributes = { role: "option", id: `token-${token}`, "data-token": token };
    if (token > start && apart[token]) parts.push(" ");
    parts.push(element("span", apart[token] ? attributes : { ...attributes, class: "piece" }, words[token]));
  }
  box.replaceChildren(...parts);
  box.dir = direction;
  box.setAttribute("aria-label", `Words of ${name}`);
}

const shaded = (opacity) => `rgba(${state.colours.shade}, ${opacity})`;
/** Where a number lies between two, from 0 to 1. */
const between = (share, low, high) => (high > low ? Math.min(Math.max((share - low) / (high - low), 0), 1) : 0);
const strongest = () => (state.dark ? 0.5 : 0.68); // opacity that words can still be read on

export function drawWords() {
  const [low, high] = usualRatios(state.layer, state.checkpoint, state.method);
  const looked = lookedAt();
  const took = new Map((looked === null ? [] : givenTo(looked)).map((each) => [each.token, each.share]));
  const mostTaken = Math.max(...took.values());
  for (const [i, span] of [...box.children].entries()) {
    const token = data.documents[state.document].start + i;
    const share = ratioOf(token, state.layer, state.checkpoint, state.method);
    const taken = took.get(token);
    span.style.backgroundColor = share === null ? "" : shaded(strongest() * between(share, low, high));
    span.style.borderBottomColor = taken ? state.colours.took : "transparent";
    span.style.borderBottomWidth = taken ? `${1 + Math.round(5 * Math.sqrt(taken / mostTaken))}px` : "4px";
    span.setAttribute("aria-selected", String(token === state.token));
    const parts = [isolated(nameThere(token)), `position ${positionOf(token)}`];
    if (share !== null) parts.push(`length ratio of others ${percent(share)}`);
    if (taken) parts.push(`gave ${percent(taken)} to ${isolated(nameThere(looked))}`);
    span.title = parts.join(", ");
  }
  if (state.token === null) box.removeAttribute("aria-activedescendant");
  else box.setAttribute("aria-activedescendant", `token-${state.token}`);
}

export function drawTextLegend() {
  const [low, high] = usualRatios(state.layer, state.checkpoint, state.method).map(percent);
  const ends = [`length ratio of other words ${low} or less`, `${high} or more`];
  byId("text-legend").replaceChildren(...ramp(...ends, [shaded(0), shaded(strongest())]));
}

/** The word that a source in the list stands for. */
export function drawPointed() {
  for (const span of box.querySelectorAll(".pointed")) span.classList.remove("pointed");
  if (state.pointed !== null) spanOf(state.pointed).classList.add("pointed");
}

function ratioLine(looked) {
  const share = ratioOf(looked, state.layer, state.checkpoint, state.method);
  const by = inText(data.labels.methods[state.method]);
  const line =
    share === null
      ? ""
      : `${data.labels.layers[state.layer]}: the length ratio of others is ${percent(share)} (${by}).`;
  return element("p", { class: "small" }, line);
}

function howLine(own, others) {
  const head = state.matrix === "attention" && state.head !== "mean" ? `, head ${state.head + 1}` : "";
  const where = state.matrix.endsWith("_rollout") ? "from the embedding to" : "in";
  const by = `By ${data.labels.matrices[state.matrix]}${head}, ${where} ${inText(data.labels.layers[state.layer])}`;
  return element("p", {}, `${by}, ${own} of it is its own${others ? "; from others:" : "."}`);
}

function listed(found) {
  const items = found.map(({ token, share }) => {
    const bar = element("i", { "aria-hidden": "true", style: `width: ${(100 * share) / found[0].share}%` });
    const position = element("small", {}, ` ${positionOf(token)}`);
    const name = element("span", {}, element("bdi", {}, nameThere(token)), position);
    return element("li", { "data-token": token }, bar, name, element("span", {}, percent(share)));
  });
  return element("ol", {}, ...items);
}

/** A token's own share; of one that is not among the largest, what it is less than. */
function ownShare(looked, found) {
  const own = found.find(({ token }) => token === looked);
  return own ? percent(own.share) : `at most ${percent(found.at(-1).share)}`;
}

function sourcesOfToken(looked) {
  const found = sourcesHere(looked);
  if (found === null) return [element("p", { class: "note" }, data.matrices.length > 0 ? NOT_HERE : NOT_MEASURED)];
  if (found.length === 0) return [element("p", { class: "note" }, NOT_TRUSTED)];
  const shown = givenTo(looked).slice(0, LISTED);
  const how = howLine(ownShare(looked, found), shown.length > 0);
  if (shown.length === 0) return [how];
  const own = found.find(({ token }) => token === looked)?.share ?? 0;
  const rest = Math.max(0, 1 - own - shown.reduce((sum, { share }) => sum + share, 0));
  return [how, listed(shown), element("p", { class: "small" }, `All others: ${percent(rest)}.`)];
}

export function drawSources() {
  const looked = lookedAt();
  const title = looked === null ? ["Took from"] : ["“", element("bdi", {}, nameThere(looked)), "” took from"];
  byId("sources-title").replaceChildren(...title);
  const none = [element("p", { class: "small" }, "Select a word.")];
  byId("sources").replaceChildren(...(looked === null ? none : [ratioLine(looked), ...sourcesOfToken(looked)]));
}

/** The token that a key leads to, null for none; undefined where the key is not one of a list's. */
function tokenByKey(key) {
  const { start, length } = data.documents[state.document];
  const last = start + length - 1;
  const move = box.dir === "rtl" && SIDEWAYS.has(key) ? -MOVES[key] : MOVES[key];
  const next = state.token === null ? start : Math.min(Math.max(state.token + move, start), last);
  return { Home: start, End: last, Escape: null, ...(key in MOVES ? { [key]: next } : {}) }[key];
}

box.addEventListener("keydown", (event) => {
  const token = tokenByKey(event.key);
  if (token === undefined) return;
  event.preventDefault();
  change({ token, hovered: null }); // the keyboard leads
  if (token !== null) spanOf(token).scrollIntoView({ block: "nearest" });
});
box.addEventListener("click", (event) => change({ token: tokenAt(event) ?? state.token }));
box.addEventListener("mouseover", (event) => change({ hovered: tokenAt(event) }));
box.addEventListener("mouseleave", () => change({ hovered: null }));
byId("sources").addEventListener("mouseover", (event) => change({ pointed: tokenAt(event) }));
byId("sources").addEventListener("mouseleave", () => change({ pointed: null }));
