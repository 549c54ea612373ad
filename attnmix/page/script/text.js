// The view Text: the words of one text, shaded by one measure, and by the same measure what a word took and gave.

import { data } from "./data.js";
import { byId, element, ramp } from "./elements.js";
import { exchanged, isSigned, modelName, shadeName, shadeRange } from "./measures.js";
import { change, state } from "./state.js";
import {
  isOfClass,
  lookedAt,
  markWords,
  NOTHING,
  shadeMeaning,
  shadeWords,
  strongest,
  tinted,
  tokenAt,
  told,
  wordsOf,
} from "./words.js";

const box = byId("words");
const KEYS = new Set(["ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp", "Home", "End", "Escape"]);

const spanOf = (token) => byId(`token-${token}`);
export function buildWords() {
  const { name, note, direction } = data.documents[state.document];
  byId("text-note").textContent = note;
  box.replaceChildren(...wordsOf(state.document, (token) => ({ role: "option", id: `token-${token}` })));
  box.dir = direction;
  box.setAttribute("aria-label", `Words of ${name}`);
}

export function drawShades() {
  shadeWords(box.children, state.checkpoint, state.difference);
}

export function drawTextLegend() {
  const [low, high] = shadeRange();
  const label = byId("text-legend");
  const by = isOfClass() ? data.labels.importance[state.shade] : shadeName();
  const about = element("span", {}, `By ${by}, ${isOfClass() ? "fine-tuned" : modelName()}:`);
  if (low === high) {
    const none =
      data.matrices.length > 0 && state.shade === "measure" ? "Not on the page for this text." : "No values.";
    return label.replaceChildren(about, element("span", {}, none));
  }
  const ends = [`${shadeMeaning()} ${told(low)} or less`, `${told(high)} or more`];
  const less = isSigned() ? [tinted(state.colours.less, strongest())] : [];
  return label.replaceChildren(
    about,
    ...ramp(...ends, [...less, tinted(state.colours.shade, 0), tinted(state.colours.shade, strongest())]),
  );
}

export function drawMarks() {
  const looked = lookedAt();
  markWords(box.children, looked === null ? NOTHING : exchanged(looked));
}

export function drawSelected() {
  for (const span of box.children)
    span.setAttribute("aria-selected", String(Number(span.dataset.token) === state.token));
  if (state.token === null) box.removeAttribute("aria-activedescendant");
  else box.setAttribute("aria-activedescendant", `token-${state.token}`);
}

/** The word that a source in the list stands for. */
export function drawPointed() {
  for (const span of box.querySelectorAll(".pointed")) span.classList.remove("pointed");
  if (state.pointed !== null) spanOf(state.pointed)?.classList.add("pointed");
}

export function drawTextName() {
  const { name } = data.documents[state.document];
  byId("words-name").replaceChildren(element("bdi", {}, name), `, ${modelName()}`);
}

// Keys and mouse.

const middleOf = ({ left, right }) => (left + right) / 2;

/** The token on the next visual line, or the one before, that stands nearest to below or above another. */
function acrossLines(token, down) {
  const here = spanOf(token).getClientRects()[0];
  const places = [...box.children].map((span) => ({ token: Number(span.dataset.token), at: span.getClientRects()[0] }));
  const beyond = places.filter(({ at }) => (down ? at.top > here.bottom - 2 : at.bottom < here.top + 2));
  if (beyond.length === 0) return token;
  const line = down ? Math.min(...beyond.map(({ at }) => at.top)) : Math.max(...beyond.map(({ at }) => at.top));
  const away = ({ at }) =>
    Math.abs(middleOf(at) - middleOf(here)) + (Math.abs(at.top - line) < here.height / 2 ? 0 : 1e6);
  return beyond.toSorted((a, b) => away(a) - away(b))[0].token;
}

/** The token that a key leads to, null for none. */
function tokenByKey(key) {
  const { start, length } = data.documents[state.document];
  const last = start + length - 1;
  if (key === "Escape") return null;
  if (key === "Home" || state.token === null) return start;
  if (key === "End") return last;
  if (key === "ArrowDown" || key === "ArrowUp") return acrossLines(state.token, key === "ArrowDown");
  const forward = (key === "ArrowRight") === (box.dir !== "rtl");
  return Math.min(Math.max(state.token + (forward ? 1 : -1), start), last);
}

box.addEventListener("keydown", (event) => {
  if (!KEYS.has(event.key)) return;
  event.preventDefault();
  const token = tokenByKey(event.key);
  change({ token, hovered: null }); // the keyboard leads
  if (token !== null) spanOf(token).scrollIntoView({ block: "nearest" });
});
box.addEventListener("click", (event) => change({ token: tokenAt(event) ?? state.token }));
box.addEventListener("mouseover", (event) => change({ hovered: tokenAt(event) }));
box.addEventListener("mouseleave", () => change({ hovered: null }));
