// Words of a text: their elements, their shades, and lines at those that a word took from or gave to.

import { data, positionOf, readingOf, readings } from "./data.js";
import { element, isolated, percent, signed } from "./elements.js";
import { isSigned, shadeOf, shadeRange } from "./measures.js";
import { state } from "./state.js";

const THICKEST = 6; // pixels, of the line at the word that gave or took the most

/** What a token is called in the chosen layer. */
export const nameThere = (token) => readingOf(state.layer).names[token];
/** The token whose card is shown: that under the mouse, or the selected one. */
export const lookedAt = () => (state.hovered === null ? state.token : state.hovered);

export const tokenAt = (event) => {
  const found = event.target.closest("[data-token]");
  return found ? Number(found.dataset.token) : null;
};

/** The words of a text; those that can be selected are options with ids. */
export function wordsOf(number, attributesOf) {
  const { start, length } = data.documents[number];
  // Only a decoder has words of its own, for which those of the text are put anew.
  const { words, apart } = readings.length > 1 ? readingOf(state.layer) : readings[0];
  const parts = [];
  for (let token = start; token < start + length; token++) {
    const attributes = { ...attributesOf(token), "data-token": token };
    if (token > start && apart[token]) parts.push(" ");
    parts.push(element("span", apart[token] ? attributes : { ...attributes, class: "piece" }, words[token]));
  }
  return parts;
}

// Shades.

export const tinted = (colour, opacity) => `rgba(${colour}, ${opacity})`;
export const strongest = () => (state.dark ? 0.5 : 0.68); // opacity that words can still be read on

/** The shade of a value between two; of one with a sign, of two colours. */
function shadeFor(value, [low, high]) {
  if (value === null || high <= low) return "";
  const share = Math.min(Math.max(isSigned() ? Math.abs(value) / high : (value - low) / (high - low), 0), 1);
  return tinted(value < 0 ? state.colours.less : state.colours.shade, strongest() * share);
}

export const isOfClass = () => state.shade in data.importance;
/** A value of the shade in words. */
export const told = (value) =>
  isOfClass() ? signed(value) : state.difference ? `${signed(100 * value, 0)} points` : percent(value);
export const shadeMeaning = () =>
  isOfClass()
    ? "score for the predicted class"
    : state.shade === "ratio"
      ? "length ratio of others"
      : "share from others";

export function shadeWords(spans, checkpoint, difference) {
  const range = shadeRange();
  for (const span of spans) {
    const token = Number(span.dataset.token);
    const value = shadeOf(token, checkpoint, difference);
    span.style.backgroundColor = shadeFor(value, range);
    const parts = [isolated(nameThere(token)), `position ${positionOf(token)}`];
    if (value !== null) parts.push(`${shadeMeaning()} ${told(value)}`);
    span.title = parts.join(", ");
  }
}

/** Lines below the words that a token took from, and above those that it gave to. */
export function markWords(spans, { took, gave }) {
  for (const [kind, found] of [
    ["took", took],
    ["gave", gave],
  ]) {
    const shares = new Map(found.map((each) => [each.token, Math.abs(each.share)]));
    const most = Math.max(...shares.values());
    for (const span of spans) {
      const share = shares.get(Number(span.dataset.token));
      span.classList.toggle(kind, share !== undefined);
      if (share === undefined) span.style.removeProperty(`--${kind}-width`);
      else
        span.style.setProperty(`--${kind}-width`, `${Math.max(1, Math.round(THICKEST * Math.sqrt(share / most)))}px`);
    }
  }
}

export const NOTHING = { took: [], gave: [] };
