// A chart of lines over the layers as a pane, with its numbers.

import type { ComponentChildren } from "preact";
import { Chart, type Line } from "./chart";
import { layers, type Maybe } from "./data";
import { figures, percent } from "./format";
import { set, state } from "./state";
import { Pane, type Rows } from "./ui";

type Row = { layer: number; mean: number; ci_low: Maybe; ci_high: Maybe };
/** A table's means and intervals by layer. */
export function byLayer(rows: Row[]) {
  const at = new Map(rows.map((row) => [row.layer, row]));
  const of = (key: "mean" | "ci_low" | "ci_high") => layers.map((layer) => at.get(layer)?.[key] ?? null);
  return { values: of("mean"), low: of("ci_low"), high: of("ci_high") };
}

export const share = (value: number) => percent(value, 0);
export const plain = (value: number) => figures(value).replace(/\.?0+$/, "");

type Props = {
  id: string;
  title: string;
  lines: Line[];
  height: number;
  format?: (value: number) => string;
  bounds?: [number, number];
  x?: string[]; // where they are not the layers
  axis?: string;
  first?: boolean;
  above?: ComponentChildren;
  children?: ComponentChildren;
};

export function CurvePane({ id, title, lines, height, first, above, children, ...props }: Props) {
  const { format = share, bounds, x = layers.map(String), axis = "layer" } = props;
  const said = (value: Maybe) => (value === null ? "–" : format(value));
  const columns = ({ name, low }: Line) => (low ? [name, `${name}, 95% from`, `${name}, 95% to`] : [name]);
  const cells = ({ values, low, high }: Line, i: number) => (low ? [values[i], low[i], high![i]] : [values[i]]);
  const rows = (): Rows => ({
    columns: [axis, ...lines.flatMap(columns)],
    rows: x.map((place, i) => [place, ...lines.flatMap((each) => cells(each, i))]),
  });
  const overLayers = axis === "layer" && {
    chosen: state.layer.value - 1,
    choose: (place: number) => set({ layer: place + 1 }),
  };
  const label = `${title}. ${lines.map(({ name, values }) => `${name}: ${values.map(said).join(", ")}`).join(". ")}`;
  return (
    <Pane id={id} title={title} file={title} rows={rows} first={first}>
      {above}
      <Chart {...{ label, x, lines, height, format, bounds }} title={axis} {...overLayers} />
      {children}
    </Pane>
  );
}
