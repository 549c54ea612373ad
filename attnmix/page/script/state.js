// What is chosen, in one place. `change` is the one way to change it, and draws again the views that show what changed.

import { checkpoints, data, documentOf, layouts, mostToSee } from "./data.js";

const values = Object.assign(
  // Of all views; tokens, documents and capture points by number.
  { document: 0, token: null, layer: data.layer, method: data.method, checkpoint: checkpoints.at(-1) },
  // Of the map; `timer` runs while it plays.
  {
    point: mostToSee(layouts[0], 0, data.layer),
    layout: layouts[0],
    colour: "position",
    shape: "words",
    everyone: true,
    excursions: false,
    view: "fit",
    timer: null,
  },
  // Of the text; the mouse is on the word `hovered`, and on `pointed` among the sources; `sought` is searched for.
  { head: "mean", hovered: null, pointed: null, sought: "" },
  { matrix: data.matrices.includes("alti") ? "alti" : data.matrices[0] },
  // What shades the words; whether a model is shown or what fine-tuning changed; what stands beside the text.
  { shade: data.matrices.length > 0 ? "measure" : "ratio", difference: false, beside: "none" },
  { stepMeasure: "cosine_input" },
  // Of the heads: lines by "weight" or "norm"; the token whose key meets the query.
  { headValue: "weight", source: null },
  { opened: {} }, // panes whose table is open, by id
  // How the page looks, on the screen or printed.
  { dark: false, printing: false, colours: {} },
);

/** How the page opens. */
export const initial = { ...values };

/** The text of a chosen token; where that stood beside, the one that was chosen stands there instead. */
const textOf = (number) =>
  values.beside === number ? { document: number, beside: values.document } : { document: number };

/** The same place in a layer, or the layer's last; of a layer without any on the maps, where the map stands. */
function pointOf(layer) {
  const now = data.sites[values.point];
  const inLayer = (site) => site.layer === layer;
  const found = [(site) => inLayer(site) && site.point === now.point, inLayer].map((is) =>
    data.sites.findLastIndex(is),
  );
  return [...found, values.point].find((point) => point >= 0);
}

// What else changes with a key.
const along = {
  document: () => ({ token: null, hovered: null, source: null }),
  token: (token) => (token === null ? {} : textOf(documentOf[token])),
  layer: (layer) => ({ point: pointOf(layer) }),
  point: (point) => (data.sites[point].layer === 0 ? {} : { layer: data.sites[point].layer }),
};

const views = []; // of each: how it is drawn, and the keys that it read when it was last drawn
let drawn = null;

/** To be read. A view that reads a key is drawn again when that changes, so a view asks this and not the page. */
export const state = new Proxy(values, {
  get(_, key) {
    if (drawn) drawn.reads.add(key);
    return values[key];
  },
  set: () => false,
});

function draw(view) {
  view.stale = false;
  view.reads.clear();
  drawn = view;
  view.draw();
  drawn = null;
  if (view.box) delete view.box.dataset.stale;
}

/** What the style sheet does not show, as much of the page in print, has no width to draw into. */
const hasRoom = ({ box }) => !box || box.getBoundingClientRect().width > 0;

/** Draw a view now if it can be seen, and else when it is. */
function refresh(view) {
  if (view.seen && hasRoom(view)) draw(view);
  else if (!view.stale) {
    view.stale = true;
    view.box.dataset.stale = "";
  }
}

/** Draw also what is not seen; between one view and the next the page does what else there is to do. */
export function drawOneByOne(then = () => {}) {
  setTimeout(() => {
    const next = views.find((view) => view.stale && hasRoom(view));
    if (!next) return then();
    draw(next);
    return drawOneByOne(then);
  });
}

export function change(changes) {
  const all = { ...changes };
  for (const key of Object.keys(changes)) if (key in along) Object.assign(all, along[key](changes[key]), changes);
  const changed = Object.keys(all).filter((key) => values[key] !== all[key]);
  Object.assign(values, all);
  for (const view of views) if (changed.some((key) => view.reads.has(key))) refresh(view);
  // Another text's panes have other heights; what grows once it is seen pushes away what someone is about to click.
  if (changed.includes("document")) drawOneByOne();
}

/** Draw views, in this order, and again whenever what they show changes. */
export function show(...draws) {
  const added = draws.map((each) => ({ draw: each, reads: new Set(), seen: true, stale: false }));
  views.push(...added);
  added.forEach(draw);
}

const NEAR = 200; // pixels from the screen, at which a pane is drawn already
const panes = new Map(); // by the element of each

const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const view = panes.get(target);
      view.seen = isIntersecting;
      if (view.seen && view.stale && hasRoom(view)) draw(view);
    }
  },
  { rootMargin: `${NEAR}px` },
);

const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const view = panes.get(target);
    if (view.width === contentRect.width) continue;
    const first = view.width === undefined; // which the watcher tells of too
    view.width = contentRect.width;
    if (!first) refresh(view);
  }
});

/** Draw a view into an element when that is seen, and again when what it shows or the element's width changes. */
export function showSeen(box, drawInto) {
  const view = { draw: drawInto, reads: new Set(), seen: false, stale: false, box };
  views.push(view);
  panes.set(box, view);
  refresh(view);
  watcher.observe(box);
  sizes.observe(box);
}

/** Draw what is not up to date also where it is not seen, as for print. */
export function drawEverything() {
  for (const view of views) if (view.stale && hasRoom(view)) draw(view);
}
