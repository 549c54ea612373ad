// The text with its measures, and what the selected word kept, took and gave.

import { useMemo } from "preact/hooks";
import { headCount } from "./attention";
import { Chart } from "./chart";
import {
  checkpoints,
  data,
  documentOf,
  layers,
  mean,
  modelName,
  positionOf,
  range,
  ratioOf,
  reviewRatios,
  type Share,
  tokensOf,
} from "./data";
import { percent, points } from "./format";
import {
  exchanged,
  mainSources,
  hasSign,
  matrixName,
  othersShare,
  shadeName,
  shadeOf,
  shadeText,
  shownModel,
  minus,
} from "./measures";
import { besideNow, canChange, hovered, set, state } from "./state";
import { Check, Pane, Ramp, type Rows, Select } from "./ui";

import { nameThere, limits, opacity, Words } from "./words";
const LISTED = 8; // words in each list

/** One bar for all that a word took: what it kept, its main sources, and all others. */
export function KeptBar({ token }: { token: number }) {
  const others = othersShare(token, state.layer.value, state.checkpoint.value);
  if (others === null) return <p class="note">{notThere()}</p>;
  const main = (mainSources(token, state.checkpoint.value) ?? []).slice(0, 4);
  const listed = main.reduce((sum, { share }) => sum + share, 0);
  const rest = Math.max(0, others - listed);
  const parts: [string, number, string][] = [
    ["itself", 1 - others, "own"],
    ...main.map(({ token: each, share }, n): [string, number, string] => [nameThere(each), share, `other other${n}`]),
    ["all others", rest, "rest"],
  ];
  return (
    <div class="kept">
      <p>
        <b>
          “<bdi>{nameThere(token)}</bdi>”
        </b>
        : {percent(1 - others)} its own, <b>{percent(others)} from other words</b>{" "}
        <span class="small">
          ({matrixName()}, {data.labels.layers[state.layer.value].toLowerCase()}, {modelName(state.checkpoint.value)})
        </span>
      </p>
      <div class="bar" role="img" aria-label={parts.map(([name, share]) => `${name} ${percent(share)}`).join(", ")}>
        {parts.map(([name, share, kind]) => (
          <span class={kind} style={`flex: ${Math.max(share, 0.001)} 0 0`} title={`${name} ${percent(share)}`}>
            {share > 0.11 && (
              <bdi>
                {name} {percent(share)}
              </bdi>
            )}
          </span>
        ))}
      </div>
    </div>
  );
}

const notThere = () =>
  data.matrices.length === 0
    ? "Which words a word took from was not measured: name contribution matrices in measure.matrices."
    : exchanged(state.token.value ?? 0) === null
      ? "What this text's words took from each other is not on the page, which would grow too large; it is in features/measure/contributions."
      : "This word's row is too small to be told from rounding, so it is not shown.";

function Sources({
  title,
  shares,
  none,
  scale,
  id,
}: {
  title: string;
  shares: Share[];
  none: string;
  scale: number;
  id: string;
}) {
  const text = (share: number) => (state.change.value ? points(share) : percent(share));
  return (
    <div>
      <h4>{title}</h4>
      {shares.length === 0 && <p class="small">{none}</p>}
      <ol class="shares" id={id}>
        {shares.slice(0, LISTED).map(({ token, share }) => (
          <li onMouseEnter={() => (hovered.value = token)} onMouseLeave={() => (hovered.value = null)}>
            <button type="button" data-token={token} onClick={() => set({ token })}>
              <bdi>{nameThere(token)}</bdi> <small>{positionOf(token)}</small>
            </button>
            <i
              class={share < 0 ? "less" : ""}
              style={`width: ${Math.min(100, (100 * Math.abs(share)) / scale)}%`}
              aria-hidden="true"
            />
            <span class="number">{text(share)}</span>
          </li>
        ))}
      </ol>
    </div>
  );
}

const course = (token: number, checkpoint: string) => layers.map((layer) => othersShare(token, layer, checkpoint));
const colours: Record<string, string> = { pretrained: "var(--before)", finetuned: "var(--after)" };
export const colourOf = (checkpoint: string) => (checkpoints.length > 1 ? colours[checkpoint] : "var(--after)");

function Course({ token }: { token: number }) {
  if (othersShare(token, 1, checkpoints[0]) === null) return null;
  return (
    <>
      <h4>
        “<bdi>{nameThere(token)}</bdi>”: share from other words by layer ({matrixName()})
      </h4>
      <Chart
        label={`Share of “${nameThere(token)}” from other words by layer`}
        x={layers.map(String)}
        title="layer"
        height={170}
        format={(value) => percent(value, 0)}
        bounds={[0, 1]}
        chosen={state.layer.value - 1}
        choose={(place) => set({ layer: place + 1 })}
        lines={checkpoints.map((each) => ({
          name: data.labels.checkpoints[each],
          colour: colourOf(each),
          values: course(token, each),
        }))}
      />
    </>
  );
}

function Card({ token }: { token: number }) {
  const { took, gave } = exchanged(token) ?? { took: [], gave: [] };
  const scale = state.change.value
    ? Math.max(...[...took, ...gave].map(({ share }) => Math.abs(share)), 0.01)
    : Math.max(...[...took, ...gave].map(({ share }) => share), 0.2);
  const [before, after] = checkpoints.map((each) => othersShare(token, state.layer.value, each));
  const change = minus(after ?? null, before);
  return (
    <>
      {state.change.value && canChange && change !== null ? (
        <p>
          <b>
            “<bdi>{nameThere(token)}</bdi>”
          </b>
          : {points(change)} from other words by fine-tuning{" "}
          <span class="small">
            ({matrixName()}, {data.labels.layers[state.layer.value].toLowerCase()})
          </span>
        </p>
      ) : (
        <KeptBar token={token} />
      )}
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

/** How a text's mean ratio lies among those of the measured reviews; of a few texts no rank. */
export function rankOf(number: number): string {
  const { layer, checkpoint, method } = state;
  const [at, model, ratio] = [layer.value, checkpoint.value, method.value];
  const own = mean(tokensOf(number).map((token) => ratioOf(token, at, model, ratio)));
  if (own === null) return "";
  const others = reviewRatios(at, model, ratio).filter((each) => each !== null);
  const below = others.filter((each) => each < own).length;
  const said = `In layer ${at}, the mixing ratio of this text averages ${percent(own)} (${modelName(model)})`;
  return others.length < 20 ? `${said}.` : `${said}; ${below} of the ${others.length} measured reviews lie below.`;
}

const textRows = (): Rows => {
  const token = state.token.value;
  const { took, gave } = (token !== null && exchanged(token)) || { took: [], gave: [] };
  const of = (shares: Share[], each: number) => shares.find((one) => one.token === each)?.share ?? null;
  return {
    columns: [
      "position",
      "token",
      shadeName(),
      ...(token === null ? [] : ["contributed to the selected word", "received from it"]),
    ],
    rows: tokensOf(state.document.value).map((each) => [
      positionOf(each),
      nameThere(each),
      shadeOf(each, state.checkpoint.value, state.change.value),
      ...(token === null ? [] : [of(took, each), of(gave, each)]),
    ]),
    note: `${shownModel()}, layer ${state.layer.value}; of a word's sources the ${data.sourcesKept} largest`,
  };
};

export function Text() {
  const { document, layer, matrix, head, shade: by, change, beside } = state;
  const number = document.value;
  const { name, note } = data.documents[number];
  const besides = besideNow.value;
  const [low, high] = limits.value;
  const besideModel = typeof besides === "string" ? besides : null;
  const tokens = useMemo(() => tokensOf(number), [number]);
  const other = besideModel ? tokens : typeof besides === "number" ? tokensOf(besides) : null;
  const alpha = opacity();
  const more = `rgb(var(--more) / ${alpha})`;
  const title = (each: string, model: string) => `${each}, ${model}`;
  return (
    <Pane
      id="text"
      title={
        <>
          <bdi>{name}</bdi>, {shownModel()}, layer {layer.value}
        </>
      }
      file={`${name}, ${shownModel()}, layer ${layer.value}`}
      rows={textRows}
    >
      <p class="small noprint" id="text-note">
        {note} {rankOf(number)}
      </p>
      <div class="controls">
        <Select
          id="shade"
          label="Colour words by"
          value={by.value}
          on={(value) => set({ shade: value })}
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
            id="matrix"
            label="Sources by"
            value={matrix.value!}
            on={(value) => set({ matrix: value })}
            options={data.matrices.map((each) => [each, data.labels.matrices[each]] as const)}
          />
        )}
        {by.value === "ratio" && (
          <Select
            id="method"
            label="Ratio"
            value={state.method.value}
            on={(value) => set({ method: value, measure: value })}
            options={data.ratios.methods.map((each) => [each, data.labels.methods[each]] as const)}
          />
        )}
        {matrix.value === "attention" && headCount > 0 && (
          <Select
            id="head"
            label="Head"
            value={String(head.value ?? "mean")}
            on={(value) => set({ head: value === "mean" ? null : Number(value) })}
            options={[
              ["mean", "mean of all"],
              ...range(headCount).map((each) => [String(each), `no. ${each + 1}`] as const),
            ]}
          />
        )}
        <Select
          id="beside"
          label="Compare with"
          value={String(beside.value)}
          on={(value) => set({ beside: value === "none" || checkpoints.includes(value) ? value : Number(value) })}
          options={[
            ["none", "nothing"],
            ...(canChange ? checkpoints.map((each) => [each, `${modelName(each)} model`] as const) : []),
            ...data.documents.flatMap((each, n) => (n === number ? [] : [[String(n), each.name] as const])),
          ]}
        />
        {canChange && (
          <Check label="Change by fine-tuning" checked={change.value} on={(checked) => set({ change: checked })} />
        )}
      </div>
      <p class="legend" id="text-legend">
        {hasSign() ? (
          <Ramp
            low={`${shadeText(low)} or less`}
            high={`${shadeText(high)} or more`}
            colours={`rgb(var(--less) / ${alpha}), transparent, ${more}`}
          />
        ) : (
          <Ramp
            low={`${shadeText(low)} or less`}
            high={`${shadeText(high)} or more`}
            colours={`transparent, ${more}`}
          />
        )}{" "}
        {shadeName()}
        {state.token.value !== null && (
          <>
            . <span class="took-key">Underlined</span> words contributed to the selected one;{" "}
            <span class="gave-key">overlined</span> words received from it
          </>
        )}
        .
      </p>
      <div class={other ? "reader two" : "reader"}>
        <div>
          {other && (
            <h4>
              <bdi>{title(name, shownModel())}</bdi>
            </h4>
          )}
          <Words
            id="words"
            tokens={tokens}
            prefix="token-"
            label="Words of the text"
            checkpoint={state.checkpoint.value}
            change={change.value}
            marks
          />
          {state.token.value !== null && !other && <Course token={state.token.value} />}
          {other && (
            <>
              <h4>
                <bdi>
                  {title(
                    data.documents[documentOf[other[0]]].name,
                    besideModel ? modelName(besideModel) : shownModel(),
                  )}
                </bdi>
              </h4>
              <Words
                id="beside-words"
                tokens={other}
                label="Words to compare with"
                checkpoint={besideModel ?? state.checkpoint.value}
                change={besideModel === null && change.value}
                marks={besideModel !== null}
              />
            </>
          )}
        </div>
        <aside id="card" aria-label="The selected word" aria-live="polite">
          {state.token.value === null ? (
            <p class="small noprint">Select a word, by click or arrow keys, to see what it took and gave.</p>
          ) : (
            <Card token={state.token.value} />
          )}
        </aside>
      </div>
    </Pane>
  );
}
