// The mouse on the map: what it points at is told, what it clicks is selected.

import { canvases, mark, places, sceneOn, unzoomed } from "./camera.js";
import { CAPTURED, data, documentOf, positionOf, ratioOf } from "./data.js";
import { byId, element, percent } from "./elements.js";
import { change, state } from "./state.js";

const seatOfTip = byId("map-chart");
const tip = byId("map-tip");
const REACH = 14; // pixels from a point at which it is meant
const trees = new WeakMap(); // of the tokens of a scene, made when it is first asked for
let under = null; // the token under the mouse
let [paper] = canvases; // the one under the mouse

function treeOf(scene) {
  if (!trees.has(scene)) {
    const [x, y] = [0, 1].map((axis) => (token) => scene.base(token)[axis]);
    trees.set(scene, d3.quadtree().x(x).y(y).addAll(scene.shown));
  }
  return trees.get(scene);
}

function tokenUnder(event) {
  const scene = sceneOn(event.target);
  if (!scene) return null;
  const { at, times } = unzoomed(event);
  return treeOf(scene).find(...at, REACH / times) ?? null;
}

/** What a token is, beside it. */
function tell(token) {
  tip.hidden = token === null;
  if (token === null) return;
  const scene = sceneOn(paper);
  const site = data.sites[scene.point];
  const share = ratioOf(token, site.layer, CAPTURED, state.method);
  const parts = [`position ${positionOf(token)} of ${data.documents[documentOf[token]].name}`, site.label];
  if (share !== null) parts.push(`${data.labels.methods[state.method]}: length ratio of others ${percent(share)}`);
  tip.replaceChildren(
    element("b", {}, element("bdi", {}, scene.nameHere(token))),
    ...parts.map((each) => element("div", {}, each)),
  );
  const at = places(token);
  const [x, y] = [at[0] + paper.offsetLeft, at[1] + paper.offsetTop];
  tip.style.left = `${Math.min(Math.max(x + 14, 0), seatOfTip.clientWidth - tip.offsetWidth - 4)}px`;
  tip.style.top = `${y + 16 + tip.offsetHeight > seatOfTip.clientHeight ? y - tip.offsetHeight - 12 : y + 14}px`;
}

function pointAt(token) {
  if (token === under) return;
  under = token;
  paper.style.cursor = token === null ? "grab" : "pointer";
  tell(token);
  mark(token);
}

/** Another map has other tokens under the mouse. */
export function drawPointing() {
  if (state.layout !== null && state.point !== null) pointAt(null);
}

for (const each of canvases) {
  each.addEventListener("mousemove", (event) => {
    paper = each;
    pointAt(event.buttons ? null : tokenUnder(event));
  });
  each.addEventListener("mouseleave", () => pointAt(null));
  each.addEventListener("click", (event) => {
    const token = tokenUnder(event);
    seatOfTip.focus({ preventScroll: true });
    if (token !== null) change({ token });
  });
}
