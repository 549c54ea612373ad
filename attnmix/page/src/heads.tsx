// One attention head as lines and as a matrix, and all heads small; a line unfolds into the numbers behind it.

import { useEffect, useMemo, useRef } from "preact/hooks";
import { headCount, headRows, headsOf } from "./attention";
import { data, layers, modelText, once, range } from "./data";
import { figures, percent } from "./format";
import { dark, headsLayer, position, set, shownHead, state } from "./state";
import { Pane, paintCells, type Rows, Select, useWidth } from "./ui";
import { Weight } from "./weight";
import { nameOf } from "./words";

const MAX_ROWS = 24; // on each side
const MAX_LINES = 240;
const STRONGEST = 3; // of each word of a long text, while none is selected
const FAINT = 0.02; // of the strongest, below which a line is left out
const ROW = 21; // pixels
const SMALL_ROWS = 32; // of a small picture

type Link = { i: number; j: number; value: number };
type Weights = Float32Array[];
const largestIn = (row: Float32Array) => row.reduce((most, value) => Math.max(most, value), 0);
const largest = (rows: Weights) => rows.reduce((most, row) => Math.max(most, largestIn(row)), 0) || 1;

/** The lines that are drawn, and the tokens in the two columns: all of a short text, else those of the strongest lines. */
function linksOf(rows: Weights, looked: number | null, faintest = FAINT) {
  const all = range(rows.length);
  const of = (i: number, j: number): Link => ({ i, j, value: rows[i][j] });
  const strongest = (i: number) => {
    const least = rows.length <= MAX_ROWS ? 0 : (rows[i].toSorted().at(-STRONGEST) ?? 0);
    return all.filter((j) => rows[i][j] >= least).map((j) => of(i, j));
  };
  const links =
    looked === null
      ? all.flatMap(strongest)
      : [...all.map((j) => of(looked, j)), ...all.filter((i) => i !== looked).map((i) => of(i, looked))];
  const most = links.reduce((top, { value }) => Math.max(top, value), 0) || 1;
  const strong = links.filter(({ value }) => value > faintest * most).toSorted((a, b) => b.value - a.value);
  if (rows.length <= MAX_ROWS) return { links: strong.slice(0, MAX_LINES), left: all, right: all, most };
  const [left, right] = [new Set<number>(), new Set<number>()];
  if (looked !== null) [left, right].forEach((side) => side.add(looked));
  const room = (side: Set<number>, each: number) => side.has(each) || side.size < MAX_ROWS;
  const kept = strong.filter(({ i, j }) => room(left, i) && room(right, j) && left.add(i) && right.add(j));
  const sorted = (side: Set<number>) => [...side].toSorted((a, b) => a - b);
  return { links: kept.slice(0, MAX_LINES), left: sorted(left), right: sorted(right), most };
}

const said = (value: number) => (state.lines.value === "weight" ? percent(value) : figures(value));
const startOf = () => data.documents[state.document.value].start;
const linkText = ({ i, j, value }: Link) =>
  `${nameOf(startOf() + i)} attends to ${nameOf(startOf() + j)}: ${said(value)}`;
const select = ({ i, j }: { i: number; j: number }) => set({ token: startOf() + i, source: startOf() + j });

/** A name that fits into a number of pixels. */
const clipped = (name: string, width: number) => {
  const fit = Math.max(3, Math.floor(width / 8.2) - 3);
  const letters = [...name];
  return letters.length <= fit ? name : `${letters.slice(0, fit - 1).join("")}…`;
};

function Lines({ rows }: { rows: Weights }) {
  const { box, width } = useWidth(420);
  const looked = position.value;
  const { links, left, right, most } = useMemo(() => linksOf(rows, looked), [rows, looked]);
  const [names, height] = [Math.min(150, width * 0.33), ROW * Math.max(left.length, right.length) + 24];
  const y = (side: number[], each: number) => 24 + ROW * (side.indexOf(each) + 0.5);
  const [x0, x1] = [names + 6, width - names - 6];
  const bend = (x1 - x0) * 0.42;
  const curve = ({ i, j }: Link) =>
    `M${x0},${y(left, i)}C${x0 + bend},${y(left, i)} ${x1 - bend},${y(right, j)} ${x1},${y(right, j)}`;
  const column = (side: number[], x: number, anchor: "end" | "start") =>
    side.map((each) => (
      <text
        class={each === looked ? "token now" : "token"}
        x={x}
        y={y(side, each)}
        text-anchor={anchor}
        dominant-baseline="central"
        onClick={() => set({ token: startOf() + each })}
      >
        {clipped(nameOf(startOf() + each), names)} <tspan class="value">{each}</tspan>
        <title>{`${nameOf(startOf() + each)}, position ${each}`}</title>
      </text>
    ));
  return (
    <div ref={box} class="plot">
      <svg
        class="chart"
        id="heads-lines"
        role="img"
        width={width}
        height={height}
        aria-label={`The strongest lines: ${links.slice(0, 5).map(linkText).join(", ")}`}
      >
        <text class="axis" x={names} y="10" text-anchor="end">
          this word
        </text>
        <text class="axis" x={width - names} y="10">
          attends to
        </text>
        {links.toReversed().map((link) => (
          <path
            class="link"
            d={curve(link)}
            stroke={looked !== null && link.i !== looked ? "var(--after)" : "var(--took)"}
            stroke-width={0.6 + 3.6 * (link.value / most)}
            stroke-opacity={0.18 + 0.8 * (link.value / most)}
            onClick={() => select(link)}
          >
            <title>{linkText(link)}</title>
          </path>
        ))}
        {column(left, names, "end")}
        {column(right, width - names, "start")}
      </svg>
    </div>
  );
}

/** Paint rows, the darker the larger by the square root; a small picture has the largest of each few columns. */
function paint(canvas: HTMLCanvasElement, rows: Weights, columns = rows[0].length) {
  const [most, wide] = [largest(rows), rows[0].length / columns];
  const cell = (row: Float32Array) => (_: unknown, n: number) =>
    Math.sqrt(largestIn(row.subarray(Math.floor(n * wide), Math.ceil((n + 1) * wide))) / most);
  paintCells(
    canvas,
    rows.map((row) => Float32Array.from({ length: columns }, cell(row))),
  );
}

function Matrix({ rows }: { rows: Weights }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const night = dark.value;
  useEffect(() => paint(canvas.current!, rows), [rows, night]);
  const [share, at] = [100 / rows.length, position.value];
  const cell = (e: MouseEvent): Link => {
    const { x, y, width, height } = canvas.current!.getBoundingClientRect();
    const place = (part: number) => Math.min(rows.length - 1, Math.max(0, Math.floor(part * rows.length)));
    const [i, j] = [place((e.clientY - y) / height), place((e.clientX - x) / width)];
    return { i, j, value: rows[i][j] };
  };
  return (
    <figure class="matrix">
      <div>
        <canvas
          ref={canvas}
          role="img"
          aria-label="The same head as a matrix"
          onClick={(e) => select(cell(e))}
          onMouseMove={(e) => (canvas.current!.title = linkText(cell(e)))}
        />
        {at !== null && <i class="row" style={`top: ${at * share}%; height: ${share}%`} />}
        {at !== null && <i class="column" style={`left: ${at * share}%; width: ${share}%`} />}
      </div>
      <figcaption class="small">
        The same head as a matrix, rows attend to columns. The selected word's row is outlined, its column dashed.
        Colour: square root; darkest {said(largest(rows))}.
      </figcaption>
    </figure>
  );
}

const smallRows = once((number: number, checkpoint: string, layer: number, head: number) => {
  const heads = headsOf(number, checkpoint);
  return heads && headRows(heads, layer, head, "weight", Math.ceil(heads.length / SMALL_ROWS));
});

/** All heads small, drawn one after another so that nothing waits for them. */
function All() {
  const box = useRef<HTMLDivElement>(null);
  const [text, model, night] = [state.document.value, state.checkpoint.value, dark.value];
  useEffect(() => {
    const queue = [...box.current!.querySelectorAll("canvas")];
    let timer = 0;
    const draw = () => {
      const canvas = queue.shift();
      const [layer, head] = canvas?.dataset.head?.split(" ").map(Number) ?? [];
      const rows = canvas && smallRows(text, model, layer, head);
      if (!rows) return;
      paint(canvas, rows, Math.min(SMALL_ROWS, rows[0].length));
      timer = window.setTimeout(draw);
    };
    timer = window.setTimeout(draw, 100);
    return () => clearTimeout(timer);
  }, [text, model, night]);
  const [nowLayer, nowHead] = [headsLayer.value, shownHead.value];
  const move = (e: KeyboardEvent) => {
    const STEPS: Record<string, [number, number]> = {
      ...{ ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] },
    };
    const [down, right] = STEPS[e.key] ?? [0, 0];
    const button = box.current!.querySelector<HTMLElement>(
      `[aria-label="Layer ${nowLayer + down}, head ${nowHead + right + 1}"]`,
    );
    if (!(e.key in STEPS) || !button) return;
    e.preventDefault();
    set({ layer: nowLayer + down, head: nowHead + right });
    button.focus();
  };
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="All heads, small">
      <div
        ref={box}
        id="heads-all"
        class="all"
        role="group"
        aria-label="All heads"
        style={`grid-template-columns: 2.2rem repeat(${headCount}, minmax(26px, 64px))`}
        onKeyDown={move}
      >
        {layers.map((layer) => (
          <>
            <span class="small">{layer}</span>
            {range(headCount).map((head) => (
              <button
                tabIndex={layer === nowLayer && head === nowHead ? 0 : -1}
                aria-pressed={layer === nowLayer && head === nowHead}
                aria-label={`Layer ${layer}, head ${head + 1}`}
                title={`Layer ${layer}, head ${head + 1}`}
                onClick={() => set({ layer, head })}
              >
                <canvas data-head={`${layer} ${head}`} />
              </button>
            ))}
          </>
        ))}
      </div>
    </div>
  );
}

export function Heads() {
  const { document, checkpoint, lines } = state;
  const [number, model, layer, head] = [document.value, checkpoint.value, headsLayer.value, shownHead.value];
  const heads = headsOf(number, model);
  const [kind, name] = [lines.value, lines.value === "weight" ? "attention weight" : "weight times length"];
  const matrix = useMemo(() => heads && headRows(heads, layer, head, kind), [heads, layer, head, kind]);
  if (!matrix || !heads)
    return (
      <p class="note" id="heads-note">
        This text's queries and keys are not on the page, which would grow too large; they are in
        features/measure/heads.
      </p>
    );
  const where = `${data.labels.layers[layer]}, head ${head + 1} of ${headCount}, ${modelText(model)}`;
  const rows = (): Rows => ({
    columns: ["position", "token", "attends to position", "attends to token", name],
    rows: linksOf(matrix, position.value, 0).links.map(({ i, j, value }) => [
      ...[i, nameOf(startOf() + i)],
      ...[j, nameOf(startOf() + j)],
      value,
    ]),
    note: `${where}; the strongest lines`,
    digits: 6,
  });
  return (
    <>
      <Pane id="heads" title={`Heads: ${where}`} file={`${data.documents[number].name}, ${where}`} rows={rows}>
        <p class="small noprint">
          Each line goes from a word to a word that it attends to, the stronger the larger. Until you pick a head, we
          show one that attends to other words. Click a line to see the numbers behind it.{" "}
          {matrix.length > MAX_ROWS &&
            `Of ${matrix.length} tokens, those of the strongest lines are shown${position.value === null ? "" : " of the selected word"}.`}
        </p>
        {heads.bits === 8 && (
          <p class="note">
            The text is long, so each head keeps its strongest dimensions: weights are off by{" "}
            {heads.mean_error!.toPrecision(1)} on average, at most {heads.largest_error!.toPrecision(1)}.
          </p>
        )}
        {data.encoder !== null && layer > data.encoder && (
          <p class="note">Self-attention of the decoder; cross-attention is not shown.</p>
        )}
        <div class="controls">
          <Select
            choice="lines"
            label="Lines by"
            options={[
              ["weight", "attention weight"],
              ["norm", "weight × length of the vector (norm-based)"],
            ]}
          />
          <span class="small">A weight ignores the size of the vector it multiplies; norm-based lines include it.</span>
        </div>
        <div class="heads">
          <Lines rows={matrix} />
          <Matrix rows={matrix} />
          <div>
            <h4>All heads: rows are layers, columns heads</h4>
            <All />
          </div>
        </div>
      </Pane>
      <Weight heads={heads} />
    </>
  );
}
