// The text with its measures, and the own share, sources and targets of the selected token.

import { valueText } from "./chosen";
import { checkpoints, data, positionOf, type Share, tokensOf } from "./data";
import { inPoints, percent } from "./format";
import * as measures from "./measures";
import { effectText } from "./prediction";
import { hovered, matrix, state } from "./state";
import { Pane, rowsOf, ScaleRamp, Select } from "./ui";
import { Find, nameInText, nameOf, SourcesName, TokenLink, Tokens } from "./words";

const LISTED = 8; // tokens in each list
const IN_BAR = 4; // sources shown as separate segments of the bar
const LETTER = 0.021; // width of a character, as a fraction of the bar
const BY_LENGTHS = "The rest is divided among the other tokens in proportion to the lengths of their parts.";

/** The value of a token in the picture, in the selected layer and model. */
function ShownValue({ token }: { token: number }) {
  const layer = state.layer.value;
  const value = valueText(measures.valueOf(token, layer, measures.wordsModel.value), false, token);
  const change = state.change.value ? ` ${data.wording.by_change}` : "";
  return (
    <p id="shown-value">
      <b>
        “<bdi>{nameOf(token)}</bdi>”
      </b>
      : {measures.shareKind()} <b>{value}</b>
      {change}{" "}
      <span class="small">
        ({measures.measureName()}, {data.labels.layers[layer].toLowerCase()}, {measures.matrixModel()})
      </span>
    </p>
  );
}

/** A bar of the token's own share and its largest sources, from the contribution matrix. */
function KeptBar({ token }: { token: number }) {
  const own = measures.ownPart(token, state.layer.value, state.checkpoint.value);
  if (own === null) return <p class="note">{whyMissing(token)}</p>;
  if (state.change.value) return null;
  const main = (measures.exchanged(token)?.took ?? []).slice(0, IN_BAR);
  const rest = main.reduce((left, { share }) => Math.max(0, left - share), 1 - own);
  const named = main.map((each): [string, number, string] => [nameInText(each.token), each.share, "other"]);
  const parts: typeof named = [["its own", own, "own"], ...named, ["all others", rest, "rest"]];
  const isOtherMeasure = !data.matrices.includes(state.share.value);
  const labelled = parts.map(([name, share]) => `${name} ${percent(share)}`).join(", ");
  return (
    <>
      <p class="small" id="bar-measure">
        {isOtherMeasure ? "The selected measure has no sources. Sources by another measure, " : "Sources by "}
        <SourcesName />:
      </p>
      <div class="bar" role="img" aria-label={labelled}>
        {parts.map(([name, share, kind]) => (
          <span class={kind} style={`flex: ${Math.max(share, 0.001)} 0 0`} title={`${name} ${percent(share)}`}>
            {share > LETTER * `${name} ${percent(share)}`.length && <bdi>{`${name} ${percent(share)}`}</bdi>}
          </span>
        ))}
      </div>
      <p class="small" id="bar-parts">
        <bdi>{labelled}</bdi>. {matrix.value === "parts" && BY_LENGTHS}
      </p>
    </>
  );
}

function whyMissing(token: number): string {
  if (data.matrices.length === 0)
    return `The sources of tokens are not known, because no contribution matrix was measured. ${data.wording.no_matrices}`;
  return measures.exchanged(token) === null
    ? `To limit the size of the page, it has no contribution matrix of this text. ${data.wording.matrices_elsewhere}`
    : "The sources of this token are not shown, because they cannot be distinguished from rounding errors.";
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
            <span class="number">{state.change.value ? inPoints(share) : percent(share)}</span>
          </li>
        ))}
      </ol>
    </div>
  );
}

/** The title of the list of sources, with the measure if the page has any matrices. */
function sourcesTitle(): string {
  const title = state.change.value ? "Changes of its sources" : "Its sources";
  return measures.sourcesName() ? `${title} (${measures.sourcesName()})` : title;
}

/** The own share, sources and targets of the selected token. */
export function Card({ token }: { token: number }) {
  const { took, gave } = measures.exchanged(token) ?? { took: [], gave: [] };
  const least = state.change.value ? 0.01 : 0.2; // minimum end of the scale, so that small shares have short bars
  const scale = Math.max(...[...took, ...gave].map(({ share }) => Math.abs(share)), least);
  const none = "No other token lists it among its main sources.";
  return (
    <>
      <div class="kept">
        <ShownValue token={token} />
        <KeptBar token={token} />
      </div>
      <div class="lists">
        <Sources id="sources" title={sourcesTitle()} shares={took} none="No other token." scale={scale} />
        <Sources
          id="gave"
          title={state.change.value ? "Changes of its targets" : "Its targets"}
          shares={gave}
          none={none}
          scale={scale}
        />
      </div>
      <p class="small">
        {state.change.value
          ? "Changes of the share are in percentage points."
          : `Shares refer to the receiving token's vector; a full bar is ${percent(scale, 0)}.`}{" "}
        {state.change.value
          ? `The page has each token's ${data.sourcesKept} largest sources in each model, and its ${data.sourcesKept} largest changes.`
          : `The page has each token's ${data.sourcesKept} largest sources.`}{" "}
        The number next to a token is its position in the text; positions start at 0.
      </p>
    </>
  );
}

function rows() {
  const token = state.token.value;
  const { took, gave } = (token !== null && measures.exchanged(token)) || { took: [], gave: [] };
  const share = (shares: Share[], each: number) => shares.find((one) => one.token === each)?.share ?? null;
  const of = {
    model: measures.shownModel(),
    layer: state.layer.value,
    "selected position": token === null ? null : positionOf(token),
  };
  return rowsOf(of, {
    columns: [
      ...["position", "token", measures.wordName()],
      ...["contributed to the selected token", "received from it"],
    ],
    rows: tokensOf(state.document.value).map((each) => [
      ...[positionOf(each), nameOf(each), measures.wordValue(each)],
      ...[share(took, each), share(gave, each)],
    ]),
  });
}

const EFFECTS = {
  "": "the share selected above",
  ...Object.fromEntries(
    Object.keys(data.importance).map((name) => [
      name,
      `effect on the prediction: ${data.labels.importance[name].toLowerCase()}`,
    ]),
  ),
};

const Controls = () => (
  <div class="controls">
    {Object.keys(EFFECTS).length > 1 && <Select choice="effect" label="Colour tokens by" names={EFFECTS} />}
    <Find />
  </div>
);

export function Text() {
  const { document, effect, layer, token } = state;
  const { title: name, note, predicted } = data.documents[document.value];
  const title = `${name}, ${measures.shownModel()}, layer ${layer.value}`;
  return (
    <Pane id="text" title={<bdi>{title}</bdi>} file={title} rows={rows}>
      <p class="small noprint" id="text-note">
        {note}
        {predicted !== null && checkpoints.length > 1 && " The model before fine-tuning has no classifier."}
      </p>
      <Controls />
      <p class="legend" id="text-legend">
        <ScaleRamp range={measures.wordRange.value} said={measures.wordEndText} /> {measures.scaleUnit()}
        {measures.wordName()}. {effect.value && effectText(document.value, effect.value)}
        {token.value !== null && (
          <>
            {" "}
            <span class="key-line">
              <span class="took-key">Underlined</span> tokens{" "}
              {state.change.value ? (
                "are the sources of the selected token with the largest changes."
              ) : (
                <>
                  are sources of the selected token
                  {measures.hasOtherSources() && (
                    <>
                      , by <SourcesName />
                    </>
                  )}
                  .
                </>
              )}{" "}
            </span>
            <span class="key-line">
              <span class="gave-key">Overlined</span> tokens{" "}
              {state.change.value ? "are its targets with the largest changes." : "are its targets."}
            </span>
          </>
        )}
      </p>
      <div class="reader">
        <Tokens id="words" tokens={tokensOf(document.value)} prefix="token-" label="Tokens of the text" marks />
        <aside id="card" aria-label="The selected token" aria-live="polite">
          {token.value === null ? (
            <p class="small noprint">Select a token with a click or arrow keys to see its sources and targets.</p>
          ) : (
            <Card token={token.value} />
          )}
        </aside>
      </div>
    </Pane>
  );
}
