// The text with its measures, and what the selected word kept, took and gave.

import type { ComponentChildren } from "preact";
import { headCount } from "./attention";
import { data, modelName, positionOf, range, type Share, tokensOf } from "./data";
import { percent, points } from "./format";
import * as measures from "./measures";
import { canChange, hovered, set, state } from "./state";
import { Pane, Ramp, type Rows, Select } from "./ui";
import { Find, limits, nameOf, opacity, TokenLink, Words } from "./words";

const LISTED = 8; // words in each list

/** The selected word's name, what is said of it, and by which measure. */
const Said = ({ token, children }: { token: number; children: ComponentChildren }) => (
  <p>
    <b>
      “<bdi>{nameOf(token)}</bdi>”
    </b>
    : {children}{" "}
    <span class="small">
      ({measures.matrixName()}, {data.labels.layers[state.layer.value].toLowerCase()}
      {!state.change.value && `, ${modelName(state.checkpoint.value)}`})
    </span>
  </p>
);

/** One bar for all that a word took: what it kept, its main sources, and all others. */
export function KeptBar({ token }: { token: number }) {
  const checkpoint = state.checkpoint.value;
  const change = state.change.value ? measures.othersChange(token) : null;
  if (change !== null) return <Said token={token}>{points(change)} from other words by fine-tuning</Said>;
  const others = measures.othersShare(token, state.layer.value, checkpoint);
  if (others === null) return <p class="note">{notThere(token)}</p>;
  const main = (measures.mainSources(token) ?? []).slice(0, 4);
  const rest = Math.max(
    0,
    main.reduce((left, { share }) => left - share, others),
  );
  const parts: [string, number, string][] = [
    ["itself", 1 - others, "own"],
    ...main.map((each): [string, number, string] => [nameOf(each.token), each.share, "other"]),
    ["all others", rest, "rest"],
  ];
  return (
    <div class="kept">
      <Said token={token}>
        {percent(1 - others)} its own, <b>{percent(others)} from other words</b>
      </Said>
      <div class="bar" role="img" aria-label={parts.map(([name, share]) => `${name} ${percent(share)}`).join(", ")}>
        {parts.map(([name, share, kind]) => (
          <span class={kind} style={`flex: ${Math.max(share, 0.001)} 0 0`} title={`${name} ${percent(share)}`}>
            {share > 0.11 && <bdi>{`${name} ${percent(share)}`}</bdi>}
          </span>
        ))}
      </div>
    </div>
  );
}

function notThere(token: number): string {
  if (data.matrices.length === 0)
    return "Which words a word took from was not measured: name contribution matrices in measure.matrices.";
  return measures.exchanged(token) === null
    ? "What this text's words took from each other is not on the page, which would grow too large; it is in features/measure/contributions."
    : "This word's row is too small to be told from rounding, so it is not shown.";
}

function Sources(props: { id: string; title: string; shares: Share[]; none: string; scale: number }) {
  const { id, title, shares, none, scale } = props;
  return (
    <div>
      <h4>{title}</h4>
      {shares.length === 0 && <p class="small">{none}</p>}
      <ol class="shares" id={id}>
        {shares.slice(0, LISTED).map(({ token, share }) => (
          <li onMouseEnter={() => (hovered.value = token)} onMouseLeave={() => (hovered.value = null)}>
            <TokenLink token={token} name={nameOf(token)} />
            <i
              class={share < 0 ? "less" : ""}
              style={`width: ${Math.min(100, (100 * Math.abs(share)) / scale)}%`}
              aria-hidden="true"
            />
            <span class="number">{state.change.value ? points(share) : percent(share)}</span>
          </li>
        ))}
      </ol>
    </div>
  );
}

function Card({ token }: { token: number }) {
  const { took, gave } = measures.exchanged(token) ?? { took: [], gave: [] };
  const least = state.change.value ? 0.01 : 0.2; // of the scale, so that small shares look small
  const scale = Math.max(...[...took, ...gave].map(({ share }) => Math.abs(share)), least);
  return (
    <>
      <KeptBar token={token} />
      <div class="lists">
        <Sources id="sources" title="Contributed to it" shares={took} none="No other word." scale={scale} />
        <Sources
          id="gave"
          title="Received from it"
          shares={gave}
          none="No other word lists it among its main sources."
          scale={scale}
        />
      </div>
      <p class="small">
        {state.change.value
          ? "Change of the share, in percentage points."
          : `Share of a word's input; bars end at ${percent(scale, 0)}.`}{" "}
        Only a word's {data.sourcesKept} largest sources are on the page.
      </p>
    </>
  );
}

const rows = (): Rows => {
  const token = state.token.value;
  const { took, gave } = (token !== null && measures.exchanged(token)) || { took: [], gave: [] };
  const share = (shares: Share[], each: number) => shares.find((one) => one.token === each)?.share ?? null;
  const columns = ["position", "token", measures.shadeName()];
  return {
    columns: token === null ? columns : [...columns, "contributed to the selected word", "received from it"],
    rows: tokensOf(state.document.value).map((each) => {
      const row = [positionOf(each), nameOf(each), measures.shadeOf(each)];
      return token === null ? row : [...row, share(took, each), share(gave, each)];
    }),
    note: `${measures.shownModel()}, layer ${state.layer.value}; of a word's sources the ${data.sourcesKept} largest`,
  };
};

const Controls = () => (
  <div class="controls">
    <Select
      choice="shade"
      label="Colour words by"
      options={[
        ...(data.matrices.length > 0 ? [["sources", "amount from other words"] as const] : []),
        ["ratio", "mixing ratio"],
        ...Object.keys(data.importance).map(
          (each) => [each, `effect on the prediction: ${data.labels.importance[each].toLowerCase()}`] as const,
        ),
      ]}
    />
    {data.matrices.length > 0 && (
      <Select
        choice="matrix"
        label="Sources by"
        options={data.matrices.map((each) => [each, data.labels.matrices[each]] as const)}
      />
    )}
    {state.shade.value === "ratio" && (
      <Select
        choice="method"
        label="Ratio"
        options={data.ratios.methods.map((each) => [each, data.labels.methods[each]] as const)}
      />
    )}
    {state.matrix.value === "attention" && headCount > 0 && (
      <Select
        choice="head"
        label="Head"
        options={[[null, "mean of all"], ...range(headCount).map((each) => [each, `no. ${each + 1}`] as const)]}
      />
    )}
    {canChange && (
      <label class="check">
        <input
          type="checkbox"
          checked={state.change.value}
          onChange={(e) => set({ change: e.currentTarget.checked })}
        />
        Change by fine-tuning
      </label>
    )}
    <Find />
  </div>
);

export function Text() {
  const { document, layer, token } = state;
  const { name, note } = data.documents[document.value];
  const [low, high] = limits.value.map(measures.shadeText);
  const [less, more] = ["less", "more"].map((each) => `rgb(var(--${each}) / ${opacity()})`);
  const title = `${name}, ${measures.shownModel()}, layer ${layer.value}`;
  return (
    <Pane id="text" title={<bdi>{title}</bdi>} file={title} rows={rows}>
      <p class="small noprint" id="text-note">
        {note}
      </p>
      <Controls />
      <p class="legend" id="text-legend">
        <Ramp
          low={`${low} or less`}
          high={`${high} or more`}
          colours={`${measures.hasSign() ? `${less}, ` : ""}transparent, ${more}`}
        />{" "}
        {measures.shadeName()}
        {token.value !== null && (
          <>
            . <span class="took-key">Underlined</span> words contributed to the selected one;{" "}
            <span class="gave-key">overlined</span> words received from it
          </>
        )}
        .
      </p>
      <div class="reader">
        <Words id="words" tokens={tokensOf(document.value)} prefix="token-" label="Words of the text" marks />
        <aside id="card" aria-label="The selected word" aria-live="polite">
          {token.value === null ? (
            <p class="small noprint">Select a word, by click or arrow keys, to see what it took and gave.</p>
          ) : (
            <Card token={token.value} />
          )}
        </aside>
      </div>
    </Pane>
  );
}
