// The canvas of the map: tokens as dots at one capture point, with zoom and transitions between points.

import { computed, effect, signal, untracked } from "@preact/signals";
import { interpolateViridis, least, pointer, select, timer, zoom, zoomIdentity, type ZoomTransform } from "d3";
import { useLayoutEffect, useRef } from "preact/hooks";
import { kindColours } from "./colours";
import * as run from "./data";
import { captured, data, documentOf, nearestTo, once, placesOf, positionOf, range, tokensOf } from "./data";
import { percent } from "./format";
import { dark, hovered, printing, ratio, set, state } from "./state";
import { type DrawnCanvas, PICTURE_FONT, shape, textWidth, widthAttributes } from "./picture";
import { ARROWS, PRINTED_WIDTH } from "./ui";

const MOVE = 450; // milliseconds of the transition between two capture points
const MARGIN = 26; // pixels
const FONT_SIZE = 13; // pixels
const FONT = `${FONT_SIZE}px ${PICTURE_FONT}`;
const HALO = 3; // pixels, width of the background colour around a name
const PRINT_SHARPNESS = 3; // canvas pixels per CSS pixel
const PRINTED_HEIGHT = 700; // pixels, maximum height
const STEPS = 24; // distinct colours of a scale; dots of one colour are drawn together
const MANY = 1500; // with more tokens, dots are smaller
const NAME_GAP = 6; // pixels between the middle of a dot and its name
const NAME_MARGIN = 2; // pixels, left and right of a name
const NAME_RISE = 5; // pixels from the middle of a dot to the baseline of a name above it
const NAME_FALL = 14; // pixels from the middle of a dot to the baseline of a name below it
const CELL = 16; // pixels, cells of the grid that finds names and dots near a place
const CLICK = 14; // pixels, maximum distance of a click from a dot
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Viridis without the end that has little contrast to the background. */
export const viridis = (share: number) => interpolateViridis(dark.value ? 0.25 + 0.75 * share : 0.86 * share);
export const SOFT = "#8a8f99";
export const textColour = (number: number) => {
  const kinds = kindColours();
  return data.documents.length <= kinds.length ? kinds[number] : number === state.document.value ? kinds[0] : SOFT;
};
/** The predicted classes of the texts, in the order of their names. */
export const classes = [...new Set(data.documents.flatMap(({ predicted }) => predicted ?? []))].toSorted();
export const classColour = (name: string | null) => kindColours()[classes.indexOf(name ?? "")] ?? SOFT;

const site = computed(() => data.sites[state.point.value]);
const reading = computed(() => data.readings[site.value.reading]);
export const nameHere = (token: number) => reading.value.names[token];

function colourOf(token: number): string {
  const [number, kind] = [documentOf[token], state.colour.value];
  const step = (share: number) => viridis(Math.round(share * STEPS) / STEPS);
  if (kind === "position") return step(positionOf(token) / Math.max(data.documents[number].length - 1, 1));
  if (kind === "class") return kindColours()[reading.value.classes[token]];
  if (kind === "predicted") return classColour(data.documents[number].predicted);
  if (kind === "document") return textColour(number);
  const share = run.ratioOf(token, site.value.layer, captured, ratio.value);
  return share === null ? SOFT : step(share / run.largestRatio(captured, ratio.value));
}

/** The tokens on the map. */
export const shown = computed(() => {
  const [x] = placesOf(state.layout.value, state.point.value);
  return range(run.tokenCount).filter((token) => !Number.isNaN(x[token]));
});
/** The shown tokens by colour and opacity. Tokens of other texts are fainter unless colours distinguish texts. */
const groups = computed(() => {
  const others = ["document", "predicted"].includes(state.colour.value) ? 1 : 0.35;
  const opacity = (token: number) => (documentOf[token] === state.document.value ? 1 : others);
  return Map.groupBy(shown.value, (token) => `${colourOf(token)} ${opacity(token)}`);
});

const screen = signal({ width: 600, height: 480 });
/** The size of the printed map relative to the map on the screen. */
const scale = computed(() => {
  const { width, height } = screen.value;
  return printing.value ? Math.min(PRINTED_WIDTH / width, PRINTED_HEIGHT / height) : 1;
});
/** The size of the map. In print, only the distances between dots are scaled, not the dots and names. */
const frame = computed(() => ({ width: screen.value.width * scale.value, height: screen.value.height * scale.value }));
const camera = signal<ZoomTransform>(zoomIdentity);
export const playing = signal(false);

/** The pixel coordinates `[x, y]` of all tokens on the screen before zooming. */
const target = computed(() => {
  const { width, height } = screen.value;
  const side = Math.min(width - 3 * MARGIN, height - 2 * MARGIN); // side of the square that contains all texts
  const [x, y] = placesOf(state.layout.value, state.point.value);
  const middle = (width - MARGIN) / 2; // names are to the right of their dots
  return [x.map((each) => middle + (each - 0.5) * side), y.map((each) => height / 2 - (each - 0.5) * side)];
});
let moving: { from: Float32Array[]; progress: number } | null = null;

/** Return a function for the current position of a token, which is interpolated during transitions. */
function placer(): (token: number) => [number, number] {
  const [view, to, way] = [camera.peek(), target.peek(), moving];
  const onMap = (x: number, y: number): [number, number] => {
    const [left, top] = view.apply([x, y]);
    return [left * scale.peek(), top * scale.peek()];
  };
  if (!way) return (token) => onMap(to[0][token], to[1][token]);
  const between = (axis: number, token: number) => {
    const [start, end] = [way.from[axis][token], to[axis][token]];
    return Number.isNaN(start) ? end : start + way.progress * (end - start);
  };
  return (token) => onMap(between(0, token), between(1, token));
}

/** The colours of the style sheet, read only when they change, because `getComputedStyle` can trigger a layout. */
const theme = computed(() => {
  void dark.value;
  const style = getComputedStyle(document.getElementById("map-canvas")!);
  return ["--ink", "--paper", "--mark", "--took", "--soft"].map((name) => style.getPropertyValue(name).trim());
});
const widthOf = once((name: string, bold: boolean) => textWidth(name, FONT_SIZE, bold));

type Box = { left: number; right: number; top: number; bottom: number };
/** A name next to its dot: the token, the start of the text and its baseline, and the covered area. */
type Label = { token: number; x: number; y: number; box: Box };

const meet = (a: Box, b: Box) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

/** Boxes by the cells of a grid, to find those that meet a box without looking at all of them. */
class Boxes {
  private readonly cells = new Map<number, Box[]>();

  add(box: Box): void {
    for (const cell of this.near(box)) {
      const boxes = this.cells.get(cell);
      if (boxes) boxes.push(box);
      else this.cells.set(cell, [box]);
    }
  }

  /** True if one of the boxes meets `box`. */
  hasIn(box: Box): boolean {
    return this.near(box).some((cell) => this.cells.get(cell)?.some((each) => meet(each, box)));
  }

  private near({ left, right, top, bottom }: Box): number[] {
    const cells = [];
    for (let row = Math.floor(top / CELL); row * CELL < bottom; row++)
      for (let column = Math.floor(left / CELL); column * CELL < right; column++) cells.push(row * 10_000 + column);
    return cells;
  }
}

const isMark = (name: string) => /^[\p{P}\p{S}]$/u.test(name);
const radiusOfDots = () => (shown.peek().length > MANY ? 2.4 : 4);

/**
 * The names that fit next to their dots without covering dots or other names.
 *
 * Names are placed in order of priority: selected token, its neighbours, its text, all other tokens. The selected
 * token always has its name; other punctuation marks have none, because they would look like small dots.
 */
function labels(place: (token: number) => [number, number]): Label[] {
  const { width, height } = frame.peek();
  const isInside = ({ left, right, top, bottom }: Box) => left > 0 && right < width && top > 0 && bottom < height;
  const radius = radiusOfDots();
  const dots = new Boxes();
  const dotOf = new Map<number, Box>();
  for (const token of shown.peek()) {
    const [x, y] = place(token);
    const dot = { left: x - radius, right: x + radius, top: y - radius, bottom: y + radius };
    if (!(x > 0 && y > 0 && x < width && y < height)) continue;
    dotOf.set(token, dot);
    dots.add(dot);
  }
  const names = new Boxes();
  const selected = state.token.peek();
  const first = selected === null ? [] : [selected, ...nearestTo(selected, state.point.peek())];
  const placed: Label[] = [];
  for (const token of new Set([...first, ...tokensOf(state.document.peek()), ...dotOf.keys()])) {
    if (!dotOf.has(token) || (token !== selected && isMark(nameHere(token)))) continue;
    const candidates = labelsAt(token, place(token)).filter(({ box }) => isInside(box) && !names.hasIn(box));
    const free = candidates.find(({ box }) => !dots.hasIn(box));
    const label = free ?? (token === selected ? candidates[0] : undefined);
    if (!label) continue;
    names.add(label.box);
    placed.push(label);
  }
  return placed;
}

/** The possible names of a dot: above or below it, to its right or left, moved into the map if they are too long. */
function labelsAt(token: number, [x, y]: [number, number]): Label[] {
  const width = widthOf(nameHere(token), token === state.token.peek());
  return [y - NAME_RISE, y + NAME_FALL].flatMap((baseline) =>
    [x + NAME_GAP, x - NAME_GAP - width].map((wanted) => {
      const start = Math.max(2 * NAME_MARGIN, Math.min(wanted, frame.peek().width - width - 2 * NAME_MARGIN));
      const [left, right] = [start - NAME_MARGIN, start + width + NAME_MARGIN];
      return { token, x: start, y: baseline, box: { left, right, top: baseline - FONT_SIZE, bottom: baseline + HALO } };
    }),
  );
}

type Dots = { colour: string; opacity: number; places: [number, number][] };
type Name = { text: string; x: number; y: number; colour: string; bold: boolean; anchor: "start" | "end" };
type Ring = { x: number; y: number; radius: number; colour: string; width: number };

/** The axis labels of a PCA map: the explained variance of both principal components. */
function axisNames(width: number, height: number): Name[] {
  const [across, up] = data.variances[state.point.peek()];
  if (state.layout.peek() !== "pca" || across === null || up === null) return [];
  const right = `component 1: ${percent(across)} of the variance →`;
  const looks = { colour: theme.peek()[4], bold: false };
  return [
    { text: right, x: width - 8, y: height - 8, anchor: "end", ...looks },
    { text: `↑ component 2: ${percent(up)}`, x: 8, y: 18, anchor: "start", ...looks },
  ];
}

/** The current contents of the map. */
function scene(): { radius: number; paper: string; dots: Dots[]; names: Name[]; rings: Ring[] } {
  const { width } = frame.peek();
  const [ink, paper, mark, took, soft] = theme.peek();
  const [place, token] = [placer(), state.token.peek()];
  const radius = radiusOfDots();
  const dots = [...groups.peek()].map(([key, group]) => {
    const [colour, opacity] = key.split(" ");
    return { colour, opacity: Number(opacity), places: group.map(place) };
  });
  const names = labels(place).map(({ token: each, x, y }): Name => {
    const colour = each === token ? mark : documentOf[each] === state.document.peek() ? ink : soft;
    return { text: nameHere(each), x, y, anchor: "start", colour, bold: each === token };
  });
  names.push(...axisNames(width, frame.peek().height));
  const rings: Ring[] = [];
  const addRing = (each: number, wider: number, colour: string, lineWidth: number) => {
    const [x, y] = place(each);
    if (!Number.isNaN(x)) rings.push({ x, y, radius: radius + wider, colour, width: lineWidth });
  };
  if (token !== null) {
    for (const near of nearestTo(token, state.point.peek())) addRing(near, 3, took, 1.4);
    addRing(token, 4.5, mark, 2.6);
  }
  if (hovered.peek() !== null) addRing(hovered.peek()!, 3, ink, 2);
  return { radius, paper, dots, names, rings };
}

function paint(canvas: HTMLCanvasElement) {
  const sharpness = printing.peek() ? PRINT_SHARPNESS : Math.max(1, devicePixelRatio);
  const { width, height } = frame.peek();
  const { radius, paper, dots, names, rings } = scene();
  Object.assign(canvas, { width: Math.round(width * sharpness), height: Math.round(height * sharpness) });
  const context = canvas.getContext("2d")!;
  context.setTransform(sharpness, 0, 0, sharpness, 0, 0);
  context.clearRect(0, 0, width, height);
  for (const { colour, opacity, places } of dots) {
    Object.assign(context, { fillStyle: colour, globalAlpha: opacity });
    context.beginPath();
    for (const [x, y] of places) {
      context.moveTo(x + radius, y);
      context.arc(x, y, radius, 0, 2 * Math.PI);
    }
    context.fill();
  }
  Object.assign(context, { globalAlpha: 1, lineJoin: "round" });
  for (const { text, x, y, colour, bold, anchor } of names) {
    const font = bold ? `bold ${FONT}` : FONT;
    Object.assign(context, { font, fillStyle: colour, strokeStyle: paper, lineWidth: HALO, textAlign: anchor });
    context.strokeText(text, x, y);
    context.fillText(text, x, y);
  }
  for (const { x, y, radius: size, colour, width: lineWidth } of rings) {
    Object.assign(context, { strokeStyle: colour, lineWidth });
    context.beginPath();
    context.arc(x, y, size, 0, 2 * Math.PI);
    context.stroke();
  }
}

/** Return the contents of the map as SVG shapes for a saved picture, without the dots outside of the map. */
function shapes(): SVGElement {
  const { width, height } = frame.peek();
  const { radius, paper, dots, names, rings } = scene();
  const isInside = ([x, y]: [number, number]) =>
    x > -radius && y > -radius && x < width + radius && y < height + radius;
  const circles = dots.map(({ colour, opacity, places }) =>
    shape(
      "g",
      { fill: colour, "fill-opacity": opacity },
      ...places.filter(isInside).map(([cx, cy]) => shape("circle", { cx, cy, r: radius })),
    ),
  );
  const halo = { stroke: paper, "stroke-width": HALO, "stroke-linejoin": "round", "paint-order": "stroke" };
  const texts = names.map(({ text, x, y, colour, bold, anchor }) => {
    const looks = { fill: colour, "font-weight": bold ? 700 : null, "text-anchor": anchor };
    return shape("text", { x, y, ...looks, ...widthAttributes(textWidth(text, FONT_SIZE, bold)) }, text);
  });
  const ringed = rings.map(({ x, y, radius: r, colour, width: thickness }) =>
    shape("circle", { cx: x, cy: y, r, fill: "none", stroke: colour, "stroke-width": thickness }),
  );
  const labelled = shape("g", { "font-family": PICTURE_FONT, "font-size": FONT_SIZE, ...halo }, ...texts);
  return shape("g", {}, ...circles, labelled, ...ringed);
}

const behaviour = zoom<HTMLCanvasElement, unknown>()
  .scaleExtent([0.05, 200])
  .filter((e: WheelEvent & TouchEvent) =>
    e.type === "wheel"
      ? e.ctrlKey || e.metaKey || document.activeElement === e.currentTarget
      : e.type === "touchstart"
        ? e.touches.length > 1
        : !e.button,
  )
  .on("zoom", (e: { transform: ZoomTransform }) => (camera.value = e.transform));
const held = () => select<HTMLCanvasElement, unknown>("#map-canvas");
/** Zoom the map by a factor; 0 resets the zoom, so that all texts are visible. */
export const zoomBy = (factor: number) =>
  factor ? behaviour.scaleBy(held(), factor) : behaviour.transform(held(), zoomIdentity);

function handleKey(e: KeyboardEvent) {
  const factor = { "+": 1.5, "-": 1 / 1.5, "0": 0 }[e.key];
  if (factor !== undefined) zoomBy(factor);
  else if (e.key in ARROWS) {
    const [x, y] = ARROWS[e.key].map((each) => (-60 * each) / camera.peek().k);
    behaviour.translateBy(held(), x, y);
  } else return;
  e.preventDefault();
}

/** Redraw the map after each change of its contents, with transitions; return a function that stops this. */
function follow(canvas: HTMLCanvasElement): () => void {
  let before = { layout: "", point: -1, pixels: target.peek() };
  let isOnScreen = true; // transitions outside of the window would slow down the visible views
  new IntersectionObserver(([{ isIntersecting }]) => (isOnScreen = isIntersecting)).observe(canvas);
  const move = (from: Float32Array[]) => {
    const duration = playing.peek() ? Math.min(MOVE, 700 / data.pointsPerSecond) : MOVE;
    const way = (moving = { from, progress: 0 });
    const clock = timer((elapsed) => {
      way.progress = elapsed / duration;
      if (moving === way && way.progress >= 1) moving = null;
      if (moving !== way) clock.stop();
      paint(canvas);
    });
  };
  return effect(() => {
    const next = { layout: state.layout.value, point: state.point.value, pixels: target.value };
    const { layout, point, pixels } = before;
    before = next;
    if (layout !== next.layout) {
      moving = null;
      untracked(() => zoomBy(0));
    } else if (point !== next.point && isOnScreen && !calm.matches) move(pixels);
    void [camera, groups, hovered, state.token, dark, frame].map((each) => each.value);
    if (printing.value || !moving) paint(canvas);
  });
}

/** The contents of the map for tests. */
const drawn = () => ({
  moving: moving !== null,
  tokens: shown.peek(),
  pixels: shown.peek().map(placer()),
  names: labels(placer()).map(({ token, box }) => ({ token, box })),
  radius: radiusOfDots(),
});

export function Canvas() {
  const canvas = useRef<HTMLCanvasElement>(null);
  useLayoutEffect(() => {
    const element: DrawnCanvas = Object.assign(canvas.current!, { drawn, shapes });
    screen.value = { width: element.clientWidth, height: element.clientHeight };
    held().call(behaviour);
    const observer = new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width > 0 && !printing.peek()) screen.value = contentRect;
    });
    observer.observe(element);
    return follow(element);
  }, []);
  const tokenAt = (e: MouseEvent) => {
    const [place, [left, top]] = [placer(), pointer(e)];
    const far = (token: number) => Math.hypot(place(token)[0] - left, place(token)[1] - top);
    const token = least(shown.peek(), far);
    return token !== undefined && far(token) < CLICK ? token : null;
  };
  const hover = (e: PointerEvent) => {
    if (e.buttons) return;
    const token = (hovered.value = tokenAt(e));
    canvas.current!.title =
      token === null
        ? ""
        : `${nameHere(token)}, position ${positionOf(token)} in ${data.documents[documentOf[token]].title}`;
  };
  return (
    <canvas
      ref={canvas}
      id="map-canvas"
      tabIndex={0}
      role="application"
      aria-roledescription="map"
      aria-label={`${state.layout.value} map, ${site.value.label}: ${shown.value.length} tokens. Arrow keys move the map, plus and minus zoom.`}
      style={
        printing.value
          ? `width: ${frame.value.width}px; aspect-ratio: ${frame.value.width} / ${frame.value.height}`
          : undefined
      }
      onKeyDown={handleKey}
      onPointerMove={hover}
      onPointerLeave={() => (hovered.value = null)}
      onClick={(e) => tokenAt(e) !== null && set({ token: tokenAt(e) })}
    />
  );
}
