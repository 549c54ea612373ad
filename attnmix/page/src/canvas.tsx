// The map's picture: places of tokens at a capture point, zoomed and on their way, drawn on a canvas.

import { computed, effect, signal, untracked } from "@preact/signals";
import { quadtree } from "d3-quadtree";
import { pointer, select } from "d3-selection";
import { zoom, zoomIdentity, type ZoomTransform } from "d3-zoom";
import { useEffect, useRef } from "preact/hooks";
import {
  captured,
  data,
  documentOf,
  inOnePlane,
  largestRatio,
  limits,
  nearestTo,
  once,
  onMap,
  placesOf,
  positionOf,
  range,
  ratioOf,
  tokenCount,
  tokensOf,
} from "./data";
import { dark, hovered, printing, set, state } from "./state";

const MOVE = 450; // milliseconds, of points from one capture point to the next
const MARGIN = 26;
const CLOUD = 40_000; // surrounding points at most
const OUTSIDE = 0.02; // share of a text's tokens on each side that may lie outside of what is seen
const FEW = 60; // tokens, of which none may
const FONT = '13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const calm = matchMedia("(prefers-reduced-motion: reduce)");
// Viridis without its lightest end, and Okabe and Ito's colours, which people with any common colour blindness tell apart.
const SCALE = ["#440154", "#472c7a", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32"].map((colour) =>
  [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16)),
);
export const KINDS = ["#0072B2", "#C77F00", "#009E73", "#D55E00", "#CC79A7", "#3D9BD0", "#888888", "#8A7D00"];

export const viridis = (share: number) => {
  const at = (dark.value ? 0.25 + 0.75 * share : 0.86 * share) * (SCALE.length - 1);
  const low = Math.min(Math.floor(at), SCALE.length - 2);
  return `rgb(${SCALE[low].map((from, i) => Math.round(from + (at - low) * (SCALE[low + 1][i] - from))).join(",")})`;
};
export const SOFT = "#8a8f99";
const STEPS = 24; // of a colour scale, so that points are drawn by colour

function colourOf(token: number): string {
  const number = documentOf[token];
  const kind = state.colour.value;
  const step = (share: number) => viridis(Math.round(share * STEPS) / STEPS);
  if (kind === "position") return step(positionOf(token) / Math.max(data.documents[number].length - 1, 1));
  const site = data.sites[state.point.value];
  if (kind === "class") return KINDS[data.readings[site.reading].classes[token]];
  if (kind === "document")
    return data.documents.length <= KINDS.length ? KINDS[number] : number === state.document.value ? KINDS[0] : SOFT;
  const share = ratioOf(token, site.layer, captured, state.method.value);
  return share === null ? SOFT : step(share / largestRatio(`${captured} ${state.method.value}`));
}
const colours = computed(() => range(tokenCount).map(colourOf));
export const besideText = computed(() => (typeof state.beside.value === "number" ? state.beside.value : null));

/** The tokens that are drawn: of the text and one beside it, or of all. */
export const shown = computed(() => {
  const [x] = placesOf(state.layout.value, state.point.value);
  const texts = [state.document.value, ...(besideText.value === null ? [] : [besideText.value])];
  const tokens = state.everyone.value ? range(tokenCount) : texts.flatMap(tokensOf);
  return tokens.filter((token) => !Number.isNaN(x[token]));
});
export const nameHere = (token: number) => data.readings[data.sites[state.point.value].reading].names[token];

/** Places of the vectors of all capture points on the joint map. */
const cloud = once((layout: string) => {
  const all = data.sites.flatMap((_, point) => {
    const [x, y] = placesOf(layout, point);
    return range(tokenCount)
      .filter((token) => !Number.isNaN(x[token]))
      .map((token) => [x[token], y[token]] as const);
  });
  const every = Math.ceil(all.length / CLOUD);
  return all.filter((_, n) => n % every === 0);
});

/** The selected token's way along the residual stream to this point, on a layout whose points share a plane. */
const trail = computed(() => {
  const [token, point, layout] = [state.token.value, state.point.value, state.layout.value];
  if (token === null || !inOnePlane(layout)) return [];
  const { reading } = data.sites[point];
  return range(point + 1).filter((each) => {
    const site = data.sites[each];
    const comparable = layout !== "joint" || !data.ownBasis.includes(site.point);
    return (
      site.reading === reading &&
      comparable &&
      onMap(layout, each) &&
      (data.stream.includes(site.point) || each === point)
    );
  });
});

/** What share of neighbours the map keeps at this point, and what chance would keep. */
export const kept = computed(() => {
  const quality = data.quality[state.layout.value];
  const here = quality?.points[state.point.value] ?? {};
  const score = here.neighbours_kept_within ?? here.neighbours_kept;
  return score && score[0] !== null ? { share: score[0], chance: score[1] } : null;
});

// The camera, and points on their way.

const camera = signal<ZoomTransform>(zoomIdentity);
export const playing = signal(false);
let progress = 1;
let before: { layout: string; point: number } | null = null;
let from: { places: Float32Array[]; extent: number[][] } | null = null;

type Frame = { width: number; height: number };
type Project = (x: number, y: number) => [number, number];
export const fitted = signal(true); // the view is on the tokens of the chosen text rather than on the whole plane

/** The part of a layout that is seen at a point: around the text's tokens, without the farthest, or all of it. */
function extentOf(layout: string, point: number): number[][] {
  if (!fitted.value) return limits(layout);
  const texts = [state.document.value, ...(besideText.value === null ? [] : [besideText.value])].flatMap(tokensOf);
  const points = inOnePlane(layout) ? range(data.sites.length).filter((each) => onMap(layout, each)) : [point];
  return [0, 1].map((axis) => {
    const known = points
      .flatMap((each) => texts.map((token) => placesOf(layout, each)[axis][token]))
      .filter((each) => !Number.isNaN(each));
    if (known.length === 0) return limits(layout)[axis];
    const sorted = Float64Array.from(known).toSorted();
    const outside = sorted.length > FEW ? OUTSIDE : 0;
    return [sorted[Math.floor(outside * (sorted.length - 1))], sorted[Math.ceil((1 - outside) * (sorted.length - 1))]];
  });
}

function project({ width, height }: Frame, [[left, right], [low, high]]: number[][]): Project {
  const scale = Math.min(
    (width - 3 * MARGIN) / Math.max(right - left, 1e-6),
    (height - 2 * MARGIN) / Math.max(high - low, 1e-6),
  );
  return (x, y) => [
    width / 2 - MARGIN / 2 + (x - (left + right) / 2) * scale,
    height / 2 - (y - (low + high) / 2) * scale,
  ];
}
const extent = computed(() => extentOf(state.layout.value, state.point.value));

/** Where each token is now, in pixels; on its way, between its places at two points. */
function placer(frame: Frame) {
  const base = project(frame, extent.peek());
  const [x, y] = placesOf(state.layout.peek(), state.point.peek());
  const view = camera.peek();
  if (progress >= 1 || from === null) return (token: number) => view.apply(base(x[token], y[token]));
  const [start, [xs, ys]] = [project(frame, from.extent), from.places];
  return (token: number): [number, number] => {
    const end = base(x[token], y[token]);
    if (Number.isNaN(xs[token])) return view.apply(end);
    const begin = start(xs[token], ys[token]);
    return view.apply([begin[0] + progress * (end[0] - begin[0]), begin[1] + progress * (end[1] - begin[1])]);
  };
}

/** The style sheet's colours, asked for once, as that lays out the page. */
const theme = once((_dark: boolean) => {
  const style = getComputedStyle(document.documentElement);
  return ["--ink", "--paper", "--mark", "--took", "--edge"].map((name) => style.getPropertyValue(name).trim());
});

/** The words that have room, the selected one and its neighbours first. */
function labels(
  place: (token: number) => [number, number],
  context: CanvasRenderingContext2D,
  { width, height }: Frame,
) {
  const token = state.token.peek();
  const first = token === null ? [] : [token, ...nearestTo(token, state.point.peek())];
  const all = state.words.peek() ? [...first, ...shown.peek()] : first;
  const taken = new Set<string>();
  const words: [number, number, number][] = [];
  for (const each of new Set(all)) {
    const [x, y] = place(each);
    if (!(x > 0 && y > 0 && x < width && y < height)) continue;
    const cells = range(Math.ceil((context.measureText(nameHere(each)).width + 8) / 12)).flatMap((n) => [
      `${Math.floor(x / 12) + n} ${Math.floor(y / 15)}`,
      `${Math.floor(x / 12) + n} ${Math.floor(y / 15) - 1}`,
    ]);
    if (cells.some((cell) => taken.has(cell))) continue;
    for (const cell of cells) taken.add(cell);
    words.push([each, x, y]);
  }
  return words;
}

function paint(canvas: HTMLCanvasElement, frame: Frame) {
  const ratio = printing.peek() ? 2 : Math.max(1, devicePixelRatio);
  const [wide, tall] = [Math.round(frame.width * ratio), Math.round(frame.height * ratio)];
  if (canvas.width !== wide || canvas.height !== tall) Object.assign(canvas, { width: wide, height: tall });
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, frame.width, frame.height);
  const [ink, paper, mark, took, line] = theme(dark.peek());
  const [view, base, place] = [camera.peek(), project(frame, extent.peek()), placer(frame)];
  const layout = state.layout.peek();
  const tokens = shown.peek();
  if (layout === "joint") {
    context.globalAlpha = 0.35;
    context.fillStyle = line;
    for (const [x, y] of cloud(layout)) {
      const [px, py] = view.apply(base(x, y));
      context.fillRect(px, py, 1.4, 1.4);
    }
    context.globalAlpha = 1;
  }
  const path = trail.peek().map((point) => {
    const [x, y] = placesOf(layout, point);
    return { point, at: view.apply(base(x[state.token.peek()!], y[state.token.peek()!])) };
  });
  const here = new Set(tokensOf(state.document.peek()));
  const groups = Map.groupBy(
    tokens,
    (token) => `${colours.peek()[token]}|${here.has(token) || besideText.peek() === documentOf[token] ? 1 : 0.35}`,
  );
  const radius = tokens.length > 1500 ? 2.4 : 4;
  for (const [key, group] of groups) {
    const [colour, alpha] = key.split("|");
    context.fillStyle = colour;
    context.globalAlpha = Number(alpha);
    context.beginPath();
    for (const token of group) {
      const [x, y] = place(token);
      context.moveTo(x + radius, y);
      context.arc(x, y, radius, 0, 2 * Math.PI);
    }
    context.fill();
  }
  context.globalAlpha = 1;
  context.strokeStyle = mark;
  context.lineWidth = 1.6;
  context.beginPath();
  path.forEach(({ at: [x, y] }, n) => (n === 0 ? context.moveTo(x, y) : context.lineTo(x, y)));
  context.stroke();
  const write = (text: string, x: number, y: number, colour: string, bold: boolean) => {
    context.font = bold ? `bold ${FONT}` : FONT;
    context.lineWidth = 3;
    context.lineJoin = "round";
    context.strokeStyle = paper;
    context.strokeText(text, x, y);
    context.fillStyle = colour;
    context.fillText(text, x, y);
  };
  for (const { point, at } of path)
    if (data.sites[point].point === "layer_output")
      write(String(data.sites[point].layer), at[0] + 5, at[1] + 14, mark, false);
  const ring = (token: number, size: number, colour: string, width: number) => {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    context.arc(...place(token), size, 0, 2 * Math.PI);
    context.stroke();
  };
  const drawn = new Set(tokens);
  const token = state.token.peek();
  context.font = FONT;
  const faded = (each: number) => !here.has(each) && besideText.peek() !== documentOf[each];
  for (const [each, x, y] of labels(place, context, frame))
    write(nameHere(each), x + 6, y - 5, each === token ? mark : faded(each) ? SOFT : ink, each === token);
  if (token !== null && drawn.has(token)) {
    for (const near of nearestTo(token, state.point.peek())) if (drawn.has(near)) ring(near, radius + 3, took, 1.4);
    ring(token, radius + 4.5, mark, 2.6);
  }
  const over = hovered.peek();
  if (over !== null && drawn.has(over)) ring(over, radius + 3, ink, 2);
}

export function Canvas() {
  const canvas = useRef<HTMLCanvasElement>(null);
  const frame = useRef<Frame>({ width: 600, height: 480 });
  useEffect(() => {
    const element = canvas.current!;
    let waiting = 0;
    const draw = () =>
      (waiting ||= requestAnimationFrame(() => {
        waiting = 0;
        paint(element, frame.current);
      }));
    const behaviour = zoom<HTMLCanvasElement, unknown>()
      .scaleExtent([0.6, 200])
      .filter((e: Event) =>
        e.type === "wheel"
          ? (e as WheelEvent).ctrlKey || (e as WheelEvent).metaKey || document.activeElement === element
          : e.type === "touchstart"
            ? (e as TouchEvent).touches.length > 1
            : !(e as MouseEvent).button,
      )
      .on("zoom", (e: { transform: ZoomTransform }) => (camera.value = e.transform));
    const held = select(element).call(behaviour);
    const key = (e: KeyboardEvent) => {
      const [step, act] = [60, { "+": 1.5, "-": 1 / 1.5 }[e.key]];
      const moves: Record<string, [number, number]> = {
        ArrowLeft: [step, 0],
        ArrowRight: [-step, 0],
        ArrowUp: [0, step],
        ArrowDown: [0, -step],
      };
      if (act) behaviour.scaleBy(held, act);
      else if (e.key === "0") behaviour.transform(held, zoomIdentity);
      else if (e.key in moves)
        behaviour.translateBy(held, ...(moves[e.key].map((each) => each / camera.peek().k) as [number, number]));
      else return;
      e.preventDefault();
    };
    element.addEventListener("keydown", key);
    element.addEventListener("mapzoom", (e) => {
      const { detail } = e as CustomEvent<number>;
      if (detail) behaviour.scaleBy(held, detail);
      else behaviour.transform(held, zoomIdentity);
    });
    const drawn = () => {
      const place = placer(frame.current);
      const context = element.getContext("2d")!;
      context.font = FONT;
      const words = labels(place, context, frame.current).map(([token]) => token);
      return {
        moving: progress < 1,
        tokens: shown.peek(),
        pixels: shown.peek().map(place),
        words,
        trail: trail.peek(),
      };
    };
    Object.assign(element, { drawn }); // what the picture holds, for who checks it
    const observer = new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width) {
        frame.current = contentRect;
        draw();
      }
    });
    observer.observe(element);
    let [clock, lastExtent] = [0, extent.peek()];
    const stop = effect(() => {
      const next = { layout: state.layout.value, point: state.point.value };
      const moved = before !== null && (before.layout !== next.layout || before.point !== next.point);
      if (before?.layout !== next.layout && before !== null) untracked(() => behaviour.transform(held, zoomIdentity));
      if (moved && before!.layout === next.layout && onMap(before!.layout, before!.point) && !calm.matches) {
        from = { places: placesOf(before!.layout, before!.point), extent: lastExtent };
        const start = performance.now();
        const duration = playing.peek() ? Math.min(MOVE, 700 / data.pointsPerSecond) : MOVE;
        cancelAnimationFrame(clock);
        const step = () => {
          progress = Math.min(1, (performance.now() - start) / duration);
          paint(element, frame.current);
          if (progress < 1) clock = requestAnimationFrame(step);
        };
        progress = 0;
        clock = requestAnimationFrame(step);
      }
      before = next;
      lastExtent = extent.value;
      void [
        camera.value,
        shown.value,
        colours.value,
        trail.value,
        hovered.value,
        state.token.value,
        state.words.value,
        dark.value,
        printing.value,
        besideText.value,
      ];
      if (printing.value) paint(element, frame.current);
      else draw();
    });
    return () => {
      stop();
      observer.disconnect();
      element.removeEventListener("keydown", key);
    };
  }, []);
  const tokenAt = (e: MouseEvent) => {
    const place = placer(frame.current);
    const tree = quadtree<number>(
      shown.peek(),
      (token) => place(token)[0],
      (token) => place(token)[1],
    );
    return tree.find(...pointer(e, canvas.current!), 14) ?? null;
  };
  return (
    <canvas
      ref={canvas}
      id="map-canvas"
      tabIndex={0}
      role="application"
      aria-roledescription="map"
      aria-label={`${state.layout.value} map, ${data.sites[state.point.value].label}: ${shown.value.length} tokens. Arrow keys move it, plus and minus zoom.`}
      onPointerMove={(e) => {
        if (e.buttons) return;
        const token = tokenAt(e);
        hovered.value = token;
        canvas.current!.title =
          token === null
            ? ""
            : `${nameHere(token)}, position ${positionOf(token)} of ${data.documents[documentOf[token]].name}`;
      }}
      onPointerLeave={() => (hovered.value = null)}
      onClick={(e) => {
        const token = tokenAt(e);
        if (token !== null) set({ token });
      }}
    />
  );
}
