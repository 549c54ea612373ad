// Parts of every view: choices, panes with their data and pictures, legends, and words of the glossary.

import { useSignal } from "@preact/signals";
import { toBlob, toSvg } from "html-to-image";
import type { ComponentChildren } from "preact";
import { useId, useLayoutEffect, useRef } from "preact/hooks";
import { type Choice, dark, printing, set, state } from "./state";

const PRINTED = 640; // pixels

export function Select<K extends keyof Choice>(props: {
  choice: K;
  label: string;
  options: (readonly [value: Choice[K], name: string])[];
  now?: Choice[K]; // where nothing is chosen
}) {
  const { choice, label, options } = props;
  const now = props.now ?? state[choice].value;
  return (
    <label>
      <span>{label}</span>
      <select
        id={choice.replaceAll(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`)}
        value={String(now)}
        onChange={(e) => set({ [choice]: options[e.currentTarget.selectedIndex][0] })}
      >
        {options.map(([value, name]) => (
          <option value={String(value)} selected={value === now}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

export const Slider = (props: {
  choice: "layer" | "point";
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
  return { box, width: printing.value ? Math.min(PRINTED, width.value) : width.value };
}

type Cell = string | number | null;
/** Numbers have four digits, as most have 16 bits on the page. */
export type Rows = { columns: string[]; rows: Cell[][]; note?: string; digits?: number };
const asText = (cell: Cell, digits = 4) =>
  cell === null ? "" : String(typeof cell === "number" ? Number(cell.toPrecision(digits)) : cell);
const inCsv = (text: string) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

function save(name: string, content: string | Blob): void {
  const href = URL.createObjectURL(new Blob([content]));
  Object.assign(document.createElement("a"), { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

function saveCsv(name: string, { columns, rows, note, digits }: Rows): void {
  const lines = [columns, ...rows].map((row) => row.map((cell) => inCsv(asText(cell, digits))).join(","));
  save(name, `${note ? `# ${note}\n` : ""}${lines.join("\n")}\n`);
}

// Of the some 400 properties of each element, those that a picture needs.
const COPIED =
  "align-items background background-color border border-block border-radius border-spacing bottom box-sizing color " +
  "display dominant-baseline fill fill-opacity flex flex-wrap font gap grid-column grid-template-columns height " +
  "image-rendering justify-content left line-height list-style margin max-width min-width opacity outline " +
  "outline-offset overflow padding paint-order position right stroke stroke-dasharray stroke-linecap stroke-opacity " +
  "stroke-width text-align text-anchor text-decoration text-overflow top transform vertical-align white-space width";

async function savePicture(pane: HTMLElement, name: string, kind: "svg" | "png"): Promise<void> {
  const options = {
    skipFonts: true,
    backgroundColor: getComputedStyle(document.body).backgroundColor,
    includeStyleProperties: COPIED.split(" "),
    filter: (node: HTMLElement) => !node.matches?.(".files, .controls, .noprint, [role=tooltip], title"),
  };
  if (kind === "png") return save(`${name}.png`, (await toBlob(pane, { ...options, pixelRatio: 2 }))!);
  save(`${name}.svg`, decodeURIComponent((await toSvg(pane, options)).replace(/^[^,]*,/, "")));
}

/** A view with its name, and its numbers as a table, as csv and as a picture. `file` names what the view shows. */
export function Pane(props: {
  id: string;
  title: ComponentChildren;
  file: string;
  first?: boolean; // of its section, right below the page's name
  rows: () => Rows;
  children: ComponentChildren;
}) {
  const pane = useRef<HTMLDivElement>(null);
  const open = useSignal(false);
  const name = `${props.id}_${props.file}`.replaceAll(/[^\p{L}\p{N}]+/gu, "_");
  const act = (kind: string) =>
    kind === "csv" ? saveCsv(`${name}.csv`, props.rows()) : void savePicture(pane.current!, name, kind as "svg");
  return (
    <div class="pane" id={props.id} ref={pane}>
      <div class="title">
        {props.first ? <h2 class="small-title">{props.title}</h2> : <h3>{props.title}</h3>}
        <details class="files" onToggle={(e) => (open.value = e.currentTarget.open)}>
          <summary aria-label={`Data and image of ${props.id}`}>Data and image</summary>
          <p>
            {["csv", "SVG", "PNG"].map((kind) => (
              <button onClick={() => act(kind.toLowerCase())}>{kind}</button>
            ))}
          </p>
          {open.value && <Values {...props.rows()} label={props.id} />}
        </details>
      </div>
      {props.children}
    </div>
  );
}

const MAX_ROWS = 500; // of a table on the screen; its csv has all

const Values = ({ columns, rows, note, digits, label }: Rows & { label: string }) => (
  <>
    <Table label={`Values of ${label}`} columns={columns} caption={note}>
      {rows.slice(0, MAX_ROWS).map((row) => (
        <tr>
          {row.map((cell) => (
            <td class={typeof cell === "number" ? "number" : ""}>
              <bdi>{asText(cell, digits)}</bdi>
            </td>
          ))}
        </tr>
      ))}
    </Table>
    {rows.length > MAX_ROWS && (
      <p class="small">
        The first {MAX_ROWS} of {rows.length} rows; the csv has all.
      </p>
    )}
  </>
);

/** A table that scrolls in its own box, by mouse and keys. */
export const Table = (props: {
  label: string;
  columns: string[];
  caption?: string;
  id?: string;
  children: ComponentChildren;
}) => (
  <div class="scroll" tabIndex={0} role="region" aria-label={props.label}>
    <table id={props.id}>
      {props.caption && <caption>{props.caption}</caption>}
      <thead>
        <tr>
          {props.columns.map((each) => (
            <th scope="col">{each}</th>
          ))}
        </tr>
      </thead>
      <tbody>{props.children}</tbody>
    </table>
  </div>
);

/** Cells of a picture: blue above 0, orange below, the stronger the further from it. Strengths are at most 1. */
export function paintCells(canvas: HTMLCanvasElement, rows: ArrayLike<number>[]): void {
  const [above, below] = dark.peek()
    ? [
        [110, 195, 245],
        [255, 157, 77],
      ]
    : [
        [0, 96, 160],
        [179, 74, 0],
      ];
  const [width, height] = [rows[0].length, rows.length];
  Object.assign(canvas, { width, height });
  const image = new ImageData(width, height);
  rows.forEach((row, i) => {
    for (let n = 0; n < width; n++)
      image.data.set([...(row[n] < 0 ? below : above), Math.round(255 * Math.abs(row[n]))], 4 * (i * width + n));
  });
  canvas.getContext("2d")!.putImageData(image, 0, 0);
}

export const Ramp = ({ low, high, colours }: { low: string; high: string; colours: string }) => (
  <span class="ramp">
    {low} <i style={`background: linear-gradient(to right, ${colours})`} aria-hidden="true" /> {high}
  </span>
);

const GLOSSARY = {
  "mixing ratio":
    "The length of what other tokens give to a token's vector, divided by that plus the length of what the token gives itself. 25% of the length is 10% of the squared length at a right angle.",
  "shared value":
    "A control: every token passes on the same vector, the mean of its text's values. It says nothing of which token it came from.",
  "words in random order": "A control: the same text with its words shuffled.",
  derivative:
    "How strongly a token's output changes with the other tokens' inputs, within one layer (norms of the Jacobian).",
  "capture point": "A place in the model at which every token's vector is stored, such as a layer's output.",
  "neighbours kept":
    "The share of a token's 15 nearest in the full space that are also its 15 nearest on the map. Chance: the same map with positions shuffled.",
  interval: "95% bootstrap interval over reviews; not drawn for fewer than eight.",
  query: "What a token looks for: a vector that meets every key in a dot product.",
  key: "What a token offers to be found by.",
  softmax: "Turns scores into weights that add up to 1.",
};

/** A word of the glossary, explained under the pointer and to a keyboard; Escape hides what is said. */
export function Term({ name, children }: { name: keyof typeof GLOSSARY; children?: ComponentChildren }) {
  const id = useId();
  const open = useSignal(false);
  return (
    <span class="term" onMouseEnter={() => (open.value = true)} onMouseLeave={() => (open.value = false)}>
      <button
        aria-describedby={id}
        onFocus={() => (open.value = true)}
        onBlur={() => (open.value = false)}
        onKeyDown={(e) => e.key === "Escape" && (open.value = false)}
      >
        {children ?? name}
      </button>
      <span role="tooltip" id={id} hidden={!open.value}>
        {GLOSSARY[name]}
      </span>
    </span>
  );
}
