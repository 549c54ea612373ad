// One attention head as lines and as a matrix, thumbnails of all heads, and the computation of a selected weight.

import { linkHorizontal, max, sum } from "d3";
import { useMemo } from "preact/hooks";
import { hasHeads, headCount, headRows, headsOf } from "./attention";
import { strength } from "./colours";
import { data, layers, modelText, once, range } from "./data";
import { figures, percent } from "./format";
import { headsLayer, position, set, shownHead, state } from "./state";
import { ARROWS, Cells, Pane, rowsOf, Scroll, Select, useWidth } from "./ui";
import { headColumns, Weight } from "./weight";
import { nameOf } from "./words";

const LINES = {
  weight: "attention weight",
  norm: "attention weight × length of the transformed value vector (norm-based)",
};
const SHORT = 24; // tokens; all tokens of shorter texts are shown
const MAX_LINES = [240, 36]; // for short and longer texts
const FAINT = 0.02; // minimum strength of a line, relative to the strongest line
const ROW = 21; // pixels
const SMALL_ROWS = 32; // maximum number of rows of a thumbnail

const curve = linkHorizontal();
type Link = { i: number; j: number; value: number };
type Weights = Float32Array[];

/** The weights from and to a token, or all weights, in descending order, without those below `least` of the largest. */
function linksOf(rows: Weights, token: number | null, least: number): Link[] {
  const all = range(rows.length);
  const sources = (i: number) => (token === null || i === token ? all : [token]);
  const most = Math.max(...all.map((i) => sources(i).reduce((top, j) => Math.max(top, rows[i][j]), 0)));
  const links = all.flatMap((i) =>
    sources(i)
      .filter((j) => rows[i][j] > least * most)
      .map((j) => ({ i, j, value: rows[i][j] })),
  );
  return links.toSorted((a, b) => b.value - a.value);
}

/** The unit of a token's links: 1 for weights, which add up to 1, or the sum of its norms. */
const wholeOf = (row: Float32Array) => (state.lines.value === "weight" ? 1 : sum(row) || 1);
const said = (value: number) => (state.lines.value === "weight" ? percent(value) : figures(value));
const startOf = () => data.documents[state.document.value].start;
const name = (i: number) => nameOf(startOf() + i);
const linkText = ({ i, j, value }: Link) => `${name(i)} attends to ${name(j)}: ${said(value)}`;
const select = ({ i, j }: Link) => set({ token: startOf() + i, source: startOf() + j });

/** A name, truncated to a width in pixels. */
const clipped = (full: string, width: number) => {
  const [letters, fit] = [[...full], Math.max(3, Math.floor(width / 8.2) - 3)];
  return letters.length <= fit ? full : `${letters.slice(0, fit - 1).join("")}…`;
};

function Lines({ rows }: { rows: Weights }) {
  const { box, width } = useWidth(420);
  const [token, short] = [position.value, rows.length <= SHORT];
  const links = useMemo(() => linksOf(rows, token, FAINT).slice(0, MAX_LINES[short ? 0 : 1]), [rows, token]);
  const [left, right] = (["i", "j"] as const).map((end) =>
    range(rows.length).filter((each) => short || each === token || links.some((link) => link[end] === each)),
  );
  const names = Math.min(150, width * 0.33);
  const y = (side: number[], each: number) => 24 + ROW * (side.indexOf(each) + 0.5);
  const [x0, x1] = [names + 6, width - names - 6];
  const column = (title: string, side: number[], x: number, anchor: "end" | "start") => (
    <g text-anchor={anchor}>
      <text class="axis" x={x} y="10">
        {title}
      </text>
      {side.map((each) => (
        <text
          class={each === token ? "token now" : "token"}
          x={x}
          y={y(side, each)}
          dy="0.35em"
          onClick={() => set({ token: startOf() + each })}
        >
          {clipped(name(each), names)} <tspan class="value">{each}</tspan>
          <title>{`${name(each)}, position ${each}`}</title>
        </text>
      ))}
    </g>
  );
  return (
    <div ref={box} class="plot">
      <svg
        class="chart"
        id="heads-lines"
        role="img"
        width={width}
        height={ROW * Math.max(left.length, right.length) + 24}
        aria-label={`The strongest lines: ${links.slice(0, 5).map(linkText).join(", ")}`}
      >
        {links.toReversed().map((link) => {
          const share = link.value / wholeOf(rows[link.i]);
          return (
            <path
              class="link"
              d={curve({ source: [x0, y(left, link.i)], target: [x1, y(right, link.j)] })!}
              stroke={token !== null && link.i !== token ? "var(--after)" : "var(--took)"}
              stroke-width={0.8 + 4 * share}
              stroke-opacity={strength(share)}
              onClick={() => select(link)}
            >
              <title>{linkText(link)}</title>
            </path>
          );
        })}
        {column("this token", left, names, "end")}
        {column("attends to", right, width - names, "start")}
      </svg>
    </div>
  );
}

/**
 * The colours of rows, on the same scale in all heads: the square root of a weight, or of a norm's share of its row.
 *
 * A cell of a thumbnail is the maximum over several columns.
 */
function shades(
  rows: Weights,
  columns = rows[0].length,
  whole: (row: Float32Array) => number = () => 1,
): Float32Array[] {
  const wide = rows[0].length / columns;
  return rows.map((row) => {
    const most = (n: number) => max(row.subarray(Math.floor(n * wide), Math.ceil((n + 1) * wide)))!;
    return Float32Array.from({ length: columns }, (_, n) => strength(most(n) / whole(row)));
  });
}

function Matrix({ rows }: { rows: Weights }) {
  const [share, at] = [100 / rows.length, position.value];
  const cell = (e: MouseEvent): Link => {
    const { x, y, width, height } = (e.currentTarget as Element).getBoundingClientRect();
    const place = (part: number) => Math.min(rows.length - 1, Math.max(0, Math.floor(part * rows.length)));
    const [i, j] = [place((e.clientY - y) / height), place((e.clientX - x) / width)];
    return { i, j, value: rows[i][j] };
  };
  return (
    <figure class="matrix">
      <div>
        <Cells
          rows={() => shades(rows, rows.length, wholeOf)}
          by={[rows]}
          label="The same head as a matrix"
          onClick={(e) => select(cell(e))}
          onMouseMove={(e) => (e.currentTarget.title = linkText(cell(e)))}
        />
        {at !== null && <i class="row" style={`top: ${at * share}%; height: ${share}%`} />}
        {at !== null && <i class="column" style={`left: ${at * share}%; width: ${share}%`} />}
      </div>
      <figcaption class="small">
        The matrix shows the same head; its rows attend to its columns. The selected token's row is outlined, its column
        dashed. The strength of a colour is the square root of the{" "}
        {state.lines.value === "weight" ? "weight" : "value's share of its row"}; full strength is 100% in all heads.
      </figcaption>
    </figure>
  );
}

const smallShades = once((number: number, checkpoint: string, layer: number, head: number) => {
  const heads = headsOf(number, checkpoint)!;
  const rows = headRows(heads, layer, head, "weight", Math.ceil(heads.length / SMALL_ROWS));
  return shades(rows, Math.min(SMALL_ROWS, heads.length));
});

/** Thumbnails of all heads, which select a head. */
function All() {
  const [text, model] = [state.document.value, state.checkpoint.value];
  const [nowLayer, nowHead] = [headsLayer.value, shownHead.value];
  const move = (e: KeyboardEvent & { currentTarget: HTMLElement }) => {
    const [right, down] = ARROWS[e.key] ?? [0, 0];
    const [layer, head] = [nowLayer + down, nowHead + right];
    const button = e.currentTarget.querySelector<HTMLElement>(`[aria-label="Layer ${layer}, head ${head}"]`);
    if (!(e.key in ARROWS) || !button) return;
    e.preventDefault();
    set({ layer, head });
    button.focus();
  };
  return (
    <Scroll label="All heads, small">
      <div
        id="heads-all"
        class="all"
        role="group"
        aria-label="All heads"
        style={`grid-template-columns: 1.2rem repeat(${headCount}, minmax(21px, 64px))`}
        onKeyDown={move}
      >
        {layers.map((layer) => (
          <>
            <span class="small">{layer}</span>
            {range(headCount).map((head) => (
              <button
                tabIndex={layer === nowLayer && head === nowHead ? 0 : -1}
                aria-pressed={layer === nowLayer && head === nowHead}
                aria-label={`Layer ${layer}, head ${head}`}
                title={`Layer ${layer}, head ${head}`}
                onClick={() => set({ layer, head })}
              >
                <Cells rows={() => smallShades(text, model, layer, head)} by={[text, model]} later />
              </button>
            ))}
          </>
        ))}
      </div>
    </Scroll>
  );
}

/** A note on a text without heads on the page, with buttons for the texts that have heads. */
function MissingHeads() {
  const texts = [...data.documents.keys()].filter(hasHeads);
  return (
    <p class="note" id="heads-note">
      To limit the size of the page, it has no queries and keys of this text. {data.wording.heads_elsewhere}{" "}
      {texts.length > 0 && "The page has the heads of "}
      {texts.map((each, n) => (
        <>
          {n > 0 && ", "}
          <button onClick={() => set({ document: each })}>{data.documents[each].title}</button>
        </>
      ))}
      {texts.length > 0 && "."}
    </p>
  );
}

export function Heads() {
  const [number, model, kind] = [state.document.value, state.checkpoint.value, state.lines.value];
  const [layer, head] = [headsLayer.value, shownHead.value];
  const heads = headsOf(number, model);
  const matrix = useMemo(() => heads && headRows(heads, layer, head, kind), [heads, layer, head, kind]);
  if (!matrix || !heads) return <MissingHeads />;
  const where = `${data.labels.layers[layer]}, head ${head} (0 to ${headCount - 1}), ${modelText(model)}`;
  const measure = kind === "weight" ? "attention weight" : "weight times length";
  const rows = () =>
    rowsOf(headColumns(layer, head), {
      columns: ["position", "token", "attends to position", "attends to token", measure],
      rows: linksOf(matrix, position.value, 0).map(({ i, j, value }) => [i, name(i), j, name(j), value]),
      digits: 6,
    });
  return (
    <>
      <Pane id="heads" title={`Heads: ${where}`} file={`${data.documents[number].title}, ${where}`} rows={rows}>
        <p class="small noprint">
          Each line connects a token to a token that it attends to; the larger its{" "}
          {kind === "weight" ? "weight" : "weight times length"}, the stronger the line. By default, a head is shown in
          which tokens attend to other tokens. Click a line to see how its weight is computed.{" "}
          {matrix.length > SHORT &&
            `Only tokens on the ${position.value === null ? "" : "selected token's "}strongest lines (at most ${MAX_LINES[1]}) are shown. `}
          The number next to a token is its position in the text; positions start at 0.
        </p>
        {data.encoder !== null && layer > data.encoder && (
          <p class="note">Self-attention of the decoder; cross-attention is not shown.</p>
        )}
        <div class="controls">
          <Select choice="lines" label="Lines by" names={LINES} />
          <span class="small">
            Attention weights ignore the length of the weighted vector; norm-based lines include it.
          </span>
        </div>
        <div class="heads">
          <Lines rows={matrix} />
          <Matrix rows={matrix} />
          <div class="overview">
            <h4>Attention weights of all heads: rows are layers, columns heads</h4>
            <p class="small">
              Layers are numbered from 1 and heads from 0, as in the function attnmix.interventions.without_heads.
            </p>
            <All />
          </div>
        </div>
      </Pane>
      <Weight heads={heads} />
    </>
  );
}
