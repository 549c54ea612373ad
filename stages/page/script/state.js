// What is chosen, in one place. `change` is the one way to change it, and draws again the views that show what changed.

import { checkpoints, data, documentOf, layouts, mostToSee } from "./data.js";

const values = Object.assign(
  // Of all views; tokens, documents and capture points by number.
  { document: 0, token: null, layer: data.layer, method: data.method, checkpoint: checkpoints.at(-1) },
  // Of the map; `timer` runs while it plays.
  {
    point: mostToSee(layouts[0], 0),
    layout: layouts[0],
    colour: "position",
    shape: "words",
    everyone: true,
    timer: null,
  },
  // Of the text; the mouse is on the word `hovered`, and on `pointed` among the sources; `sought` is searched for.
  { head: "mean", hovered: null, pointed: null, sought: "" },
  { matrix: data.matrices.includes("alti") ? "alti" : data.matrices[0] },
  { stepMeasure: "cosine_input" },
  // How the page looks, on the screen or printed; pixels of the first picture.
  { dark: false, printing: false, colours: {}, width: 800 },
);

/** How the page opens. */
export const initial = { ...values };

// What else changes with a key.
const along = {
  document: () => ({ token: null, hovered: null }),
  token: (token) => (token === null ? {} : { document: documentOf[token] }),
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
  view.reads.clear();
  drawn = view;
  view.draw();
  drawn = null;
}

export function change(changes) {
  const all = { ...changes };
  for (const key of Object.keys(changes)) if (key in along) Object.assign(all, along[key](changes[key]), changes);
  const changed = Object.keys(all).filter((key) => values[key] !== all[key]);
  Object.assign(values, all);
  for (const view of views) if (changed.some((key) => view.reads.has(key))) draw(view);
}

/** Draw views, in this order, and again whenever what they show changes. */
export function show(...draws) {
  const added = draws.map((each) => ({ draw: each, reads: new Set() }));
  views.push(...added);
  added.forEach(draw);
}
