// One attention head as lines and as a matrix, and all heads small; a line unfolds into the numbers behind it.

import { useEffect, useMemo, useRef } from "preact/hooks";
import { headCount, headMatrix, headRows, headsOf } from "./attention";
import { useWidth } from "./chart";
import { data, documentOf, layers, modelName, once, positionOf, range } from "./data";
import { figures, percent } from "./format";
import { nameThere } from "./words";
import { dark, hovered, headsLayer, position, set, shownHead, state } from "./state";
import { Pane, type Rows, Select } from "./ui";
import { Weight } from "./weight";

const MAX_ROWS = 24; // on each side
const MAX_LINES = 240;
const STRONGEST = 3; // of each word of a long text, while none is selected
const FAINT = 0.02; // of the strongest, below which a line is left out
const ROW = 21; // pixels
const SMALL_ROWS = 32; // of a small picture

type Link = { i: number; j: number; value: number };

const maxima = new WeakMap<Float32Array[], number>();
function largest(rows: Float32Array[]): number {
  const known =
    maxima.get(rows) ?? (rows.reduce((most, row) => row.reduce((more, x) => Math.max(more, x), most), 0) || 1);
  maxima.set(rows, known);
  return known;
}

/** The lines that are drawn, and the tokens in the two columns: all of a short text, else those of the strongest lines. */
function linksOf(rows: Float32Array[], looked: number | null, faintest = FAINT) {
  const length = rows.length;
  const all: Link[] = [];
  const add = (i: number, j: number) => rows[i][j] > 0 && all.push({ i, j, value: rows[i][j] });
  if (looked === null)
    range(length).forEach((i) => {
      const least = length <= MAX_ROWS ? 0 : (rows[i].toSorted().at(-STRONGEST) ?? 0); // of a long text, a few of each word
      range(length).forEach((j) => rows[i][j] >= least && add(i, j));
    });
  else {
    range(length).forEach((j) => add(looked, j));
    range(length).forEach((i) => i !== looked && add(i, looked));
  }
  const most = all.reduce((top, { value }) => Math.max(top, value), 0) || 1;
  const strong = all.filter(({ value }) => value > faintest * most).toSorted((a, b) => b.value - a.value);
  if (length <= MAX_ROWS) return { links: strong.slice(0, MAX_LINES), left: range(length), right: range(length), most };
  const [left, right] = [new Set<number>(), new Set<number>()];
  if (looked !== null) [left, right].forEach((side) => side.add(looked));
  const links = strong.filter(({ i, j }) => {
    const room = (side: Set<number>, each: number) => side.has(each) || side.size < MAX_ROWS;
    if (!room(left, i) || !room(right, j)) return false;
    left.add(i);
    right.add(j);
    return true;
  });
  const sorted = (side: Set<number>) => [...side].toSorted((a, b) => a - b);
  return { links: links.slice(0, MAX_LINES), left: sorted(left), right: sorted(right), most };
}

const shown = () =>
  headMatrix(state.document.value, state.checkpoint.value, headsLayer.value, shownHead.value, state.lines.value);
const said = (value: number) => (state.lines.value === "weight" ? percent(value) : figures(value));

function Lines({ rows }: { rows: Float32Array[] }) {
  const { box, width } = useWidth(420);
  const { start } = data.documents[state.document.value];
  const over =
    hovered.value !== null && documentOf[hovered.value] === state.document.value ? positionOf(hovered.value) : null;
  const owner = rows.length <= MAX_ROWS ? (position.value ?? over) : position.value;
  const { links, left, right, most } = useMemo(() => linksOf(rows, owner), [rows, owner]);
  const [names, height] = [Math.min(150, width * 0.33), ROW * Math.max(left.length, right.length) + 24];
  const y = (side: number[], each: number) => 24 + ROW * (side.indexOf(each) + 0.5);
  const bend = (width - 2 * names) * 0.42;
  const [x0, x1] = [names + 6, width - names - 6];
  const line = ({ i, j }: Link) =>
    `M${x0},${y(left, i)}C${x0 + bend},${y(left, i)} ${x1 - bend},${y(right, j)} ${x1},${y(right, j)}`;
  const name = (side: number[], each: number, x: number, anchor: "end" | "start") => (
    <text
      class={each === position.value ? "token now" : "token"}
      x={x}
      y={y(side, each)}
      text-anchor={anchor}
      dominant-baseline="central"
      data-token={start + each}
      onClick={() => set({ token: start + each })}
      onMouseEnter={() => (hovered.value = start + each)}
      onMouseLeave={() => (hovered.value = null)}
    >
      {clipped(nameThere(start + each), names)} <tspan class="value">{each}</tspan>
      <title>{`${nameThere(start + each)}, position ${each}`}</title>
    </text>
  );
  return (
    <div ref={box} class="plot">
      <svg
        class="chart"
        id="heads-lines"
        role="img"
        width={width}
        height={height}
        aria-label={`Attention of ${data.labels.layers[headsLayer.value]}, head ${shownHead.value + 1}: ${links
          .slice(0, 5)
          .map(({ i, j, value }) => `${nameThere(start + i)} to ${nameThere(start + j)} ${said(value)}`)
          .join(", ")}`}
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
            d={line(link)}
            data-source={link.j}
            stroke={owner !== null && link.i !== owner ? "var(--after)" : "var(--took)"}
            stroke-width={0.6 + 3.6 * (link.value / most)}
            stroke-opacity={0.18 + 0.8 * (link.value / most)}
            onClick={() => set({ token: start + link.i, source: start + link.j })}
          >
            <title>{`${nameThere(start + link.i)} attends to ${nameThere(start + link.j)}: ${said(link.value)}`}</title>
          </path>
        ))}
        {left.map((each) => name(left, each, names, "end"))}
        {right.map((each) => name(right, each, width - names, "start"))}
      </svg>
    </div>
  );
}

const clipped = (name: string, width: number) => {
  const fit = Math.max(3, Math.floor(width / 8.2) - 3);
  const letters = [...name];
  return letters.length <= fit ? name : `${letters.slice(0, fit - 1).join("")}…`;
};

/** Paint rows, the darker the larger by the square root. */
function paint(canvas: HTMLCanvasElement, rows: Float32Array[], most: number, columns = rows[0].length) {
  [canvas.width, canvas.height] = [columns, rows.length];
  const image = new ImageData(columns, rows.length);
  const [r, g, b] = dark.peek() ? [110, 195, 245] : [0, 96, 160];
  const wide = rows[0].length / columns;
  rows.forEach((row, i) => {
    for (let n = 0; n < columns; n++) {
      let value = 0;
      for (let j = Math.floor(n * wide); j < Math.max((n + 1) * wide, n * wide + 1) && j < row.length; j++)
        value = Math.max(value, row[j]);
      image.data.set([r, g, b, Math.round(255 * Math.sqrt(value / most))], 4 * (i * columns + n));
    }
  });
  canvas.getContext("2d")!.putImageData(image, 0, 0);
}

function Matrix({ rows }: { rows: Float32Array[] }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const night = dark.value;
  useEffect(() => paint(canvas.current!, rows, largest(rows)), [rows, night]);
  const { start } = data.documents[state.document.value];
  const share = 100 / rows.length;
  const at = position.value;
  const cell = (e: MouseEvent) => {
    const { x, y, width, height } = canvas.current!.getBoundingClientRect();
    const place = (each: number, size: number) =>
      Math.min(rows.length - 1, Math.max(0, Math.floor((each / size) * rows.length)));
    return [place(e.clientY - y, height), place(e.clientX - x, width)];
  };
  return (
    <figure class="matrix">
      <div>
        <canvas
          ref={canvas}
          id="heads-matrix"
          role="img"
          aria-label="The same head as a matrix"
          onClick={(e) => {
            const [i, j] = cell(e);
            set({ token: start + i, source: start + j });
          }}
          onMouseMove={(e) => {
            const [i, j] = cell(e);
            canvas.current!.title = `${nameThere(start + i)} attends to ${nameThere(start + j)}: ${said(rows[i][j])}`;
          }}
        />
        {at !== null && (
          <>
            <i class="row" style={`top: ${at * share}%; height: ${share}%`} />
            <i class="column" style={`left: ${at * share}%; width: ${share}%`} />
          </>
        )}
      </div>
      <figcaption class="small">
        The same head as a matrix, rows attend to columns. The selected word's row is outlined, its column dashed.
        Colour: square root; darkest {said(largest(rows))}.
      </figcaption>
    </figure>
  );
}

const smallRows = once((key: string) => {
  const [number, checkpoint, layer, head] = key.split(" ");
  const heads = headsOf(Number(number), checkpoint);
  return heads && headRows(heads, Number(layer), Number(head), "weight", Math.ceil(heads.length / SMALL_ROWS));
});

/** All heads small, drawn one after another so that nothing waits for them. */
function All() {
  const box = useRef<HTMLDivElement>(null);
  const { document: number, checkpoint } = state;
  const [text, model, night] = [number.value, checkpoint.value, dark.value];
  useEffect(() => {
    const queue = [...box.current!.querySelectorAll("canvas")];
    let timer = 0;
    const draw = () => {
      const canvas = queue.shift();
      if (!canvas) return;
      const rows = smallRows(`${text} ${model} ${canvas.dataset.layer} ${canvas.dataset.head}`);
      if (rows) paint(canvas, rows, largest(rows), Math.min(SMALL_ROWS, rows[0].length));
      timer = window.setTimeout(draw);
    };
    timer = window.setTimeout(draw, 100);
    return () => clearTimeout(timer);
  }, [text, model, night]);
  const chosen = [headsLayer.value, shownHead.value].join();
  const move = (e: KeyboardEvent) => {
    const steps: Record<string, [number, number]> = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
    };
    if (!(e.key in steps)) return;
    e.preventDefault();
    const [layer, head] = [headsLayer.value + steps[e.key][0], shownHead.value + steps[e.key][1]];
    if (layer < 1 || layer > layers.length || head < 0 || head >= headCount) return;
    set({ layer, head, matrix: data.matrices.includes("attention") ? "attention" : state.matrix.value });
    box.current!.querySelector<HTMLElement>(`[data-key="${layer},${head}"]`)?.focus();
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
                type="button"
                data-key={`${layer},${head}`}
                tabIndex={chosen === `${layer},${head}` ? 0 : -1}
                aria-pressed={chosen === `${layer},${head}`}
                aria-label={`Layer ${layer}, head ${head + 1}`}
                title={`Layer ${layer}, head ${head + 1}`}
                onClick={() => set({ layer, head })}
              >
                <canvas data-layer={layer} data-head={head} />
              </button>
            ))}
          </>
        ))}
      </div>
    </div>
  );
}

export function Heads() {
  const rows = shown();
  const number = state.document.value;
  const heads = headsOf(number, state.checkpoint.value);
  const { name, start } = data.documents[number];
  const where = `${data.labels.layers[headsLayer.value]}, head ${shownHead.value + 1} of ${headCount}, ${modelName(state.checkpoint.value)} model`;
  const table = (): Rows => {
    const all = rows ? linksOf(rows, position.value, 0).links : [];
    return {
      columns: [
        "position",
        "token",
        "attends to position",
        "attends to token",
        state.lines.value === "weight" ? "attention weight" : "weight times length",
      ],
      rows: all.map(({ i, j, value }) => [i, nameThere(start + i), j, nameThere(start + j), value]),
      note: `${where}; the strongest lines`,
      digits: 6,
    };
  };
  if (!rows || !heads)
    return (
      <p class="note" id="heads-note">
        This text's queries and keys are not on the page, which would grow too large; they are in
        features/measure/heads.
      </p>
    );
  return (
    <>
      <Pane id="heads" title={<>Heads: {where}</>} file={`${name}, ${where}`} rows={table}>
        <p class="small noprint">
          Each line goes from a word to a word that it attends to, the stronger the larger. Until you pick a head, we
          show one that attends to other words. Click a line to see the numbers behind it.{" "}
          {rows.length > MAX_ROWS &&
            `Of ${rows.length} tokens, those of the strongest lines are shown${position.value === null ? "" : " of the selected word"}.`}
        </p>
        {heads.bits === 8 && (
          <p class="note">
            The text is long, so each head keeps its strongest dimensions: weights are off by{" "}
            {heads.mean_error!.toPrecision(1)} on average, at most {heads.largest_error!.toPrecision(1)}.
          </p>
        )}
        {data.encoder !== null && headsLayer.value > data.encoder && (
          <p class="note">Self-attention of the decoder; cross-attention is not shown.</p>
        )}
        <div class="controls">
          <Select
            id="lines"
            label="Lines by"
            value={state.lines.value}
            on={(value) => set({ lines: value })}
            options={[
              ["weight", "attention weight"],
              ["norm", "weight × length of the vector (norm-based)"],
            ]}
          />
          <span class="small">A weight ignores the size of the vector it multiplies; norm-based lines include it.</span>
        </div>
        <div class="heads">
          <Lines rows={rows} />
          <Matrix rows={rows} />
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
