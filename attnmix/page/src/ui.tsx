// Parts of every view: choices, panes with their data and pictures, legends, and words of the glossary.

import { useSignal } from "@preact/signals";
import type { ComponentChildren, TargetedMouseEvent } from "preact";
import { useId, useLayoutEffect, useRef } from "preact/hooks";
import { shade } from "./colours";
import { data } from "./data";
import { isReady } from "./parts";
import { pictureOf, pngOf } from "./picture";
import { type Choice, dark, printing, saving, set, state } from "./state";

/** What an arrow key moves by, to the right and down. */
export const ARROWS: Record<string, [x: number, y: number]> = {
  ...{ ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] },
};

export const PRINTED_WIDTH = 640; // pixels, of which A4 has 688 between its margins

/** A choice among values by their names; `options` where not all names, or other values, can be chosen, `groups` of them. */
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
  on?: () => void; // before it changes
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

/** An element's width, of a picture that fills it. */
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

/** A box that scrolls, with a shadow at a side where there is more than is seen. */
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
/** Numbers have four digits, as most have 16 bits on the page. */
export type Rows = { columns: string[]; rows: Cell[][]; digits?: number };
/** Rows that begin with the same cells: what they are of, such as the model and the layer. */
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

/** Save rows below one line with the columns' names, as every reader of csv expects them. */
function saveCsv(name: string, { columns, rows, digits }: Rows): void {
  const lines = [columns, ...rows].map((row) => row.map((cell) => inCsv(asText(cell, digits))).join(","));
  save(`${name}.csv`, `${lines.join("\n")}\n`);
}

async function savePicture(view: HTMLElement, name: string, kind: "SVG" | "PNG"): Promise<void> {
  const picture = pictureOf(view, name.replaceAll("_", " "));
  save(`${name}.${kind.toLowerCase()}`, kind === "SVG" ? picture : await pngOf(picture));
}

/** A view with its name, its numbers as csv, and its picture. `file` names what the view shows, as its title does. */
export function Pane(props: {
  id: string;
  title: ComponentChildren;
  file?: string;
  first?: boolean; // of its section, right below the page's name
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

/** Rows of numbers from -1 to 1 as a picture that follows `by`: blue above 0, orange below, the stronger the further. */
export function Cells(props: {
  rows: () => (Float32Array | Float64Array)[];
  by: unknown[];
  class?: string;
  label?: string;
  title?: string;
  later?: boolean; // so that nothing waits for it
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

/** A scale of colours, evenly spaced, with the words at its ends; a colour may have an opacity. */
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

/** The scale of shares, or one with a sign, with the numbers at its ends. */
export function ScaleRamp({ range, said }: { range: [low: number, high: number]; said: (value: number) => string }) {
  const [low, high] = range;
  const places = Array.from({ length: 11 }, (_, n) => n / 10);
  const colours = places.map((at) => ({ at, colour: shade(low < 0 ? 2 * at - 1 : at).colour }));
  return <Ramp low={said(low)} high={said(high)} colours={colours} />;
}

export const GLOSSARY = {
  token: "A token is one item that the model reads: a word, a piece of a word, or a mark such as [CLS].",
  "mixing ratio of one layer":
    "This ratio says how much of a token's vector in one layer comes from other tokens. It is the length of what all of them together give, divided by that plus the length of what the token gives itself. The measure's name says which part of the layer counts; by attention weights, sums of weights take the place of lengths. Lengths are not squared: if the two vectors are at a right angle, a ratio of 25% is 10% of the squared length of their sum. The ratio describes one layer and not all layers since the input.",
  "own share":
    "The own share is how far the vector moves if its own token is replaced by one of another text, divided by that plus how far it moves if all other tokens are replaced. The model runs as it is, so attention changes with the words. Special tokens stay in place and have no own share.",
  "exact parts":
    "Exact parts write a vector as a sum: one part for each token of the input and one for the biases, which add up to the model's own vector. The own share is the length of the token's own part, divided by that plus the length of the sum of all other tokens' parts; the rest is divided among the others by the lengths of their parts.",
  "shared value":
    "In this control every token passes on the same vector, the mean of its text's values, which carries no information about the token it came from.",
  "other texts' values":
    "In this control every value is replaced by the mean value of such tokens in other texts, while the attention weights stay the same. It shows what the ratio would be without what the text itself says.",
  "words shuffled":
    "In this control the mixing ratio is measured again with the words of every text shuffled, while the tokens of a word stay together. What remains of fine-tuning's change does not depend on word order.",
  share:
    "A share is one token's part in another token's vector, after attention or at the end of the layer, as the chosen measure defines; the shares of a vector add up to 100%. ALTI compares each part with the whole vector by their distance (Ferrando et al., 2022). A rollout multiplies the shares of the layers, from the input on.",
  derivative:
    "A derivative says how strongly a token's output changes with the inputs of the other tokens, within one layer: the norm of the Jacobian by the others, divided by that plus the norm by the token itself.",
  "place in the model":
    "Vectors are stored at several places in the model, such as the output of a layer; the documentation calls them capture points.",
  "neighbours kept":
    "This is the share of a token's 15 nearest neighbours in the full space that are also among its 15 nearest on the map. Chance is the same share with the positions on the map shuffled.",
  interval: `This is a 95% bootstrap interval over ${data.wording.texts}; it is not drawn for fewer than eight.`,
  query: "A query says what a token looks for; its dot product with every key gives the scores.",
  key: "A key says what a token can be found by; the queries of all tokens are compared with it.",
  softmax: "Softmax turns scores into weights that add up to 1.",
};

/** Whether the pointer itself moved, and not the page under it. */
const isMoved = ({ movementX, movementY }: MouseEvent) => movementX !== 0 || movementY !== 0;

const MARGIN = 16; // pixels between an explanation and the window's edge

/** Move an explanation that reaches beyond the window to the left. */
function moveInside(element: HTMLElement | null) {
  if (element === null || element.hidden) return;
  element.style.left = "";
  const excess = element.getBoundingClientRect().right - (document.documentElement.clientWidth - MARGIN);
  if (excess > 0) element.style.left = `${-excess}px`;
}

/** A word of the glossary, explained under the pointer and to a keyboard; Escape hides what is said. */
export function Term(props: {
  name: keyof typeof GLOSSARY;
  withoutNote?: boolean; // on how many texts the run measured, which is not true of a single text's numbers
  children?: ComponentChildren;
}) {
  const { name, withoutNote, children } = props;
  const id = useId();
  const open = useSignal(false);
  return (
    <span
      class="term"
      onMouseMove={(e) => (open.value = open.value || isMoved(e))}
      onMouseLeave={() => (open.value = false)}
    >
      <button
        aria-describedby={id}
        onFocus={() => (open.value = true)}
        onBlur={() => (open.value = false)}
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
