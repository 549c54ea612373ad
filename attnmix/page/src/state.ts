// What is chosen, one signal for each choice. `set` is the one way to change it; the address holds it.

import { batch, computed, effect, signal, type Signal } from "@preact/signals";
import { headCount, tellingHead } from "./attention";
import { checkpoints, data, documentOf, layers, layouts, positionOf, range } from "./data";

type Choice = {
  document: number;
  token: number | null;
  checkpoint: string;
  layer: number;
  method: string; // a ratio
  measure: string; // of the pane Layers: a ratio or a derivative
  matrix: string | undefined; // a measure of sources
  head: number | null; // null: the mean of all in the text, and a telling one in Heads
  shade: string; // "sources", "ratio" or a score for the class
  change: boolean; // words are shaded by what fine-tuning changed
  beside: string | number; // "none", a checkpoint or the number of a text
  lines: string; // heads by "weight" or by "norm"
  source: number | null; // whose key meets the query
  layout: string;
  point: number;
  colour: string;
  words: boolean; // on the map
  everyone: boolean; // tokens of all texts on the map
  stepMeasure: string;
  geometry: string;
  tour: number; // 0: not on the screen
};

const firstPoint = () => pointIn(data.layer, data.sites.length - 1);
export const canChange = checkpoints.length === 2;

export const initial: Choice = {
  document: data.opens.document,
  token: data.opens.token,
  checkpoint: checkpoints.at(-1)!,
  layer: data.layer,
  method: data.method,
  measure: data.method,
  matrix: data.matrices.includes("alti") ? "alti" : data.matrices[0],
  head: null,
  shade: data.matrices.length > 0 ? "sources" : "ratio",
  change: false,
  beside: "none",
  lines: "weight",
  source: null,
  layout: layouts[0],
  point: firstPoint(),
  colour: "position",
  words: true,
  everyone: data.documents.length > 1,
  stepMeasure: "cosine_input",
  geometry: Object.keys(data.labels.geometry)[0],
  tour: 0,
};
const keys = Object.keys(initial) as (keyof Choice)[];
export const state = Object.fromEntries(keys.map((key) => [key, signal(initial[key])])) as {
  [K in keyof Choice]: Signal<Choice[K]>;
};
export const hovered = signal<number | null>(null); // the token under the pointer, in any view
export const dark = signal(matchMedia("(prefers-color-scheme: dark)").matches);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ({ matches }) => (dark.value = matches));
export const printing = signal(false);

/** The same place in a layer, or the layer's last; without any, where the map stands. */
function pointIn(layer: number, now: number): number {
  const same = data.sites.findLastIndex((site) => site.layer === layer && site.point === data.sites[now].point);
  const last = data.sites.findLastIndex((site) => site.layer === layer);
  return [same, last, now].find((point) => point >= 0)!;
}

/** What else changes with a choice. */
function consequences(changes: Partial<Choice>): Partial<Choice> {
  const all: Partial<Choice> = {};
  const now = <K extends keyof Choice>(key: K) => state[key].peek() as Choice[K];
  const { token, document, layer, point, measure } = changes;
  if (document !== undefined && document !== now("document")) Object.assign(all, { token: null, source: null });
  if (token !== undefined && token !== null && documentOf[token] !== (document ?? now("document")))
    Object.assign(all, { document: documentOf[token], source: null });
  const shown = all.document ?? document;
  if (shown !== undefined && now("beside") === shown) all.beside = now("document");
  if (layer !== undefined) all.point = pointIn(layer, now("point"));
  if (point !== undefined && data.sites[point].layer > 0) all.layer = data.sites[point].layer;
  if (measure !== undefined && data.ratios.methods.includes(measure)) all.method = measure;
  return { ...all, ...changes };
}

/** The layer that Heads shows. It follows once a slider rests, as all weights of a layer take longer than a frame. */
export const headsLayer = signal(initial.layer);
const REST = 120; // milliseconds
let resting = 0;

export function set(changes: Partial<Choice>): void {
  const all = consequences(changes);
  batch(() => {
    for (const [key, value] of Object.entries(all)) (state[key as keyof Choice] as Signal<unknown>).value = value;
  });
  const follow = () => (headsLayer.value = state.layer.peek());
  clearTimeout(resting);
  if (Object.keys(all).every((key) => key === "layer" || key === "point")) resting = window.setTimeout(follow, REST);
  else follow();
}

export const shownHead = computed(
  () => state.head.value ?? tellingHead(`${state.document.value} ${state.checkpoint.value} ${headsLayer.value}`),
);
/** The position of the selected token in the chosen text. */
export const position = computed(() => (state.token.value === null ? null : positionOf(state.token.value)));
/** What stands beside the text: another model, or another text's number; null for nothing. */
export const besideNow = computed(() => {
  const { value } = state.beside;
  if (value === "none" || value === state.document.value) return null;
  return checkpoints.includes(String(value)) && (state.change.value || value === state.checkpoint.value) ? null : value;
});

// The address. Names rather than numbers, so that the page of another run reads them too.
const siteName = (point: number) => {
  const { layer, point: name } = data.sites[point];
  return layer === 0 ? name : `${layer}.${name}`;
};
const WRITTEN: Partial<Record<keyof Choice, (value: never) => string>> = {
  document: (number: number) => data.documents[number].name,
  beside: (each: string | number) => (typeof each === "number" ? data.documents[each].name : each),
  token: (token: number | null) => (token === null ? "none" : String(positionOf(token))),
  source: (token: number | null) => (token === null ? "none" : String(positionOf(token))),
  head: (head: number | null) => (head === null ? "mean" : String(head + 1)),
  point: siteName,
};
const written = (key: keyof Choice, value: unknown) =>
  (WRITTEN[key] as (value: unknown) => string)?.(value) ?? String(value);
/** What each choice may be. */
const allowed = (key: keyof Choice, document: number): unknown[] => {
  const { start, length } = data.documents[document];
  const tokens = [null, ...range(start + length, start)];
  const { labels } = data;
  const of: Record<keyof Choice, unknown[]> = {
    ...{
      document: range(data.documents.length),
      token: tokens,
      source: tokens,
      checkpoint: checkpoints,
      layer: layers,
    },
    ...{ method: data.ratios.methods, measure: [...data.ratios.methods, ...Object.keys(labels.derivatives)] },
    ...{ matrix: data.matrices, head: [null, ...range(headCount)], lines: ["weight", "norm"] },
    ...{ shade: ["ratio", ...(data.matrices.length > 0 ? ["sources"] : []), ...Object.keys(data.importance)] },
    ...{ change: canChange ? [true, false] : [false], words: [true, false], everyone: [true, false] },
    ...{ beside: ["none", ...checkpoints, ...range(data.documents.length)], point: range(data.sites.length) },
    ...{ layout: layouts, colour: ["position", "class", "ratio", "document"], tour: range(7) },
    ...{ stepMeasure: Object.keys(labels.stepMeasures), geometry: Object.keys(labels.geometry) },
  };
  return of[key];
};

export function address(): string {
  const changed = keys.filter((key) => state[key].value !== initial[key]);
  if (state.document.value !== initial.document && state.token.value !== null && !changed.includes("token"))
    changed.push("token");
  return new URLSearchParams(changed.map((key) => [key, written(key, state[key].value)])).toString();
}

/** Choose what the address says; what it does not name, or this page does not have, is as the page opens. */
export function readAddress(): void {
  const read = new URLSearchParams(location.hash.slice(1));
  const find = (key: keyof Choice, document: number) =>
    allowed(key, document)?.find((each) => read.has(key) && written(key, each) === read.get(key));
  const document = (find("document", 0) as number | undefined) ?? initial.document;
  const chosen: Record<string, unknown> = { ...initial, document };
  if (document !== initial.document) chosen.token = null;
  for (const key of keys) {
    const each = find(key, document);
    if (each !== undefined) chosen[key] = each;
  }
  if (read.has("layer") && !read.has("point")) chosen.point = pointIn(chosen.layer as number, initial.point);
  batch(() => {
    for (const key of keys) (state[key] as Signal<unknown>).value = chosen[key];
    headsLayer.value = chosen.layer as number;
  });
}

const STEPS: (keyof Choice)[] = ["document", "token", "checkpoint", "tour"]; // each a step of Back
const PAUSE = 250; // milliseconds; browsers limit how often an address changes

export function followAddress(): void {
  if (location.hash.includes("=")) readAddress();
  const stepNow = () => STEPS.map((key) => state[key].value).join();
  let [step, timer, last] = [stepNow(), 0, address()];
  addEventListener("popstate", () => {
    if (location.hash && !location.hash.includes("=")) return; // a place on the page
    readAddress();
  });
  effect(() => {
    const [text, now] = [address(), stepNow()];
    if (text === last) return;
    last = text;
    if (text === location.hash.slice(1)) {
      step = now; // the address was read
      return;
    }
    clearTimeout(timer);
    const page = location.href.split("#")[0];
    const write = (act: "pushState" | "replaceState") => history[act](null, "", text ? `${page}#${text}` : page);
    if (location.protocol === "about:") return; // in a notebook's frame, which has no address of its own
    if (now !== step) write("pushState");
    else timer = window.setTimeout(() => write("replaceState"), PAUSE);
    step = now;
  });
}
