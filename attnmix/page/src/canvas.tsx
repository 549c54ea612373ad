// The map's picture: places of tokens at a capture point, zoomed and on their way, drawn on a canvas.

import { computed, effect, signal, untracked } from "@preact/signals";
import { extent, interpolateViridis, pointer, quadtree, select, zoom, zoomIdentity, type ZoomTransform } from "d3";
import { useEffect, useRef } from "preact/hooks";
import * as run from "./data";
import { captured, data, documentOf, nearestTo, once, onMap, placesOf, positionOf, range, tokensOf } from "./data";
import { dark, hovered, printing, set, state } from "./state";

const MOVE = 450; // milliseconds, of points from one capture point to the next
const MARGIN = 26; // pixels
const FONT = '13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const STEPS = 24; // of a colour scale, so that points are drawn by colour
const MANY = 1500; // tokens, of which each is drawn smaller
const CELL = [12, 15]; // pixels, of the grid in which a word takes its room
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Viridis without its end that the paper hides. */
export const viridis = (share: number) => interpolateViridis(dark.value ? 0.25 + 0.75 * share : 0.86 * share);
// Okabe and Ito's colours, which people with any common colour blindness tell apart.
export const KINDS = ["#0072B2", "#C77F00", "#009E73", "#D55E00", "#CC79A7", "#3D9BD0", "#888888", "#8A7D00"];
export const SOFT = "#8a8f99";
export const textColour = (number: number) =>
  data.documents.length <= KINDS.length ? KINDS[number] : number === state.document.value ? KINDS[0] : SOFT;

function colourOf(token: number): string {
  const number = documentOf[token];
  const kind = state.colour.value;
  const site = data.sites[state.point.value];
  const step = (share: number) => viridis(Math.round(share * STEPS) / STEPS);
  if (kind === "position") return step(positionOf(token) / Math.max(data.documents[number].length - 1, 1));
  if (kind === "class") return KINDS[data.readings[site.reading].classes[token]];
  if (kind === "document") return textColour(number);
  const share = run.ratioOf(token, site.layer, captured, state.method.value);
  return share === null ? SOFT : step(share / run.largestRatio(captured, state.method.value));
}

/** The tokens that have a place. */
export const shown = computed(() => {
  const [x] = placesOf(state.layout.value, state.point.value);
  return range(run.tokenCount).filter((token) => !Number.isNaN(x[token]));
});
/** The shown tokens by colour, those of other texts fainter. */
const groups = computed(() =>
  Map.groupBy(shown.value, (token) => `${colourOf(token)} ${documentOf[token] === state.document.value ? 1 : 0.35}`),
);
export const nameHere = (token: number) => data.readings[data.sites[state.point.value].reading].names[token];

/** The selected token's way along the residual stream to this point, on a layout whose points share a plane. */
const trail = computed(() => {
  const [token, last, layout] = [state.token.value, state.point.value, state.layout.value];
  if (token === null || !run.inOnePlane(layout)) return [];
  return range(last + 1).filter((point) => {
    const { point: name, reading } = data.sites[point];
    const comparable = layout !== "joint" || !data.ownBasis.includes(name);
    const stream = data.stream.includes(name) || point === last;
    return reading === data.sites[last].reading && comparable && stream && onMap(layout, point);
  });
});

// Places on the screen, before the camera's zoom.

const frame = signal({ width: 600, height: 480 });
const camera = signal<ZoomTransform>(zoomIdentity);
export const playing = signal(false);

/** The part of a layout that is seen: around the text's tokens, or all of it. */
const seen = computed(() => {
  const [layout, point] = [state.layout.value, state.point.value];
  const texts = tokensOf(state.document.value);
  const points = run.inOnePlane(layout) ? range(data.sites.length).filter((each) => onMap(layout, each)) : [point];
  return run.limits(layout).map((limits, axis) => {
    const columns = points.map((each) => placesOf(layout, each)[axis]);
    const places = columns.flatMap((column) => texts.map((token) => column[token]));
    const [low = limits[0], high = limits[1]] = state.whole.value ? limits : extent(places);
    return [low, high];
  });
});

/** All tokens' places in pixels at a point, `[x, y]`. */
function pixelsAt(point: number): Float32Array[] {
  const { width, height } = frame.value;
  const [[left, right], [low, high]] = seen.value;
  const wide = (width - 3 * MARGIN) / Math.max(right - left, 1e-6);
  const scale = Math.min(wide, (height - 2 * MARGIN) / Math.max(high - low, 1e-6));
  const [x, y] = placesOf(state.layout.value, point);
  return [
    x.map((each) => width / 2 - MARGIN / 2 + (each - (left + right) / 2) * scale),
    y.map((each) => height / 2 - (each - (low + high) / 2) * scale),
  ];
}
const target = computed(() => pixelsAt(state.point.value));
let moving: { from: Float32Array[]; progress: number } | null = null;

/** Where each token is now; on its way, between its places at two points. */
function placer(): (token: number) => [number, number] {
  const [view, to, way] = [camera.peek(), target.peek(), moving];
  if (!way) return (token) => view.apply([to[0][token], to[1][token]]);
  const between = (axis: number, token: number) => {
    const [start, end] = [way.from[axis][token], to[axis][token]];
    return Number.isNaN(start) ? end : start + way.progress * (end - start);
  };
  return (token) => view.apply([between(0, token), between(1, token)]);
}

/** The style sheet's colours, asked for once, as that lays out the page. */
const theme = once((_dark: boolean) => {
  const style = getComputedStyle(document.documentElement);
  return ["--ink", "--paper", "--mark", "--took"].map((name) => style.getPropertyValue(name).trim());
});
const ruler = document.createElement("canvas").getContext("2d")!;
ruler.font = FONT;
const widthOf = once((name: string) => ruler.measureText(name).width + 8);

/** The words that have room, the selected one and its neighbours first. */
function labels(place: (token: number) => [number, number]) {
  const token = state.token.peek();
  const first = token === null ? [] : [token, ...nearestTo(token, state.point.peek())];
  const taken = new Set<number>();
  const words: { token: number; x: number; y: number }[] = [];
  for (const each of new Set([...first, ...shown.peek()])) {
    const [x, y] = place(each);
    if (!(x > 0 && y > 0 && x < frame.peek().width && y < frame.peek().height)) continue;
    const [column, row] = [Math.floor(x / CELL[0]), Math.floor(y / CELL[1])];
    const cells = range(column + Math.ceil(widthOf(nameHere(each)) / CELL[0]), column).flatMap((n) => [
      n * 1000 + row,
      n * 1000 + row - 1,
    ]);
    if (cells.some((cell) => taken.has(cell))) continue;
    for (const cell of cells) taken.add(cell);
    words.push({ token: each, x, y });
  }
  return words;
}

function paint(canvas: HTMLCanvasElement) {
  const ratio = printing.peek() ? 2 : Math.max(1, devicePixelRatio);
  const { width, height } = frame.peek();
  const [wide, tall] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== tall) Object.assign(canvas, { width: wide, height: tall });
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const [ink, paper, mark, took] = theme(dark.peek());
  const [place, token] = [placer(), state.token.peek()];
  const tokens = new Set(shown.peek());
  const radius = tokens.size > MANY ? 2.4 : 4;
  for (const [key, group] of groups.peek()) {
    const [colour, alpha] = key.split(" ");
    Object.assign(context, { fillStyle: colour, globalAlpha: Number(alpha) });
    context.beginPath();
    for (const each of group) {
      const [x, y] = place(each);
      context.moveTo(x + radius, y);
      context.arc(x, y, radius, 0, 2 * Math.PI);
    }
    context.fill();
  }
  const line = (strokeStyle: string, lineWidth: number, draw: () => void) => {
    Object.assign(context, { strokeStyle, lineWidth, globalAlpha: 1 });
    context.beginPath();
    draw();
    context.stroke();
  };
  const write = (text: string, x: number, y: number, fillStyle: string) => {
    Object.assign(context, { strokeStyle: paper, lineWidth: 3, lineJoin: "round", fillStyle });
    context.strokeText(text, x, y);
    context.fillText(text, x, y);
  };
  context.font = FONT;
  const way = trail.peek().map((point) => {
    const [x, y] = pixelsAt(point);
    return { at: camera.peek().apply([x[token!], y[token!]]), ...data.sites[point] };
  });
  line(mark, 1.6, () => way.forEach(({ at: [x, y] }) => context.lineTo(x, y)));
  for (const { at, point, layer } of way)
    if (point === "layer_output") write(String(layer), at[0] + 5, at[1] + 14, mark);
  const ring = (each: number, size: number, colour: string, thick: number) => {
    if (tokens.has(each)) line(colour, thick, () => context.arc(...place(each), size, 0, 2 * Math.PI));
  };
  for (const { token: each, x, y } of labels(place)) {
    context.font = each === token ? `bold ${FONT}` : FONT;
    const colour = documentOf[each] === state.document.peek() ? ink : SOFT;
    const room = Math.min(x + 6, width - widthOf(nameHere(each)));
    write(nameHere(each), room, y - 5, each === token ? mark : colour);
  }
  if (token !== null) {
    for (const near of nearestTo(token, state.point.peek())) ring(near, radius + 3, took, 1.4);
    ring(token, radius + 4.5, mark, 2.6);
  }
  if (hovered.peek() !== null) ring(hovered.peek()!, radius + 3, ink, 2);
}

const ARROWS: Record<string, [number, number]> = {
  ...{ ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] },
};
const behaviour = zoom<HTMLCanvasElement, unknown>()
  .scaleExtent([0.6, 200])
  .filter((e: WheelEvent & TouchEvent) =>
    e.type === "wheel"
      ? e.ctrlKey || e.metaKey || document.activeElement === e.currentTarget
      : e.type === "touchstart"
        ? e.touches.length > 1
        : !e.button,
  )
  .on("zoom", (e: { transform: ZoomTransform }) => (camera.value = e.transform));
const held = () => select<HTMLCanvasElement, unknown>("#map-canvas");
/** Zoom the map by a factor; 0 shows again what was seen first. */
export const zoomBy = (factor: number) =>
  factor ? behaviour.scaleBy(held(), factor) : behaviour.transform(held(), zoomIdentity);

function handleKey(e: KeyboardEvent) {
  const factor = { "+": 1.5, "-": 1 / 1.5, "0": 0 }[e.key];
  if (factor !== undefined) zoomBy(factor);
  else if (e.key in ARROWS) {
    const [x, y] = ARROWS[e.key].map((each) => each / camera.peek().k);
    behaviour.translateBy(held(), x, y);
  } else return;
  e.preventDefault();
}

/** Draw the map whenever something changes that it shows, and move its tokens to the next point; return how to stop. */
function follow(canvas: HTMLCanvasElement): () => void {
  let [waiting, before] = [0, { layout: "", point: -1, pixels: target.peek() }];
  const draw = () => {
    waiting = 0;
    paint(canvas);
  };
  const move = (from: Float32Array[]) => {
    const start = performance.now();
    const duration = playing.peek() ? Math.min(MOVE, 700 / data.pointsPerSecond) : MOVE;
    const way = (moving = { from, progress: 0 });
    const step = () => {
      if (moving !== way) return;
      way.progress = (performance.now() - start) / duration;
      if (way.progress >= 1) moving = null;
      paint(canvas);
      if (moving) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  };
  return effect(() => {
    const next = { layout: state.layout.value, point: state.point.value, pixels: target.value };
    const { layout, point, pixels } = before;
    before = next;
    if (layout !== next.layout) {
      moving = null;
      untracked(() => zoomBy(0));
    } else if (point !== next.point && !calm.matches) move(pixels);
    void [camera, groups, trail, hovered, state.token, dark, printing].map((each) => each.value);
    if (printing.value) paint(canvas);
    else if (!moving) waiting ||= requestAnimationFrame(draw);
  });
}

/** What the picture holds, for who checks it. */
const drawn = () => ({
  moving: moving !== null,
  tokens: shown.peek(),
  pixels: shown.peek().map(placer()),
  words: labels(placer()).map(({ token }) => token),
  trail: trail.peek(),
});

export function Canvas() {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const element = Object.assign(canvas.current!, { drawn });
    held().call(behaviour);
    const observer = new ResizeObserver(([{ contentRect }]) => contentRect.width && (frame.value = contentRect));
    observer.observe(element);
    return follow(element);
  }, []);
  const tokenAt = (e: MouseEvent) => {
    const place = placer();
    const tree = quadtree<number>(
      shown.peek(),
      (token) => place(token)[0],
      (token) => place(token)[1],
    );
    return tree.find(...pointer(e, canvas.current), 14) ?? null;
  };
  const hover = (e: PointerEvent) => {
    if (e.buttons) return;
    const token = tokenAt(e);
    hovered.value = token;
    const where = token === null ? "" : `, position ${positionOf(token)} of ${data.documents[documentOf[token]].name}`;
    canvas.current!.title = token === null ? "" : nameHere(token) + where;
  };
  return (
    <canvas
      ref={canvas}
      id="map-canvas"
      tabIndex={0}
      role="application"
      aria-roledescription="map"
      aria-label={`${state.layout.value} map, ${data.sites[state.point.value].label}: ${shown.value.length} tokens. Arrow keys move it, plus and minus zoom.`}
      onKeyDown={handleKey}
      onPointerMove={hover}
      onPointerLeave={() => (hovered.value = null)}
      onClick={(e) => tokenAt(e) !== null && set({ token: tokenAt(e) })}
    />
  );
}
