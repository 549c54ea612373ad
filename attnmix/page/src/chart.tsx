// Lines over the layers: a mean with its interval, dots beside it, and names where the lines end.

import { useSignal } from "@preact/signals";
import { scaleLinear } from "d3-scale";
import { area, line } from "d3-shape";
import { useLayoutEffect, useRef } from "preact/hooks";
import { type Maybe, range } from "./data";
import { printing } from "./state";

export type Line = {
  name: string;
  colour: string;
  values: Maybe[];
  low?: Maybe[];
  high?: Maybe[];
  dash?: string;
  dots?: Maybe[][]; // by place on the x axis
  width?: number;
  quiet?: boolean; // without its name in the chart
};
const PRINTED = 640; // pixels
const [TOP, BOTTOM, LEFT, NAMES, TEXT] = [14, 38, 46, 204, 16];

/** A name in lines that fit. */
function folded(name: string, width: number): string[] {
  const lines = [""];
  for (const word of name.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (longer.length * 7 > width && lines.at(-1)) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}

/** Names at the ends of lines, moved apart until none lies on another. */
function spread(places: number[], heights: number[], low: number, high: number): number[] {
  const order = places.map((_, i) => i).toSorted((a, b) => places[a] - places[b]);
  const moved = [...places];
  let least = low;
  for (const i of order) least = (moved[i] = Math.max(moved[i], least + heights[i] / 2)) + heights[i] / 2;
  let most = high;
  for (const i of order.toReversed()) most = (moved[i] = Math.min(moved[i], most - heights[i] / 2)) - heights[i] / 2;
  return moved;
}

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

export function Chart(props: {
  label: string;
  x: string[];
  lines: Line[];
  format: (value: number) => string;
  height?: number;
  title: string; // of the x axis
  chosen?: number; // a place on the x axis
  choose?: (place: number) => void;
  bounds?: [number, number]; // of what the measure can be
  zero?: boolean;
}) {
  const { box, width } = useWidth(560);
  const height = props.height ?? 300;
  const lines = props.lines.filter(({ values }) => values.some((each) => each !== null));
  const all = lines.flatMap(({ values, low = [], high = [], dots = [] }) => [
    ...values,
    ...low,
    ...high,
    ...dots.flat(),
  ]);
  const known = all.filter((each) => each !== null && each !== undefined);
  const [floor, ceiling] = props.bounds ?? [-Infinity, Infinity];
  const start = props.zero === false ? Math.min(...known) : Math.min(0, ...known);
  const extent = [Math.max(start, floor), Math.min(Math.max(...known, start + 1e-3), ceiling)];
  const y = scaleLinear(extent, [height - BOTTOM, TOP]).nice(5);
  const within = (value: number) => Math.min(Math.max(value, y.domain()[0]), y.domain()[1]);
  const names = Math.min(NAMES, width * 0.36);
  const right = width - names;
  const step = (right - LEFT) / Math.max(props.x.length, 1);
  const x = (place: number) => LEFT + step * (place + 0.5);
  const path = line<Maybe>(
    (_, i) => x(i),
    (value) => y(value!),
  ).defined((value) => value !== null);
  const band = area<number>(
    x,
    (i) => y(i),
    (i) => y(i),
  );
  const drawBand = ({ low, high }: Line) =>
    low && high && low.some((each) => each !== null)
      ? band
          .y0((i) => y(within(low[i]!)))
          .y1((i) => y(within(high[i]!)))
          .defined((i) => low[i] !== null && high[i] !== null)(range(low.length))
      : null;
  /** All dots as one path, beside the line's points: to the right and left in turn, so that they hide each other less. */
  const drawDots = (dots: Maybe[][], n: number) =>
    dots
      .flatMap((values, i) =>
        values.map((value, k) => {
          const side = (k % 2 ? 1 : -1) * (0.4 + ((k * 7) % 10) / 16);
          return value === null
            ? ""
            : `M${(x(i) + step * (0.1 + 0.22 * n) * side).toFixed(1)},${y(value).toFixed(1)}h0`;
        }),
      )
      .join("");
  const ends = lines.map(({ values }) => {
    const last = values.findLastIndex((each) => each !== null);
    return { last, at: y(values[last]!) };
  });
  const texts = lines.map(({ name, quiet }) => (quiet ? [] : folded(name, names - 42)));
  const named = spread(
    ends.map(({ at }) => at),
    texts.map((each) => TEXT * each.length),
    TOP - 8,
    height - BOTTOM + 14,
  );
  const reading = (place: number) =>
    [
      `${props.title} ${props.x[place]}`,
      ...lines.map(({ name, values }) => (values[place] === null ? "" : `${name}: ${props.format(values[place]!)}`)),
    ]
      .filter(Boolean)
      .join("\n");
  return (
    <div ref={box} class="plot">
      <svg
        class="chart"
        role="img"
        aria-label={props.label}
        width={width}
        height={height}
        viewBox={`0 0 ${width} ${height}`}
      >
        {y.ticks(5).map((tick) => (
          <g>
            <line class="grid" x1={LEFT} x2={right} y1={y(tick)} y2={y(tick)} />
            <text class="axis" x={LEFT - 8} y={y(tick)} text-anchor="end" dominant-baseline="central">
              {props.format(tick)}
            </text>
          </g>
        ))}
        {props.chosen !== undefined && (
          <rect class="chosen" x={x(props.chosen) - step / 2} y={TOP} width={step} height={height - TOP - BOTTOM} />
        )}
        {props.x.map((name, i) => (
          <text class={i === props.chosen ? "axis now" : "axis"} x={x(i)} y={height - BOTTOM + 16} text-anchor="middle">
            {name}
          </text>
        ))}
        <text class="axis" x={(LEFT + right) / 2} y={height - 4} text-anchor="middle">
          {props.title}
        </text>
        {lines.map((each) => (
          <path class="band" d={drawBand(each) ?? ""} fill={each.colour} />
        ))}
        {lines.map(({ dots, colour }, n) => dots && <path class="dots" d={drawDots(dots, n)} stroke={colour} />)}
        {lines.map(({ values, colour, dash, width: wide }) => (
          <path
            class="line"
            d={path(values) ?? ""}
            stroke={colour}
            stroke-dasharray={dash}
            stroke-width={wide ?? 2.2}
          />
        ))}
        {lines.map(({ values, colour }) =>
          values.map((value, i) => value !== null && <circle r="2.6" cx={x(i)} cy={y(value)} fill={colour} />),
        )}
        {lines.map(
          ({ colour, values }, i) =>
            texts[i].length > 0 && (
              <g>
                <line
                  x1={x(ends[i].last) + 4}
                  y1={ends[i].at}
                  x2={right + 4}
                  y2={named[i]}
                  stroke={colour}
                  stroke-width="0.7"
                />
                <text
                  class="name"
                  x={right + 8}
                  y={named[i] - (TEXT / 2) * (texts[i].length - 1)}
                  dominant-baseline="central"
                  fill={colour}
                >
                  {texts[i].map((each, n) => (
                    <tspan x={right + 8} dy={n === 0 ? 0 : TEXT}>
                      {each}
                    </tspan>
                  ))}
                  {props.chosen !== undefined && values[props.chosen] !== null && (
                    <tspan class="value"> {props.format(values[props.chosen]!)}</tspan>
                  )}
                </text>
              </g>
            ),
        )}
        {props.choose &&
          props.x.map((_, i) => (
            <rect
              class="hit"
              data-place={i}
              x={x(i) - step / 2}
              y={0}
              width={step}
              height={height}
              onClick={() => props.choose!(i)}
            >
              <title>{reading(i)}</title>
            </rect>
          ))}
      </svg>
    </div>
  );
}
