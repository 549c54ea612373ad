// Marks of a picture, which are painted on a canvas, or returned as SVG shapes for saving.

import { PICTURE_FONT, shape, textWidth, widthAttributes } from "./picture";

type Box = [x: number, y: number, width: number, height: number];
export type Mark =
  | { kind: "boxes"; fill: string; boxes: Box[] }
  | { kind: "frame"; box: Box; stroke: string; width: number }
  | { kind: "path"; d: string; stroke: string; width: number; opacity: number }
  | {
      kind: "text";
      text: string;
      x: number;
      y: number; // of the baseline's middle
      fill: string;
      size: number;
      bold?: boolean;
      anchor: "start" | "middle" | "end";
      upright?: boolean; // rotated: reads from bottom to top
      halo?: string; // colour around the letters, which separates them from lines below
    };

const ALIGNS = { start: "left", middle: "center", end: "right" } as const;
const HALO = 4; // pixels, width of the lines around letters, half of which is outside of the letters
const BASELINE = 0.35; // in font sizes, from the middle of a letter down to its baseline

function paint(context: CanvasRenderingContext2D, mark: Mark): void {
  if (mark.kind === "boxes") {
    context.fillStyle = mark.fill;
    for (const box of mark.boxes) context.fillRect(...box);
  } else if (mark.kind === "frame") {
    Object.assign(context, { strokeStyle: mark.stroke, lineWidth: mark.width });
    context.strokeRect(...mark.box);
  } else if (mark.kind === "path") {
    Object.assign(context, { strokeStyle: mark.stroke, lineWidth: mark.width, globalAlpha: mark.opacity });
    context.stroke(new Path2D(mark.d));
    context.globalAlpha = 1;
  } else {
    const font = `${mark.bold ? "bold " : ""}${mark.size}px ${PICTURE_FONT}`;
    Object.assign(context, { font, fillStyle: mark.fill, textAlign: ALIGNS[mark.anchor] });
    context.save();
    context.translate(mark.x, mark.y);
    if (mark.upright) context.rotate(-Math.PI / 2);
    if (mark.halo) {
      Object.assign(context, { strokeStyle: mark.halo, lineWidth: HALO, lineJoin: "round" });
      context.strokeText(mark.text, 0, BASELINE * mark.size);
    }
    context.fillText(mark.text, 0, BASELINE * mark.size);
    context.restore();
  }
}

/** Paint marks on a canvas; `size` is in CSS pixels, and `sharpness` is the number of canvas pixels per CSS pixel. */
export function paintMarks(canvas: HTMLCanvasElement, size: [number, number], marks: Mark[], sharpness: number): void {
  const [width, height] = size;
  Object.assign(canvas, { width: Math.round(width * sharpness), height: Math.round(height * sharpness) });
  const context = canvas.getContext("2d")!;
  context.setTransform(sharpness, 0, 0, sharpness, 0, 0);
  for (const mark of marks) paint(context, mark);
}

function shapeOf(mark: Mark): SVGElement {
  if (mark.kind === "boxes") {
    const rectangle = ([x, y, width, height]: Box) => shape("rect", { x, y, width, height });
    return shape("g", { fill: mark.fill }, ...mark.boxes.map(rectangle));
  }
  if (mark.kind === "frame") {
    const [x, y, width, height] = mark.box;
    return shape("rect", { x, y, width, height, fill: "none", stroke: mark.stroke, "stroke-width": mark.width });
  }
  if (mark.kind === "path") {
    const line = { stroke: mark.stroke, "stroke-width": mark.width, "stroke-opacity": mark.opacity };
    return shape("path", { d: mark.d, fill: "none", ...line });
  }
  const { x, y, size } = mark;
  const turn = mark.upright ? `translate(${x.toFixed(2)} ${y.toFixed(2)}) rotate(-90)` : null;
  const place = { x: turn ? 0 : x, y: (turn ? 0 : y) + BASELINE * size, transform: turn };
  const looks = { fill: mark.fill, "font-size": size, "font-weight": mark.bold ? 700 : null };
  const halo = { stroke: mark.halo, "stroke-width": HALO, "stroke-linejoin": "round", "paint-order": "stroke" };
  const width = widthAttributes(textWidth(mark.text, size, mark.bold));
  const attributes = { ...place, ...looks, ...(mark.halo ? halo : {}), ...width, "text-anchor": mark.anchor };
  return shape("text", attributes, mark.text);
}

/** Return the marks as SVG shapes. */
export const shapesOf = (marks: Mark[]) => shape("g", { "font-family": PICTURE_FONT }, ...marks.map(shapeOf));
