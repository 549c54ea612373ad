// Components of all views: choices, panes with export of data and pictures, legends, and glossary terms.

import { useSignal } from "@preact/signals";
import type { ComponentChildren, TargetedMouseEvent } from "preact";
import { useId, useLayoutEffect, useRef } from "preact/hooks";
import { shade } from "./colours";
import { data } from "./data";
import { isReady } from "./parts";
import { pictureOf, pngOf } from "./picture";
import { type Choice, dark, printing, saving, set, state } from "./state";

/** The steps of the arrow keys, to the right and down. */
export const ARROWS: Record<string, [x: number, y: number]> = {
  ...{ ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] },
};

export const PRINTED_WIDTH = 640; // pixels; A4 has 688 between its margins

/** A choice among named values: all keys of `names`, the values in `options`, or the values in titled `groups`. */
export function Select<K extends keyof Choice>(props: {
  choice: K;
  label: string;
  names: Record<string, string> | Record<number, string>;
  options?: readonly Choice[K][];
  groups?: Record<string, readonly Choice[K][]>;
}) {
  const { choice, label, names, groups } = props;
  const options = groups ? Object.values(groups).flat() : (props.options ?? (Object.keys(names) as Choice[K][]));
  const now = state[choice].value;
  const list = (values: readonly Choice[K][]) =>
    values.map((value) => (
      <option value={String(value)} selected={value === now}>
        {(names as Record<string, string>)[String(value)]}
      </option>
    ));
  return (
    <label>
      <span>{label}</span>
      <select
        id={choice}
        value={String(now)}
        onChange={(e) => set({ [choice]: options[e.currentTarget.selectedIndex] })}
      >
        {groups
          ? Object.entries(groups).map(([title, values]) => <optgroup label={title}>{list(values)}</optgroup>)
          : list(options)}
      </select>
    </label>
  );
}

export const Slider = (props: {
  choice: "layer" | "point" | "threshold";
  label: string;
  between: [number, number];
  children: ComponentChildren;
  class: string;
  on?: () => void; // called before a change
}) => (
  <label class={props.class}>
    {props.children}
    <input
      type="range"
      id={props.choice}
      min={props.between[0]}
      max={props.between[1]}
      value={state[props.choice].value}
      aria-valuetext={props.label}
      onInput={(e) => {
        props.on?.();
        set({ [props.choice]: Number(e.currentTarget.value) });
      }}
    />
  </label>
);

/** The current width of an element, for a picture that fills it. */
export function useWidth(fallback: number) {
  const box = useRef<HTMLDivElement>(null);
  const width = useSignal(fallback);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([{ contentRect }]) => (width.value = contentRect.width || width.value));
    width.value = box.current!.clientWidth || width.value;
    observer.observe(box.current!);
    return () => observer.disconnect();
  }, []);
  return { box, width: printing.value ? PRINTED_WIDTH : width.value };
}

/** A scrollable box, with shadows at the sides with hidden content. */
export function Scroll(props: { class?: string; label?: string; children: ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  const more = useSignal("");
  useLayoutEffect(() => {
    const { current } = box;
    const look = () => {
      const { scrollLeft, scrollWidth, clientWidth } = current!;
      const sides = { left: scrollLeft > 1, right: scrollLeft + clientWidth < scrollWidth - 1 };
      more.value = Object.entries(sides)
        .filter(([, is]) => is)
        .map(([side]) => side)
        .join(" ");
    };
    const observer = new ResizeObserver(look);
    for (const each of [current!, ...current!.children]) observer.observe(each);
    current!.addEventListener("scroll", look);
    return () => observer.disconnect();
  }, []);
  const named = props.label ? ({ tabIndex: 0, role: "region", "aria-label": props.label } as const) : {};
  return (
    <div class="more" data-more={more.value}>
      <div class={`scroll ${props.class ?? ""}`} ref={box} {...named}>
        {props.children}
      </div>
    </div>
  );
}

type Cell = string | number | null;
/** A table. Numbers have four significant digits by default, because most are stored in 16 bits. */
export type Rows = { columns: string[]; rows: Cell[][]; digits?: number };
/** Add columns with constant values at the left of a table, such as the model and the layer. */
export const rowsOf = (of: Record<string, Cell>, { columns, rows, digits }: Rows): Rows => ({
  columns: [...Object.keys(of), ...columns],
  rows: rows.map((row) => [...Object.values(of), ...row]),
  digits,
});
const asText = (cell: Cell, digits = 4) =>
  cell === null ? "" : String(typeof cell === "number" ? Number(cell.toPrecision(digits)) : cell);
const inCsv = (text: string) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

function save(name: string, content: string | Blob): void {
  const href = URL.createObjectURL(new Blob([content]));
  Object.assign(document.createElement("a"), { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

/** Save a table as csv with one header line. */
function saveCsv(name: string, { columns, rows, digits }: Rows): void {
  const lines = [columns, ...rows].map((row) => row.map((cell) => inCsv(asText(cell, digits))).join(","));
  save(`${name}.csv`, `${lines.join("\n")}\n`);
}

async function savePicture(view: HTMLElement, name: string, kind: "SVG" | "PNG"): Promise<void> {
  const picture = pictureOf(view, name.replaceAll("_", " "));
  save(`${name}.${kind.toLowerCase()}`, kind === "SVG" ? picture : await pngOf(picture));
}

/** A view with a title and buttons for saving csv, SVG and PNG; `file` is the title in the names of these files. */
export function Pane(props: {
  id: string;
  title: ComponentChildren;
  file?: string;
  first?: boolean; // true for the first pane of the page
  rows: () => Rows;
  children: ComponentChildren;
}) {
  const pane = useRef<HTMLDivElement>(null);
  const { id, title, file = title, rows } = props;
  const name = `${id}_${file}`.replaceAll(/[^\p{L}\p{N}]+/gu, "_");
  return (
    <div class="pane" id={id} ref={pane}>
      <div class="title">
        {props.first ? <h2 class="small-title">{title}</h2> : <h3>{title}</h3>}
        <span class="files" role="group" aria-label={`Files of ${id}`}>
          <button onClick={() => saveCsv(name, rows())}>csv</button>
          {(["SVG", "PNG"] as const).map((kind) => (
            <button onClick={() => savePicture(pane.current!, name, kind)}>{kind}</button>
          ))}
        </span>
      </div>
      {props.children}
    </div>
  );
}

/** Rows of numbers from -1 to 1 as coloured pixels, blue above 0 and orange below, redrawn after changes of `by`. */
export function Cells(props: {
  rows: () => (Float32Array | Float64Array)[];
  by: unknown[];
  class?: string;
  label?: string;
  title?: string;
  later?: boolean; // draw with a delay, so that other views do not wait
  onClick?: (e: TargetedMouseEvent<HTMLCanvasElement>) => void;
  onMouseMove?: (e: TargetedMouseEvent<HTMLCanvasElement>) => void;
}) {
  const { rows, by, label, later, ...others } = props;
  const canvas = useRef<HTMLCanvasElement>(null);
  const night = dark.value;
  const paint = () => {
    const [below, above] = night ? [0x4d9dff, 0xf5c36e] : [0x004ab3, 0xa06000]; // blue, green, red
    const cells = rows();
    const image = new ImageData(cells[0].length, cells.length);
    const pixels = new Uint32Array(image.data.buffer);
    let at = 0;
    for (const row of cells)
      for (const x of row) pixels[at++] = (x < 0 ? below : above) + 2 ** 24 * Math.round(255 * Math.abs(x));
    Object.assign(canvas.current!, { width: image.width, height: image.height });
    canvas.current!.getContext("2d")!.putImageData(image, 0, 0);
  };
  const atOnce = !later || saving.value || printing.value;
  useLayoutEffect(() => {
    if (atOnce || !isReady()) return paint();
    const timer = setTimeout(paint, 100);
    return () => clearTimeout(timer);
  }, [...by, night, atOnce]);
  return <canvas ref={canvas} role={label ? "img" : undefined} aria-label={label} {...others} />;
}

/** A colour scale with labels at its ends. */
export function Ramp(props: {
  low: string;
  high: string;
  colours: { at: number; colour: string; opacity?: number }[];
}) {
  const id = useId();
  return (
    <span class="ramp">
      {props.low}{" "}
      <svg width="112" height="13" aria-hidden="true">
        <defs>
          <linearGradient id={id}>
            {props.colours.map(({ at, colour, opacity = 1 }) => (
              <stop offset={at} stop-color={colour} stop-opacity={opacity} />
            ))}
          </linearGradient>
        </defs>
        <rect x="0.5" y="0.5" width="111" height="12" rx="3" fill={`url(#${id})`} stroke="var(--line)" />
      </svg>{" "}
      {props.high}
    </span>
  );
}

/** The colour scale of shares, or of values with a sign if `range` includes negative values, with labelled ends. */
export function ScaleRamp({ range, said }: { range: [low: number, high: number]; said: (value: number) => string }) {
  const [low, high] = range;
  const places = Array.from({ length: 11 }, (_, n) => n / 10);
  const colours = places.map((at) => ({ at, colour: shade(low < 0 ? 2 * at - 1 : at).colour }));
  return <Ramp low={said(low)} high={said(high)} colours={colours} />;
}

export const GLOSSARY = {
  token: "A token is one input of the model: a word, a piece of a word, or a special token such as [CLS].",
  "mixing ratio of one layer":
    "This ratio measures how much of a token's vector in one layer comes from other tokens. It is the length of their summed contribution, divided by the sum of this length and the length of the token's own contribution. The name of the measure states which part of the layer is included; measures by attention weights use sums of weights instead of lengths. Lengths are not squared: if the two vectors are orthogonal, a ratio of 25% corresponds to 10% of the squared length of their sum. The ratio describes one layer, not all layers since the input.",
  "own share":
    "The own share is the displacement of the vector if its own token is replaced by one of another text, divided by the sum of this displacement and the displacement if all other tokens are replaced. Attention weights are recomputed for the replaced tokens. Special tokens are not replaced and have no own share.",
  "exact parts":
    "Exact parts decompose a vector into a sum of one part for each input token and one part for the biases. The own share is the length of the token's own part, divided by the sum of this length and the length of all other tokens' summed parts. The rest is divided among the other tokens in proportion to the lengths of their parts. If the parts of other tokens and the biases are nearly opposite, which fine-tuning can cause in the last layer, the shares are not meaningful.",
  "shared value":
    "In this control, every token has the same value vector, the mean over its text, which contains no information about single tokens.",
  "other texts' values":
    "In this control, every value vector is replaced by the mean over tokens of other texts with the same token class and a similar position, while the attention weights stay the same. It shows the ratio without the content of the text in the values.",
  "words shuffled":
    "In this control, the mixing ratio is measured with the words of every text in random order, while the tokens of a word stay together. The part of the change by fine-tuning that remains does not depend on word order.",
  share:
    "A share is the contribution of one token to another token's vector, after attention or at the end of the layer, depending on the selected measure. The shares of a vector add up to 100%. ALTI compares each contribution with the whole vector by their distance (Ferrando et al., 2022). A rollout multiplies the shares of all layers since the input.",
  derivative:
    "A derivative measures how strongly a token's output depends on the inputs of the other tokens, within one layer: the norm of the Jacobian with respect to the other tokens' inputs, divided by the sum of this norm and the norm with respect to the token's own input.",
  "capture point": "Vectors are stored at several points in the model, such as the output of a layer.",
  "neighbours kept":
    "This is the share of a token's 15 nearest neighbours in the full space that are also among its 15 nearest neighbours on the map. Chance is the same share with the positions on the map shuffled.",
  donors:
    "Donors are the texts whose tokens replace those of the measured text: other measured texts or, for a single or typed text, neutral sentences that attnmix contains. Donors of the same and of another class, predicted by the fine-tuned model, are also reported separately.",
  interval: `This is a 95% bootstrap interval over ${data.wording.texts}. It is not shown for fewer than eight ${data.wording.texts}. Unless it is called simultaneous, it is not adjusted for the number of comparisons.`,
  query: "The query of a token is compared with the keys of all tokens; its dot products with them give the scores.",
  key: "The key of a token is compared with the queries of all tokens.",
  softmax: "Softmax turns scores into weights that add up to 1.",
};

/** True if the pointer moved, rather than the page under it. */
const isMoved = ({ movementX, movementY }: MouseEvent) => movementX !== 0 || movementY !== 0;

/** False for taps: when the finger is lifted, the browser reports that the pointer left, but the explanation stays. */
const isMouse = ({ pointerType }: PointerEvent) => pointerType === "mouse";

const MARGIN = 16; // pixels between an explanation and the window's edge

/** Move an explanation that reaches beyond the window to the left. */
function moveInside(element: HTMLElement | null) {
  if (element === null || element.hidden) return;
  element.style.left = "";
  const excess = element.getBoundingClientRect().right - (document.documentElement.clientWidth - MARGIN);
  if (excess > 0) element.style.left = `${-excess}px`;
}

/** A glossary term, explained on hover, on keyboard focus and by a tap; Escape or another tap hides the explanation. */
export function Term(props: {
  name: keyof typeof GLOSSARY;
  withoutNote?: boolean; // omit the run's sample size, which does not apply to a single text
  children?: ComponentChildren;
}) {
  const { name, withoutNote, children } = props;
  const id = useId();
  const open = useSignal(false);
  return (
    <span
      class="term"
      onPointerMove={(e) => (open.value = open.value || (isMouse(e) && isMoved(e)))}
      onPointerLeave={(e) => isMouse(e) && (open.value = false)}
    >
      <button
        aria-describedby={id}
        onFocus={() => (open.value = true)}
        onBlur={() => (open.value = false)}
        onPointerUp={(e) => !isMouse(e) && (open.value = !open.value)}
        onKeyDown={(e) => e.key === "Escape" && (open.value = false)}
      >
        {children ?? name}
      </button>
      <span role="tooltip" id={id} hidden={!open.value} ref={(element) => moveInside(element)}>
        {GLOSSARY[name]} {!withoutNote && data.answer.notes[name]}
      </span>
    </span>
  );
}
