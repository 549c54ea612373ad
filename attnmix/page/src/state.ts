// The state of the page: one signal for each choice. Only `set` changes choices. The address contains them.

import { batch, computed, effect, signal, type Signal } from "@preact/signals";
import { options } from "preact";
import { areAlike } from "./alignment";
import { headCount, tellingHead } from "./attention";
import {
  checkpoints,
  data,
  documentOf,
  hasOwnShare,
  layers,
  layouts,
  type Maybe,
  OWN_SHARE,
  positionOf,
  range,
  tokensOf,
} from "./data";

/** A choice: its initial value, and the allowed values for a text. */
const choice = <T>(initial: T, allowed: (document: number) => readonly T[]) => ({ initial, allowed });
const tokensIn = (document: number) => [null, ...tokensOf(document)];
const texts = range(data.documents.length);
const { methods } = data.ratios;
export const canChange = checkpoints.length === 2;
/** The ratios among the shares. The ratio of attention weights is 1 minus the own share in the attention matrix. */
export const shareRatios = methods.filter(
  (name) => name !== "attn_w" || name === data.method || !data.matrices.includes("attention"),
);
/** The quantities that cells and tokens can show; the first one is the default. */
export const shares = [...(hasOwnShare ? [OWN_SHARE] : []), ...data.matrices, ...shareRatios];
/** The initially selected token of a text. */
const openingToken = (document: number) => data.documents[document].start + data.opens.positions[document];
/** The initial comparison: if the page has exactly two texts and they are similar, the other text. */
const openingComparison = texts.length === 2 && areAlike(0, 1) ? 1 - data.opens.document : null;
const MAP_COLOURS = ["document", "predicted", "ratio", "class", "position"];

const choices = {
  document: choice(data.opens.document, () => texts),
  compare: choice<Maybe>(openingComparison, (document) => [null, ...texts.filter((text) => text !== document)]),
  token: choice<Maybe>(openingToken(data.opens.document), tokensIn),
  checkpoint: choice(checkpoints.at(-1)!, () => checkpoints),
  layer: choice(data.layer, () => layers),
  measure: choice(data.method, () => [...methods, ...Object.keys(data.labels.derivatives)]), // a ratio or derivative
  share: choice(shares.length > shareRatios.length ? shares[0] : data.method, () => shares),
  threshold: choice(2, () => range(31, 1)), // minimum share of a drawn line in the selected vector, in percent
  stretch: choice(false, () => [false, true]), // colours span the shown values instead of 0 to 100 %
  head: choice<Maybe>(null, () => [null, ...range(headCount)]), // null: a head that attends to other tokens
  effect: choice("", () => ["", ...Object.keys(data.importance)]), // score for the colours of tokens; "": the share
  change: choice(false, () => [false, canChange]), // show changes of shares between the models
  lines: choice("weight", () => ["weight", "norm"]), // measure of the lines of heads
  source: choice<Maybe>(null, tokensIn), // source token whose key is compared with the query
  layout: choice(layouts[0], () => layouts),
  point: choice(pointIn(data.layer, data.sites.length - 1), () => range(data.sites.length)),
  colour: choice(texts.length > 1 ? "document" : "position", () => MAP_COLOURS),
};
export type Choice = { [K in keyof typeof choices]: (typeof choices)[K]["initial"] };
const keys = Object.keys(choices) as (keyof Choice)[];
const initial = Object.fromEntries(keys.map((key) => [key, choices[key].initial])) as Choice;
export const state = Object.fromEntries(keys.map((key) => [key, signal(initial[key])])) as {
  [K in keyof Choice]: Signal<Choice[K]>;
};
/** The selected ratio; the initial ratio if a derivative is selected. */
export const ratio = computed(() => (methods.includes(state.measure.value) ? state.measure.value : data.method));
/** The matrix whose sources are listed; the first matrix if the selected measure is not a matrix. */
export const matrix = computed(() =>
  data.matrices.includes(state.share.value) ? state.share.value : data.matrices[0],
);
export const hovered = signal<Maybe>(null); // the token under the pointer, in any view
export const printing = signal(false);
export const saving = signal(false); // true while a view is saved as a picture
const night = matchMedia("(prefers-color-scheme: dark)");
const prefersDark = signal(night.matches);
night.addEventListener("change", () => (prefersDark.value = night.matches));
/** True for the dark colours; printed and saved pictures always have light colours. */
export const dark = computed(() => prefersDark.value && !printing.value && !saving.value);

/** Make a change and render it synchronously, because printing does not wait for Preact's next rendering. */
export function showAtOnce(change: () => void): void {
  const before = options.debounceRendering;
  options.debounceRendering = (render) => render();
  change();
  options.debounceRendering = before;
}

/** The index of a layer's site with the same capture point as site `now`, else of its last site, else `now`. */
function pointIn(layer: number, now: number): number {
  const same = data.sites.findLastIndex((site) => site.layer === layer && site.point === data.sites[now].point);
  const last = data.sites.findLastIndex((site) => site.layer === layer);
  return [same, last, now].find((point) => point >= 0)!;
}

/** The token named `word` in a text that is nearest to a position; null if there is none. */
function sameWord(word: string, position: number, text: number): Maybe {
  const distance = (other: number) => Math.abs(positionOf(other) - position);
  const same = tokensOf(text).filter((other) => data.readings[0].names[other] === word);
  return same.toSorted((a, b) => distance(a) - distance(b))[0] ?? null;
}

/** The selection in another text: equally named tokens; otherwise, the initially selected token and no source. */
function chosenIn(text: number): Pick<Choice, "token" | "source"> {
  const [token, source] = [state.token.peek(), state.source.peek()];
  const same = (each: number) => sameWord(data.readings[0].names[each], positionOf(each), text);
  return {
    token: token === null ? null : (same(token) ?? openingToken(text)),
    source: source === null ? null : same(source),
  };
}

/** The further changes that follow from changed choices. */
function consequences({ token, document, layer, point }: Partial<Choice>): Partial<Choice> {
  const now = state.document.peek();
  const text = typeof token === "number" ? documentOf[token] : (document ?? now);
  const more: Partial<Choice> = text === now ? {} : { document: text, ...chosenIn(text) };
  if (text !== now && text === state.compare.peek()) more.compare = now; // swap both texts
  if (layer !== undefined) more.point = pointIn(layer, state.point.peek());
  if (point !== undefined && data.sites[point].layer > 0) more.layer = data.sites[point].layer;
  return more;
}

const assign = (chosen: Partial<Choice>) =>
  batch(() => {
    for (const [key, value] of Object.entries(chosen)) (state[key as keyof Choice] as Signal<unknown>).value = value;
  });

/** The layer shown in Heads. It follows sliders with a delay, because computing a layer takes longer than a frame. */
export const headsLayer = signal(initial.layer);
const REST = 120; // milliseconds
let resting = 0;

const SINGLE_TEXT_CHOICES = new Set<keyof Choice>(["document", "compare", "token", "source", "point"]);
/** The choices that were set by the reader or by the address. */
const named = new Set<keyof Choice>();

/** The choices that also apply to pages of other texts, as a query string. */
function choicesForOthers(): string {
  // Read the values of all signals, so that effects depend on choices that are made later.
  const all = keys.map((key): [keyof Choice, string] => [key, String(state[key].value)]);
  const values: string[][] = all.filter(([key]) => named.has(key) && !SINGLE_TEXT_CHOICES.has(key));
  if (named.has("token"))
    values.push(position.value === null ? ["token", "null"] : ["position", String(position.value)]);
  return new URLSearchParams(values).toString();
}

/** The name of the selected token, which is not part of addresses. */
const chosenWord = () => (state.token.value === null ? "" : data.readings[0].names[state.token.value]);

/** Make choices, with the changes that follow from them. */
export function set(changes: Partial<Choice>): void {
  const chosen = { ...consequences(changes), ...changes };
  for (const key of Object.keys(chosen)) named.add(key as keyof Choice);
  assign(chosen);
  if (chosen.document !== undefined) hovered.value = null;
  clearTimeout(resting);
  const slides = Object.keys(chosen).every((key) => key === "layer" || key === "point");
  const follow = () => (headsLayer.value = state.layer.peek());
  if (slides) resting = window.setTimeout(follow, REST);
  else follow();
}

export const shownHead = computed(
  () => state.head.value ?? tellingHead(state.document.value, state.checkpoint.value, headsLayer.value),
);
/** The position of the selected token in its text. */
export const position = computed(() => (state.token.value === null ? null : positionOf(state.token.value)));

export function address(): string {
  const changed = keys.filter((key) => state[key].value !== initial[key]);
  return new URLSearchParams(changed.map((key) => [key, String(state[key].value)])).toString();
}

/**
 * The token that corresponds to the selected token of the previous page in the frame of `attnmix serve`.
 *
 * It is the equally named token that is nearest in position; null if there is none. If the name of the previous token
 * is unknown, it is the token at its position.
 */
function tokenOfOtherPage(document: number, place: number): Maybe {
  const { start, length } = data.documents[document];
  const near = Math.min(Math.max(0, Math.trunc(place) || 0), length - 1);
  const word = window.frameElement?.getAttribute("data-word");
  return word ? sameWord(word, near, document) : start + near;
}

/** Make the choices in the address. Missing choices and choices with invalid values get their defaults. */
function readAddress(): void {
  const read = new URLSearchParams(location.hash.slice(1));
  const find = (key: keyof Choice, document: number) => {
    const allowed: readonly unknown[] = choices[key].allowed(document);
    return allowed.find((each) => String(each) === read.get(key));
  };
  const document = (find("document", 0) as number | undefined) ?? initial.document;
  const chosen: Record<string, unknown> = { ...initial };
  if (document !== initial.document) chosen.token = null;
  for (const key of keys) {
    const each = find(key, document);
    if (each === undefined) continue;
    chosen[key] = each;
    named.add(key);
  }
  if (read.has("position")) {
    chosen.token = tokenOfOtherPage(document, Number(read.get("position")));
    named.add("token");
  }
  if (read.has("layer") && !read.has("point")) chosen.point = pointIn(chosen.layer as number, initial.point);
  if (chosen.compare === document) chosen.compare = initial.document;
  assign(chosen);
  headsLayer.value = state.layer.peek();
}

const STEPS: (keyof Choice)[] = ["document", "compare", "token", "checkpoint"]; // each change is a history entry
const PAUSE = 250; // milliseconds; browsers limit the rate of address changes

/** Read the choices in the address, and keep the address and the history of the browser up to date. */
export function followAddress(): void {
  if (location.hash.includes("=")) readAddress();
  const stepNow = () => STEPS.map((key) => state[key].value).join();
  let [step, timer, last] = [stepNow(), 0, address()];
  addEventListener("popstate", () => {
    if (!location.hash || location.hash.includes("=")) readAddress(); // other hashes are IDs of elements
  });
  effect(() => {
    // `attnmix serve` passes these to the page of the next text.
    document.documentElement.dataset.choices = choicesForOthers();
    document.documentElement.dataset.word = chosenWord();
  });
  effect(() => {
    const [text, now] = [address(), stepNow()];
    if (text === last) return;
    last = text;
    clearTimeout(timer);
    const pushed = now !== step;
    step = now;
    // The address was just read, or the page is in the frame of a notebook, which has no address.
    if (text === location.hash.slice(1) || location.protocol === "about:") return;
    const url = `${location.href.split("#")[0]}${text && "#"}${text}`;
    if (pushed) history.pushState(null, "", url);
    else timer = window.setTimeout(() => history.replaceState(null, "", url), PAUSE);
  });
}
