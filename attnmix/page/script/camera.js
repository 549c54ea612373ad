// How the map is looked at: zoom and pan by mouse, wheel, fingers and keys; moves of points and of the view, eased.

import { paint, sized, withRoom } from "./canvas.js";
import { data } from "./data.js";
import { byId, element } from "./elements.js";
import { pinchable } from "./pinch.js";
import { change, state } from "./state.js";

const seat = byId("map-chart");
const canvas = seat.querySelector("canvas");
const second = element("canvas"); // of the text that stands beside, through the same zoom
export const canvases = [canvas, second];
const ROOMY = 46; // pixels around the tokens, where they are what is seen
const CLOSEST = 60; // times that the map is enlarged for the tokens to fill it
const FARTHEST = [0.6, 3000]; // times that its reader can
const OUTSIDE = 0.03; // share of the tokens on each side that may lie outside of what is seen
const FEW = 100; // tokens, of which none may
const MOVE = 450; // milliseconds, for a change of the map
const PART = 0.7; // of the time between two frames, while it plays
const STEP = 60; // pixels that a key moves the view by
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let scene = null;
let before = null; // the scene that it came from, while points move
let progress = 1;
let clock = null;
let pointed = null; // the token under the mouse
let whenDone = () => {};

const zoom = d3
  .zoom()
  .scaleExtent(FARTHEST)
  .filter(() => {
    const { type, ctrlKey, metaKey, button, touches } = d3.event;
    if (type === "wheel") return ctrlKey || metaKey || document.activeElement === seat; // else it scrolls the page
    if (type === "touchstart") return touches.length > 1; // one finger scrolls the page
    return !ctrlKey && !button;
  })
  .on("zoom", () => {
    for (const each of canvases) Object.assign(each, { __zoom: d3.event.transform }); // where d3 keeps it
    if (d3.event.sourceEvent) {
      stop();
      change({ view: "own" });
    }
    if (!clock) label();
    repaint();
  });
d3.selectAll(canvases).call(zoom).style("touch-action", "pan-y");
const held = d3.select(canvas);

const here = () => d3.zoomTransform(canvas);
const scenes = () => [scene, scene.beside].filter((each) => each !== null);

/** Where a token is seen now, on its way from the scene before. */
export function places(token) {
  const to = scene.base(token);
  const from = progress < 1 && before?.anywhere.has(token) ? before.base(token) : to;
  const share = progress < 1 ? progress : 1;
  return here().apply([from[0] + share * (to[0] - from[0]), from[1] + share * (to[1] - from[1])]);
}

function repaint() {
  if (!scene) return;
  for (const [i, each] of scenes().entries()) {
    const context = sized(canvases[i], each.width, each.height, each.sharper);
    const hovered = pointed ?? state.hovered;
    paint(context, { ...each, hovered }, here(), { at: (place) => here().apply(place), places });
  }
}

/** Choose the words that have room once nothing moves. */
function label(view = here()) {
  if (!scene) return;
  for (const each of scenes()) {
    const first = [each.selected, ...each.near].filter((token) => token !== null);
    const others = each.words ? each.shown : [];
    each.labelled = withRoom(new Set([...first, ...others]), (token) => view.apply(each.base(token)), each, view.k);
  }
  whenDone(scene.labelled, (at) => view.apply(at));
}

/** The ends of the middle of numbers, all of them where they are few. */
function most(numbers) {
  const sorted = numbers.toSorted((a, b) => a - b);
  const outside = sorted.length > FEW ? Math.floor(OUTSIDE * sorted.length) : 0;
  return [sorted[outside], sorted[sorted.length - 1 - outside]];
}

/** The zoom with which the shown tokens, the selected one among them, fill the map; at least the whole plane. */
function fitting({ anywhere, base, width, height, selected }) {
  const shown = [...anywhere];
  if (shown.length === 0) return d3.zoomIdentity;
  const [[left, right], [top, bottom]] = [0, 1].map((axis) => {
    const ends = most(shown.map((token) => base(token)[axis]));
    return d3.extent(selected === null ? ends : [...ends, base(selected)[axis]]);
  });
  const room = Math.min((width - 2 * ROOMY) / (right - left || 1), (height - 2 * ROOMY) / (bottom - top || 1));
  const k = Math.min(Math.max(room, 1), CLOSEST);
  if (k === 1) return d3.zoomIdentity;
  return d3.zoomIdentity
    .translate(width / 2, height / 2)
    .scale(k)
    .translate(-(left + right) / 2, -(top + bottom) / 2);
}

const wanted = () => ({ fit: () => fitting(scene), whole: () => d3.zoomIdentity, own: here })[scene.view]();

function stop() {
  clock?.stop();
  delete seat.dataset.moving;
  clock = null;
  progress = 1;
  before = null;
}

/** How the view goes from one zoom to another, as a function of the share of the way. */
function wayBetween(from, to, { width, height }) {
  const seen = ({ k, x, y }) => [(width / 2 - x) / k, (height / 2 - y) / k, width / k];
  const way = d3.interpolateZoom(seen(from), seen(to));
  return (share) => {
    if (share >= 1) return to;
    const [x, y, across] = way(share);
    const k = width / across;
    return d3.zoomIdentity.translate(width / 2 - x * k, height / 2 - y * k).scale(k);
  };
}

function setZoom(transform) {
  zoom.transform(held, transform);
}

/** Go to a zoom, and take the points along from the scene before, if they share its plane. */
function go(to, from) {
  const start = here();
  const playing = state.timer !== null;
  const time = playing ? Math.min(MOVE, (PART * 1000) / data.pointsPerSecond) : MOVE;
  stop();
  if (calm.matches || state.printing || (!from && start.toString() === to.toString())) {
    setZoom(to);
    return;
  }
  const view = wayBetween(start, to, scene);
  label(to);
  seat.dataset.moving = "";
  before = from;
  progress = 0;
  clock = d3.timer((elapsed) => {
    const share = d3.easeCubicInOut(Math.min(elapsed / time, 1));
    if (elapsed >= time) stop();
    else progress = share;
    setZoom(view(elapsed >= time ? 1 : share));
  });
  setZoom(start);
}

function makeRoom(forTwo) {
  seat.classList.toggle("pair", forTwo);
  if (forTwo) canvas.after(second);
  else second.remove();
}

const sameFrame = (one, other) =>
  one.width === other.width && one.height === other.height && one.layout === other.layout;

/** Show a scene; `whenLabelled` is whenDone which tokens have words. */
export function follow(next, whenLabelled) {
  const last = scene;
  scene = next;
  makeRoom(next.beside !== null);
  whenDone = whenLabelled;
  const same = last && sameFrame(last, next);
  const moved = same && last.point !== next.point && next.continues ? last : null;
  if (last && last.layout !== next.layout && next.view === "own") scene.view = "fit"; // a plane of its own
  const to = wanted();
  if (same) go(to, moved);
  else {
    stop();
    setZoom(to);
  }
}

/** Mark the token that is pointed at elsewhere. */
export function drawHovered() {
  if (state.hovered === null || scene?.anywhere.has(state.hovered)) repaint();
}

/** What is shown on a canvas now; null before the map was seen. */
export const sceneOn = (target) => (target === second ? scene?.beside : scene) ?? null;

/** Where a place on the screen is without zoom, and by how much it is enlarged. */
export function unzoomed({ clientX, clientY, target }) {
  const box = target.getBoundingClientRect();
  return { at: here().invert([clientX - box.left, clientY - box.top]), times: here().k };
}

/** Mark the token under the mouse, or none. */
export function mark(token) {
  pointed = token;
  repaint();
}

canvases.forEach(pinchable);

/** Zoom or move what is seen by hand. */
function by(act) {
  change({ view: "own" });
  act();
}

/** Enlarge around the selected token, if it is seen, and else around the middle. */
function enlarge(times) {
  const { width, height, selected } = scene;
  const at = selected === null ? [-1, -1] : places(selected);
  const inside = at[0] >= 0 && at[0] <= width && at[1] >= 0 && at[1] <= height;
  const [x, y] = inside ? at : [width / 2, height / 2];
  const k = Math.min(Math.max(here().k * times, FARTHEST[0]), FARTHEST[1]);
  const [left, top] = here().invert([x, y]);
  setZoom(d3.zoomIdentity.translate(x - k * left, y - k * top).scale(k));
}

const ACTS = {
  in: () => by(() => enlarge(1.5)),
  out: () => by(() => enlarge(1 / 1.5)),
  fit: () => change({ view: "fit" }),
  whole: () => change({ view: "whole" }),
};
const MOVES_OF_VIEW = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
const ZOOM_KEYS = { "+": ACTS.in, "=": ACTS.in, "-": ACTS.out, 0: ACTS.fit };

seat.addEventListener("keydown", (event) => {
  if (event.target !== seat || event.ctrlKey || event.metaKey) return;
  const move = MOVES_OF_VIEW[event.key];
  const act = move
    ? () => by(() => zoom.translateBy(held, ...move.map((each) => (each * STEP) / here().k)))
    : ZOOM_KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
for (const button of byId("map-view").querySelectorAll("button")) {
  button.addEventListener("click", () => ACTS[button.dataset.act]());
}
