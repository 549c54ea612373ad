// A part of the page that is words and strips, as a drawing that stands alone.

import { drawing } from "./elements.js";
import { state } from "./state.js";

const BASELINE = 0.24; // of a line's height, above its lower edge

/** Each word of a text where it stands. */
function wordsIn(node, { left, top }) {
  const { color, fontSize, fontWeight } = getComputedStyle(node.parentElement);
  const range = document.createRange();
  return [...node.data.matchAll(/\S+/g)].map(({ 0: word, index }) => {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const box = range.getBoundingClientRect();
    const fill = node.parentElement.matches("b.number") ? state.colours.ink : color; // which has no ground here
    const looks = { fill, "font-size": fontSize, "font-weight": fontWeight, "font-family": "sans-serif" };
    const size = { textLength: box.width, lengthAdjust: "spacingAndGlyphs" };
    const y = box.bottom - top - BASELINE * box.height;
    return drawing("text", { ...looks, ...size, x: box.left - left, y }, word);
  });
}

/** Its words and strips, at their places. */
export function printedPart(box) {
  const origin = box.getBoundingClientRect();
  const [width, height] = [Math.ceil(box.scrollWidth), Math.ceil(origin.height)];
  const strips = [...box.querySelectorAll("canvas")].map((canvas) => {
    const { left, top, ...at } = canvas.getBoundingClientRect().toJSON();
    const place = { x: left - origin.left, y: top - origin.top, width: at.width, height: at.height };
    const edge = drawing("rect", { ...place, fill: "none", stroke: state.colours.edge });
    const looks = { preserveAspectRatio: "none", style: "image-rendering: pixelated" };
    return [drawing("image", { ...place, ...looks, href: canvas.toDataURL() }), edge];
  });
  const texts = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  const words = [];
  while (texts.nextNode()) words.push(...wordsIn(texts.currentNode, origin));
  const ground = drawing("rect", { width: "100%", height: "100%", fill: state.colours.paper });
  const size = { width, height, viewBox: `0 0 ${width} ${height}` };
  return drawing("svg", size, ground, ...strips.flat(), ...words);
}
