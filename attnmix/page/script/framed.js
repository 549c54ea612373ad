// In a page that holds two runs' pages: what is chosen here is told to it, and what it says is chosen here.

import { everything, read, siteName } from "./address.js";
import { data, positionOf, readings } from "./data.js";
import { change, state } from "./state.js";

const READ_AT = 120; // pixels from the top, below the bar that stays: the part of the page there is the one that is read
export const framed = parent !== window;
const parts = [...document.querySelectorAll("header, main section[id]")];
let following = false;
let led = false; // whether the reader scrolls the other page, which this one follows

const say = (message) => parent.postMessage(message, "*");
const wordOf = (token) => readings[0].words[token].toLowerCase();

const TOKENS = ["token", "source"]; // keys of the state

/** What is chosen, and of each chosen token its word and where in its text it stands, as a share of its length. */
function chosenHere() {
  const more = TOKENS.filter((key) => state[key] !== null).flatMap((key) => {
    const share = positionOf(state[key]) / data.documents[state.document].length;
    return Object.entries({ [`${key}Word`]: wordOf(state[key]), [`${key}Share`]: share });
  });
  return new URLSearchParams([...everything(), ...more]).toString();
}

/** Where another run's token stands here: tokenizers differ, so the same word nearest to the same share; or "none". */
function placeInText(said, key) {
  const text = data.documents.find(({ name }) => name === said.get("document"));
  const inText = text ? d3.range(text.start, text.start + text.length) : [];
  const same = inText.filter((token) => wordOf(token) === said.get(`${key}Word`));
  const away = (token) => Math.abs(positionOf(token) / text.length - said.get(`${key}Share`));
  const [nearest] = same.toSorted((one, other) => away(one) - away(other));
  return nearest === undefined ? "none" : String(positionOf(nearest));
}

/** A view: tells of every choice, but for one that it was told. */
export function tellChosen() {
  const chosen = chosenHere();
  if (!following) say({ chosen });
}

function obey(said) {
  for (const key of TOKENS) if (said.has(key)) said.set(key, placeInText(said, key));
  following = true;
  change(read(said));
  following = false;
  say({ followed: chosenHere() });
}

const partNamed = (name) => parts.find(({ id }) => id === name);

/** How far the reader is: the part of the page, and the share of its height. */
function tellPart() {
  const boxes = parts.map((part) => [part.id, part.getBoundingClientRect()]).filter(([, { height }]) => height > 0);
  const [id, { top, height }] = boxes.findLast((each) => each[1].top <= READ_AT) ?? boxes[0];
  say({ part: new URLSearchParams({ part: id, share: (READ_AT - top) / height }).toString() });
}

function goTo(said) {
  const part = partNamed(said.get("part"));
  const share = Number(said.get("share"));
  const { top, height } = part?.getBoundingClientRect() ?? { height: 0 };
  if (height === 0 || !Number.isFinite(share)) return;
  led = true;
  scrollBy(0, top + share * height - READ_AT);
}

/** Once the views are drawn: listen to the page around this one, and to no one else. */
export function beginFramed() {
  document.documentElement.classList.add("framed");
  addEventListener("message", ({ source, data: text }) => {
    if (source !== parent || typeof text !== "string") return;
    const said = new URLSearchParams(text);
    if (said.has("part")) goTo(said);
    else obey(said);
  });
  for (const kind of ["wheel", "touchstart", "pointerdown", "keydown"]) {
    addEventListener(kind, () => (led = false), { capture: true, passive: true });
  }
  addEventListener("scroll", () => !led && tellPart(), { passive: true });
  // A frame has no address of its own that a link could lead to.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (!link) return;
    event.preventDefault();
    partNamed(link.hash.slice(1))?.scrollIntoView();
  });
  const sites = data.sites.map((site) => ({ name: siteName(site), label: site.label, layer: site.layer }));
  say({ about: { sites, texts: Object.fromEntries(data.documents.map(({ name, begins }) => [name, begins])) } });
}
