// A pane with a line chart by layer: means with intervals and reviews, drawn by Observable Plot.

import * as Plot from "@observablehq/plot";
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { layers, type Maybe } from "./data";
import { wholePercent } from "./format";
import type { Series } from "./payload";
import { set, state } from "./state";
import { Pane, useWidth } from "./ui";

export type Line = Partial<Series> & {
  name: string;
  colour: string;
  values: Maybe[];
  dots?: Maybe[][]; // values of reviews by layer
  dash?: "dashed" | "dotted";
};
const [LEFT, RIGHT] = [46, 8]; // pixels
const DASHES = { dashed: "6 4", dotted: "1.5 3" }; // as in SVG

const DEFAULTS = {
  bounds: [0, Infinity], // range of the measure
  height: 320,
};
type Props = Partial<typeof DEFAULTS> & {
  id: string;
  title: string;
  lines: Line[];
  children?: ComponentChildren;
};

function draw(props: typeof DEFAULTS & { lines: Line[]; width: number }) {
  const { lines, bounds, height, width } = props;
  const shown = lines.flatMap(({ values, low = [], high = [], dots = [] }) => [values, low, high, ...dots].flat());
  const numbers = shown.filter((each) => each !== null);
  const [start, end] = [Math.min(0, ...numbers), Math.max(...numbers, 1e-3)];
  const points = lines.flatMap(({ name, values, low, high, colour, dash }) =>
    layers.map((_, i) => ({ name, colour, dash, i, value: values[i], low: low?.[i], high: high?.[i] })),
  );
  // Draw reviews alternately to the right and left of the line's dot, so that they overlap less.
  const side = (k: number) => (k % 2 ? 1 : -1) * (0.04 + ((k * 7) % 10) / 35);
  const reviews = lines.flatMap(({ dots = [], colour }) =>
    dots.flatMap((all, i) => all.map((value, k) => ({ colour, i: i + side(k), value }))),
  );
  const at = { x: "i", y: "value", z: "name" };
  const line = (dash: Line["dash"]) => {
    const drawn = points.filter((each) => each.dash === dash);
    const strokeDasharray = dash && DASHES[dash];
    return Plot.lineY(drawn, { ...at, stroke: "colour", strokeWidth: dash ? 1.7 : 2.2, strokeDasharray });
  };
  const title = (d: (typeof points)[number]) => `${d.name}\nlayer ${layers[d.i]}: ${wholePercent(d.value!)}`;
  const known = points.filter(({ value }) => value !== null);
  const nowBand = Plot.rect([0], { x1: [-0.5], x2: [0.5], fill: "var(--ink)", fillOpacity: 0.07, className: "now" });
  const interval = { fill: "colour", fillOpacity: 0.16, className: "band" };
  return Plot.plot({
    ...{ width, height, className: "chart", marginLeft: LEFT, marginRight: RIGHT, marginBottom: 38, marginTop: 14 },
    x: { domain: [-0.5, layers.length - 0.5] },
    y: { domain: [Math.max(start, bounds[0]), Math.min(end, bounds[1])], nice: 5, clamp: true },
    color: { type: "identity" },
    marks: [
      nowBand,
      Plot.gridY({ ticks: 5 }),
      Plot.axisX([...layers.keys()], {
        ...{ tickFormat: (i: number) => String(layers[i]), tickSize: 0 },
        ...{ label: "layer", labelAnchor: "center", labelArrow: "none" },
      }),
      Plot.axisY({ ticks: 5, tickFormat: wholePercent, tickSize: 0, label: null }),
      Plot.areaY(points, { x: "i", y1: "low", y2: "high", z: "name", ...interval }),
      Plot.dot(reviews, { x: "i", y: "value", r: 2, fill: "colour", fillOpacity: 0.3 }),
      ...[line(undefined), line("dashed"), line("dotted")],
      Plot.dot(known, { ...at, r: 2.6, fill: "colour" }),
      Plot.tip(known, Plot.pointer({ x: "i", y: "value", title, maxRadius: 30 })),
    ],
  });
}

export function Chart({ id, title, children, ...given }: Props) {
  const props = { ...DEFAULTS, ...given };
  // Exact parts are only defined in the encoder, so the decoder's layers have no values.
  const whole = given.lines.map((line) => ({ ...line, values: layers.map((_, i) => line.values[i] ?? null) }));
  const lines = whole.filter(({ values }) => values.some((each) => each !== null));
  const { box, width } = useWidth(560);
  const plot = useRef<HTMLDivElement>(null);
  const chosen = state.layer.value - 1;
  const step = (width - LEFT - RIGHT) / layers.length;
  const drawn = JSON.stringify([lines, width]);
  useLayoutEffect(() => {
    plot.current!.replaceChildren(draw({ ...props, lines, width }));
  }, [drawn]);
  // Move the band of the selected layer without redrawing the chart, which would take longer.
  useLayoutEffect(() => {
    plot.current!.querySelector(".now")?.setAttribute("transform", `translate(${step * chosen} 0)`);
  }, [drawn, chosen]);
  const columns = ({ name, low }: Line) => (low ? [name, `${name}, 95% from`, `${name}, 95% to`] : [name]);
  const cells = ({ values, low, high }: Line, i: number) => (low ? [values[i], low[i], high![i]] : [values[i]]);
  const rows = () => ({
    columns: ["layer", ...lines.flatMap(columns)],
    rows: layers.map((layer, i) => [layer, ...lines.flatMap((each) => cells(each, i))]),
  });
  const choose = (e: MouseEvent) => {
    const layer = 1 + Math.floor((e.clientX - box.current!.getBoundingClientRect().x - LEFT) / step);
    if (layers.includes(layer)) set({ layer });
  };
  const said = (value: Maybe) => (value === null ? "–" : wholePercent(value));
  const label = `${title}. ${lines.map(({ name, values }) => `${name}: ${values.map(said).join(", ")}`).join(". ")}`;
  const order = lines.toSorted((a, b) => (b.values[chosen] ?? 0) - (a.values[chosen] ?? 0));
  return (
    <Pane id={id} title={title} rows={rows}>
      {children}
      <div class="curves">
        <div ref={box} class="plot" onClick={choose} role="img" aria-label={label}>
          <div ref={plot} aria-hidden="true" />
        </div>
        <ul class="names" aria-label={`layer ${layers[chosen]}`}>
          {order.map(({ name, colour, dash, values }) => (
            <li style={`color: ${colour}`}>
              <svg width="22" height="3" aria-hidden="true">
                <line
                  x2="22"
                  y1="1.5"
                  y2="1.5"
                  stroke={colour}
                  stroke-width="2.5"
                  stroke-dasharray={dash && DASHES[dash]}
                />
              </svg>{" "}
              <span>
                <b>{name}</b> {said(values[chosen]).replaceAll(" ", "\u00a0")}
              </span>
            </li>
          ))}
        </ul>
      </div>
    </Pane>
  );
}
