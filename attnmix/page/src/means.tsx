// The right margin of the picture, and a paragraph with the means of the last layer.

import { type Block, blocks, layersOf, type Layout, layout, modelTitle, titleInText } from "./blocks";
import { comparison } from "./comparison";
import { checkpoints, data, layerCount, type Maybe } from "./data";
import { wholePercent } from "./format";
import { corpusMeans, marginOf, textMeans } from "./margin";
import { CHANGE, endText, isOfOneLayer, shareKind, shareStatement } from "./measures";
import { state } from "./state";

const DOT = 2.8; // pixels, radius of the dot of a mean over texts
const TICK = 10; // pixels, height of the line of a mean over the shown text
const TITLE_MIDDLE = 11; // pixels, from the top of a block to the middle of its title

/** The colour of a model, as in the charts. */
const colourOf = (model: string) =>
  model === checkpoints.at(-1) || model === CHANGE ? "var(--after)" : "var(--before)";

const inWhole = (value: number) => (state.change.value ? endText(value) : wholePercent(value));
const lastOf = (values: Maybe[] | undefined) => values?.[layerCount - 1] ?? null;
const tickAt = (x: number, y: number) => `M${x},${y - TICK / 2}v${TICK}`;
const pathOf = (points: { x: number; y: number }[]) => points.map(({ x, y }) => `${x},${y}`).join("L");

/** The means of the last layer, at the height of a block's title. */
function LastMeans(props: { block: Block; corpus: Maybe; ofText: Maybe; colour: string; now: Layout }) {
  const { block, corpus, ofText, colour, now } = props;
  const y = now.top(block) + TITLE_MIDDLE;
  return (
    <>
      {corpus !== null && (
        <>
          <circle cx="6" cy={y} r={DOT} fill={colour} />
          <text x="13" y={y + 4} fill={colour} font-weight="700">
            {inWhole(corpus)}
          </text>
        </>
      )}
      {ofText !== null && (
        <>
          <path d={tickAt(56, y)} stroke="var(--ink)" stroke-width="1.5" />
          <text x="63" y={y + 4} fill="var(--ink)">
            {inWhole(ofText)}
          </text>
        </>
      )}
    </>
  );
}

/** Means over the texts of a run with their intervals, and over the shown text, next to the rows of the layers. */
export function Margin() {
  const now = layout.value;
  const { marginWidth, height, rowHeight, y } = now;
  if (marginWidth === 0) return null;
  return (
    <svg id="margin" class="chart" width={marginWidth} height={height} aria-hidden="true">
      {marginOf(now).map(({ block, corpus, ofText, means, band, text, scale }) => {
        const colour = colourOf(block.model);
        const [top, bottom] = [y(block, layerCount), y(block, layersOf(block)[1]) + rowHeight];
        return (
          <g>
            {scale.map(({ x }) => (
              <line x1={x} x2={x} y1={top} y2={bottom} stroke="var(--line)" />
            ))}
            {band.length > 0 && <path d={`M${pathOf(band)}Z`} fill={colour} fill-opacity="0.2" />}
            {means.length > 0 && <path d={`M${pathOf(means)}`} fill="none" stroke={colour} stroke-width="1.5" />}
            {means.map((point) => (
              <circle cx={point.x} cy={point.y} r={DOT} fill={colour} />
            ))}
            {text.map((point) => (
              <path d={tickAt(point.x, point.y)} stroke="var(--ink)" stroke-width="1.5" />
            ))}
            {scale.map(({ value, x }, n) => (
              <text x={x} y={bottom + 12} fill="var(--soft)" text-anchor={n > 0 ? "end" : "start"}>
                {endText(value)}
              </text>
            ))}
            <LastMeans {...{ block, colour, now }} corpus={lastOf(corpus?.values)} ofText={lastOf(ofText)} />
          </g>
        );
      })}
    </svg>
  );
}

/** The means of the last layer, and an explanation of the margin if it is shown. */
export function MeansText() {
  const shown = blocks.value.filter(({ isDifference }) => !isDifference);
  const models = [...new Set(shown.map(({ model }) => model))];
  const inModel = (model: string) => (models.length > 1 ? ` ${modelTitle(model).toLowerCase()}` : "");
  const ofCorpus = models.flatMap((model) => {
    const series = corpusMeans(model);
    const [mean, low, high] = [series?.values, series?.low, series?.high].map(lastOf);
    if (mean === null) return [];
    const interval = low === null || high === null ? "" : ` [${inWhole(low)}, ${inWhole(high)}]`;
    return [`${inWhole(mean)}${interval}${inModel(model)}`];
  });
  const ofTexts = shown.flatMap((block) => {
    const mean = lastOf(textMeans(block));
    if (mean === null) return [];
    const where = comparison.value ? ` in ${titleInText(block)}` : inModel(block.model);
    return [`${inWhole(mean)}${where}`];
  });
  const count = corpusMeans(models[0])?.texts;
  const measured = `${count} ${data.wording.texts}`;
  const unit = state.change.value ? " points" : "";
  return (
    <p class="small" id="means-text">
      {ofTexts.length > 0 &&
        `${isOfOneLayer() ? "In" : "After"} the last layer, ${shareStatement(`mean ${shareKind()} of ${comparison.value ? "each" : "this"} text's tokens`)} ${ofTexts.join(", ")}${unit}. `}
      {ofCorpus.length > 0 && `Over ${measured}: ${ofCorpus.join(", ")}${unit} [95% interval of the mean]. `}
      {layout.value.marginWidth > 0 &&
        `On the right, short lines show the means of ${shown.length > 1 && comparison.value ? "the texts" : "this text"} by layer${ofCorpus.length > 0 ? `, and dots and bands the means over ${measured} with their intervals` : ""}.`}
    </p>
  );
}
