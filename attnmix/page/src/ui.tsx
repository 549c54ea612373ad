// Parts of every view: choices, panes with their data and pictures, legends, and words of the glossary.

import { useComputed, useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useId, useRef } from "preact/hooks";
import { rounded } from "./format";
import { savePicture, saveText } from "./files";
import { address } from "./state";

type Option = readonly [value: string, name: string];
export function Select(props: {
  label: string;
  value: string;
  options: Option[];
  on: (value: string) => void;
  id?: string;
}) {
  return (
    <label>
      <span>{props.label}</span>
      <select id={props.id} autocomplete="off" value={props.value} onChange={(e) => props.on(e.currentTarget.value)}>
        {props.options.map(([value, name]) => (
          <option key={value} value={value} selected={value === props.value}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

export function Check(props: { label: string; checked: boolean; disabled?: boolean; on: (checked: boolean) => void }) {
  return (
    <label class="check">
      <input
        type="checkbox"
        autocomplete="off"
        checked={props.checked}
        disabled={props.disabled}
        onChange={(e) => props.on(e.currentTarget.checked)}
      />
      {props.label}
    </label>
  );
}

/** Numbers have four digits, as most have 16 bits on the page. */
export type Rows = { columns: string[]; rows: (string | number | null)[][]; note?: string; digits?: number };
const asText = (each: string | number | null, digits = 4) =>
  each === null ? "" : String(typeof each === "number" ? rounded(each, digits) : each);
const inCsv = (each: string) => (/[",\n\r]/.test(each) ? `"${each.replaceAll('"', '""')}"` : each);

/** A view with its name, and its numbers as a table, as csv and as a picture. `file` names what the view shows. */
export function Pane(props: {
  id: string;
  title: ComponentChildren;
  file: string;
  first?: boolean; // of its section, right below the page's name
  rows: () => Rows;
  children: ComponentChildren;
}) {
  const body = useRef<HTMLDivElement>(null);
  const open = useSignal(false);
  const name = `${props.id}_${props.file}`.replaceAll(/[^\p{L}\p{N}]+/gu, "_");
  const csv = () => {
    const { columns, rows, note, digits } = props.rows();
    const lines = [columns, ...rows].map((row) => row.map((each) => inCsv(asText(each, digits))).join(","));
    saveText(`${name}.csv`, [...(note ? [`# ${note}`] : []), ...lines].join("\n") + "\n");
  };
  const picture = (kind: "svg" | "png") => void savePicture(body.current!, `${name}.${kind}`, kind, props.file);
  return (
    <div class="pane" id={props.id}>
      <div class="title">
        {props.first ? <h2 class="small-title">{props.title}</h2> : <h3>{props.title}</h3>}
        <details class="files" onToggle={(e) => (open.value = e.currentTarget.open)}>
          <summary aria-label={`Data and image of ${props.id}`}>Data and image</summary>
          <p>
            <button type="button" onClick={csv}>
              csv
            </button>{" "}
            <button type="button" onClick={() => picture("svg")}>
              SVG
            </button>{" "}
            <button type="button" onClick={() => picture("png")}>
              PNG
            </button>
          </p>
          {open.value && <Table {...props.rows()} label={props.id} />}
        </details>
      </div>
      <div ref={body}>{props.children}</div>
    </div>
  );
}

const MAX_ROWS = 500; // of a table on the screen; its csv has all

function Table({ columns, rows, note, digits, label }: Rows & { label: string }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={`Values of ${label}`}>
      <table>
        {note && <caption>{note}</caption>}
        <thead>
          <tr>
            {columns.map((each) => (
              <th scope="col">{each}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.slice(0, MAX_ROWS).map((row) => (
            <tr>
              {row.map((each) => (
                <td class={typeof each === "number" ? "number" : ""}>{<bdi>{asText(each, digits)}</bdi>}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > MAX_ROWS && (
        <p class="small">
          The first {MAX_ROWS} of {rows.length} rows; the csv has all.
        </p>
      )}
    </div>
  );
}

export function Ramp({ low, high, colours }: { low: string; high: string; colours: string }) {
  return (
    <span class="ramp">
      {low} <i style={`background: linear-gradient(to right, ${colours})`} aria-hidden="true" /> {high}
    </span>
  );
}

const GLOSSARY: Record<string, string> = {
  "mixing ratio":
    "The length of what other tokens give to a token's vector, divided by that plus the length of what the token gives itself. 25% of the length is 10% of the squared length at a right angle.",
  "shared value":
    "A control: every token passes on the same vector, the mean of its text's values. It says nothing of which token it came from.",
  "words in random order": "A control: the same text with its words shuffled.",
  derivative:
    "How strongly a token's output changes with the other tokens' inputs, within one layer (norms of the Jacobian).",
  ALTI: "Shares by how near each token's part lies to the resulting vector (Ferrando et al., 2022).",
  "Value Zeroing": "How far a token's output moves when another token's value is set to zero.",
  "capture point": "A place in the model at which every token's vector is stored, such as a layer's output.",
  "neighbours kept": "The share of a token's 15 nearest in the full space that are also its 15 nearest on the map.",
  interval: "95% bootstrap interval over reviews; not drawn for fewer than eight.",
  "leave one out": "How much the predicted class's logit falls when the word is masked.",
  query: "What a token looks for: a vector that meets every key in a dot product.",
  key: "What a token offers to be found by.",
  softmax: "Turns scores into weights that add up to 1.",
  value: "What a token passes on, multiplied by its weight.",
};

/** A word of the glossary, explained under the pointer and to a keyboard. */
export function Term({ name, children }: { name: string; children?: ComponentChildren }) {
  const id = useId();
  const open = useSignal(false);
  return (
    <span class="term" onMouseEnter={() => (open.value = true)} onMouseLeave={() => (open.value = false)}>
      <button
        type="button"
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

export function CopyLink() {
  const said = useSignal("Copy link");
  const label = useComputed(() => said.value);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(`${location.href.split("#")[0]}#${address()}`);
      said.value = "Copied";
    } catch {
      said.value = "Copy the address";
    }
    setTimeout(() => (said.value = "Copy link"), 2000);
  };
  return (
    <button type="button" id="copy-link" onClick={copy}>
      {label}
    </button>
  );
}
